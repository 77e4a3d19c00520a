"""The recorder and the timeline: what a rank writes about a step, and what a resumed rank copies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.rank.recorder import Recorder, time_shares
from testbed.results.folder import RunFolder
from testbed.results.records import (
    Hash,
    Record,
    Start,
    Step,
    encode,
    read,
)
from testbed.spec.errors import SpecError

START = Start(rank=0, world=1, unix=0.0, parameters=1, gradient_bytes=4, tensors=1, deadline=1.0, counter="none")


def step(number: int, loss: float) -> Step:
    times = dict.fromkeys(("at", "data", "forward", "backward", "sync", "update", "total"), 0.0)
    return Step(step=number, epoch=0, loss=loss, images=1, sent=None, received=None, **times)


def same(number: int) -> Hash:
    return Hash(step=number, parameters="same", agree=True)


def attempt(folder: RunFolder, *records: Record, resume: int = 0) -> None:
    """What a resumed rank does: set records aside, open, copy, record."""
    folder.set_records_aside(0)
    with Recorder(folder.records(0), folder.attempts(0)) as recorder:
        recorder.write(START)
        recorder.write(same(0))
        if resume:
            recorder.copy_earlier(resume)
        for record in records:
            recorder.write(record)


def test_the_mode_of_the_attempt_before_is_known(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for mode in ("ring/bucket:1MiB/pipeline", "ring/bucket:2MiB/pipeline"):
        folder.set_records_aside(0)
        with Recorder(folder.records(0), folder.attempts(0)) as recorder:
            recorder.write(replace(START, mode=mode))
    folder.set_records_aside(0)
    folder.records(0).write_text('{"kind": "start"')  # killed while it wrote its first line
    folder.set_records_aside(0)
    with Recorder(folder.records(0), folder.attempts(0)) as recorder:
        assert recorder.earlier_mode() == "ring/bucket:2MiB/pipeline"
    with Recorder(tmp_path / "other.jsonl") as recorder:
        assert recorder.earlier_mode() == ""


def found(folder: RunFolder) -> list[tuple[int, float, int | None]]:
    return [(r.step, r.loss, r.attempt) for r in read(folder.records(0)) if isinstance(r, Step)]


def test_steps_are_copied_past_an_attempt_that_ended_before_it_copied_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    attempt(folder, step(0, 1.0), step(1, 1.0), step(2, 1.0))
    attempt(folder)
    attempt(folder, step(2, 3.0), step(3, 3.0), resume=2)
    assert found(folder) == [(0, 1.0, 1), (1, 1.0, 1), (2, 3.0, None), (3, 3.0, None)]


def test_of_a_step_done_twice_the_later_record_counts_and_records_are_in_order(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    attempt(folder, *(step(k, 1.0) for k in range(6)))
    attempt(folder, step(2, 2.0), step(3, 2.0), same(4), resume=2)
    attempt(folder)
    attempt(folder, step(5, 4.0), resume=5)
    assert found(folder) == [(0, 1.0, 1), (1, 1.0, 1), (2, 2.0, 2), (3, 2.0, 2), (4, 1.0, 1), (5, 4.0, None)]
    kinds = [(r.kind, vars(r).get("step")) for r in read(folder.records(0))]
    assert kinds[:2] == [("start", None), ("hash", 0)] and kinds.count(("hash", 0)) == 1
    assert kinds.index(("step", 3)) < kinds.index(("hash", 4)) < kinds.index(("step", 4))


def test_the_incomplete_last_line_of_a_killed_attempt_is_ignored(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.records(0).write_text("".join(encode(r) + "\n" for r in (START, step(0, 1.0))) + encode(step(1, 1.0))[:-9])
    attempt(folder, resume=9)
    assert found(folder) == [(0, 1.0, 1)]
    assert all(json.loads(line) for line in folder.records(0).read_text().splitlines())


DAMAGE = {"loss": None, "step": -1, "sent": 10**30, "total": "long", "comm": [["x"]], "attempt": "first"}


@pytest.mark.parametrize(("key", "value"), DAMAGE.items())
def test_a_line_that_is_no_record_is_refused_and_nothing_is_copied(tmp_path: Path, key: str, value: object) -> None:
    """The controller prints the loss of each line, so a line without one must not be copied."""
    line = {"kind": "step", **vars(step(1, 1.0)), key: value}
    old = tmp_path / "rank0.attempt1.jsonl"
    old.write_text("".join(f"{text}\n" for text in (encode(START), encode(step(0, 1.0)), json.dumps(line))))
    with (
        Recorder(tmp_path / "rank0.jsonl", {1: old}) as recorder,
        pytest.raises(SpecError, match=rf"{old}: line 3 .*step\.{key}"),
    ):
        recorder.copy_earlier(2)
    assert (tmp_path / "rank0.jsonl").read_text() == ""


def test_a_step_without_a_loss_is_refused(tmp_path: Path) -> None:
    line = {"kind": "step", **vars(step(0, 1.0))}
    old = tmp_path / "rank0.attempt1.jsonl"
    old.write_text(json.dumps({key: line[key] for key in line if key != "loss"}) + "\n")
    with Recorder(tmp_path / "rank0.jsonl", {1: old}) as recorder, pytest.raises(SpecError, match=r"step\.loss"):
        recorder.copy_earlier(1)


def event(name: str, start: float, end: float) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_time_divides_into_compute_communication_and_other() -> None:
    shares = time_shares(
        [
            event("aten::conv2d", 0, 40),
            event("aten::mkldnn_convolution", 5, 35),  # inside the other
            event("gloo:all_reduce", 30, 60),  # ten of it while an operator runs
            event("communication", 60, 80),
            event("aten::add_", 70, 75),  # an operator while the loop waits is not compute
            event("python", 90, 100),
        ]
    )
    assert shares == pytest.approx({"compute": 0.4, "communication": 0.4, "overlap": 0.1, "other": 0.2})


def test_no_events_no_shares() -> None:
    assert time_shares([]) == {}
