"""Waiting and transfer, and the rules by which a straggler is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed.report.load import LoadedRun, load
from testbed.report.waiting import stragglers, waiting
from testbed.results.folder import RunFolder
from testbed.spec.units import covered_length
from tests.support.synthetic import Conditions, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}}


def run_of(folder: Path, made: Conditions, **values: Any) -> LoadedRun:
    make_run(folder, made, **(LINK | values))
    return load([folder]).runs[0]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", ["ring", "ddp"])
def test_rank_2_with_half_the_cpu_is_named(tmp_path: Path, seed: int, mode: str) -> None:
    made = Conditions(slow_cpu={2: 2.0}, noise=0.1, seed=seed)
    found = stragglers(run_of(tmp_path / "run", made, mode=mode))
    assert [(each.rank, each.cause) for each in found] == [(2, "CPU")]
    assert "rank 2" in found[0].sentence and found[0].factor == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", ["ring", "ddp", "gather"])
def test_rank_2_with_a_quarter_of_the_rate_is_named(tmp_path: Path, seed: int, mode: str) -> None:
    made = Conditions(slow_link={2: 0.25}, noise=0.1, seed=seed)
    found = stragglers(run_of(tmp_path / "run", made, mode=mode))
    assert [(each.rank, each.cause) for each in found] == [(2, "link")]
    assert found[0].factor == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_equal_ranks_with_noise_have_no_straggler(tmp_path: Path, seed: int) -> None:
    assert stragglers(run_of(tmp_path / "run", Conditions(noise=0.1, seed=seed), mode="ring")) == []


def test_without_a_probe_the_requested_rate_names_the_link(tmp_path: Path) -> None:
    overrides = {"node1": {"link": {"rate": "100mbit"}}}
    run = run_of(tmp_path / "run", Conditions(slow_link={1: 0.2}), mode="ring", nodes=2, overrides=overrides)
    assert [(each.rank, each.cause) for each in stragglers(run)] == [(1, "link")]


def test_a_rank_with_more_images_is_not_a_straggler(tmp_path: Path) -> None:
    """Rank 1 computes three times as long because it has three times the images."""
    data = {"name": "cifar10", "shares": [16, 48]}
    run = run_of(tmp_path / "run", Conditions(slow_cpu={0: 0.5, 1: 1.5}), mode="ring", nodes=2, data=data)
    assert stragglers(run) == []


def test_the_others_wait_for_the_slowest_rank(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", Conditions(compute=4.0, slow_cpu={2: 2.0}, noise=0.0), mode="ring")
    found = waiting(run)
    assert found.slowest == 2 and found.last[2] == 1.0
    assert found.waiting[2] == pytest.approx(0.0, abs=1e-6)
    assert found.waiting[0] > 0.2
    busy = [float(steps.busy.mean()) for steps in run.kept]
    assert [w + t for w, t in zip(found.waiting, found.transfer, strict=True)] == pytest.approx(busy)


PIPELINE = "ring/bucket:2MiB/pipeline"


def rewrite(folder: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every step that a rank recorded."""
    path = RunFolder(folder).records(rank)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_continued_transfer_counts_once(tmp_path: Path) -> None:
    found = waiting(run_of(tmp_path / "run", Conditions(compute=4.0, slow_cpu={2: 2.0}, noise=0.0), mode=PIPELINE))
    assert found.exchanges == 10 * 4 * 2  # steps that count, buffers, ways
    assert found.slowest == 2 and found.last[2] > 0.5 and found.waiting[2] == pytest.approx(0.0, abs=1e-6)


def test_a_transfer_that_began_between_two_steps_counts(tmp_path: Path) -> None:
    """Rank 1's last gather of step 4 begins after the step was recorded; step 5 marks it as continued."""
    folder = tmp_path / "run"
    make_run(folder, Conditions(noise=0.0), mode=PIPELINE, **LINK)
    rewrite(folder, 1, lambda step: step["comm"].pop() if step["step"] == 4 else None)
    found = waiting(load([folder]).runs[0])
    assert found.exchanges == 10 * 4 * 2 and found.last[1] == pytest.approx(1 / 80)


def test_transfers_are_compared_by_number_and_not_by_step(tmp_path: Path) -> None:
    """Rank 1 ends each step before the last gather begins, so it records it in the next step, without a mark."""
    folder = tmp_path / "run"
    make_run(folder, Conditions(noise=0.0), mode=PIPELINE, **LINK)

    def later(step: dict[str, Any]) -> None:
        *comm, last = [each for each in step["comm"] if not each[0].endswith("(cont.)")]
        own = [last] if step["step"] == 11 else []
        step["comm"] = [*([[last[0], 0.0, 0.004, last[3]]] if step["step"] else []), *comm, *own]

    rewrite(folder, 1, later)
    found = waiting(load([folder]).runs[0])
    assert found.exchanges == 10 * 4 * 2
    assert found.slowest == 1 and found.last[1] == pytest.approx(9 / 80)
    assert max(found.waiting) < 0.2  # compared with the wrong transfer it would be a whole step


def test_a_name_that_occurs_unequally_often_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, Conditions(noise=0.0), mode="ring", **LINK)
    rewrite(folder, 3, lambda step: step["comm"].pop() if step["step"] == 5 else None)
    assert waiting(load([folder]).runs[0]).exchanges == 10 * 3


@pytest.mark.parametrize(("step", "exchanges"), [(11, 10 * 4 - 1), (10, 10 * 3)])
def test_only_the_last_transfer_of_a_name_may_be_missing(tmp_path: Path, step: int, exchanges: int) -> None:
    """A rank may begin it after the last step was recorded. One that is missing earlier would shift all later ones."""
    folder = tmp_path / "run"
    make_run(folder, Conditions(noise=0.0), mode="ring", **LINK)
    rewrite(folder, 3, lambda record: record["comm"].pop() if record["step"] == step else None)
    assert waiting(load([folder]).runs[0]).exchanges == exchanges


def test_whether_a_slow_link_matters_depends_on_the_bytes_sent(tmp_path: Path) -> None:
    """1 % of the gradient at a quarter of the rate is a small part of the time of communication here."""
    folder = tmp_path / "run"
    make_run(folder, Conditions(slow_link={2: 0.25}, overhead=8.0), mode="direct/topk:0.01", **LINK)
    assert stragglers(load([folder]).runs[0]) == []


def test_clocks_are_converted_to_that_of_rank_0(tmp_path: Path) -> None:
    plain = waiting(run_of(tmp_path / "one", Conditions(slow_cpu={2: 2.0}), mode="ring"))
    shifted = run_of(tmp_path / "two", Conditions(slow_cpu={2: 2.0}, offsets=[0.0, 5.0, -3.0, 0.1]), mode="ring")
    assert waiting(shifted).waiting == pytest.approx(plain.waiting, abs=1e-6)
    assert shifted.network.offset_error == pytest.approx(0.0005)


def test_overlapping_waits_count_once() -> None:
    assert covered_length([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == pytest.approx(4.0)
