"""The optimizer's step as the run asks for it: learning rate of the step, clipping, update."""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor, nn

from testbed.spec.run import OptimizerSpec


def lr_at(step: int, spec: OptimizerSpec, batch: int, total: int) -> float:
    """Learning rate of step 0, 1, ...; scaled with the global batch, warmed up, then scheduled."""
    lr = spec.lr * (batch / spec.base_batch if spec.base_batch else 1.0)
    if step < spec.warmup:
        return lr * (step + 1) / spec.warmup
    return lr * _factor(step - spec.warmup, spec, max(1, total - spec.warmup))


def _factor(step: int, spec: OptimizerSpec, total: int) -> float:
    if spec.schedule == "step":
        return spec.gamma ** (step // spec.period)
    if spec.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
    if spec.schedule == "cyclic":  # a triangle between gamma and 1, starting at the bottom
        phase = abs(1 - (step / spec.period) % 2)
        return spec.gamma + (1 - spec.gamma) * (1 - phase)
    return 1.0


def _build(spec: OptimizerSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if spec.name == "adam":
        return torch.optim.Adam(parameters, lr=spec.lr, weight_decay=spec.weight_decay)
    if spec.name == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)
    return torch.optim.SGD(parameters, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)


def _leave_compiler_alone() -> None:
    """torch's optimizers import its compiler, a second of every rank's start, only to say that they do not use it.

    Each method so marked keeps the answer in an attribute of the plain function; with it set, nobody asks again.
    """
    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain


class Part:
    """A stretch of the parameters with an optimizer to itself."""

    def __init__(self, spec: OptimizerSpec, values: Tensor) -> None:
        self.parameter = nn.Parameter(values)
        self.inner = _build(spec, [self.parameter])
        self.done = 0


class Optimizer:
    """What a synchronizer steps; it knows nothing of other ranks."""

    def __init__(self, spec: OptimizerSpec, model: nn.Module, batch: int, total: int) -> None:
        self.spec = spec
        self.batch = batch
        self.total = total
        self.done = 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        _leave_compiler_alone()
        self.inner = _build(spec, self.parameters)
        self._plain_step = inspect.unwrap(type(self.inner).step)  # the wrappers ask for the compiler, too

    def state(self) -> dict[str, torch.Tensor]:
        """What the update rule remembers of each parameter, or own part of one, by its number; and the steps done."""
        found = {"done": torch.tensor(self.done)}
        for number, parameter in enumerate(self.inner.param_groups[0]["params"]):
            values = self.inner.state.get(parameter, {})
            found |= {f"{number}.{key}": value for key, value in values.items() if isinstance(value, torch.Tensor)}
        return found

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """The other way; a tensor that fits no parameter raises."""
        self.done = int(state["done"])
        self.inner.state.clear()
        for name, value in state.items():
            number, _, key = name.partition(".")
            if key:
                parameter = self.inner.param_groups[0]["params"][int(number)]
                if value.numel() > 1 and value.shape != parameter.shape:
                    raise ValueError(f"optimizer {name} is {tuple(value.shape)}, not {tuple(parameter.shape)}")
                self.inner.state[parameter][key] = value.clone()

    def zero(self, keep: bool) -> None:
        """Clear gradients; `keep` zeroes them in place, for they are views of a mode's buffers."""
        self.inner.zero_grad(set_to_none=not keep)

    @property
    def clips(self) -> bool:
        return self.spec.clip is not None

    def clip_coefficient(self, norm: float) -> float:
        """What a gradient of this norm is multiplied by; torch's own formula."""
        return min(1.0, (self.spec.clip or math.inf) / (norm + 1e-6))

    def step(self) -> None:
        """Set the learning rate, clip, update."""
        if self.spec.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.spec.clip)
        self._step(self.inner, self.done)
        self.done += 1

    def own(self, parts: list[Tensor]) -> None:
        """From now on it is these parts of the parameters that are updated, each when its gradient is there."""
        self.parts = [Part(self.spec, part) for part in parts]

    def step_part(self, number: int, gradient: Tensor) -> None:
        """Update one part. Threads may update different parts at the same time."""
        part = self.parts[number]
        part.parameter.grad = gradient
        self._step(part.inner, part.done)
        part.done += 1

    def _step(self, inner: torch.optim.Optimizer, done: int) -> None:
        for group in inner.param_groups:
            group["lr"] = lr_at(done, self.spec, self.batch, self.total)
        with torch.no_grad():
            self._plain_step(inner)
