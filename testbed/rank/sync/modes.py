"""The shapes a mode can have; algorithm and granularity fill them in. `build` picks the shape."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import Mean, collect_, find_mean, spread_
from testbed.rank.sync.base import Synchronizer, SyncStats, Update
from testbed.rank.sync.chunks import cut, flat_gradients, flat_parameters
from testbed.spec.mode import SyncMode


class NoSync:
    """Every rank steps on its own gradients. Also what the other shapes share."""

    keeps_gradients = False  # True where .grad are views of our buffers

    def __init__(self, mode: SyncMode, group: Group) -> None:
        self.mode = mode
        self.group = group

    def attach(self, model: Module, update: Update) -> Module:
        self.update = update
        return model

    def zero(self) -> None:
        self.update.zero(keep=self.keeps_gradients)

    def accumulating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def step(self) -> SyncStats:
        return SyncStats(update=self.update.step())

    def close(self) -> None:
        """Nothing drifted that should not have."""


class GradientMean(NoSync):
    """Average the gradients, buffer by buffer, after backward; then step."""

    keeps_gradients = True

    def __init__(self, mode: SyncMode, group: Group, mean_: Mean) -> None:
        super().__init__(mode, group)
        self.mean_ = mean_

    def attach(self, model: Module, update: Update) -> Module:
        self.gradients = flat_gradients(cut(list(model.parameters()), self.mode))
        return super().attach(model, update)

    def average(self, buffers: list[Tensor]) -> None:
        for buffer in buffers:
            self.mean_(buffer, self.group)

    def step(self) -> SyncStats:
        self.average(self.gradients)
        return SyncStats(update=self.update.step())


class AfterStep(GradientMean):
    """R3's mistake: the local step comes first, so the averaged gradients are never used and replicas drift apart."""

    def step(self) -> SyncStats:
        seconds = self.update.step()
        self.average(self.gradients)
        return SyncStats(update=seconds)


class ParameterMean(GradientMean):
    """`every:K@M`: up to step M average gradients, from then on step locally and average parameters every K steps."""

    def attach(self, model: Module, update: Update) -> Module:
        self.parameters = flat_parameters(cut(list(model.parameters()), self.mode))
        self.done = 0
        self.drifted = False
        return super().attach(model, update)

    def step(self) -> SyncStats:
        local = self.done >= self.mode.every_from
        if not local:
            self.average(self.gradients)
        seconds = self.update.step()
        self.done += 1
        self.drifted = local
        if local and (self.done - self.mode.every_from) % self.mode.every == 0:
            self.close()
        return SyncStats(update=seconds)

    def close(self) -> None:
        if self.drifted:
            self.average(self.parameters)
            self.drifted = False


class Server(NoSync):
    """Parameter server: gradients go up to rank 0, which alone steps; parameters come down."""

    keeps_gradients = True

    def attach(self, model: Module, update: Update) -> Module:
        groups = cut(list(model.parameters()), self.mode)
        self.parameters = flat_parameters(groups)
        self.gradients = flat_gradients(groups)
        return super().attach(model, update)

    def step(self) -> SyncStats:
        for buffer in self.gradients:
            collect_(buffer, self.group)
            buffer.div_(self.group.size)
        seconds = self.update.step() if self.group.rank == 0 else 0.0
        for buffer in self.parameters:
            spread_(buffer, self.group)
        return SyncStats(update=seconds)


class DDP(NoSync):
    """torch's DistributedDataParallel. BatchNorm buffers are left to the run's own setting, as in every mode."""

    def attach(self, model: Module, update: Update) -> Module:
        super().attach(model, update)
        megabytes = self.mode.bucket / 2**20 if self.mode.bucket else None
        self.module = DistributedDataParallel(model, bucket_cap_mb=megabytes, broadcast_buffers=False)
        return self.module

    def accumulating(self) -> AbstractContextManager[object]:
        return self.module.no_sync()


def build(mode: SyncMode, placement: str, group: Group) -> Synchronizer:
    """The synchronizer of a mode."""
    shapes = {"single": NoSync, "server": Server, "ddp": DDP}
    if mode.algorithm in shapes:
        return shapes[mode.algorithm](mode, group)
    shape = AfterStep if placement == "after-step" else ParameterMean if mode.every > 1 else GradientMean
    return shape(mode, group, find_mean(mode.algorithm))
