"""The split of a step, on steps whose answer is known, and on made-up runs where it must add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.report.load import Steps, load
from testbed.report.model import Cell, chapters
from testbed.report.tables import kinds, sent_over_theory
from testbed.results.records import Step
from tests.support.synthetic import Made, make_run, size_of


def one(**values: Any) -> Steps:
    times = dict.fromkeys(("at", "data", "forward", "backward", "sync", "update", "total", "loss"), 0.0)
    counts: dict[str, Any] = {"step": 0, "epoch": 0, "images": 0, "sent": None, "received": None}
    return Steps.of([Step(**counts | times | values)], "here")


def test_what_blocks_inside_backward_is_no_compute() -> None:
    """DDP's case: backward lasts 3 s of which the last 1 s waits; timing from outside would call all of it compute."""
    phases = [["forward", 0, 1], ["backward", 1, 3], ["sync", 4, 0.5], ["update", 4, 0.5]]
    steps = one(forward=1, backward=3, sync=0.5, update=0.5, total=4.5, blocked=1, stalls=[[3, 1]], phases=phases)
    assert (steps.compute[0], steps.rest[0]) == pytest.approx((3.5, 0.0))


def test_what_sync_does_besides_waiting_and_updating_is_rest() -> None:
    phases = [["forward", 0, 1], ["backward", 1, 1], ["sync", 2, 2]]
    steps = one(forward=1, backward=1, sync=2, update=0.5, total=4.25, blocked=1, stalls=[[2.1, 1]], phases=phases)
    assert (steps.compute[0], steps.rest[0]) == pytest.approx((2.5, 0.75))
    assert steps.compute[0] + steps.blocked[0] + steps.rest[0] == pytest.approx(steps.total[0])


def test_a_stall_that_reaches_from_backward_into_sync_is_shared_out() -> None:
    phases = [["backward", 0, 2], ["sync", 2, 1]]
    steps = one(backward=2, sync=1, total=3, blocked=1, stalls=[[1.5, 1]], phases=phases)
    assert steps.blocked_in_sync[0] == pytest.approx(0.5)
    assert steps.compute[0] == pytest.approx(1.5)


def cell_of(folder: Path, made: Made | None = None, **values: Any) -> Cell:
    make_run(folder, made, **values)
    return chapters(load([folder]))[0].cells[0]


MODES = ["single", "none", "gather", "allreduce", "ring", "ddp", "server", "ddp/fp16", "direct/topk:0.01"]
MODES += ["ring/bucket:2MiB/overlap", "ring/bucket:2MiB/pipeline", "direct/bucket:2MiB/overlap/int8"]


@pytest.mark.parametrize("mode", MODES)
def test_parts_add_up_in_every_mode(tmp_path: Path, mode: str) -> None:
    cell = cell_of(tmp_path / "run", mode=mode, link={"rate": "500mbit"})
    assert cell.split.step_gap < 0.001 and cell.split.busy_gap < 0.001


def test_a_stall_outside_every_phase_is_seen_as_a_gap(tmp_path: Path) -> None:
    """The sum is no definition: what the rank says it waited must lie where its intervals say it did."""
    phases = [["backward", 0, 2], ["sync", 2.5, 0.5]]
    steps = one(backward=2, sync=0.5, total=3, blocked=0.5, stalls=[[2, 0.5]], phases=phases)
    assert steps.compute[0] + steps.blocked[0] + steps.rest[0] == pytest.approx(3.5)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("single", "none")])
def test_every_buffer_counts_once_whatever_its_ways_are_called(tmp_path: Path, mode: str) -> None:
    """S would double where the way back has a name of its own, and the kernel's count would be half of theory's."""
    cell = cell_of(tmp_path / "run", Made(buckets=4), mode=mode, link={"rate": "500mbit"})
    count, size = cell.buffers
    assert count == 4 and size == pytest.approx(size_of(cell.spec), abs=4)
    ratio = sent_over_theory(cell)
    assert ratio is not None and 1.0 < ratio < 1.06
    assert cell.bound is not None and cell.split.busy >= cell.bound


def test_only_a_mode_that_overlaps_hides_anything(tmp_path: Path) -> None:
    shares = {m: cell_of(tmp_path / m, mode=m, link={"rate": "500mbit"}).split.hidden_share for m in ("ring", "ddp")}
    assert shares["ring"] == pytest.approx(0.0, abs=1e-6)
    assert shares["ddp"] is not None and shares["ddp"] > 0.05


def test_warm_up_is_left_out_of_every_figure(tmp_path: Path) -> None:
    cell = cell_of(tmp_path / "run", mode="ring", steps=12, warmup=5)
    assert cell.seconds.n == 7 and cell.steps[0].step[0] == 5


def test_repeats_are_pooled(tmp_path: Path) -> None:
    for repeat in range(3):
        make_run(tmp_path / f"ring-r{repeat}", Made(seed=repeat), mode="ring")
    (chapter,) = chapters(load([tmp_path]))
    (cell,) = chapter.cells
    assert (len(cell.runs), cell.seconds.n) == (3, 30)


def test_other_modes_places_and_spans_are_no_repeats(tmp_path: Path) -> None:
    make_run(tmp_path / "a", mode="ring")
    make_run(tmp_path / "b", mode="ddp")
    make_run(tmp_path / "c", Made(substrate="compose"), mode="ring")
    make_run(tmp_path / "d", mode="ring", spans=False)
    assert len(chapters(load([tmp_path]))[0].cells) == 4


def test_what_a_restarted_run_sent_is_shared_out_over_its_last_attempt(tmp_path: Path) -> None:
    """Its end counts that attempt's payload alone, and the counters of the steps before are another's."""
    whole = kinds(cell_of(tmp_path / "whole", mode="ring", link={"rate": "500mbit"}))
    make_run(tmp_path / "run", mode="ring", link={"rate": "500mbit"})
    for path in (tmp_path / "run").glob("rank*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "step"]
        lines[-1]["before"] = steps[3]["sent"]
        for line in steps[:4]:
            line |= {"attempt": 1, "sent": line["sent"] * 9}
        lines[-1]["payload"] = {kind: value * 8 // 12 for kind, value in lines[-1]["payload"].items()}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    restarted = chapters(load([tmp_path / "run"]))[0].cells[0]
    assert kinds(restarted)[:5] == whole[:5] and whole[0] != "-"
