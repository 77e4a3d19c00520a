"""The shapes a mode can have; algorithm and granularity fill them in. `build` picks the shape."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import Module

from testbed.rank.group import Group
from testbed.rank.recorder import Timeline
from testbed.rank.sync.algorithms import Mean, broadcast_, collect_, find_mean
from testbed.rank.sync.buckets import Readiness, cut, flat_gradients, flat_parameters
from testbed.rank.sync.codecs import Parcel, make_coder
from testbed.rank.sync.ddp import DDP
from testbed.rank.sync.pipeline import Pipeline
from testbed.rank.sync.synchronizer import NoSync, Synchronizer, Update
from testbed.spec.mode import SyncMode

# After backward: the schedule of the textbook, and what others build on.


class GradientMean(NoSync):
    """Average the gradients, buffer by buffer, after backward; then step."""

    keeps_gradients = True

    def __init__(self, mode: SyncMode, group: Group, timeline: Timeline, mean_: Mean, seed: int = 0) -> None:
        super().__init__(mode, group, timeline)
        self.mean_ = mean_
        self.seed = seed

    def attach(self, model: Module, update: Update) -> Module:
        groups = cut(list(model.parameters()), self.mode)
        self.gradients = flat_gradients(groups)
        parcels = [
            Parcel(number, [p.shape for p in group], group[0].dtype, self.group, self.seed)
            for number, group in enumerate(groups)
        ]
        self.coders = [make_coder(self.mode, self.mean_, parcel) for parcel in parcels]
        return super().attach(model, update)

    def average(self, buffers: Iterable[Tensor]) -> None:
        with self.timeline.blocked():
            for number, (buffer, coder) in enumerate(zip(buffers, self.coders, strict=True)):
                with self.timeline.comm(f"bucket {number}", coder.size):
                    coder(buffer, self.group)

    def step(self) -> None:
        self.average(self.gradients)
        super().step()

    def state(self) -> dict[str, Tensor]:
        """What the coders keep from one step to the next."""
        return {f"{number}.{name}": kept for number, c in enumerate(self.coders) for name, kept in c.state.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """The other way, after `attach`."""
        for name, kept in self.state().items():
            kept.copy_(state[name])


# Overlap: each buffer is averaged as soon as backward has filled it, while backward goes on.


class Overlap(GradientMean):
    """One thread averages the buffers, in their order, while backward fills the next ones."""

    def attach(self, model: Module, update: Update) -> Module:
        groups = cut(list(model.parameters()), self.mode)
        self.readiness = Readiness(groups, self._launch)
        for group in groups:
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(self.readiness.ready)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="overlap")
        self.works: list[Future[None]] = []
        return super().attach(model, update)

    def zero(self) -> None:
        super().zero()
        self.readiness.start()

    def accumulating(self) -> AbstractContextManager[object]:
        return self.readiness.pause()

    def _launch(self, number: int) -> None:
        token = self.timeline.begin_comm(f"bucket {number}", self.coders[number].size)
        self.works.append(self.worker.submit(self._average_one, number, token))

    def _average_one(self, number: int, token: int) -> None:
        self.coders[number](self.gradients[number], self.group)
        self.timeline.end_comm(token)

    def step(self) -> None:
        self.readiness.finish()
        with self.timeline.blocked():
            for work in self.works:
                work.result()
        self.works.clear()
        NoSync.step(self)

    def close(self) -> None:
        self.worker.shutdown()


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
                with self.timeline.comm(f"bucket {number} up", buffer.nbytes):
                    collect_(buffer, self.group)
                buffer.div_(self.group.size)
        if self.group.rank == 0:
            super().step()
        with self.timeline.blocked(), self.group.carrying("parameters"):
            for number, buffer in enumerate(self.parameters):
                with self.timeline.comm(f"bucket {number} down", buffer.nbytes):
                    broadcast_(buffer, self.group)


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
