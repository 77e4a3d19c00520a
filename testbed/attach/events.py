"""The events of a script, and the base class of the observer's parts that react to them.

A seam (seams.py) replaces a function of torch and reports calls of it to the Hub, which calls every part. If a seam or
a part raises, it is removed, an `unseen` record reports the exception, and the script goes on. Only an essential part's
exception reaches the script.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the package testbed
STDLIB = os.path.dirname(os.path.abspath(os.__file__))
MAX_DEPTH = 60  # frames that are searched for a line of the script
FAULT = "TESTBED_OBSERVER_FAULT"  # for tests: the name of the seam, or `Part.event`, that raises when it is called
MADE_BY = {  # folder or file of torch on the stack: the name of what called the collective, if not the script itself
    "torch/nn/parallel/distributed.py": "DistributedDataParallel",
    "torch/distributed/algorithms/ddp_comm_hooks/": "DistributedDataParallel",
    "torch/distributed/fsdp/": "FSDP",
    "torch/nn/modules/_functions.py": "SyncBatchNorm",
    "torch/distributed/optim/": "torch.distributed.optim",
    "torch/distributed/tensor/": "DTensor",
}


@dataclass(eq=False, slots=True)
class Collective:
    """One collective operation that is in flight, or has ended."""

    operation: str
    size: int  # bytes: the tensor; all parts (all_gather, reduce_scatter, all_to_all); one part (gather, scatter)
    begun: float  # monotonic time
    site: str  # line of the script; empty if no line of it is on the stack
    phase: str
    # reduce: operation; root or peer: rank; group: number of ranks; ranks: those of the group, if not all
    detail: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[Any, ...] = ()  # the tensors of `size`; valid while the event is handled
    launched: float = 0.0  # monotonic time when the call that started it returned
    ended: float | None = None  # monotonic time
    by: str = ""  # what called it, if not the script itself: DistributedDataParallel, ...
    row: dict[str, Any] = field(default_factory=dict)  # its row of the calls record
    token: int = -1  # its number in the timeline


class Part:
    """A part of the observer. A subclass overrides the events that it needs. Times are of the monotonic clock."""

    essential = False  # True: the script must not go on without this part, so its exceptions reach the script

    def group_made(self) -> None:
        """The default process group exists."""

    def wrapped(self, kind: str, module: Any, options: dict[str, Any]) -> None:
        """A model was wrapped, e.g. by DistributedDataParallel."""

    def optimizer_made(self, optimizer: Any) -> None:
        """An optimizer was made."""

    def sampler_began(self, sampler: Any) -> None:
        """A pass over a DistributedSampler begins."""

    def sampler_passed(self, sampler: Any, indices: list[int]) -> None:
        """The script has read all `indices` of the latest pass."""

    def data_began(self, loader: Any) -> None:
        """A batch is being fetched."""

    def data_ended(self, loader: Any, batch: Any) -> None:
        """A batch was fetched."""

    def data_exhausted(self, loader: Any) -> None:
        """No batch is left in this pass."""

    def evaluation_began(self) -> None:
        """Module.eval was called."""

    def evaluation_ended(self) -> None:
        """Module.train was called."""

    def scaled(self, result: Any, loss: Any) -> None:
        """A GradScaler multiplied a loss."""

    def backward_began(self, loss: Any) -> None:
        """A backward pass begins."""

    def backward_ended(self, reduced: list[Collective]) -> None:
        """The backward pass has ended. `reduced`: the collectives of DDP's reducer, for whose end it has waited."""

    def clipping_began(self) -> None:
        """Gradients are about to be clipped."""

    def update_began(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def update_ended(self, optimizer: Any) -> None:
        """An optimizer's step has ended."""

    def collective_began(self, collective: Collective) -> None:
        """A collective was started."""

    def collective_ended(self, collective: Collective) -> None:
        """A collective has ended. Any thread may call this."""

    def waited(self, since: float, until: float, collectives: list[Collective]) -> None:
        """The script waited for these collectives. If the list is empty, the observer does not know for which."""

    def ends(self) -> None:
        """The process ends."""


class Hub:
    """Passes events to all parts. `make` returns new parts: at the start, and again in a forked process."""

    def __init__(
        self, report: Callable[[str, str], None], make: Callable[[], list[Part]] = list, fault: str = ""
    ) -> None:
        self._report, self._make, self._fault = report, make, fault
        self.clock = time.monotonic
        self.parts: list[Part] = []
        self.off: set[str] = set()  # seams that raised
        self.muted: Callable[[], bool] = lambda: False  # returns True in a mode's own communication
        self._refusal: Exception | None = None  # the exception that an essential part raised
        self._listeners: tuple[list[Part], dict[str, list[tuple[Part, Callable[..., None]]]]] = ([], {})
        self.start()

    def start(self) -> None:
        """Make all parts anew. A forked process calls this, because it must not repeat the records of its parent."""
        self.parts = self._make()

    def emit(self, event: str, *arguments: Any) -> None:
        """Call the event of every part. A part that raises is removed; the exception of an essential part is raised."""
        if event != "collective_ended" and self.muted():  # may come from a thread in which `muted` is True
            return
        for part, react in self._listening(event):
            try:
                if self._fault:
                    self._raise_if(f"{type(part).__name__}.{event}")
                react(*arguments)
            except Exception as error:
                if part.essential:
                    self._refusal = error
                    raise
                if part in self.parts:
                    self.parts.remove(part)
                self.failed(f"{type(part).__name__}.{event}", error)

    def _listening(self, event: str) -> list[tuple[Part, Callable[..., None]]]:
        """Return the parts that override an event. Cache them, because every collective calls this several times."""
        parts, known = self._listeners
        if parts != self.parts:
            parts, known = self._listeners = (list(self.parts), {})
        found = known.get(event)
        if found is None:
            ignored = None if self._fault else getattr(Part, event)
            found = known[event] = [(p, getattr(p, event)) for p in parts if getattr(type(p), event) is not ignored]
        return found

    def observe(self, seam: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a seam and return its result. If it raises, return None and switch the seam off."""
        if seam in self.off:
            return None
        try:
            if self._fault:
                self._raise_if(seam)
            return function(*arguments)
        except Exception as error:
            if error is self._refusal:
                raise
            self.off.add(seam)
            self.failed(seam, error)
            return None

    def end(self, collective: Collective, at: float) -> None:
        """Report the end of a collective, unless it was reported before."""
        if collective.ended is None:
            collective.ended = at
            self.emit("collective_ended", collective)

    def failed(self, seam: str, error: BaseException) -> None:
        """Report that a seam or part has failed, so that a part of the script's events is not observed."""
        self._report(seam, f"{type(error).__name__}: {error}"[:1000])

    def _raise_if(self, name: str) -> None:
        if name == self._fault:
            raise RuntimeError(f"{name} was made to fail ({FAULT})")


def note_once(changed: list[str], sentence: str) -> None:
    """Append to `changed` a sentence on what was changed for the script, unless it is there already."""
    if sentence not in changed:
        changed.append(sentence)


def call_site() -> str:
    """Return the innermost line of the stack that is not in a library, e.g. `main.py:88`; empty if there is none."""
    return caller()[0]


def is_library(path: str) -> bool:
    """Return True for a file of an installed package, of testbed, or of the standard library."""
    return _classify(path)[0]


def caller(frame: Any = None) -> tuple[str, str]:
    """Return the innermost line of the stack that is not in a library, e.g. `main.py:88`, and the library called there.

    The line is empty if there is none. The library is empty if the script called torch.distributed itself. `frame`:
    the innermost frame to look at.
    """
    frame, depth, by = frame or sys._getframe(1), 0, ""
    while frame is not None and depth < MAX_DEPTH:
        path = frame.f_code.co_filename
        library, name, maker = _FILES.get(path) or _FILES.setdefault(path, _classify(path))
        if not library:
            return f"{name}:{frame.f_lineno}", by
        by = by or maker
        frame, depth = frame.f_back, depth + 1
    return "", by


_FILES: dict[str, tuple[bool, str, str]] = {}  # file: is in a library; name to show; name for `Collective.by`


def _classify(path: str) -> tuple[bool, str, str]:
    parts = path.split(os.sep)
    packages = next((k for k, part in enumerate(parts) if part in ("site-packages", "dist-packages")), None)
    if packages is not None:
        rest = "/".join(parts[packages + 1 :])
        maker = next((maker for start, maker in MADE_BY.items() if rest.startswith(start)), "")
        return True, "", maker if rest.startswith("torch/") else rest.partition("/")[0]
    if path.startswith((OURS, STDLIB, "<")):
        return True, "", ""
    inside = os.path.relpath(path) if os.path.isabs(path) else path
    return False, os.path.basename(path) if inside.startswith(os.pardir) else inside, ""
