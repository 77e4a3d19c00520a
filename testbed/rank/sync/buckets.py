"""Buckets: groups of parameters that are sent as one unit, their flat buffers, and when they are ready.

Gradients (or parameters) are views of the buffers. Each keeps the order in which its numbers are in memory, e.g.
channels_last, so that a layer computes with them as before. Backward adds each gradient to its view, which takes as
long as a copy: `time_copies` records it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from testbed.rank.group import Group
from testbed.results.theory import pipeline_bucket
from testbed.results.timeline import Timeline
from testbed.spec.errors import refuse
from testbed.spec.mode import SyncMode, fill_buckets
from testbed.spec.units import approximate_size, format_size


class Choice(NamedTuple):
    """A mode whose bucket size is known, and why the ranks chose it."""

    mode: SyncMode
    why: str


def choose_bucket(mode: SyncMode, size: int, group: Group, requested: Sequence[int] = (), earlier: str = "") -> Choice:
    """Return the mode with a bucket size, the same on all ranks, and why in words; empty if it has one already.

    `size` is that of the gradient in bytes. The rate is the lowest that was `requested` (bit/s), else what rank 0 knows
    to be measured. `earlier`: the mode of the attempt before, because a resumed run needs the same shards.
    """
    if not mode.leaves_bucket_open:
        return Choice(mode, "")
    rate = min(requested) / 8 if requested else group.rate
    source = "requested" if requested else "measured"
    found = pipeline_bucket(size, group.size, rate)
    network = f"{8 * rate / 1e6:.4g} Mbit/s ({source})" if rate else "an unknown rate"
    why = f"for a gradient of {approximate_size(size)}, {group.size} ranks and {network}"
    if before := SyncMode.parse(earlier).bucket if earlier else None:
        found, why = before, "as in the attempt before"
    found, why = json.loads(group.all_gather_text("bucket", json.dumps([found, why]))[0])
    return Choice(replace(mode, bucket=found), f"{mode}: buckets of {format_size(found)}, {why}")


def trained(model: Module) -> list[Parameter]:
    """The parameters that get gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def make_buckets(parameters: Sequence[Parameter], mode: SyncMode) -> list[list[Parameter]]:
    """Return the parameters of each bucket, last layer first: backward makes gradients in that order."""
    ordered = list(reversed([p for p in parameters if p.requires_grad]))
    if mode.granularity == "flat":
        return [ordered] if ordered else []
    if mode.granularity == "param":
        return [[p] for p in ordered]
    sizes = (p.numel() * p.element_size() for p in ordered)
    return [[ordered[number] for number in bucket] for bucket in fill_buckets(sizes, mode.bucket or 0)]


def flat_gradients(buckets: list[list[Parameter]]) -> list[Tensor]:
    """One zeroed buffer per bucket; each parameter's .grad becomes a view of it, so backward writes there.

    A parameter that gets no gradient on a rank counts as zero in the mean.
    """
    buffers = []
    for bucket in buckets:
        buffer = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype)
        for parameter, view in zip(bucket, views(buffer, bucket), strict=True):
            parameter.grad = view
        buffers.append(buffer)
    return buffers


def flat_parameters(buckets: list[list[Parameter]]) -> list[Tensor]:
    """One buffer per bucket that holds the parameters' values; each parameter becomes a view of it."""
    buffers = []
    for bucket in buckets:
        buffer = torch.empty(sum(p.numel() for p in bucket), dtype=bucket[0].dtype)
        for parameter, view in zip(bucket, views(buffer, bucket), strict=True):
            parameter.data = view.copy_(parameter.detach())
        buffers.append(buffer)
    return buffers


def views(buffer: Tensor, parameters: Sequence[Parameter]) -> list[Tensor]:
    """A slice of the buffer for each parameter, with its shape and its order in memory."""
    slices = buffer.split([p.numel() for p in parameters])
    pairs = zip(slices, parameters, strict=True)
    return [each.as_strided(p.shape, layout(p), each.storage_offset()) for each, p in pairs]


def layout(tensor: Tensor) -> tuple[int, ...]:
    """The strides that keep a tensor's order in memory and leave no gaps in it."""
    return torch.empty_like(tensor, device="meta").stride()


def memory_shape(tensor: Tensor) -> torch.Size:
    """The sizes of a tensor's dimensions, the outermost in memory first."""
    strides = layout(tensor)
    return torch.Size(tensor.shape[k] for k in sorted(range(tensor.dim()), key=lambda k: -strides[k]))


def in_order_of(parameter: Tensor, values: Tensor) -> Tensor:
    """A flat copy of values that belong to a parameter, in that parameter's order in memory."""
    flat = torch.empty(values.numel(), dtype=values.dtype)
    flat.as_strided(values.shape, layout(parameter)).copy_(values)
    return flat


def split(buffer: Tensor, count: int) -> list[Tensor]:
    """Contiguous slices whose lengths differ by one element at most; some are empty when the buffer is small.

    Split by the number of ranks they are shards, and a shard split again gives segments.
    """
    bounds = [len(buffer) * k // count for k in range(count + 1)]
    return [buffer[a:b] for a, b in itertools.pairwise(bounds)]


def time_copies(parameters: Iterable[Parameter], timeline: Timeline) -> None:
    """Record how long backward takes to add each gradient to the buffer that it is sent from.

    A parameter's hook is called before its gradient is added to `.grad`, its post-accumulate hook after.
    """
    since = timeline.now()

    def before(gradient: Tensor) -> None:
        nonlocal since
        since = timeline.now()

    def after(parameter: Tensor) -> None:
        timeline.copied(since)

    for parameter in parameters:
        parameter.register_hook(before)
        parameter.register_post_accumulate_grad_hook(after)


class Readiness:
    """Counts gradients as backward makes them and launches buckets in their order, the same on all ranks."""

    def __init__(self, mode: SyncMode, buckets: Sequence[Sequence[Parameter]], launch: Callable[[int], None]) -> None:
        self.mode, self.launch = mode, launch
        self.members = [{id(p) for p in bucket} for bucket in buckets]
        self.places: dict[int, list[int]] = {}  # by parameter: the buckets that have elements of it
        for number, members in enumerate(self.members):
            for key in members:
                self.places.setdefault(key, []).append(number)
        self.parameters = {id(p): p for bucket in buckets for p in bucket}
        self.paused = False
        self.start()

    def start(self) -> None:
        """Begin a step: no gradient is ready."""
        self.missing = [set(members) for members in self.members]
        self.next = 0

    def check_first(self, parameter: Parameter) -> None:
        """Raise SpecError if backward has made this gradient before: what was sent lacks the second part."""
        numbers = self.places.get(id(parameter), ())
        if not self.paused and numbers and id(parameter) not in self.missing[numbers[0]]:
            rule = "one backward pass makes the gradient of a parameter twice, and the first is already being sent"
            way_out = (
                "Set use_reentrant=False in torch.utils.checkpoint, or use a mode that sends after backward: ring."
            )
            raise refuse("mode", str(self.mode), rule, way_out)

    def ready(self, parameter: Parameter) -> None:
        """Mark this gradient as complete and launch every bucket that is now full.

        Does nothing while paused, because later passes still add to the gradient.
        """
        if self.paused:
            return
        for number in self.places.get(id(parameter), ()):  # one without elements is in no bucket
            self.missing[number].discard(id(parameter))
        while self.next < len(self.missing) and not self.missing[self.next]:
            self._launch_next()

    def absent(self) -> list[Parameter]:
        """The parameters that backward has made no gradient for."""
        ids = {key for missing in self.missing[self.next :] for key in missing}
        return [self.parameters[key] for key in ids]

    def finish(self) -> None:
        """Backward is over: launch the rest. A parameter without a gradient counts as zero."""
        while self.next < len(self.missing):
            self._launch_next()

    def _launch_next(self) -> None:
        self.launch(self.next)
        self.next += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """During the `with` block gradients do not count as complete."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False
