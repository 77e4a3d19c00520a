"""The timeline of one step: exposed, hidden and busy time."""

from __future__ import annotations

import time

import pytest

from testbed.results.timeline import Observed, Timeline, group_of
from testbed.spec.units import covered_length


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
    assert step.pop("process") >= 0.0
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


@pytest.mark.parametrize(
    "observed",
    [
        Observed("all_reduce", "main.py:88"),
        Observed("all_reduce"),
        Observed("gather", "main.py:91", root=2),
        Observed("broadcast", "my script, v2.py:7", root=4, ranks=(4, 5)),
        Observed("broadcast", root=4, ranks=(4, 5)),
    ],
)
def test_a_name_is_read_back_as_it_was_written(observed: Observed) -> None:
    assert Observed.parse(str(observed)) == observed


def test_a_name_is_short_where_all_ranks_take_part_and_rank_0_is_the_root() -> None:
    assert str(Observed("scatter", "main.py:9")) == "scatter main.py:9"
    assert str(Observed("scatter", "main.py:9", 1, (1, 3))) == "scatter main.py:9, root 1, ranks 1 3"


def test_a_text_that_is_no_name_is_an_operation_of_its_own() -> None:
    assert Observed.parse("*** ?") == Observed("*** ?")


def test_a_group_of_all_ranks_in_their_order_is_empty() -> None:
    assert group_of([0, 1, 2], 3) == ()
    assert group_of([2, 0, 1], 3) == (2, 0, 1) and group_of([0, 2], 3) == (0, 2)
