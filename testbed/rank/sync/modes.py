"""The shapes a mode can have; algorithm and granularity fill them in. `build` picks the shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import collect_, find_mean, spread_
from testbed.rank.sync.base import NoSync, Synchronizer, Update
from testbed.rank.sync.chunks import cut, flat_gradients, flat_parameters
from testbed.rank.sync.gradient import GradientMean
from testbed.rank.sync.overlap import Overlap
from testbed.rank.sync.pipeline import Pipeline
from testbed.rank.sync.reference import DDP
from testbed.rank.timeline import Timeline
from testbed.spec.mode import SyncMode


class AfterStep(GradientMean):
    """R3's mistake: the local step comes first, so the averaged gradients are never used and replicas drift apart."""

    def step(self) -> None:
        NoSync.step(self)
        self.average(self.gradients)


class ParameterMean(GradientMean):
    """`every:K@M`: up to step M average gradients, from then on step locally and average parameters every K steps."""

    def attach(self, model: Module, update: Update) -> Module:
        self.parameters = flat_parameters(cut(list(model.parameters()), self.mode))
        self.done = 0
        self.drifted = False
        return super().attach(model, update)

    def step(self) -> None:
        local = self.done >= self.mode.every_from
        if not local:
            self.average(self.gradients)
        NoSync.step(self)
        self.done += 1
        self.drifted = local
        if local and (self.done - self.mode.every_from) % self.mode.every == 0:
            self.close()

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"done": torch.tensor(self.done), "drifted": torch.tensor(self.drifted)}

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.done, self.drifted = int(state["done"]), bool(state["drifted"])

    def close(self) -> None:
        if self.drifted:
            with self.group.carrying("parameters"):
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

    def step(self) -> None:
        with self.timeline.blocked():
            for number, buffer in enumerate(self.gradients):
                with self.timeline.travelling(f"bucket {number} up", buffer.nbytes):
                    collect_(buffer, self.group)
                buffer.div_(self.group.size)
        if self.group.rank == 0:
            super().step()
        with self.timeline.blocked(), self.group.carrying("parameters"):
            for number, buffer in enumerate(self.parameters):
                with self.timeline.travelling(f"bucket {number} down", buffer.nbytes):
                    spread_(buffer, self.group)


def build(mode: SyncMode, placement: str, group: Group, timeline: Timeline, seed: int = 0) -> Synchronizer:
    """The synchronizer of a mode; `seed` is for codecs that draw."""
    shapes: dict[str, type[NoSync]] = {"single": NoSync, "none": NoSync, "server": Server, "ddp": DDP}
    if mode.algorithm in shapes:
        return shapes[mode.algorithm](mode, group, timeline)
    if mode.schedule == "pipeline":
        return Pipeline(mode, group, timeline)
    after = AfterStep if placement == "after-step" else ParameterMean if mode.every > 1 else GradientMean
    shape = Overlap if mode.schedule == "overlap" else after
    return shape(mode, group, timeline, find_mean(mode.algorithm), seed)
