"""The script's optimizer, divided into shards: the same update, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testbed.attach.takeover import ScriptUpdate
from testbed.rank.sync.buckets import flat_parameters, in_order_of, split
from testbed.spec.errors import SpecError

SHAPES = [(5, 3), (3,), (), (2, 3)]


def model() -> list[nn.Parameter]:
    """The last one is in channels_last order."""
    torch.manual_seed(0)
    image = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
    return [*(nn.Parameter(torch.randn(shape)) for shape in SHAPES), nn.Parameter(image)]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]


def gradient(step: int, parameters: list[nn.Parameter]) -> list[Tensor]:
    torch.manual_seed(step)
    return [torch.randn_like(p) for p in parameters]


def update(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], step: int) -> None:
    for parameter, value in zip(parameters, gradient(step, parameters), strict=True):
        parameter.grad = value
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.RMSprop, {"lr": 0.01}),
    ],
)
def test_shards_update_as_the_whole_optimizer_does(kind: Any, options: dict[str, Any]) -> None:
    whole, divided = model(), model()
    expected, optimizer = kind(groups(whole), **options), kind(groups(divided), **options)
    for step in range(3):
        update(expected, whole, step)
        update(optimizer, divided, step)
    values = flat_parameters([list(reversed(divided))])[0]
    shards = split(values, 4)
    taken = ScriptUpdate(optimizer)
    taken.own_shards(shards)
    for step in range(3, 6):
        for made in (expected, optimizer):
            made.param_groups[0]["lr"] = 0.02  # a schedule of the script's
        update(expected, whole, step)
        taken.take_settings()
        pairs = zip(reversed(divided), reversed(gradient(step, divided)), strict=True)
        flat = torch.cat([in_order_of(parameter, values) for parameter, values in pairs])
        for number, part in enumerate(split(flat, 4)):
            taken.step_shard(number, part)
        taken.check_settings()
    for a, b in zip(whole, divided, strict=True):
        assert torch.equal(a, b)


def test_a_learning_rate_changed_after_backward_is_refused() -> None:
    parameters = model()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    taken = ScriptUpdate(optimizer)
    taken.take_settings()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(SpecError, match="learning rate between backward and step"):
        taken.check_settings()


def test_an_optimizer_that_needs_whole_parameters_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(SpecError, match="LBFGS"):
        ScriptUpdate(torch.optim.LBFGS(parameters)).own_shards([parameters[0].detach().reshape(-1)])
