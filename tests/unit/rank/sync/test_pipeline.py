"""The pipeline's threads when something goes wrong: who says what, and that nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from testbed.rank.group import Group
from testbed.rank.optim import Optimizer
from testbed.rank.recorder import Timeline
from testbed.rank.sync.pipeline import Pipeline
from testbed.spec.errors import RankFailed
from testbed.spec.mode import SyncMode
from testbed.spec.run import OptimizerSpec

DEADLINE = 1.0


class Lonely(Group):
    """One rank whose peers, when the norm is added up, turn out to be gone."""

    def total(self, number: Tensor) -> Tensor:
        raise RuntimeError("gloo: connection closed by peer")


class Rig:
    """A small model in pieces of four numbers, with clipping; `passed` is called between its layers' backward."""

    def __init__(self, kind: type[Group], passed: Callable[[Tensor], None] = lambda gradient: None) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        update = Optimizer(OptimizerSpec(lr=0.1, clip=1.0), model, batch=1, total=2)
        group = kind(0, 1, dist.HashStore(), DEADLINE)
        self.pipeline = Pipeline(SyncMode.parse("ring/bucket:16B/pipeline"), group, Timeline())
        self.module = self.pipeline.attach(model, update)

        def watch(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(passed)

        model[0].register_forward_hook(watch)

    def step(self) -> None:
        self.pipeline.zero()
        self.module(torch.ones(1, 3)).sum().backward()
        self.pipeline.step()

    def end(self) -> None:
        """What the end of the process does elsewhere."""
        assert self.pipeline.clipping
        self.pipeline.clipping.abort()
        for piece in self.pipeline.pieces:
            piece.launched.put(None)
        for thread in self.pipeline.threads:
            thread.join(5)
        self.pipeline.sender.stop()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*arguments: Any) -> Rig:
        made.append(Rig(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_a_norm_that_cannot_be_had_is_told_by_whoever_knows_why(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads wait for the norm, one learns what is wrong; the others are let go before it could say so."""
    made = rig(Lonely)
    fail = made.pipeline._fail

    def late(error: Exception) -> None:
        time.sleep(0.2 * ("connection" in str(error)))
        fail(error)

    monkeypatch.setattr(made.pipeline, "_fail", late)
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        made.step()
        made.pipeline.flush()
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        made.pipeline.close()


def test_a_thread_that_fails_lets_those_go_that_wait_for_the_norm(rig: Callable[..., Rig]) -> None:
    made = rig(Group, lambda gradient: made.pipeline._fail(RuntimeError("the sender broke")))
    with pytest.raises(RuntimeError, match="the sender broke"):
        made.step()
    for piece in made.pipeline.pieces:
        piece.launched.put(None)
    for thread in made.pipeline.threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in made.pipeline.threads)


def test_a_loop_that_fails_in_backward_waits_for_nobody(rig: Callable[..., Rig]) -> None:
    """Pieces that had left wait for the others' squares, which never come; threads end with the process."""

    def broken(gradient: Tensor) -> None:
        raise ValueError("backward broke")

    made = rig(Group, broken)
    with pytest.raises(ValueError, match="backward broke"):
        made.step()
    for settled in (made.pipeline.flush, made.pipeline.close):
        with pytest.raises(RankFailed, match="timed out"):
            settled()
    assert all(thread.daemon for thread in made.pipeline.threads)


def test_a_backward_longer_than_the_deadline_is_no_failure(rig: Callable[..., Rig]) -> None:
    made = rig(Group, lambda gradient: time.sleep(1.3 * DEADLINE))
    before = [value.clone() for value in made.module.parameters()]
    made.step()
    made.pipeline.close()
    assert not any(torch.equal(a, b) for a, b in zip(before, made.module.parameters(), strict=True))
