"""Overlap: each buffer is averaged as soon as backward has filled it, while backward goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

from torch.nn import Module

from testbed.rank.sync.base import NoSync, Update
from testbed.rank.sync.chunks import cut
from testbed.rank.sync.gradient import GradientMean
from testbed.rank.sync.readiness import Readiness


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
        token = self.timeline.depart(f"bucket {number}", self.coders[number].size)
        self.works.append(self.worker.submit(self._average_one, number, token))

    def _average_one(self, number: int, token: int) -> None:
        self.coders[number](self.gradients[number], self.group)
        self.timeline.arrive(token)

    def step(self) -> None:
        self.readiness.finish()
        with self.timeline.blocked():
            for work in self.works:
                work.result()
        self.works.clear()
        NoSync.step(self)

    def close(self) -> None:
        self.worker.shutdown()
