"""The bench's verdict on codecs: paired by seed, with the limit that was promised."""

from __future__ import annotations

import pytest

from testbed.results.conclude import Summary
from testbed.spec.run import RunSpec
from tests.bench.codecs import allowed, byte_ratio, verdict


def runs(accuracies: dict[str, list[float]]) -> list[Summary]:
    return [
        Summary(spec=RunSpec.load({"mode": mode, "seed": seed}, ""), status="ok", test_accuracy=percent / 100)
        for mode, found in accuracies.items()
        for seed, percent in enumerate(found)
    ]


def test_a_difference_is_taken_seed_by_seed_and_one_point_is_allowed() -> None:
    near, far, shown = verdict(
        runs(
            {
                "ring": [30.0, 40.0, 50.0],
                "ring/fp16": [30.8, 40.9, 50.7],
                "direct/int8": [28.7, 38.9, 48.8],
                "direct/topk:0.01": [20.0, 30.0, 40.0],
            }
        )
    )
    assert near.met and near.value == pytest.approx(0.8) and near.high == 1.0
    assert not far.met and far.value == pytest.approx(-1.2)
    assert shown.met and shown.low is None and "no limit" in str(shown)


def test_where_seeds_differ_much_two_standard_errors_are_allowed() -> None:
    assert allowed([-3.0, 0.0, 3.0]) == pytest.approx(2 * 3 / 3**0.5)
    assert allowed([0.1, 0.2, 0.0]) == 1.0


def test_the_byte_ratio_is_against_what_an_exact_all_reduce_sends() -> None:
    spec = RunSpec.load({"mode": "ring/fp16", "nodes": 4}, "")
    figure = byte_ratio(
        Summary(spec=spec, status="ok", sent_per_step=[0.75e6], gradient_bytes=1_000_000, seconds_per_step=1.0)
    )
    assert figure.value == pytest.approx(0.5) and figure.met
