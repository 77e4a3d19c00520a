"""Schedules on one rank: which synchronizer a mode gets, and when each one averages and updates."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from testbed.rank.group import Group, single_rank_group
from testbed.rank.optim import Optimizer
from testbed.rank.sync import schedules
from testbed.rank.sync.ddp import DDP
from testbed.rank.sync.pipeline import Pipeline
from testbed.rank.sync.schedules import AfterStep, Averager, GradientMean, Overlap, ParameterMean, Server, build
from testbed.rank.sync.synchronizer import NoSync
from testbed.results.timeline import Timeline
from testbed.spec.errors import SpecError
from testbed.spec.mode import SyncMode
from testbed.spec.run import OptimizerSpec


@pytest.mark.parametrize(
    ("mode", "placement", "kind"),
    [
        ("single", "before-step", NoSync),
        ("none", "before-step", NoSync),
        ("ddp", "before-step", DDP),
        ("server", "before-step", Server),
        ("ring", "before-step", GradientMean),
        ("ring", "after-step", AfterStep),
        ("ring/every:2", "before-step", ParameterMean),
        ("tree/param/overlap", "before-step", Overlap),
        ("direct/bucket:1KiB/overlap/int8", "before-step", Overlap),
        ("ring/bucket:1KiB/pipeline", "before-step", Pipeline),
    ],
)
def test_a_mode_gets_the_synchronizer_of_its_schedule(mode: str, placement: str, kind: type) -> None:
    assert type(build(SyncMode.parse(mode), placement, single_rank_group(), Timeline())) is kind


class Recorded:
    """A mean over one rank that notes the value of the parameter at the time of the call, and sets the buffer to 10."""

    def __init__(self, model: nn.Linear) -> None:
        self.model, self.calls = model, list[tuple[float, float]]()

    def __call__(self, buffer: Tensor, group: Group) -> None:
        self.calls.append((self.model.weight.item(), float(buffer[0])))
        buffer.fill_(10.0)


def train(kind: type[Averager], mode: str, steps: int) -> tuple[list[tuple[float, float]], float]:
    """Train a model with one weight, 0 at first, whose gradient is always 1; return the calls and the weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    mean_ = Recorded(model)
    sync = kind(SyncMode.parse(mode), single_rank_group(), Timeline(), mean_)
    module = sync.attach(model, Optimizer(OptimizerSpec(lr=1.0, momentum=0.0, weight_decay=0.0), model, 1, steps))
    for _ in range(steps):
        sync.zero()
        module(torch.ones(1, 1)).sum().backward()
        sync.step()  # type: ignore[attr-defined]
    sync.close()
    return mean_.calls, model.weight.item()


@pytest.mark.parametrize(("kind", "mode"), [(GradientMean, "ring"), (Overlap, "ring/param/overlap")])
def test_gradients_are_averaged_before_the_update(kind: type[Averager], mode: str) -> None:
    assert train(kind, mode, steps=2) == ([(0.0, 1.0), (-10.0, 1.0)], -20.0)


def test_after_step_updates_with_the_local_gradient_and_averages_too_late() -> None:
    assert train(AfterStep, "ring", steps=2) == ([(-1.0, 1.0), (-2.0, 1.0)], -2.0)


def test_every_k_averages_parameters_every_k_steps_and_at_the_end() -> None:
    """Two local steps to -2, averaged to 10; one more step to 9, averaged at the end to 10."""
    assert train(ParameterMean, "ring/every:2", steps=3) == ([(-2.0, -2.0), (9.0, 9.0)], 10.0)


def test_every_k_from_m_averages_gradients_up_to_step_m() -> None:
    """One step with the averaged gradient to -10, then two local ones to -12, which is averaged."""
    assert train(ParameterMean, "ring/every:2@1", steps=3) == ([(0.0, 1.0), (-12.0, -12.0)], 10.0)


def test_every_k_goes_on_from_the_state_of_a_checkpoint() -> None:
    mode, model = SyncMode.parse("ring/every:3@2"), nn.Linear(1, 1)
    sync = ParameterMean(mode, single_rank_group(), Timeline(), Recorded(model))
    sync.attach(model, Optimizer(OptimizerSpec(), model, 1, 9))
    sync.load({"done": torch.tensor(4), "drifted": torch.tensor(True)})
    assert {name: value.item() for name, value in sync.state().items()} == {"done": 4, "drifted": True}
    assert (sync.done, sync.drifted) == (4, True)


class Shared(nn.Module):
    """One layer in two checkpointed segments. With `reentrant` backward calls itself, once for each segment."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(2, 2), nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture
def mean_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode's mean over its only rank: the buffer as it is."""
    monkeypatch.setattr(schedules, "find_mean", lambda algorithm: lambda buffer, group: None)


def train_shared(mode: str, reentrant: bool, passes: int = 1) -> list[Tensor]:
    """The parameters after two steps, each of some passes."""
    torch.manual_seed(3)
    model = Shared(reentrant)
    sync = build(SyncMode.parse(mode), "before-step", Group(0, 1, dist.HashStore(), 30.0), Timeline())
    module = sync.attach(model, Optimizer(OptimizerSpec(lr=0.1), model, 1, 2))
    try:
        for _ in range(2):
            sync.zero()
            for number in range(passes):
                with sync.accumulating() if number < passes - 1 else nullcontext():
                    module(torch.full((1, 2), 1.0 + number)).square().sum().backward()
            sync.step()
        sync.flush()
        return [value.detach().clone() for value in model.parameters()]
    finally:
        if isinstance(sync, Pipeline):
            sync.transport.abort()
        else:
            sync.close()


AHEAD_OF_THE_END = [
    "ring/param/overlap",
    "ring/bucket:1KiB/overlap",
    "ring/bucket:8B/pipeline",
    "ring/bucket:1KiB/pipeline",
]


@pytest.mark.parametrize("mode", AHEAD_OF_THE_END)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.usefixtures("mean_of_one")
def test_a_second_gradient_of_a_parameter_in_one_backward_is_refused(mode: str, passes: int) -> None:
    """Its bucket may be sent already, or in the buffer without the first gradient."""
    with pytest.raises(SpecError, match=r"gradient of a parameter twice.*Set use_reentrant=False"):
        train_shared(mode, reentrant=True, passes=passes)


@pytest.mark.parametrize("mode", AHEAD_OF_THE_END)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.usefixtures("mean_of_one")
def test_a_layer_in_two_checkpoints_is_trained_as_by_one_node(mode: str, passes: int) -> None:
    """With use_reentrant=False, and with a mode that sends after backward in any case."""
    expected = train_shared("single", reentrant=False, passes=passes)
    for found in (train_shared(mode, False, passes), train_shared("ring", True, passes)):
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted)
