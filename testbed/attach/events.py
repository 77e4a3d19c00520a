"""What happens in a script, as events, and the parts of the observer that react to them.

A seam (seams.py) replaces a function of torch and reports what it sees to the Hub, which calls every part. A seam or a
part that raises is taken out, an `unseen` record says so, and the script goes on: it never sees an exception of the
observer.
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
FAULT = "TESTBED_OBSERVER_FAULT"  # for tests: the seam, or `Part.event`, that raises when it is called
MADE_BY = {  # folder or file of torch on the stack: who made a collective that the script did not call itself
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
    size: int  # bytes: of the tensor; of all parts (all_gather, reduce_scatter, all_to_all); of one (gather, scatter)
    begun: float  # monotonic time
    site: str  # line of the script; empty if none is on the stack
    phase: str
    detail: dict[str, Any] = field(default_factory=dict)  # reduce, root or peer, group: its size, ranks: if not all
    tensors: tuple[Any, ...] = ()  # the tensors of `size`; valid while the event is handled
    launched: float = 0.0  # the call that started it has returned
    ended: float | None = None
    by: str = ""  # who made it, if not the script itself: DistributedDataParallel, ...
    row: dict[str, Any] = field(default_factory=dict)  # of the calls record
    token: int = -1  # of the timeline


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
        """The backward pass has ended. `reduced`: collectives whose end it waited for, i.e. those of DDP's reducer."""

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

    def waited(self, since: float, until: float, collectives: list[Collective]) -> None:
        """The script waited for these collectives; for others that are not known if the list is empty."""

    def ends(self) -> None:
        """The process ends."""


class Hub:
    """Passes events to all parts. `make` returns the parts of a process: the first one, or one that was forked."""

    def __init__(
        self, report: Callable[[str, str], None], make: Callable[[], list[Part]] = list, fault: str = ""
    ) -> None:
        self._report, self._make, self._fault = report, make, fault
        self.clock = time.monotonic
        self.parts: list[Part] = []
        self.off: set[str] = set()  # seams that raised
        self.muted: Callable[[], bool] = lambda: False  # True if what happens is a mode's own, not the script's
        self._refusal: Exception | None = None  # what an essential part raised
        self._listeners: tuple[list[Part], dict[str, list[tuple[Part, Callable[..., None]]]]] = ([], {})
        self.start()

    def start(self) -> None:
        """Make all parts anew: a process that was forked begins with nothing."""
        self.parts = self._make()

    def emit(self, event: str, *arguments: Any) -> None:
        """Call the event of every part. A part that raises is taken out, unless it is essential."""
        if event != "collective_ended" and self.muted():  # a collective of the script's may end in any thread
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
        """The parts that react to an event, looked up once: this runs several times in every collective."""
        parts, known = self._listeners
        if parts != self.parts:
            parts, known = self._listeners = (list(self.parts), {})
        found = known.get(event)
        if found is None:
            ignored = None if self._fault else getattr(Part, event)
            found = known[event] = [(p, getattr(p, event)) for p in parts if getattr(type(p), event) is not ignored]
        return found

    def observe(self, seam: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a seam and return its result; None if it raises, and from then on."""
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
        """Report the end of a collective, once."""
        if collective.ended is None:
            collective.ended = at
            self.emit("collective_ended", collective)

    def failed(self, seam: str, error: BaseException) -> None:
        """Report that something of the script cannot be seen."""
        self._report(seam, f"{type(error).__name__}: {error}"[:1000])

    def _raise_if(self, name: str) -> None:
        if name == self._fault:
            raise RuntimeError(f"{name} was made to fail ({FAULT})")


def call_site() -> str:
    """The innermost line of the stack that is no library's, e.g. `main.py:88`; empty if there is none."""
    return caller()[0]


def is_library(path: str) -> bool:
    """True for a file of a package or of the standard library."""
    return _classify(path)[0]


def caller(frame: Any = None) -> tuple[str, str]:
    """The innermost line of the stack that is no library's, e.g. `main.py:88`, and who called from there.

    The line is empty if there is none; the second is empty if the script called torch.distributed itself. `frame`:
    where to begin.
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


_FILES: dict[str, tuple[bool, str, str]] = {}  # file: is a library's; name to show; whom it makes collectives for


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
