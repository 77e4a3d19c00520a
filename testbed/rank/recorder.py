"""Timeline: when this rank computed, when it communicated, and when its loop was blocked; on the monotonic clock.

The loop times phases and stalls, the communication layer times what travels, and neither asks the other: that exposed
and hidden communication add up to what was busy is a check. Any thread may write.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from testbed import __version__
from testbed.net.tcp import congestion_in_use
from testbed.results.folder import RunFolder
from testbed.results.records import (
    CONTINUED,
    Eval,
    Hash,
    Record,
    Step,
    encode,
    read,
)
from testbed.spec.units import Interval, length

# What a measurement depends on and the spec does not say: versions, kernel, processor, load.


def describe_environment() -> dict[str, Any]:
    """Facts for the start record."""
    return {
        "testbed": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "own cores": sorted(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "congestion": congestion_in_use(),
        "host": platform.node(),
    }


def _cpu_model() -> str:
    lines = _read("/proc/cpuinfo").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


PHASES = ("data", "forward", "backward", "sync", "update")  # `update` lies inside `sync`
COMPUTING = ("data", "forward", "backward")  # phases whose processor time is recorded


@dataclass
class Travel:
    """One buffer on its way."""

    name: str
    size: int  # bytes
    begun: float


class Timeline:
    """Everything since the last `take`; what is still on its way then is cut in two."""

    def __init__(self, detailed: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.detailed = detailed  # False: sums of phases only, to see what the details cost
        self.clock = clock
        self._lock = threading.Lock()
        self._tokens = itertools.count()
        self._travelling: dict[int, Travel] = {}
        self._travelled: list[tuple[Travel, float]] = []
        self._stalls: list[Interval] = []
        self._phases: list[tuple[str, float, float]] = []
        self._copies: list[Interval] = []
        self._cpu = self._kernel = self._copies_cpu = 0.0
        self._phase = ""  # the one that the loop is in
        self.mark: Callable[[], AbstractContextManager[Any]] = nullcontext  # a profiler's, around stalls
        self.begun = clock()

    def start(self) -> None:
        """A step begins: what happened between steps belongs to none."""
        self.begun = self.clock()
        with self._lock:
            self._travelled.clear()
            for travel in self._travelling.values():
                travel.begun = self.begun
                travel.name = travel.name.removesuffix(CONTINUED) + CONTINUED
        self._stalls.clear()
        self._phases.clear()
        self._copies.clear()
        self._cpu = self._kernel = self._copies_cpu = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The loop is in this phase."""
        begun, used, kernel, outer = self.clock(), time.thread_time(), _kernel_time(), self._phase
        self._phase = name
        try:
            yield
        finally:
            self._phase = outer
            self._phases.append((name, begun, self.clock()))
            if name in COMPUTING:
                self._cpu += time.thread_time() - used
                self._kernel += _kernel_time() - kernel

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The loop waits for communication."""
        begun = self.clock()
        try:
            with self.mark():
                yield
        finally:
            self._stalls.append((begun, self.clock()))

    def was_blocked(self, since: float, until: float | None = None) -> None:
        """The loop waited for communication from `since` until `until`, or until now."""
        self._stalls.append((since, self.clock() if until is None else until))

    def now(self) -> tuple[float, float]:
        """The clock, and the processor time that this thread has used: for `copied`."""
        return self.clock(), time.thread_time()

    def copied(self, since: tuple[float, float]) -> None:
        """Since then the loop has copied gradients to or from what is sent, or has run a hook of the mode."""
        self._copies.append((since[0], self.clock()))
        if self._phase in COMPUTING:
            self._copies_cpu += time.thread_time() - since[1]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """The loop copies gradients, or runs a hook of the mode."""
        since = self.now()
        try:
            yield
        finally:
            self.copied(since)

    def begin_comm(self, name: str, size: int) -> int:
        """A buffer starts to travel; give the number to `end_comm`."""
        token = next(self._tokens)
        with self._lock:
            self._travelling[token] = Travel(name, size, self.clock())
        return token

    def end_comm(self, token: int) -> None:
        now = self.clock()
        with self._lock:
            self._travelled.append((self._travelling.pop(token), now))

    @contextmanager
    def comm(self, name: str, size: int) -> Iterator[None]:
        token = self.begin_comm(name, size)
        try:
            yield
        finally:
            self.end_comm(token)

    def take(self) -> dict[str, Any]:
        """The step's fields of a record, from `start` to now."""
        begun, now = self.begun, self.clock()
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, a, b in self._phases:
            seconds[name] += b - a
        fields: dict[str, Any] = {"at": begun, **seconds, "total": now - begun, "cpu": _short(self._cpu)}
        return fields | self._details(begun, now) if self.detailed else fields

    def _details(self, begun: float, now: float) -> dict[str, Any]:
        with self._lock:
            travels = [*self._travelled, *((travel, now) for travel in self._travelling.values())]
        stalls = [(max(a, begun), b) for a, b in self._stalls]
        copies = [(a, b) for a, b in self._copies if a >= begun]
        intervals = [(travel.begun, end) for travel, end in travels]
        busy = length(intervals)
        return {
            "blocked": length(stalls),
            "busy": busy,
            "hidden": length([*intervals, *stalls]) - length(stalls),
            "copies": length([*copies, *stalls]) - length(stalls),
            "copies_cpu": _short(self._copies_cpu),
            "kernel": _short(self._kernel),
            "phases": [(name, _short(a - begun), _short(b - a)) for name, a, b in self._phases],
            "comm": [(t.name, _short(t.begun - begun), _short(end - t.begun), t.size) for t, end in travels],
            "stalls": [(_short(a - begun), _short(b - a)) for a, b in stalls],
            "copying": [(_short(a - begun), _short(b - a)) for a, b in copies],
        }


def _kernel_time() -> float:
    """Seconds that this thread has spent in the kernel: page faults, and interrupts that came while it ran."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_stime


def _short(seconds: float) -> float:
    """Microseconds are enough, and short to write."""
    return round(seconds, 6)


# Recorder: one JSON line per record, flushed at once. It draws no random number and adds no barrier.


class Recorder:
    """Appends to rankN.jsonl; a context manager."""

    def __init__(self, path: Path, earlier: Mapping[int, Path] | None = None) -> None:
        self.folder = RunFolder(path.parent)
        self._earlier = earlier or {}  # what attempts before this one recorded, oldest first
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(encode(record) + "\n")

    def repeat(self, step: int) -> None:
        """Take over what earlier attempts recorded of the steps before `step`: this run goes on from there.

        All of them are asked, the last that did a step counts: one may have ended before it repeated anything.
        """
        found: dict[tuple[str, int], Step | Eval | Hash] = {}
        for number, path in self._earlier.items():
            for record in read(path):
                if isinstance(record, Step | Eval | Hash) and record.step < step:
                    found[record.kind, record.step] = _marked(record, number)
        found.pop(("hash", 0), None)  # this attempt compared the start, too
        for record in sorted(found.values(), key=lambda each: (each.step, each.kind == "step")):
            self.write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take is lost, and was complained of
            self._file.close()


def _marked(record: Step | Eval | Hash, attempt: int) -> Step | Eval | Hash:
    """A step with the number of the attempt that did it: its counters are no other attempt's."""
    return replace(record, attempt=record.attempt or attempt) if isinstance(record, Step) else record
