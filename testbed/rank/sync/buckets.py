"""Granularity: cut parameters into flat buffers, in which gradients (or parameters) live: nothing is copied."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from testbed.spec.mode import SyncMode


def cut(parameters: Sequence[Parameter], mode: SyncMode) -> list[list[Parameter]]:
    """Groups of parameters that travel together, last layer first: that is the order gradients appear in."""
    ordered = list(reversed([p for p in parameters if p.requires_grad]))
    if mode.granularity == "flat":
        return [ordered] if ordered else []
    if mode.granularity == "param":
        return [[p] for p in ordered]
    return _pack(ordered, mode.bucket or 0)


def _pack(ordered: Iterable[Parameter], limit: int) -> list[list[Parameter]]:
    """Fill buckets up to `limit` bytes; a parameter larger than that gets its own."""
    buckets: list[list[Parameter]] = []
    room = 0
    for parameter in ordered:
        size = parameter.numel() * parameter.element_size()
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(parameter)
        room -= size
    return buckets


def flat_gradients(groups: list[list[Parameter]]) -> list[Tensor]:
    """One zeroed buffer per group; each parameter's .grad becomes a view of it, so backward writes there.

    A parameter that gets no gradient on a rank counts as zero in the mean.
    """
    buffers = []
    for group in groups:
        buffer = torch.zeros(sum(p.numel() for p in group), dtype=group[0].dtype)
        for parameter, view in zip(group, _views(buffer, group), strict=True):
            parameter.grad = view
        buffers.append(buffer)
    return buffers


def flat_parameters(groups: list[list[Parameter]]) -> list[Tensor]:
    """One buffer per group that holds the parameters' values; each parameter becomes a view of it."""
    buffers = []
    for group in groups:
        buffer = torch.cat([p.detach().reshape(-1) for p in group])
        for parameter, view in zip(group, _views(buffer, group), strict=True):
            parameter.data = view
        buffers.append(buffer)
    return buffers


def _views(buffer: Tensor, group: list[Parameter]) -> list[Tensor]:
    pieces = buffer.split([p.numel() for p in group])
    return [piece.view(p.shape) for piece, p in zip(pieces, group, strict=True)]


def trained(model: Module) -> list[Parameter]:
    """The parameters that get gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def split(buffer: Tensor, parts: int) -> list[Tensor]:
    """Contiguous parts whose sizes differ by one element at most; some are empty when the buffer is small."""
    bounds = [len(buffer) * k // parts for k in range(parts + 1)]
    return [buffer[a:b] for a, b in itertools.pairwise(bounds)]


# Readiness: which gradients backward has made, and so which buffers may leave.


class Readiness:
    """Counts gradients as backward makes them and launches groups in their order, the same on all ranks."""

    def __init__(self, groups: Sequence[Sequence[Parameter]], launch: Callable[[int], None]) -> None:
        self.launch = launch
        self.members = [{id(p) for p in group} for group in groups]
        self.parameters = {id(p): p for group in groups for p in group}
        self.paused = False
        self.start()

    def start(self) -> None:
        """A step begins: nothing is ready."""
        self.missing = [set(members) for members in self.members]
        self.next = 0

    def ready(self, parameter: Parameter) -> None:
        """This gradient is complete, unless more passes of the same step will add to it."""
        if self.paused:
            return
        for missing in self.missing[self.next :]:
            missing.discard(id(parameter))
        while self.next < len(self.missing) and not self.missing[self.next]:
            self._launch_next()

    def absent(self) -> list[Parameter]:
        """Those that backward has left out."""
        ids = {key for missing in self.missing[self.next :] for key in missing}
        return [self.parameters[key] for key in ids]

    def finish(self) -> None:
        """Backward is over: a parameter that got no gradient counts as zero, so the rest can go."""
        while self.next < len(self.missing):
            self._launch_next()

    def _launch_next(self) -> None:
        self.launch(self.next)
        self.next += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused = True
        try:
            yield
        finally:
            self.paused = False
