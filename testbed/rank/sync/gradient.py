"""After backward: the schedule of the textbook, and what others build on."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import Mean
from testbed.rank.sync.base import NoSync, Update
from testbed.rank.sync.chunks import cut, flat_gradients
from testbed.rank.sync.codecs import Parcel, make_coder
from testbed.rank.timeline import Timeline
from testbed.spec.mode import SyncMode


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
                with self.timeline.travelling(f"bucket {number}", coder.size):
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
