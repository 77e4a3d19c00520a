"""The phases of a step of a script, from its events: data, forward, backward, sync, update.

A script does not say when a forward pass begins or where its synchronisation is, so some intervals get their name when
the next event comes. Phases do not overlap, except that `update` is a part of `sync`, as in the testbed's own loop.
What belongs to no phase is the rest of the step.
"""

from __future__ import annotations

from testbed.results.timeline import COMPUTING, Moment, Timeline
from testbed.spec.units import Interval

REST = ""  # between the update and the next batch
AFTER = "after"  # backward has ended; what comes is synchronisation, or the next micro-batch


class Phases:
    """Records phases in a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.trained = False  # a backward pass has begun in this step
        self._enter(REST, timeline.moment())

    def start(self) -> None:
        """A step begins now."""
        self.timeline.start()
        self.trained = False
        self._enter(REST, self.timeline.moment())

    def data_began(self) -> None:
        """A batch is being fetched. A forward pass without backward before it was no training."""
        for since, until in self.waits:
            self.timeline.was_in_phase("sync", Moment(since, 0.0, 0.0), Moment(until, 0.0, 0.0))
        self._enter("data", self.timeline.moment())

    def data_ended(self) -> None:
        self._close("data", "forward")

    def data_exhausted(self) -> None:
        self._close("data", REST)

    def backward_began(self) -> None:
        """All since the batch, or since the last update or backward pass, was the forward pass."""
        now, self.trained = self.timeline.moment(), True
        self.timeline.was_in_phase("forward", self.since, now)
        self._enter("backward", now)

    def backward_ended(self) -> None:
        self._close("backward", AFTER)

    def update_began(self) -> None:
        now = self.timeline.moment()
        if self.state == AFTER:
            self.timeline.was_in_phase("sync", self.since, now)
        self._enter("update", now)

    def update_ended(self) -> None:
        """The optimizer's step has ended; with a closure, forward and backward passes were inside of it."""
        now = self.timeline.moment()
        self.timeline.was_in_phase("update", self.since, now)
        self.timeline.was_in_phase("sync", self.since, now)
        self._enter(REST, now)

    def was_blocked(self, since: float, until: float) -> None:
        """The script waited for communication. What is blocked belongs to a phase, so that the parts add up."""
        self.timeline.was_blocked(since, until)
        if self.state == "update":  # only what was computed before and after the wait is the update
            now = self.timeline.moment()
            self.timeline.was_in_phase("update", self.since, now._replace(at=since))
            self.timeline.was_in_phase("sync", self.since, now)
            self._enter("update", now)
        elif self.state not in COMPUTING or self.state == "forward":
            self.waits.append((since, until))

    def _close(self, name: str, following: str) -> None:
        now = self.timeline.moment()
        if self.state == name:
            self.timeline.was_in_phase(name, self.since, now)
        self._enter(following, now)

    def _enter(self, state: str, now: Moment) -> None:
        self.state, self.since = state, now
        self.waits: list[Interval] = []  # since then, that belong to no phase unless a later event says so
        self.timeline.current = state
