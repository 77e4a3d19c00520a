"""Adapt a script to a mode: its optimizer, its parameters as a module, and DDP without its reduction.

This module is imported only when a mode replaces the script's synchronisation (instead.py).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from testbed.rank.sync.buckets import in_order_of
from testbed.spec.errors import refuse

# optimizers that update each number independently, so that a shard can be updated alone
ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam")


def parameters_module(parameters: list[nn.Parameter]) -> nn.Module:
    """Return a module that has these parameters, in this order."""
    return nn.ParameterList(parameters)


def switch_off(wrapper: DistributedDataParallel) -> None:
    """Stop DDP's reduction of gradients. DDP broadcasts buffers as before, also if the script sets its switches."""
    wanted = bool(wrapper.require_backward_grad_sync)
    buffers = bool(wrapper.require_forward_param_sync)
    for name in ("require_backward_grad_sync", "require_forward_param_sync"):
        wrapper.__dict__.pop(name, None)
    kind = type(wrapper)
    wrapper.__class__ = type(kind.__name__, (_Silent, kind), {})
    wrapper.__dict__["_testbed_wanted"], wrapper.__dict__["_testbed_buffers"] = wanted, buffers


class _Silent:
    """Overrides the two switches of DDP: it never reduces, and broadcasts buffers where it would have reduced."""

    __dict__: dict[str, Any]

    @property
    def require_backward_grad_sync(self) -> bool:
        return False

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.__dict__["_testbed_wanted"] = value

    @property
    def require_forward_param_sync(self) -> bool:
        return bool(self.__dict__["_testbed_buffers"])

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:  # DDP sets this after each forward
        self.__dict__["_testbed_buffers"] = torch.is_grad_enabled() and self.__dict__["_testbed_wanted"]


class ScriptUpdate:
    """The script's optimizer, as a mode calls it (Update in rank/sync/synchronizer.py).

    The script itself calls zero_grad and step. Only a pipeline updates here: each shard has an optimizer of its own,
    of the same class as the script's.
    """

    clips = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.shards: list[Shard] = []
        self.settings: list[dict[str, Any]] = []

    def zero(self, keep: bool) -> None:
        """Do nothing, because the script itself zeroes its gradients."""

    def step(self) -> None:
        """Do nothing, because the script itself updates."""

    def clip_coefficient(self, norm: float) -> float:
        return 1.0

    def own_shards(self, shards: list[Tensor]) -> None:
        """Divide the optimizer and its state among the shards, which are slices of one buffer with all parameters.

        Raise SpecError if the optimizer is not element-wise.
        """
        name = type(self.optimizer).__name__
        if name not in ELEMENTWISE or not type(self.optimizer).__module__.startswith("torch.optim"):
            rule = f"pipeline updates shards, which the script's optimizer {name} may not allow"
            raise refuse("mode", "pipeline", rule, f"Use overlap, or one of {', '.join(ELEMENTWISE)}.")
        places = [
            (int(p.storage_offset()), p.numel(), number, p)
            for number, group in enumerate(self.optimizer.param_groups)
            for p in group["params"]
            if p.requires_grad
        ]
        self.shards = [Shard(self.optimizer, values, places) for values in shards]
        self.take_settings()

    def take_settings(self) -> None:
        """Take over the script's present settings, e.g. the learning rate."""
        self.settings = self._present()
        for shard in self.shards:
            shard.set(self.settings)

    def check_settings(self) -> None:
        """Raise SpecError if the script changed a setting after backward, when shards were updated with the old one."""
        if self._present() != self.settings:
            rule = (
                "pipeline updates during backward, and the script changes the learning rate between backward and step"
            )
            raise refuse("mode", "pipeline", rule, "Use overlap, or change the learning rate after the step.")

    def _present(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def step_shard(self, number: int, gradient: Tensor) -> None:
        self.shards[number].step(gradient)


class Shard:
    """The optimizer of one shard. It has one parameter for each piece of the script's parameters in the shard."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, values: Tensor, places: list[tuple[int, int, int, nn.Parameter]]
    ) -> None:
        first = int(values.storage_offset())
        last = first + values.numel()
        kind = type(optimizer)
        accepted = inspect.signature(kind.__init__).parameters
        groups: list[dict[str, Any]] = []
        self.pieces: list[tuple[nn.Parameter, int, int]] = []
        state = {}
        for start, length, number, parameter in places:
            a, b = max(start, first), min(start + length, last)
            if a >= b:
                continue
            piece = nn.Parameter(values[a - first : b - first])
            self.pieces.append((piece, a - first, b - first))
            groups.append({"params": [piece], "number": number})
            kept = optimizer.state.get(parameter, {})
            state[piece] = {key: _cut(key, value, parameter, a - start, b - start) for key, value in kept.items()}
        self.inner: Any = None
        if groups:
            options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
            self.inner = kind(groups, **options)
            for piece, values_of in state.items():
                if values_of:
                    self.inner.state[piece] = values_of
        self._plain_step: Any = inspect.unwrap(kind.step)  # without the hooks that mark the script's own steps

    def set(self, settings: list[dict[str, Any]]) -> None:
        """Set the settings of the script's parameter groups."""
        for group in self.inner.param_groups if self.inner else ():
            group.update(settings[group["number"]])

    def step(self, gradient: Tensor) -> None:
        """Update the shard. Threads may update different shards at the same time."""
        if self.inner is None:
            return
        for piece, a, b in self.pieces:
            piece.grad = gradient[a:b]
        with torch.no_grad():
            self._plain_step(self.inner)


def _cut(key: str, value: Any, parameter: nn.Parameter, a: int, b: int) -> Any:
    """Return the part of an optimizer's state for a piece of a parameter, but the whole number of steps."""
    if not isinstance(value, Tensor):
        return value
    return in_order_of(parameter, value)[a:b] if value.shape == parameter.shape and key != "step" else value.clone()
