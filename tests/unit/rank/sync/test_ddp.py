"""DDP: a missing gradient is refused with the mode, the rule and the way out; its copies are timed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from testbed.rank.group import Group
from testbed.rank.optim import Optimizer
from testbed.rank.sync.schedules import build
from testbed.results.timeline import Timeline
from testbed.spec.errors import SpecError
from testbed.spec.mode import SyncMode
from testbed.spec.run import OptimizerSpec

pytestmark = pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
ONE = torch.ones(1, 2)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """A group of one rank: DDP misses a gradient there too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Group(0, 1, store, 10.0)
    dist.destroy_process_group()


class Idle(nn.Module):
    """Half of its parameters get no gradient."""

    broken = False

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, images: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("raised by the model")
        return self.used(images)


def attached(mode: str, model: Idle, group: Group) -> nn.Module:
    timeline = Timeline()
    timeline.start()
    sync = build(SyncMode.parse(mode), "before-step", group, timeline)
    return sync.attach(model, Optimizer(OptimizerSpec(), model, batch=1, total=2))


@pytest.mark.parametrize("mode", ["ddp", "ddp/bucket:1MiB"])
def test_a_parameter_without_gradient_is_refused_with_the_mode_and_a_way_out(group: Group, mode: str) -> None:
    module = attached(mode, Idle(), group)
    module(ONE).sum().backward()
    with pytest.raises(SpecError, match=rf"^mode '{mode}': .* get no gradient, which DDP refuses\. Use allreduce"):
        module(ONE)


def test_an_error_of_the_model_itself_is_not_changed(group: Group) -> None:
    model = Idle()
    module = attached("ddp", model, group)
    model.broken = True
    with pytest.raises(RuntimeError, match=r"^raised by the model$"):
        module(ONE)


def test_copies_into_and_out_of_buckets_are_timed(group: Group) -> None:
    """DDP copies a gradient and calls the hook of a full bucket between our two hooks: so the call is in a copy."""
    model, timeline = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 1)), Timeline()
    sync = build(SyncMode.parse("ddp"), "before-step", group, timeline)
    module = sync.attach(model, Optimizer(OptimizerSpec(), model, batch=1, total=2))
    for _ in range(3):
        timeline.start()
        sync.zero()
        loss = module(torch.ones(4, 300)).sum()
        with timeline.phase("backward"):
            loss.backward()
        step = timeline.take()
        ((_, called, _, _),) = step["comm"]
        copies = [(begin, begin + seconds) for begin, seconds in step["copying"]]
        assert len(copies) == 4 + 1  # one per parameter, and the last bucket's copy back
        assert sum(begin <= called <= end for begin, end in copies) == 1
        assert max(end for _, end in copies) == pytest.approx(step["total"], abs=0.01)
        assert 0 < step["copies"] <= step["backward"] and 0 < step["copies_cpu"] <= step["cpu"]
