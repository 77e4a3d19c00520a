"""Transfer against waiting, and the straggler's name: the rule, and ten of ten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed.report.load import Run, load
from testbed.report.waiting import stragglers, waiting
from testbed.results.folder import RunFolder
from testbed.spec.units import length
from tests.support.synthetic import Made, make_run

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


PIPELINE = "ring/bucket:2MiB/pipeline"


def rewrite(folder: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every step that a rank recorded."""
    path = RunFolder(folder).records(rank)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_rest_of_a_flight_is_no_flight_of_its_own(tmp_path: Path) -> None:
    found = waiting(run_of(tmp_path / "run", Made(compute=4.0, slow_cpu={2: 2.0}, noise=0.0), mode=PIPELINE))
    assert found.exchanges == 10 * 4 * 2  # steps that count, buffers, ways
    assert found.slowest == 2 and found.last[2] > 0.5 and found.waiting[2] == pytest.approx(0.0, abs=1e-6)


def test_what_began_between_two_steps_is_a_flight_of_its_own(tmp_path: Path) -> None:
    """Rank 1's last gather of step 4 had not begun when the step was taken down; step 5 calls it a rest."""
    folder = tmp_path / "run"
    make_run(folder, Made(noise=0.0), mode=PIPELINE, **LINK)
    rewrite(folder, 1, lambda step: step["comm"].pop() if step["step"] == 4 else None)
    found = waiting(load([folder]).runs[0])
    assert found.exchanges == 10 * 4 * 2 and found.last[1] == pytest.approx(1 / 80)


def test_what_one_rank_begins_after_its_step_is_matched_with_what_others_began_before(tmp_path: Path) -> None:
    """Rank 1 ends each step before the last gather begins, and so records it in the next: whole, without a mark."""
    folder = tmp_path / "run"
    make_run(folder, Made(noise=0.0), mode=PIPELINE, **LINK)

    def later(step: dict[str, Any]) -> None:
        *comm, last = [each for each in step["comm"] if not each[0].endswith("(cont.)")]
        own = [last] if step["step"] == 11 else []
        step["comm"] = [*([[last[0], 0.0, 0.004, last[3]]] if step["step"] else []), *comm, *own]

    rewrite(folder, 1, later)
    found = waiting(load([folder]).runs[0])
    assert found.exchanges == 10 * 4 * 2
    assert found.slowest == 1 and found.last[1] == pytest.approx(9 / 80)
    assert max(found.waiting) < 0.2  # matched with the wrong flight it would be a whole step


def test_a_name_that_ranks_saw_unequally_often_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, Made(noise=0.0), mode="ring", **LINK)
    rewrite(folder, 3, lambda step: step["comm"].pop() if step["step"] == 5 else None)
    assert waiting(load([folder]).runs[0]).exchanges == 10 * 3


def test_a_slow_link_is_weighed_by_what_travels_not_by_the_gradient(tmp_path: Path) -> None:
    """1 % of the gradient over a quarter of the rate is nothing beside the time that communication takes here."""
    folder = tmp_path / "run"
    make_run(folder, Made(slow_link={2: 0.25}, overhead=8.0), mode="direct/topk:0.01", **LINK)
    assert stragglers(load([folder]).runs[0]) == []


def test_clocks_that_differ_are_set_to_rank_0s_first(tmp_path: Path) -> None:
    plain = waiting(run_of(tmp_path / "one", Made(slow_cpu={2: 2.0}), mode="ring"))
    shifted = run_of(tmp_path / "two", Made(slow_cpu={2: 2.0}, offsets=[0.0, 5.0, -3.0, 0.1]), mode="ring")
    assert waiting(shifted).waiting == pytest.approx(plain.waiting, abs=1e-6)
    assert shifted.network.offset_error == pytest.approx(0.0005)


def test_overlapping_waits_count_once() -> None:
    assert length([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == pytest.approx(4.0)
