"""Schedules: when the buckets of a mode are averaged. `build` makes the synchronizer of a mode.

    GradientMean    after backward, before the update
    Overlap         during backward, each bucket as soon as its gradients are complete
    ParameterMean   every:K, parameters instead of gradients
    AfterStep       after the update: the mistake of one published report (`placement = "after-step"`)
    Server          gradients to rank 0, parameters from rank 0
Pipeline (pipeline.py) and DDP (ddp.py) have modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import Mean, OwnMethod, broadcast_, collect_, find_mean
from testbed.rank.sync.buckets import (
    Readiness,
    flat_gradients,
    flat_parameters,
    make_buckets,
    memory_shape,
    time_copies,
    trained,
)
from testbed.rank.sync.codecs import BufferInfo, make_coder
from testbed.rank.sync.ddp import DDP
from testbed.rank.sync.pipeline import Pipeline
from testbed.rank.sync.synchronizer import BaseSynchronizer, NoSync, Synchronizer, Update
from testbed.rank.sync.verify import SampledMethod
from testbed.results.timeline import Timeline
from testbed.spec.mode import SyncMode


class Bucketed(BaseSynchronizer):
    """Gradients are in one flat buffer per bucket."""

    keeps_gradients = True

    def attach(self, model: Module, update: Update) -> Module:
        self.buckets: list[list[Parameter]] = make_buckets(list(model.parameters()), self.mode)
        self.gradients = flat_gradients(self.buckets)
        if self.timeline.detailed:
            time_copies(trained(model), self.timeline)
        return super().attach(model, update)

    def zero(self) -> None:
        with self.timeline.copying():
            super().zero()


class Averager(Bucketed):
    """A synchronizer with one coder (codecs.py) per bucket. Subclasses define when buckets are averaged."""

    def __init__(self, mode: SyncMode, group: Group, timeline: Timeline, mean_: Mean, seed: int = 0) -> None:
        super().__init__(mode, group, timeline)
        self.mean_ = mean_
        self.seed = seed

    def attach(self, model: Module, update: Update) -> Module:
        module = super().attach(model, update)
        infos = [
            BufferInfo(number, [memory_shape(p) for p in bucket], bucket[0].dtype, self.group, self.seed)
            for number, bucket in enumerate(self.buckets)
        ]
        self.coders = [make_coder(self.mode, self.mean_, info) for info in infos]
        return module

    def average(self, buffers: Iterable[Tensor]) -> None:
        """Replace these buffers, one per bucket, by their means over all ranks."""
        with self.timeline.blocked():
            for number, (buffer, coder) in enumerate(zip(buffers, self.coders, strict=True)):
                with self.timeline.comm(f"bucket {number}", coder.size):
                    coder(buffer, self.group)

    def state(self) -> dict[str, Tensor]:
        """What the coders keep from one step to the next."""
        return {f"{number}.{name}": kept for number, c in enumerate(self.coders) for name, kept in c.state.items()}

    def verify(self) -> None:
        if isinstance(self.mean_, SampledMethod):
            self.mean_.verify(self.group)

    def load(self, state: dict[str, Tensor]) -> None:
        for number, coder in enumerate(self.coders):
            for name, kept in coder.state.items():
                kept.copy_(state[f"{number}.{name}"])


class GradientMean(Averager):
    """Average the gradients, bucket by bucket, after backward; then update."""

    def step(self) -> None:
        self.average(self.gradients)
        self.update_parameters()


class AfterStep(Averager):
    """The local update comes first, so the averaged gradients are never used and replicas drift apart."""

    def step(self) -> None:
        self.update_parameters()
        self.average(self.gradients)


class Overlap(Averager):
    """One thread averages the buckets, in their order, while backward fills the next ones."""

    def attach(self, model: Module, update: Update) -> Module:
        module = super().attach(model, update)
        self.readiness = Readiness(self.mode, self.buckets, self._launch)
        for bucket in self.buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self._ready)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="overlap")
        self.works: list[Future[None]] = []
        return module

    def zero(self) -> None:
        super().zero()
        self.readiness.start()

    def accumulating(self) -> AbstractContextManager[object]:
        return self.readiness.pause()

    def step(self) -> None:
        self.readiness.finish()
        with self.timeline.blocked():
            for work in self.works:
                work.result()
        self.works.clear()
        self.update_parameters()

    def close(self) -> None:
        self.worker.shutdown()

    def _ready(self, parameter: Parameter) -> None:
        """The hook of backward: a gradient is complete."""
        with self.timeline.copying():
            self.readiness.check_first(parameter)
            self.readiness.ready(parameter)

    def _launch(self, number: int) -> None:
        token = self.timeline.begin_comm(f"bucket {number}", self.coders[number].size)
        self.works.append(self.worker.submit(self._average_one, number, token))

    def _average_one(self, number: int, token: int) -> None:
        self.coders[number](self.gradients[number], self.group)
        self.timeline.end_comm(token)


class ParameterMean(Averager):
    """`every:K@M`: up to step M average gradients, from then on update locally and average parameters every K steps."""

    def attach(self, model: Module, update: Update) -> Module:
        self.parameters = flat_parameters(make_buckets(list(model.parameters()), self.mode))
        self.done = 0  # steps
        self.drifted = False  # True if replicas differ
        return super().attach(model, update)

    def step(self) -> None:
        local = self.done >= self.mode.every_from
        if not local:
            self.average(self.gradients)
        self.update_parameters()
        self.done += 1
        self.drifted = local
        if local and (self.done - self.mode.every_from) % self.mode.every == 0:
            self._average_parameters()

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"done": torch.tensor(self.done), "drifted": torch.tensor(self.drifted)}

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.done, self.drifted = int(state["done"]), bool(state["drifted"])

    def close(self) -> None:
        self._average_parameters()

    def _average_parameters(self) -> None:
        if self.drifted:
            with self.group.payload_kind("parameters"):
                self.average(self.parameters)
            self.drifted = False


class Server(Bucketed):
    """Parameter server: rank 0 receives all gradients, updates, and sends the parameters to all ranks."""

    def attach(self, model: Module, update: Update) -> Module:
        self.parameters = flat_parameters(make_buckets(list(model.parameters()), self.mode))
        return super().attach(model, update)

    def step(self) -> None:
        with self.timeline.blocked():
            for number, buffer in enumerate(self.gradients):
                with self.timeline.comm(f"bucket {number} up", buffer.nbytes):
                    collect_(buffer, self.group)
                buffer.div_(self.group.size)
        if self.group.rank == 0:
            self.update_parameters()
        with self.timeline.blocked(), self.group.payload_kind("parameters"):
            for number, buffer in enumerate(self.parameters):
                with self.timeline.comm(f"bucket {number} down", buffer.nbytes):
                    broadcast_(buffer, self.group)


def build(mode: SyncMode, placement: str, group: Group, timeline: Timeline, seed: int = 0) -> Synchronizer:
    """The synchronizer of a mode; `seed` is for codecs that draw random numbers."""
    if mode.silent:
        return NoSync(mode, group, timeline)
    if mode.is_reference:
        return DDP(mode, group, timeline)
    if mode.row.sends_parameters:
        return Server(mode, group, timeline)
    if mode.schedule == "pipeline":
        return Pipeline(mode, group, timeline)
    averager: type[GradientMean | Overlap | ParameterMean | AfterStep] = GradientMean
    if mode.schedule == "overlap":
        averager = Overlap
    elif placement == "after-step":
        averager = AfterStep
    elif mode.every > 1:
        averager = ParameterMean
    mean_ = find_mean(mode.algorithm)
    return averager(mode, group, timeline, SampledMethod(mode, mean_) if isinstance(mean_, OwnMethod) else mean_, seed)
