"""Layers: which parameters belong to which, and that their times add up to the passes that they are parts of."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from testbed.rank.layers import LayerClock, find_owners, make_profile
from testbed.rank.models import GPT
from testbed.results.records import Step
from testbed.spec.errors import SpecError
from testbed.spec.run import RunSpec

SPEC = RunSpec.load({"mode": "single", "nodes": 1, "batch_per_rank": 4, "layers": True}, "case")
WAIT_S = 0.02


class Wait(nn.Module):
    """A layer whose forward takes WAIT_S, on the processor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        until = time.thread_time() + WAIT_S
        while time.thread_time() < until:
            pass
        return x * self.scale


class Odd(nn.Module):
    """A parameter of the whole model, a module that is read and never called, one that returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(5))
        self.first = nn.Linear(5, 3)
        self.same = nn.Identity()
        self.read = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.same(self.first(x + self.shift))
        return self.last(self.frozen(x) @ self.read.weight)


def one_step(model: nn.Module, number: int, *inputs: Tensor) -> Step:
    begun = time.monotonic()
    model.zero_grad()
    phases = [("data", 0.0, 0.0)]
    since = time.monotonic()
    loss = model(*inputs).float().square().sum()
    phases.append(("forward", since - begun, (forward := time.monotonic() - since)))
    since = time.monotonic()
    loss.backward()
    phases.append(("backward", since - begun, (backward := time.monotonic() - since)))
    times = {"data": 0.0, "forward": forward, "backward": backward, "sync": 0.0, "update": 0.001}
    counts = {"epoch": 0, "loss": 1.0, "images": 4, "sent": None, "received": None}
    return Step(step=number, at=begun, total=time.monotonic() - begun, phases=phases, **times, **counts)


def test_every_trained_parameter_belongs_to_one_layer() -> None:
    model = Odd()
    clock = LayerClock(model)
    one_step(model, 0, torch.rand(4, 5))
    assert clock.names == ["first", "same", "frozen", "last"]
    owned = dict(zip(clock.names, find_owners(model, clock), strict=True))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {name: [names[id(p)] for p in own] for name, own in owned.items()}
    assert found["same"] == found["frozen"] == []
    assert found["last"] == ["last.weight", "last.bias"]
    # of no layer, so it is ready when the whole backward is over: it is given to the first one
    assert found["first"] == ["shift", "first.weight", "first.bias", "read.weight", "read.bias"]


def test_a_shared_parameter_belongs_to_the_layer_that_needs_it_first() -> None:
    model = GPT(16, 8)
    clock = LayerClock(model)
    one_step(model, 0, torch.randint(0, 16, (2, 8)))
    owned = dict(zip(clock.names, find_owners(model, clock), strict=True))
    assert clock.names[0] == "tokens" and clock.names[-1] == "head"
    assert [tuple(p.shape) for p in owned["tokens"]] == [(16, 384)] and owned["head"] == []
    assert sum(len(own) for own in owned.values()) == len(list(model.parameters()))


def test_the_times_of_layers_add_up_to_the_passes() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Wait(), nn.ReLU(inplace=True), nn.Linear(3, 2))
    clock = LayerClock(model)
    steps = [one_step(model, number, torch.rand(4, 3)) for number in range(5)]
    found = make_profile(SPEC, model, clock, steps)
    layers = {layer.name: layer for layer in found.layers}
    assert list(layers) == ["0", "1", "2", "3"]
    assert layers["1"].sizes == (12,) and layers["1"].shapes == ((3,),) and found.gradient_bytes == 4 * (12 + 3 + 8)
    assert layers["1"].forward_s >= 0.9 * WAIT_S and layers["1"].forward_s > 0.8 * found.forward_s
    shortest = min(step.forward + step.backward for step in steps)
    assert found.forward_s + found.backward_s + found.loss_s >= 0.9 * shortest
    assert len(found.jitter) == 5 and found.batch_per_rank == 4 and found.optimizer_s == 0.001


def test_passes_without_gradients_are_not_recorded() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    clock = LayerClock(model)
    with torch.no_grad():
        model(torch.rand(4, 3))
    assert clock.passes == []
    with pytest.raises(SpecError, match="no step was recorded"):
        make_profile(SPEC, model, clock, [])


def test_a_model_that_calls_other_layers_in_every_step_is_refused() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.turn = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            for layer in self.layers[: self.turn]:
                x = layer(x)
            return x

    model = Changing()
    clock = LayerClock(model)
    steps = [one_step(model, number, torch.rand(4, 3)) for number in range(2)]
    with pytest.raises(SpecError, match="does not call the same layers"):
        make_profile(SPEC, model, clock, steps)


def test_layers_are_recorded_only_where_nothing_else_runs_in_backward(tmp_path: Path) -> None:
    for mode in ("ddp", "ring/bucket:1MiB/overlap", "ring/bucket:1MiB/pipeline"):
        with pytest.raises(SpecError, match="nothing else may run during backward"):
            RunSpec.load({"mode": mode, "layers": True}, "case")
    assert RunSpec.load({"mode": "ring", "layers": True}, "case").layers
