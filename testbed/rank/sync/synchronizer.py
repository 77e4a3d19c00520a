"""Synchronizer: the seam between the loop, which names no mode, and the modes, which know no loop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor
from torch.nn import Module

from testbed.rank.group import Group
from testbed.rank.recorder import Timeline
from testbed.spec.mode import SyncMode


class Update(Protocol):
    """The optimizer as a mode sees it: clear gradients, or clip, step and move the learning rate on."""

    def zero(self, keep: bool) -> None: ...
    def step(self) -> None: ...

    # For a mode in which each rank updates only its own parts of the parameters.
    @property
    def clips(self) -> bool: ...
    def own_shards(self, shards: list[Tensor]) -> None: ...
    def step_shard(self, number: int, gradient: Tensor) -> None: ...
    def clip_coefficient(self, norm: float) -> float: ...


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

    def step(self) -> None:
        """Finish synchronising, then step. What it cost is in the timeline."""
        ...

    def flush(self) -> None:
        """Somebody is about to look at the parameters: finish what is on its way."""
        ...

    needs_warmup_step: bool  # True if the first step differs from all others: a resumed run must make one first

    def state(self) -> dict[str, Tensor]:
        """What the mode itself holds between two steps, once settled, for a checkpoint."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """The other way, after `attach`."""
        ...

    def close(self) -> None:
        """Bring replicas together where the mode let them drift."""
        ...


class NoSync:
    """Every rank steps on its own gradients. Also what the other shapes share."""

    keeps_gradients = False  # True where .grad are views of our buffers
    needs_warmup_step = False

    def __init__(self, mode: SyncMode, group: Group, timeline: Timeline) -> None:
        self.mode = mode
        self.group = group
        self.timeline = timeline

    def attach(self, model: Module, update: Update) -> Module:
        self.update = update
        return model

    def zero(self) -> None:
        self.update.zero(keep=self.keeps_gradients)

    def accumulating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def step(self) -> None:
        with self.timeline.phase("update"):
            self.update.step()

    def flush(self) -> None:
        """Nothing is on its way between steps."""

    def state(self) -> dict[str, Tensor]:
        """Nothing beyond what model and optimizer hold."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Nothing to take over."""

    def close(self) -> None:
        """Nothing drifted that should not have."""
