"""The phases of a step from the events of a script."""

from __future__ import annotations

import pytest

from testbed.attach.phases import Phases
from testbed.results.timeline import Timeline


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def phases(clock: Clock) -> Phases:
    made = Phases(Timeline(clock=clock))
    made.start()
    return made


def play(phases: Phases, clock: Clock, *events: str) -> dict[str, float]:
    """Call the events one second apart; return seconds of phases and of the step."""
    for event in events:
        clock.now += 1
        if event == "wait":  # the second that has just passed
            phases.was_blocked(clock.now - 1, clock.now)
        else:
            getattr(phases, event)()
    return phases.timeline.take()


def seconds(step: dict[str, float]) -> dict[str, float]:
    return {name: step[name] for name in ("data", "forward", "backward", "sync", "update", "blocked") if step[name]}


def test_the_usual_loop(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "data_began", "data_ended", "backward_began", "backward_ended", "wait", "update_began")
    step = play(phases, clock, "update_ended")
    # one second before the batch is the rest
    assert seconds(step) == {"data": 1, "forward": 1, "backward": 1, "sync": 3, "update": 1, "blocked": 1}
    assert step["total"] == 7


def test_without_a_loader_all_before_backward_is_forward(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "wait", "backward_began", "backward_ended", "update_began", "update_ended")
    assert seconds(step) == {"forward": 2, "backward": 1, "sync": 2, "update": 1, "blocked": 1}


def test_passes_of_a_closure_are_no_part_of_the_update(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "data_began", "data_ended", "update_began", "backward_began", "backward_ended")
    step = play(phases, clock, "update_ended")
    assert seconds(step) == {"data": 1, "forward": 1, "backward": 1, "sync": 1, "update": 1}


def test_micro_batches_add_up(phases: Phases, clock: Clock) -> None:
    batch = ("data_began", "data_ended", "backward_began", "backward_ended")
    step = play(phases, clock, *batch, *batch, "update_began", "update_ended")
    assert seconds(step) == {"data": 2, "forward": 2, "backward": 2, "sync": 2, "update": 1}


def test_two_optimizers_make_one_step_without_overlapping_phases(phases: Phases, clock: Clock) -> None:
    turn = ("backward_began", "backward_ended", "update_began", "update_ended")
    step = play(phases, clock, "data_began", "data_ended", *turn, *turn)
    assert seconds(step) == {"data": 1, "forward": 2, "backward": 2, "sync": 4, "update": 2}
    assert step["total"] == 1 + 1 + 2 * 4


def test_a_wait_after_the_update_is_synchronisation(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "wait", "data_began", "data_ended", "backward_began", "backward_ended")
    assert seconds(step) == {"data": 1, "forward": 1, "backward": 1, "sync": 1, "blocked": 1}


def test_a_wait_inside_the_update_is_not_computing(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "backward_began", "backward_ended", "update_began", "wait", "update_ended")
    assert seconds(step)["update"] == 1 and seconds(step)["sync"] == 3 and seconds(step)["blocked"] == 1


def test_a_batch_that_no_backward_used_is_no_forward_pass(phases: Phases, clock: Clock) -> None:
    step = play(phases, clock, "data_began", "data_ended", "data_began", "data_ended", "backward_began")
    assert seconds(step) == {"data": 2, "forward": 1}
