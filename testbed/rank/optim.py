"""The optimizer's step: learning rate of the step, clipping, update."""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor, nn

from testbed.spec.run import OptimizerSpec


def lr_at(step: int, spec: OptimizerSpec, batch: int, total: int) -> float:
    """Return the learning rate of a step, counted from 0: scaled with the global batch, warmed up, then scheduled."""
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


def _avoid_compiler_import() -> None:
    """Keep torch's optimizers from importing torch's compiler, which takes a second at the start of every rank.

    The optimizers import the compiler only to mark methods as not compiled. The mark is an attribute of the plain
    function; if it is set, torch does not import the compiler.
    """
    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain


class ParameterGroup:
    """Parameters that one torch optimizer updates together."""

    def __init__(self, spec: OptimizerSpec, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.inner = _build(spec, parameters)
        self.done = 0  # steps


class Optimizer:
    """The optimizer that a synchronizer calls. It does not communicate."""

    def __init__(self, spec: OptimizerSpec, model: nn.Module, batch: int, total: int) -> None:
        self.spec = spec
        self.batch = batch
        self.total = total
        _avoid_compiler_import()
        self.groups = [ParameterGroup(spec, [p for p in model.parameters() if p.requires_grad])]
        self._plain_step = inspect.unwrap(type(self.groups[0].inner).step)  # the wrappers import the compiler, too

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer state of each parameter or shard, by its number, and the number of steps done."""
        found = {"done": torch.tensor(self.groups[0].done)}
        for number, (group, parameter) in enumerate(self._all_parameters()):
            values = group.inner.state.get(parameter, {})
            found |= {f"{number}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned. Raises ValueError if a tensor does not fit its parameter."""
        for group in self.groups:
            group.done = int(state["done"])
            group.inner.state.clear()
        parameters = self._all_parameters()
        for name, value in state.items():
            number, _, key = name.partition(".")
            if key:
                group, parameter = parameters[int(number)]
                if value.numel() > 1 and value.shape != parameter.shape:
                    raise ValueError(f"optimizer {name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
                group.inner.state[parameter][key] = value.clone()

    def _all_parameters(self) -> list[tuple[ParameterGroup, nn.Parameter]]:
        return [(group, parameter) for group in self.groups for parameter in group.parameters]

    def zero(self, keep: bool) -> None:
        """Clear the gradients. `keep`: set them to zero in place, because they are views of a mode's buffers."""
        for group in self.groups:
            group.inner.zero_grad(set_to_none=not keep)

    @property
    def clips(self) -> bool:
        return self.spec.clip is not None

    def clip_coefficient(self, norm: float) -> float:
        """Return the factor for a gradient of this norm, by torch's own formula."""
        ratio = (self.spec.clip or math.inf) / (norm + 1e-6)
        return 1.0 if ratio > 1.0 else ratio  # NaN stays NaN

    def step(self) -> None:
        """Clip the gradients if the spec says so, set the learning rate, update the parameters."""
        if self.spec.clip is not None:
            nn.utils.clip_grad_norm_(self.groups[0].parameters, self.spec.clip)
        self._step(self.groups[0])

    def own_shards(self, shards: list[Tensor]) -> None:
        """Replace all parameters by these shards. `step_shard` updates a shard when its gradient is there."""
        self.groups = [ParameterGroup(self.spec, [nn.Parameter(values)]) for values in shards]

    def step_shard(self, number: int, gradient: Tensor) -> None:
        """Update one shard. Threads may update different shards at the same time."""
        self.groups[number].parameters[0].grad = gradient
        self._step(self.groups[number])

    def _step(self, group: ParameterGroup) -> None:
        for torch_group in group.inner.param_groups:
            torch_group["lr"] = lr_at(group.done, self.spec, self.batch, self.total)
        with torch.no_grad():
            self._plain_step(group.inner)
        group.done += 1
