"""torch.profiler over a few steps, if the spec has `profile`: a Chrome trace of this rank, and shares of its time.

compute        an operator ran, and the loop did not wait for other ranks
communication  the loop waited for other ranks, or Gloo was active, and no operator ran
other          the rest: Python, and waiting for a processor
overlap        Gloo was active while an operator ran; part of compute
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from testbed.spec.units import Interval, covered_length

STEPS = 3  # profiled steps, after warm-up
WAITING = "communication"  # the name of this module's marks in the trace


class Profiler:
    """Runs torch.profiler on this rank for STEPS steps from `first`, then writes the trace and the shares of time.

    Call `before` and `after` around every step.
    """

    def __init__(self, first: int, last: int, trace: Path, shares: Path) -> None:
        self.first, self.last = first, min(last, first + STEPS - 1)
        self.trace, self.shares = trace, shares
        self.running: profile | None = None

    def before(self, step: int, flush: Callable[[], None]) -> None:
        """Start the profiler at the first step. `flush` waits until no other thread works, as the profiler requires."""
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
        """Mark a wait of the loop in the trace."""
        return record_function(WAITING) if self.running is not None else nullcontext()


def time_shares(events: Iterable[Any]) -> dict[str, float]:
    """Return the shares of the profiled time. Events have a name and a time_range with start and end."""
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
    """Length of the part of `intervals` that is outside `taken`."""
    return covered_length([*intervals, *taken]) - covered_length(taken)
