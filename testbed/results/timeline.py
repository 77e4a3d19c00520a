"""The timeline of one step: its phases, what was in flight, when the loop waited or copied.

All times are of the monotonic clock. The training loop measures phases and stalls; the communication layer measures
buffers in flight. The two are independent, so the equation exposed + hidden = busy is a check. Standard library only,
because this also runs inside a user's own script (attach/).

A collective of such a script has a readable name in `Step.comm`, with all that results/theory.py needs:

    all_reduce main.py:88                      by all ranks
    gather main.py:91, root 2                  rank 2 is the root; without `root` it is rank 0
    broadcast train.py:7, root 4, ranks 4 5    by the group of ranks 4 and 5
"""

from __future__ import annotations

import itertools
import math
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from testbed.spec.units import Interval, covered_length

CONTINUED = " (cont.)"  # suffix of the name in `comm` of a buffer that was in flight when the step began
PHASES = ("data", "forward", "backward", "sync", "update")  # `update` is a part of `sync`
COMPUTING = ("data", "forward", "backward")  # phases whose processor time is recorded


@dataclass
class Transfer:
    """One buffer in flight."""

    name: str
    size: int  # bytes
    begun: float


class Moment(NamedTuple):
    """When a phase begins or ends."""

    at: float  # monotonic time
    cpu: float  # processor time of this thread
    kernel: float  # the part of `cpu` in kernel mode


class Timeline:
    """The times of one step. A buffer in flight at the end of a step continues in the next one.

    Any thread may record buffers; phases, waits and copies are recorded by the loop's thread.
    """

    def __init__(self, detailed: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.detailed = detailed  # False: record sums of phases only
        self.clock = clock
        self._lock = threading.Lock()
        self._tokens = itertools.count()
        self._in_flight: dict[int, Transfer] = {}
        self._finished: list[tuple[Transfer, float]] = []
        self._stalls: list[Interval] = []
        self._phases: list[tuple[str, float, float]] = []
        self._copies: list[Interval] = []
        self._cpu = self._kernel = self._copies_cpu = 0.0
        self.current = ""  # the present phase of the loop
        self.mark: Callable[[], AbstractContextManager[Any]] = nullcontext  # set by a profiler: a context around stalls
        self.begun = clock()
        self._process = time.process_time()
        self._taken = math.inf  # when the last step ended

    def start(self) -> None:
        """Begin a step. The time between two steps belongs to neither step.

        A buffer that was sent between two steps is recorded at the beginning of the second step with 0 s, so that all
        ranks record the same number of buffers.
        """
        self.begun, self._process = self.clock(), time.process_time()
        with self._lock:
            between = [transfer for transfer, _ in self._finished if transfer.begun >= self._taken]
            for transfer in [*between, *self._in_flight.values()]:
                transfer.begun = self.begun
                transfer.name = transfer.name.removesuffix(CONTINUED) + CONTINUED
            self._finished = [(transfer, self.begun) for transfer in between]
        self._stalls.clear()
        self._phases.clear()
        self._copies.clear()
        self._cpu = self._kernel = self._copies_cpu = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of the loop: the `with` block."""
        begun, outer = self.moment(), self.current
        self.current = name
        try:
            yield
        finally:
            self.current = outer
            self.was_in_phase(name, begun, self.moment())

    def moment(self) -> Moment:
        """Return the time and the processor time of this thread, for `was_in_phase`."""
        return Moment(self.clock(), time.thread_time(), _kernel_time())

    def was_in_phase(self, name: str, since: Moment, until: Moment) -> None:
        """Record a phase that has ended. Both moments are of one thread."""
        self._phases.append((name, since.at, until.at))
        if name in COMPUTING:
            self._cpu += until.cpu - since.cpu
            self._kernel += until.kernel - since.kernel

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Measure a wait of the loop for communication: the `with` block."""
        begun = self.clock()
        try:
            with self.mark():
                yield
        finally:
            self._stalls.append((begun, self.clock()))

    def was_blocked(self, since: float, until: float | None = None) -> None:
        """Record a wait of the loop for communication from `since` until `until`, or until now."""
        self._stalls.append((since, self.clock() if until is None else until))

    def now(self) -> tuple[float, float]:
        """Return the clock and the processor time of this thread, for `copied`."""
        return self.clock(), time.thread_time()

    def copied(self, since: tuple[float, float]) -> None:
        """Record that the loop copied gradients, or ran a hook of the mode, from `since` (see `now`) until now."""
        self._copies.append((since[0], self.clock()))
        if self.current in COMPUTING:
            self._copies_cpu += time.thread_time() - since[1]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Measure copies of gradients, or a hook of the mode: the `with` block."""
        since = self.now()
        try:
            yield
        finally:
            self.copied(since)

    def begin_comm(self, name: str, size: int, at: float | None = None) -> int:
        """Record that a buffer is in flight from now on, or since `at`. Return a number for `end_comm`."""
        token = next(self._tokens)
        with self._lock:
            self._in_flight[token] = Transfer(name, size, self.clock() if at is None else at)
        return token

    def end_comm(self, token: int, at: float | None = None) -> None:
        """Record that a buffer is no longer in flight, now or since `at`. `token` is the number from `begin_comm`."""
        now = self.clock() if at is None else at
        with self._lock:
            self._finished.append((self._in_flight.pop(token), now))

    @contextmanager
    def comm(self, name: str, size: int) -> Iterator[None]:
        """Record that a buffer of `size` bytes is in flight during the `with` block."""
        token = self.begin_comm(name, size)
        try:
            yield
        finally:
            self.end_comm(token)

    def take(self) -> dict[str, Any]:
        """Return the times of the step so far as fields of a Step record."""
        begun, now = self.begun, self.clock()
        self._taken = now
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, a, b in self._phases:
            seconds[name] += b - a
        fields: dict[str, Any] = {"at": begun, **seconds, "total": now - begun, "cpu": _short(self._cpu)}
        fields["process"] = _short(time.process_time() - self._process)
        return fields | self._details(begun, now) if self.detailed else fields

    def _details(self, begun: float, now: float) -> dict[str, Any]:
        with self._lock:
            transfers = [*self._finished, *((transfer, now) for transfer in self._in_flight.values())]
        stalls = [(max(a, begun), b) for a, b in self._stalls]
        copies = [(a, b) for a, b in self._copies if a >= begun]
        intervals = [(transfer.begun, end) for transfer, end in transfers]
        blocked = covered_length(stalls)
        return {
            "blocked": blocked,
            "busy": covered_length(intervals),
            "hidden": covered_length([*intervals, *stalls]) - blocked,
            "copies": covered_length([*copies, *stalls]) - blocked,
            "copies_cpu": _short(self._copies_cpu),
            "kernel": _short(self._kernel),
            "phases": [(name, _short(a - begun), _short(b - a)) for name, a, b in self._phases],
            "comm": [(t.name, _short(t.begun - begun), _short(end - t.begun), t.size) for t, end in transfers],
            "stalls": [(_short(a - begun), _short(b - a)) for a, b in stalls],
            "copying": [(_short(a - begun), _short(b - a)) for a, b in copies],
        }


def _kernel_time() -> float:
    """Return the seconds of this thread in kernel mode: page faults, and interrupts while the thread ran."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_stime


def _short(seconds: float) -> float:
    """Return the seconds, rounded to microseconds."""
    return round(seconds, 6)


_NAME = re.compile(r"(\w+)(?: (.*?))??(?:, root (\d{1,4}))?(?:, ranks ([\d ]{1,1500}))?", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class Observed:
    """A collective of one rank. Ranks are numbered as in the whole run, not as in the group."""

    operation: str  # all_reduce, gather, ...
    site: str = ""  # line of the script
    root: int = 0
    ranks: tuple[int, ...] = ()  # of its group; empty: all ranks

    @classmethod
    def parse(cls, name: str) -> Observed:
        """Parse a name. A text of another form becomes the operation."""
        found = _NAME.fullmatch(name)
        if found is None:
            return cls(name)
        operation, site, root, ranks = found.groups()
        return cls(operation, site or "", int(root or 0), tuple(map(int, (ranks or "").split())))

    def __str__(self) -> str:
        words = f"{self.operation} {self.site}".strip()
        words += f", root {self.root}" if self.root else ""
        return words + (f", ranks {' '.join(map(str, self.ranks))}" if self.ranks else "")


def group_of(ranks: Sequence[int], world: int) -> tuple[int, ...]:
    """Return the ranks of a group as in a name: empty if the group has all ranks in their order."""
    return () if list(ranks) == list(range(world)) else tuple(ranks)
