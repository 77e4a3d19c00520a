"""Transfer against waiting, and the straggler's name: the rule, and ten of ten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic import Made, make_run

from testbed.report.load import Run, load
from testbed.report.waiting import stragglers, waiting
from testbed.spec.intervals import length

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}}


def run_of(folder: Path, made: Made, **values: Any) -> Run:
    make_run(folder, made, **(LINK | values))
    return load([folder]).runs[0]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", ["ring", "ddp"])
def test_half_the_cpu_on_rank_2_is_named_ten_of_ten(tmp_path: Path, seed: int, mode: str) -> None:
    made = Made(slow_cpu={2: 2.0}, noise=0.1, seed=seed)
    found = stragglers(run_of(tmp_path / "run", made, mode=mode))
    assert [(each.rank, each.cause) for each in found] == [(2, "CPU")]
    assert "rank 2" in found[0].sentence and found[0].factor == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", ["ring", "ddp", "gather"])
def test_a_quarter_of_the_rate_on_rank_2_is_named_ten_of_ten(tmp_path: Path, seed: int, mode: str) -> None:
    made = Made(slow_link={2: 0.25}, noise=0.1, seed=seed)
    found = stragglers(run_of(tmp_path / "run", made, mode=mode))
    assert [(each.rank, each.cause) for each in found] == [(2, "link")]
    assert found[0].factor == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_equal_ranks_with_noise_have_no_straggler(tmp_path: Path, seed: int) -> None:
    assert stragglers(run_of(tmp_path / "run", Made(noise=0.1, seed=seed), mode="ring")) == []


def test_where_no_probe_ran_the_asked_rate_names_the_link(tmp_path: Path) -> None:
    overrides = {"node1": {"link": {"rate": "100mbit"}}}
    run = run_of(tmp_path / "run", Made(), mode="ring", nodes=2, overrides=overrides)
    assert [(each.rank, each.cause) for each in stragglers(run)] == [(1, "link")]


def test_a_rank_with_more_images_is_no_straggler(tmp_path: Path) -> None:
    """Shares are uneven on purpose: rank 1 computes three times as long because it has three times the images."""
    data = {"name": "cifar10", "shares": [16, 48]}
    run = run_of(tmp_path / "run", Made(slow_cpu={0: 0.5, 1: 1.5}), mode="ring", nodes=2, data=data)
    assert stragglers(run) == []


def test_the_others_wait_for_the_slowest_and_it_for_nobody(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", Made(compute=4.0, slow_cpu={2: 2.0}, noise=0.0), mode="ring")
    found = waiting(run)
    assert found.slowest == 2 and found.last[2] == 1.0
    assert found.waiting[2] == pytest.approx(0.0, abs=1e-6)
    assert found.waiting[0] > 0.2
    busy = [float(steps.busy.mean()) for steps in run.kept]
    assert [w + t for w, t in zip(found.waiting, found.transfer, strict=True)] == pytest.approx(busy)


def test_clocks_that_differ_are_set_to_rank_0s_first(tmp_path: Path) -> None:
    plain = waiting(run_of(tmp_path / "one", Made(slow_cpu={2: 2.0}), mode="ring"))
    shifted = run_of(tmp_path / "two", Made(slow_cpu={2: 2.0}, offsets=[0.0, 5.0, -3.0, 0.1]), mode="ring")
    assert waiting(shifted).waiting == pytest.approx(plain.waiting, abs=1e-6)
    assert shifted.network.offset_error == pytest.approx(0.0005)


def test_overlapping_waits_count_once() -> None:
    assert length([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == pytest.approx(4.0)
