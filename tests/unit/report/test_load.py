"""Reading run folders: complete ones are read, damaged ones are named and skipped; and the parts of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.report.load import Steps, load
from testbed.report.model import chapters
from testbed.results.records import Step
from testbed.spec.errors import SpecError
from testbed.spec.run import SCHEMA
from tests.support.synthetic import make_run

RATE: dict[str, Any] = {"link": {"rate": "500mbit"}}


def test_a_folder_named_twice_counts_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    assert len(load([tmp_path, tmp_path / "a"]).runs) == 1


def test_a_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nowhere"):
        load([tmp_path / "nowhere"])


@pytest.mark.parametrize("status", ["invalid", "failed", "interrupted"])
def test_a_run_whose_status_is_not_ok_is_skipped_with_its_reason(tmp_path: Path, status: str) -> None:
    make_run(tmp_path / "bad", status=status, reason="rank 2 died")
    loaded = load([tmp_path])
    assert loaded.runs == [] and f"{status}: rank 2 died" in loaded.skipped[0].reason


def test_a_reason_is_one_short_line_without_control_characters(tmp_path: Path) -> None:
    make_run(tmp_path / "bad", status="failed", reason="rank 2 \x1b]0;owned\x07" + "x" * 100_000)
    (skipped,) = load([tmp_path]).skipped
    assert skipped.reason.startswith("failed: rank 2 ?]0;owned?xxx")
    assert skipped.reason.isprintable() and len(skipped.reason) < 500


def truncate_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(key: str, value: Any) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[4][key] = value
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return do


def to_link(path: Path) -> None:
    """Move the file elsewhere and leave a link."""
    path.symlink_to(path.replace(path.parent.parent / f"{path.name}.elsewhere"))


def oversized(path: Path) -> None:
    """A sparse file that is larger than the limit."""
    path.touch()
    os.truncate(path, (16 << 20) + 1)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no summary": ("summary.json", Path.unlink, "no summary.json"),
    "half a summary": ("summary.json", truncate_half, "damaged"),
    "half a spec": ("spec.json", truncate_half, "not JSON"),
    "a receipt that is a list": ("receipt.json", lambda p: p.write_text("[1]"), "receipt"),
    "half a receipt": ("receipt.json", truncate_half, "damaged"),
    "a rank without an end": ("rank1.jsonl", truncate_half, "rank 1 did not finish"),
    "a rank's file gone": ("rank1.jsonl", Path.unlink, "rank1.jsonl"),
    "not UTF-8": ("rank1.jsonl", lambda p: p.write_bytes(b"\xff\xfe\x00\n"), "damaged"),
    "another schema": ("spec.json", lambda p: p.write_text(json.dumps({"schema": SCHEMA + 1})), f"schema {SCHEMA + 1}"),
    "a negative time": ("rank0.jsonl", change("total", -1.0), "total"),
    "a time that is no number": ("rank0.jsonl", change("busy", "long"), "damaged"),
    "an infinite time": ("rank0.jsonl", change("at", float("inf")), "at has a value"),
    "a step left out": ("rank0.jsonl", change("step", 7), "out of order"),
    "comm of another shape": ("rank0.jsonl", change("comm", [[1, 2]]), "damaged"),
    "phases that are a number": ("rank0.jsonl", change("phases", 5), "damaged"),
    "a link for a rank's records": ("rank1.jsonl", lambda p: to_link(p), "is a symlink"),
    "a link for a receipt": ("receipt.json", lambda p: to_link(p), "is a symlink"),
    "a link that is not one of our files": ("notes", lambda p: p.symlink_to("/etc/passwd"), "is a symlink"),
    "a pipe": ("rank9.log", lambda p: os.mkfifo(p), "not a regular file"),
    "too large records": (
        "rank1.jsonl",
        lambda p: os.truncate(p, (128 << 20) + 1),
        "at most 134217728 are read",
    ),
    "a too large receipt": (
        "receipt.json",
        lambda p: os.truncate(p, (16 << 20) + 1),
        "at most 16777216 are read",
    ),
    "a too large profile": ("rank0.profile.json", lambda p: oversized(p), "at most 16777216 are read"),
    "brackets nested too deeply": ("receipt.json", lambda p: p.write_text("[" * 100_000), "damaged"),
}


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_folder_is_named_and_skipped(
    tmp_path: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    make_run(tmp_path / "good", **RATE)
    make_run(tmp_path / "bad", **RATE)
    damage(tmp_path / "bad" / name)
    loaded = load([tmp_path])
    assert [run.folder.path.name for run in loaded.runs] == ["good"]
    (skipped,) = loaded.skipped
    assert skipped.path.name == "bad" and words in skipped.reason and "\n" not in skipped.reason


def test_folders_that_the_user_linked_are_read(tmp_path: Path) -> None:
    make_run(tmp_path / "disk" / "quick" / "ring", mode="ring", **RATE)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one").symlink_to(tmp_path / "disk" / "quick" / "ring")
    for path in (tmp_path / "runs", tmp_path / "mine", tmp_path / "mine" / "one"):
        loaded = load([path])
        assert len(loaded.runs) == 1 and loaded.skipped == []


@pytest.mark.parametrize("spoil", [to_link, lambda p: os.truncate(p, (16 << 20) + 1)], ids=["link", "oversized"])
def test_a_damaged_experiment_file_is_ignored_and_the_runs_are_kept(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    make_run(tmp_path / "quick" / "ring", mode="ring", **RATE)
    question = tmp_path / "quick" / "experiment.json"
    question.write_text(json.dumps({"name": "adhoc", "title": "a question"}))
    assert load([tmp_path / "quick"]).experiments["adhoc"].title == "a question"
    spoil(question)
    loaded = load([tmp_path / "quick"])
    assert len(loaded.runs) == 1 and loaded.experiments == {}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_never_raises(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("rot") / "run"
    make_run(folder, nodes=2, steps=4, **RATE)
    name = data.draw(st.sampled_from(["spec.json", "summary.json", "receipt.json", "rank0.jsonl", "rank1.jsonl"]))
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(bytes(content))
    loaded = load([folder])
    assert len(loaded.runs) + len(loaded.skipped) == 1
    for chapter in chapters(loaded):  # a run that was accepted can be used
        assert chapter.cells[0].seconds.n > 0


def one_step(**values: Any) -> Steps:
    times = dict.fromkeys(("at", "data", "forward", "backward", "sync", "update", "total", "loss"), 0.0)
    counts: dict[str, Any] = {"step": 0, "epoch": 0, "images": 0, "sent": None, "received": None}
    return Steps.of([Step(**counts | times | values)], "here")


def test_blocked_time_inside_backward_is_not_compute() -> None:
    """As in DDP: backward lasts 3 s, the last of which waits. Timed from outside all of it would be compute."""
    phases = [["forward", 0, 1], ["backward", 1, 3], ["sync", 4, 0.5], ["update", 4, 0.5]]
    steps = one_step(forward=1, backward=3, sync=0.5, update=0.5, total=4.5, blocked=1, stalls=[[3, 1]], phases=phases)
    assert (steps.compute[0], steps.rest[0]) == pytest.approx((3.5, 0.0))


def test_other_work_in_sync_is_rest() -> None:
    phases = [["forward", 0, 1], ["backward", 1, 1], ["sync", 2, 2]]
    steps = one_step(forward=1, backward=1, sync=2, update=0.5, total=4.25, blocked=1, stalls=[[2.1, 1]], phases=phases)
    assert (steps.compute[0], steps.rest[0]) == pytest.approx((2.5, 0.75))
    assert steps.compute[0] + steps.blocked[0] + steps.rest[0] == pytest.approx(steps.total[0])


def test_a_stall_across_two_phases_counts_in_both_by_its_length() -> None:
    phases = [["backward", 0, 2], ["sync", 2, 1]]
    steps = one_step(backward=2, sync=1, total=3, blocked=1, stalls=[[1.5, 1]], phases=phases)
    assert steps.blocked_in_sync[0] == pytest.approx(0.5)
    assert steps.compute[0] == pytest.approx(1.5)


def test_a_stall_outside_every_phase_makes_the_sum_exceed_the_step() -> None:
    """The sum is a check: the time that a rank recorded as waiting must lie inside its intervals."""
    phases = [["backward", 0, 2], ["sync", 2.5, 0.5]]
    steps = one_step(backward=2, sync=0.5, total=3, blocked=0.5, stalls=[[2, 0.5]], phases=phases)
    assert steps.compute[0] + steps.blocked[0] + steps.rest[0] == pytest.approx(3.5)


def test_copies_inside_backward_are_not_compute() -> None:
    phases = [("forward", 0, 1), ("backward", 1, 2), ("sync", 3, 0.5), ("update", 3, 0.5)]
    copying = [(1.5, 0.25), (2.5, 0.25)]
    steps = one_step(forward=1, backward=2, sync=0.5, update=0.5, total=3.5, copies=0.5, copying=copying, phases=phases)
    assert (steps.compute[0], steps.copies[0], steps.rest[0]) == pytest.approx((3.0, 0.5, 0.0))


def test_copies_between_phases_are_not_rest() -> None:
    """As when a mode clears its gradient buffers before forward."""
    phases = [("data", 0, 1), ("forward", 1.5, 1), ("backward", 2.5, 1)]
    steps = one_step(data=1, forward=1, backward=1, total=3.75, copies=0.5, copying=[(1, 0.5)], phases=phases)
    assert (steps.compute[0], steps.rest[0]) == pytest.approx((3.0, 0.25))


def test_copies_while_the_loop_is_blocked_count_as_blocked() -> None:
    """As in a hook that waits: the hook takes 1 s, of which it waits 0.6 s."""
    phases = [("backward", 0, 3)]
    steps = one_step(backward=3, total=3, blocked=0.6, stalls=[(1.2, 0.6)], copies=0.4, copying=[(1, 1)], phases=phases)
    assert (steps.compute[0], steps.rest[0]) == pytest.approx((2.0, 0.0))
    assert steps.compute[0] + steps.copies[0] + steps.blocked[0] + steps.rest[0] == pytest.approx(3.0)
