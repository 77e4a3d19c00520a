"""Learning rates of known steps, clipping, and the three update rules."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from testbed.rank.optim import Optimizer, lr_at
from testbed.spec.run import OptimizerSpec


def rates(count: int, batch: int = 256, total: int = 100, **values: Any) -> list[float]:
    spec = OptimizerSpec.load({"lr": 1.0} | values, "test")
    return [lr_at(step, spec, batch, total) for step in range(count)]


def test_a_constant_rate_stays() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_the_rate_is_scaled_with_the_global_batch() -> None:
    assert rates(1, batch=512, base_batch=128) == [4.0]
    assert rates(1, batch=64, base_batch=128) == [0.5]


def test_warm_up_rises_in_equal_steps_and_ends_at_the_rate() -> None:
    assert rates(6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_step_schedule_drops_by_gamma_every_period_after_warm_up() -> None:
    assert rates(6, schedule="step", period=2, gamma=0.5) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert rates(5, schedule="step", period=2, gamma=0.5, warmup=1) == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_the_cosine_schedule_falls_from_the_rate_to_zero_over_the_run() -> None:
    found = rates(101, schedule="cosine", total=100)
    assert found[0] == 1.0
    assert found[50] == pytest.approx(0.5)
    assert found[25] == pytest.approx(0.5 * (1 + math.sqrt(0.5)))
    assert found[100] == pytest.approx(0.0, abs=1e-12)
    assert found == sorted(found, reverse=True)


def test_the_cosine_starts_after_warm_up() -> None:
    assert rates(11, schedule="cosine", total=20, warmup=10)[10] == 1.0


def test_the_cyclic_schedule_is_a_triangle_between_gamma_and_the_rate() -> None:
    found = rates(9, schedule="cyclic", period=4, gamma=0.2)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2])


# --- the update itself -------------------------------------------------------------------------------------------


def one(gradient: list[float], **values: Any) -> tuple[nn.Linear, Optimizer]:
    """A layer of two weights at zero, whose gradient is set."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    spec = OptimizerSpec.load({"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0} | values, "test")
    optimizer = Optimizer(spec, model, batch=1, total=10)
    model.weight.grad = torch.tensor([gradient])
    return model, optimizer


def test_clipping_keeps_the_direction_and_limits_the_norm() -> None:
    model, optimizer = one([3.0, 4.0], clip=1.0)
    optimizer.step()
    assert model.weight.tolist()[0] == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_a_gradient_within_the_limit_is_not_touched() -> None:
    model, optimizer = one([3.0, 4.0], clip=5.1)
    optimizer.step()
    assert model.weight.tolist() == [[-3.0, -4.0]]


def test_every_step_uses_the_rate_of_its_number() -> None:
    model, optimizer = one([1.0, 0.0], warmup=4)
    changes = []
    for _ in range(5):
        before = model.weight[0, 0].item()
        optimizer.step()
        changes.append(before - model.weight[0, 0].item())
    assert changes == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_zeroing_can_keep_the_gradient_where_it_is() -> None:
    model, optimizer = one([3.0, 4.0])
    kept = model.weight.grad
    optimizer.zero(keep=True)
    assert model.weight.grad is kept
    assert kept is not None and kept.tolist() == [[0.0, 0.0]]
    optimizer.zero(keep=False)
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("rmsprop", torch.optim.RMSprop)]
)
def test_each_name_builds_torchs_optimizer_with_the_settings_of_the_spec(name: str, kind: type) -> None:
    _, optimizer = one([1.0, 1.0], name=name, weight_decay=0.25, momentum=0.5)
    assert type(optimizer.groups[0].inner) is kind
    settings = optimizer.groups[0].inner.param_groups[0]
    assert settings["weight_decay"] == 0.25
    assert settings.get("momentum", 0.5) == 0.5


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    assert Optimizer(OptimizerSpec(), model, batch=1, total=1).groups[0].parameters == [model.weight]


# --- the same as torch's own, without its compiler ---------------------------------------------------------------

TORCHS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.9, weight_decay=0.01),
}


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    images = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    (100 * model(images).square().mean()).backward()


@pytest.mark.parametrize("name", TORCHS)
def test_three_clipped_steps_end_where_plain_torch_ends(name: str) -> None:
    ours, plain = small_model(), small_model()
    values = {"name": name, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}
    optimizer = Optimizer(OptimizerSpec.load(values, "test"), ours, batch=6, total=3)
    theirs = TORCHS[name](plain.parameters())
    for step in range(3):
        backward(ours, step)
        optimizer.step()
        backward(plain, step)
        assert nn.utils.clip_grad_norm_(plain.parameters(), 1.0) > 1.0, "nothing was clipped"
        theirs.step()
    start = small_model()
    for mine, other, old in zip(ours.parameters(), plain.parameters(), start.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert not torch.equal(mine, old)


WITHOUT_COMPILER = """
import sys
import torch
from testbed.rank.optim import Optimizer
from testbed.spec.run import OptimizerSpec

model = torch.nn.Linear(2, 1)
optimizer = Optimizer(OptimizerSpec(name=sys.argv[1], clip=1.0), model, batch=1, total=2)
for _ in range(2):
    optimizer.zero(keep=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
optimizer.zero(keep=True)
print([name for name in sys.modules if name.startswith("torch._dynamo")])
"""


@pytest.mark.parametrize("name", TORCHS)
def test_an_optimizer_steps_without_importing_torchs_compiler(name: str) -> None:
    argv = [sys.executable, "-c", WITHOUT_COMPILER, name]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
