"""Codecs: how one flat buffer is averaged when something smaller travels in its place.

A coder is a `Mean` for one buffer: it wraps the algorithm's (what travels can be added up on its way) or replaces it
(payloads go straight to the others), and knows how many bytes it makes of the buffer. What it keeps from one step to
the next are tensors in `state`. All ranks end with the same bits: what a rank decodes, all ranks decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import Mean
from testbed.rank.sync.codecs_lowrank import LowRank
from testbed.rank.sync.codecs_payload import Int8, TopK
from testbed.spec.mode import SyncMode


class Coder(Protocol):
    """Averages one buffer, always the same one."""

    size: int  # bytes of this rank's buffer as it travels
    state: dict[str, Tensor]  # kept between steps, for a checkpoint; changed in place

    def __call__(self, buffer: Tensor, group: Group) -> None: ...


@dataclass(frozen=True)
class Parcel:
    """What a coder must know of its buffer before it sees it."""

    number: int  # of the buffer
    shapes: list[torch.Size]  # of the tensors that lie in it, one after the other
    dtype: torch.dtype
    group: Group
    seed: int

    @property
    def length(self) -> int:
        return sum(shape.numel() for shape in self.shapes)


class Exact:
    """No codec: the buffer itself travels."""

    def __init__(self, mean_: Mean, parcel: Parcel) -> None:
        self.mean_ = mean_
        self.size = parcel.length * parcel.dtype.itemsize
        self.state: dict[str, Tensor] = {}

    def __call__(self, buffer: Tensor, group: Group) -> None:
        self.mean_(buffer, group)


class Rounded:
    """Another type of float, by any algorithm.

    Divided by N first, so that a sum of N is no larger than the largest of them: fp16 ends at 65504. The algorithm's
    own division makes it N times smaller again: what is below N^2 3e-8 is lost in fp16.
    """

    def __init__(self, mean_: Mean, parcel: Parcel, dtype: torch.dtype) -> None:
        self.mean_ = mean_
        self.wire = torch.empty(parcel.length, dtype=dtype)
        self.size = self.wire.nbytes
        self.state: dict[str, Tensor] = {}

    def __call__(self, buffer: Tensor, group: Group) -> None:
        self.wire.copy_(buffer.div_(group.size))
        self.mean_(self.wire, group)
        buffer.copy_(self.wire).mul_(group.size)


def make_coder(mode: SyncMode, mean_: Mean, parcel: Parcel) -> Coder:
    """The coder of a mode for one buffer."""
    number = mode.codec_number or 0
    makers: dict[str | None, Callable[[], Coder]] = {
        None: lambda: Exact(mean_, parcel),
        "fp16": lambda: Rounded(mean_, parcel, torch.float16),
        "bf16": lambda: Rounded(mean_, parcel, torch.bfloat16),
        "int8": lambda: Int8(parcel.length, parcel.group, (parcel.seed, parcel.number)),
        "topk": lambda: TopK(parcel.length, parcel.dtype, parcel.group, number),
        "powersgd": lambda: LowRank(mean_, parcel.shapes, parcel.dtype, int(number), (parcel.seed, parcel.number)),
    }
    return makers[mode.codec]()
