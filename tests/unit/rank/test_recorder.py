"""The recorder and the timeline: what a rank writes about a step, and what a resumed rank copies."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from testbed.rank.recorder import Recorder, Timeline
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
from testbed.spec.units import covered_length

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


# --- timeline: exposed, hidden and busy, on a clock that the test sets ------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline(clock: Clock) -> Timeline:
    return Timeline(clock=clock)


def test_a_step_that_waits_for_all_it_sends_hides_nothing(timeline: Timeline, clock: Clock) -> None:
    timeline.start()
    with timeline.phase("backward"):
        clock.now += 2
    with timeline.phase("sync"), timeline.blocked(), timeline.comm("bucket 0", 8):
        clock.now += 3
    step = timeline.take()
    assert (step["total"], step["backward"], step["sync"]) == (5, 2, 3)
    assert (step["blocked"], step["busy"], step["hidden"]) == (3, 3, 0)
    assert step["comm"] == [("bucket 0", 2, 3, 8)]


def test_communication_while_the_loop_computes_is_hidden(timeline: Timeline, clock: Clock) -> None:
    timeline.start()
    with timeline.phase("backward"):
        clock.now += 1
        token = timeline.begin_comm("bucket 0", 8)
        clock.now += 2
        with timeline.blocked():
            clock.now += 4
            timeline.end_comm(token)
    step = timeline.take()
    assert (step["busy"], step["blocked"], step["hidden"]) == (6, 4, 2)


def test_a_buffer_in_flight_at_the_end_of_a_step_is_split_there(timeline: Timeline, clock: Clock) -> None:
    timeline.start()
    clock.now += 1
    token = timeline.begin_comm("bucket 0 gather", 8)
    clock.now += 2
    first = timeline.take()
    clock.now += 10  # between steps: a test, a hash
    timeline.start()
    clock.now += 3
    timeline.end_comm(token)
    clock.now += 1
    second = timeline.take()
    assert first["comm"] == [("bucket 0 gather", 1, 2, 8)]
    assert second["comm"] == [("bucket 0 gather (cont.)", 0, 3, 8)]
    assert (first["busy"], second["busy"]) == (2, 3)


def test_what_happens_between_two_steps_belongs_to_neither(timeline: Timeline, clock: Clock) -> None:
    with timeline.blocked(), timeline.comm("buffers", 8):
        clock.now += 5
    timeline.start()
    clock.now += 1
    step = timeline.take()
    assert (step["busy"], step["blocked"], step["comm"]) == (0, 0, [])


def test_a_buffer_that_was_sent_between_two_steps_is_recorded_without_time(timeline: Timeline, clock: Clock) -> None:
    """Every rank records as many transfers as the others, whether one falls between its steps or not."""
    timeline.start()
    token = timeline.begin_comm("bucket 0 reduce", 8)
    clock.now += 1
    timeline.take()
    clock.now += 1
    timeline.end_comm(token)  # its time in the first step is recorded; the rest is not
    with timeline.comm("bucket 0 gather", 8):
        clock.now += 1
    timeline.start()
    clock.now += 1
    step = timeline.take()
    assert (step["busy"], step["comm"]) == (0, [("bucket 0 gather (cont.)", 0, 0, 8)])


def test_without_details_only_sums_are_kept(clock: Clock) -> None:
    timeline = Timeline(detailed=False, clock=clock)
    timeline.start()
    with timeline.phase("data"):
        clock.now += 1
    step = timeline.take()
    step.pop("cpu")
    assert step == {
        "at": 100,
        "data": 1,
        "forward": 0,
        "backward": 0,
        "sync": 0,
        "update": 0,
        "total": 1,
    }


def test_length_counts_overlaps_once() -> None:
    assert covered_length([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert covered_length([]) == 0


def test_processor_time_is_that_of_computing_and_not_of_waiting() -> None:
    timeline = Timeline()
    timeline.start()
    for phase in ("forward", "sync"):
        with timeline.phase(phase):
            end = time.thread_time() + 0.03
            while time.thread_time() < end:
                pass
    with timeline.phase("backward"):
        time.sleep(0.05)
    assert 0.03 <= timeline.take()["cpu"] < 0.05


def test_copies_are_timed_without_what_is_blocked_inside_them(timeline: Timeline, clock: Clock) -> None:
    timeline.start()
    with timeline.phase("backward"):
        clock.now += 1
        with timeline.copying():
            clock.now += 2
            with timeline.blocked():
                clock.now += 4
        since = timeline.now()
        clock.now += 8
        timeline.copied(since)
    step = timeline.take()
    assert (step["backward"], step["copies"], step["blocked"]) == (15, 10, 4)
    assert step["copying"] == [(1, 6), (7, 8)]
    timeline.start()
    assert timeline.take()["copies"] == 0


def test_processor_time_of_copies_is_counted_where_that_of_computing_is() -> None:
    timeline = Timeline()
    timeline.start()

    def copy_for(seconds: float) -> None:
        with timeline.copying():
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass

    copy_for(0.02)  # between phases
    with timeline.phase("backward"):
        copy_for(0.03)
    step = timeline.take()
    assert 0.03 <= step["copies_cpu"] <= step["cpu"] < 0.05 and step["copies"] >= 0.05
    assert 0.0 <= step["kernel"] <= step["cpu"]
