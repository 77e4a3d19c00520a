"""Synchronizer: the seam between the loop, which names no mode, and the modes, which know no loop."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch.nn import Module


class Update(Protocol):
    """The optimizer as a mode sees it: clear gradients, or clip, step and move the learning rate on."""

    def zero(self, keep: bool) -> None: ...
    def step(self) -> float: ...  # seconds it took


@dataclass(frozen=True)
class SyncStats:
    """What one step's synchronisation cost, as seen from the loop."""

    update: float = 0.0  # seconds of the optimizer's step, on this rank


class Synchronizer(Protocol):
    """One mode. Built once; `attach` before the first step, `close` after the last."""

    def attach(self, model: Module, update: Update) -> Module:
        """Return what the loop calls: DDP wraps the model, others return it."""
        ...

    def zero(self) -> None:
        """Clear gradients; a mode that owns gradient buffers keeps them."""
        ...

    def accumulating(self) -> AbstractContextManager[object]:
        """Entered around every backward but the step's last."""
        ...

    def step(self) -> SyncStats:
        """Finish synchronising, then step."""
        ...

    def close(self) -> None:
        """Bring replicas together where the mode let them drift."""
        ...
