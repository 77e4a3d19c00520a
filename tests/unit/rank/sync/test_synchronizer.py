"""What all modes have in common: the base class, and the mode that does not synchronise."""

from __future__ import annotations

import pytest
import torch

from testbed.rank.group import single_rank_group
from testbed.rank.sync.synchronizer import BaseSynchronizer, NoSync
from testbed.results.timeline import Timeline
from testbed.spec.mode import SyncMode


class Calls:
    """An optimizer that records how it is called."""

    clips = False

    def __init__(self) -> None:
        self.made: list[str] = []

    def zero(self, keep: bool) -> None:
        self.made.append(f"zero keep={keep}")

    def step(self) -> None:
        self.made.append("step")

    def own_shards(self, shards: list[torch.Tensor]) -> None:
        raise AssertionError("only for modes with shards")

    def step_shard(self, number: int, gradient: torch.Tensor) -> None:
        raise AssertionError("only for modes with shards")

    def clip_coefficient(self, norm: float) -> float:
        raise AssertionError("only for modes with shards")


def test_a_mode_without_synchronisation_updates_with_its_own_gradients() -> None:
    calls, model = Calls(), torch.nn.Linear(2, 2)
    sync = NoSync(SyncMode.parse("single"), single_rank_group(), Timeline())
    assert sync.attach(model, calls) is model
    sync.zero()
    with sync.accumulating():
        pass
    sync.step()
    sync.flush()
    sync.close()
    assert calls.made == ["zero keep=False", "step"] and sync.state() == {}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_mode_that_owns_the_gradient_buffers_zeroes_them_in_place(keeps: bool) -> None:
    class Mode(BaseSynchronizer):
        keeps_gradients = keeps

    calls = Calls()
    mode = Mode(SyncMode.parse("single"), single_rank_group(), Timeline())
    mode.attach(torch.nn.Linear(2, 2), calls)
    mode.zero()
    assert calls.made == [f"zero keep={keeps}"]
