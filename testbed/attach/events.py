"""What happens in a script, as events, and the parts of the observer that react to them.

A seam (seams.py) replaces a function of torch and reports what it sees to the Hub, which calls every part. A part that
raises is taken out, an `unseen` record says so, and the script goes on: it never sees an exception of the observer.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the package testbed
MAX_DEPTH = 60  # frames that are searched for a line of the script


@dataclass
class Collective:
    """One collective operation that is in flight, or has ended."""

    operation: str
    size: int  # bytes: of the tensor; of all parts (all_gather, reduce_scatter, all_to_all); of one (gather, scatter)
    begun: float  # monotonic time
    site: str  # line of the script; empty if none is on the stack
    phase: str
    detail: dict[str, Any] = field(default_factory=dict)  # root, ranks: if not rank 0 and all
    tensors: tuple[Any, ...] = ()  # valid while the event is handled
    ended: float | None = None
    blocked: float = 0.0  # seconds that the script waited for it


class Part:
    """A part of the observer. It overrides the events it needs; times are of the monotonic clock."""

    essential = False  # True: the script must not go on without it, so what it raises reaches the script

    def group_made(self) -> None:
        """The default process group exists."""

    def wrapped(self, kind: str, module: Any, options: dict[str, Any]) -> None:
        """A model was wrapped, e.g. by DistributedDataParallel."""

    def optimizer_made(self, optimizer: Any) -> None:
        """An optimizer was made."""

    def sampler_began(self, sampler: Any) -> None:
        """A pass over a DistributedSampler begins."""

    def sampler_passed(self, sampler: Any, indices: list[int]) -> None:
        """All indices of the pass that began last were taken: these."""

    def data_began(self, loader: Any) -> None:
        """A batch is being fetched."""

    def data_ended(self, loader: Any, batch: Any) -> None:
        """A batch was fetched."""

    def backward_began(self, loss: Any) -> None:
        """A backward pass begins."""

    def backward_ended(self) -> None:
        """The backward pass has ended."""

    def clipping_began(self) -> None:
        """Gradients are about to be clipped."""

    def update_began(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def update_ended(self, optimizer: Any) -> None:
        """An optimizer's step has ended."""

    def collective_began(self, collective: Collective) -> None:
        """A collective was started."""

    def collective_ended(self, collective: Collective) -> None:
        """A collective has ended; in any thread."""

    def waited(self, since: float, until: float, site: str) -> None:
        """The script waited for communication."""

    def ends(self) -> None:
        """The process ends."""


class Hub:
    """Passes events to all parts."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self.parts: list[Part] = []
        self._report = report  # (seam, error)
        self.clock = time.monotonic
        self.muted: Callable[[], bool] = lambda: False  # True if what happens is a mode's own, not the script's

    def emit(self, event: str, *arguments: Any) -> None:
        """Call the event of every part. A part that raises is taken out, unless it is essential."""
        if event != "collective_ended" and self.muted():  # a collective of the script's may end in any thread
            return
        for part in tuple(self.parts):
            try:
                getattr(part, event)(*arguments)
            except Exception as error:
                if part.essential:
                    raise
                if part in self.parts:
                    self.parts.remove(part)
                self.failed(f"{type(part).__name__}.{event}", error)

    def failed(self, seam: str, error: BaseException) -> None:
        """Report that something of the script cannot be seen."""
        self._report(seam, f"{type(error).__name__}: {error}"[:1000])


def call_site() -> str:
    """The innermost line of the stack that is neither torch's nor ours, e.g. `main.py:88`; empty if there is none."""
    frame, depth = sys._getframe(1), 0
    while frame is not None and depth < MAX_DEPTH:
        path = frame.f_code.co_filename
        if not path.startswith((OURS, "<")) and not is_library(path):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return ""


_LIBRARY: dict[str, bool] = {}


def is_library(path: str) -> bool:
    """True for a file of a package or of the standard library."""
    known = _LIBRARY.get(path)
    if known is None:
        parts = path.split(os.sep)
        known = _LIBRARY[path] = "site-packages" in parts or "dist-packages" in parts or path.startswith(STDLIB)
    return known


STDLIB = os.path.dirname(os.path.abspath(os.__file__))
