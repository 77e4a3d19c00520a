"""What a rank records: the lines of rankN.jsonl, its environment, and a profile of a few steps.

The recorder draws no random numbers and does not synchronise ranks. If the spec has `profile`, torch.profiler gives a
Chrome trace of this rank and shares of its time:

compute        an operator ran, and the loop did not wait for other ranks
communication  the loop waited for other ranks, or Gloo was active, and no operator ran
other          the rest: Python, and waiting for a processor
overlap        Gloo was active while an operator ran; part of compute
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from testbed import __version__
from testbed.net.tcp import congestion_in_use
from testbed.results.folder import RunFolder
from testbed.results.records import (
    Eval,
    Hash,
    Record,
    Start,
    Step,
    encode,
    read,
)
from testbed.spec.units import Interval, covered_length


class Recorder:
    """Appends records to rankN.jsonl, one JSON line each, written at once. A context manager."""

    def __init__(self, path: Path, earlier: Mapping[int, Path] | None = None) -> None:
        self.folder = RunFolder(path.parent)
        self._earlier = earlier or {}  # records of earlier attempts, oldest first
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(encode(record) + "\n")

    def earlier_mode(self) -> str:
        """Return the mode with the bucket size that the last earlier attempt has chosen; empty if there was none."""
        records = (record for path in reversed(list(self._earlier.values())) for record in read(path))
        return next((record.mode for record in records if isinstance(record, Start)), "")

    def copy_earlier(self, step: int) -> None:
        """Copy the records of earlier attempts about steps before `step`, where this attempt resumes.

        All earlier attempts are read, because an attempt may have ended before it copied anything itself. If several
        attempts did the same step, the record of the last of them is copied.
        """
        found: dict[tuple[str, int], Step | Eval | Hash] = {}
        for number, path in self._earlier.items():
            for record in read(path, raw=True):
                if isinstance(record, Step | Eval | Hash) and record.step < step:
                    found[record.kind, record.step] = _with_attempt(record, number)
        found.pop(("hash", 0), None)  # this attempt has compared the initial parameters itself
        for record in sorted(found.values(), key=lambda each: (each.step, each.kind == "step")):
            self.write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when the record was written
            self._file.close()


def _with_attempt(record: Step | Eval | Hash, attempt: int) -> Step | Eval | Hash:
    """Set the number of the attempt that did a step, because every attempt counts bytes from 0."""
    return replace(record, attempt=record.attempt or attempt) if isinstance(record, Step) else record


def describe_environment() -> dict[str, Any]:
    """Return what a measurement depends on and the spec does not contain: versions, kernel, processor, load."""
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


PROFILED_STEPS = 3  # number of steps after warm-up that are profiled
WAITING = "communication"  # in the trace, the name of the intervals in which the loop waits


class Profiler:
    """Runs torch.profiler on this rank for some steps from `first`, then writes the trace and the shares of time.

    Call `before` and `after` around every step.
    """

    def __init__(self, first: int, last: int, trace: Path, shares: Path) -> None:
        self.first, self.last = first, min(last, first + PROFILED_STEPS - 1)
        self.trace, self.shares = trace, shares
        self.running: profile | None = None

    def before(self, step: int, flush: Callable[[], None]) -> None:
        """Start the profiler at the first step. `flush` waits for the mode's threads: the profiler needs them idle."""
        if step == self.first:
            flush()
            self.running = profile(activities=[ProfilerActivity.CPU])
            self.running.start()

    def after(self, step: int, flush: Callable[[], None]) -> None:
        """Stop the profiler after the last step and write both files."""
        if self.running is not None and step == self.last:
            flush()
            self.running.stop()
            self.running.export_chrome_trace(str(self.trace))
            self.shares.write_text(json.dumps(time_shares(self.running.events() or [])), encoding="utf-8")
            self.running = None

    def mark(self) -> AbstractContextManager[Any]:
        """Return a context manager that marks a wait of the loop in the trace."""
        return record_function(WAITING) if self.running is not None else nullcontext()


def time_shares(events: Iterable[Any]) -> dict[str, float]:
    """Return each category's share of the profiled time. Events have a name and a time_range with start and end."""
    spans = [(event.name, (event.time_range.start, event.time_range.end)) for event in events]
    if not spans:
        return {}
    whole = max(end for _, (_, end) in spans) - min(begin for _, (begin, _) in spans)
    waiting = [span for name, span in spans if name == WAITING]
    gloo = [span for name, span in spans if name.startswith("gloo:")]
    operators = [span for name, span in spans if name.startswith(("aten::", "autograd::", "Optimizer."))]
    computing = _length_outside(operators, waiting)
    both = covered_length(operators) + covered_length([*waiting, *gloo]) - covered_length([*operators, *waiting, *gloo])
    hidden = both - (covered_length(operators) - computing)
    communicating = covered_length([*operators, *waiting, *gloo]) - computing
    shares = {"compute": computing, "communication": communicating, "overlap": max(0.0, hidden)}
    shares["other"] = whole - computing - communicating
    return {key: value / whole for key, value in shares.items()} if whole else {}


def _length_outside(intervals: list[Interval], taken: list[Interval]) -> float:
    """Return the length of the part of `intervals` that is outside `taken`."""
    return covered_length([*intervals, *taken]) - covered_length(taken)
