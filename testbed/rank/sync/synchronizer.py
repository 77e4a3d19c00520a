"""The interface between the training loop and the modes; neither depends on the other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor
from torch.nn import Module

from testbed.rank.group import Group
from testbed.results.timeline import Timeline
from testbed.spec.mode import SyncMode


class Update(Protocol):
    """The methods of the optimizer that a mode may call."""

    def zero(self, keep: bool) -> None:
        """Clear gradients; `keep` zeroes them in place."""
        ...

    def step(self) -> None:
        """Clip, update all parameters, and advance the learning rate."""
        ...

    # For a mode in which each rank updates only its own shards of the parameters.
    @property
    def clips(self) -> bool: ...
    def own_shards(self, shards: list[Tensor]) -> None: ...
    def step_shard(self, number: int, gradient: Tensor) -> None: ...
    def clip_coefficient(self, norm: float) -> float: ...


class Synchronizer(Protocol):
    """One mode. Built once; `attach` before the first step, `close` after the last."""

    needs_warmup_step: bool  # True if the first step differs from all others: a resumed run must make one first

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
        """Finish synchronising, then update. The times are in the timeline."""
        ...

    def flush(self) -> None:
        """Finish all communication, so that the parameters can be read."""
        ...

    def verify(self) -> None:
        """Raise SpecError if a user's method had a wrong mean in its first exchange. Called after every step."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The state that the mode keeps between two steps, for a checkpoint; call `flush` before."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; call `attach` before."""
        ...

    def close(self) -> None:
        """Finish all communication; average the parameters if the replicas differ."""
        ...


class BaseSynchronizer:
    """What all modes have in common; a mode adds `step`."""

    keeps_gradients = False  # True if .grad are views of the mode's buffers
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

    def update_parameters(self) -> None:
        """Run the optimizer's step with the gradients that this rank has now."""
        with self.timeline.phase("update"):
            self.update.step()

    def flush(self) -> None:
        """Nothing is on the wire between steps."""

    def verify(self) -> None:
        """Built-in modes are tested; check.py tries them, too."""

    def state(self) -> dict[str, Tensor]:
        """Nothing but the state of model and optimizer."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Nothing to finish."""


class NoSync(BaseSynchronizer):
    """Every rank updates with its own gradients."""

    def step(self) -> None:
        self.update_parameters()
