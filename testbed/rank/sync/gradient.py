"""After backward: the schedule of the textbook, and what others build on."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import Mean
from testbed.rank.sync.base import NoSync, Update
from testbed.rank.sync.chunks import cut, flat_gradients
from testbed.rank.timeline import Timeline
from testbed.spec.mode import SyncMode


class GradientMean(NoSync):
    """Average the gradients, buffer by buffer, after backward; then step."""

    keeps_gradients = True

    def __init__(self, mode: SyncMode, group: Group, timeline: Timeline, mean_: Mean) -> None:
        super().__init__(mode, group, timeline)
        self.mean_ = mean_

    def attach(self, model: Module, update: Update) -> Module:
        self.gradients = flat_gradients(cut(list(model.parameters()), self.mode))
        return super().attach(model, update)

    def average(self, buffers: Iterable[Tensor]) -> None:
        with self.timeline.blocked():
            for number, buffer in enumerate(buffers):
                with self.timeline.travelling(f"bucket {number}", buffer.nbytes):
                    self.mean_(buffer, self.group)

    def step(self) -> None:
        self.average(self.gradients)
        super().step()
