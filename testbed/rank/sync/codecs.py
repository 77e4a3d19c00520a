"""Codecs: how one flat buffer is averaged when something smaller is sent in its place.

A coder is a `Mean` for one buffer. If payloads can be summed, it wraps the algorithm's mean (Rounded, LowRank). If they
cannot, it replaces it, and payloads go directly to the ranks that need them, by the plan of `direct` (Int8, TopK). All
ranks end with the same bits, because all ranks decode the same payloads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import Mean, exchange_shards, plan_for
from testbed.rank.sync.buckets import split
from testbed.spec.mode import SyncMode

SCALE_BYTES = 4  # a float32 in front of an int8 payload
MAX_INT8 = 127  # the range is symmetric: -127 to 127
SAMPLE_STRIDE = 61  # a prime, so that samples do not all come from the same column of a matrix


class Coder(Protocol):
    """Averages one buffer. Each buffer has a coder of its own, because its state belongs to that buffer."""

    size: int  # bytes of this rank's buffer as it is sent
    state: dict[str, Tensor]  # kept between steps, for a checkpoint; changed in place

    def __call__(self, buffer: Tensor, group: Group) -> None: ...


@dataclass(frozen=True)
class BufferInfo:
    """The properties of a buffer that its coder needs before the first step."""

    number: int  # of the bucket
    shapes: list[torch.Size]  # of the tensors in it, one after the other, as they are in memory
    dtype: torch.dtype
    group: Group
    seed: int  # of the run

    @property
    def length(self) -> int:
        return sum(shape.numel() for shape in self.shapes)


MakeCoder = Callable[[Mean, BufferInfo, float], Coder]  # the last is the codec's number, e.g. F of topk:F; 0: none
CODERS: dict[str, MakeCoder] = {}  # by the names of the rows in spec/mode.py
C = TypeVar("C", bound=MakeCoder)


def codec(name: str) -> Callable[[C], C]:
    """Register the class of a codec under the name of its row."""

    def register(coder: C) -> C:
        CODERS[name] = coder
        return coder

    return register


def make_coder(mode: SyncMode, mean_: Mean, info: BufferInfo) -> Coder:
    """The coder of a mode for one buffer."""
    if mode.codec is None:
        return Exact(mean_, info)
    return CODERS[mode.codec](mean_, info, mode.codec_number or 0)


def generator(*numbers: int) -> torch.Generator:
    """A random generator that depends on these numbers only; a codec must not draw from the experiment's generators."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)


class Exact:
    """No codec: the buffer itself is sent."""

    def __init__(self, mean_: Mean, info: BufferInfo) -> None:
        self.mean_ = mean_
        self.size = info.length * info.dtype.itemsize
        self.state: dict[str, Tensor] = {}

    def __call__(self, buffer: Tensor, group: Group) -> None:
        self.mean_(buffer, group)


class Rounded:
    """A shorter type of float, by any algorithm.

    The buffer is divided by N first, so that a sum of N is no larger than the largest of them: fp16 ends at 65504. The
    algorithm divides by N again, so in fp16 values below N^2 3e-8 are lost.
    """

    dtype: torch.dtype

    def __init__(self, mean_: Mean, info: BufferInfo, number: float) -> None:
        self.mean_ = mean_
        self.wire = torch.empty(info.length, dtype=self.dtype)
        self.size = self.wire.nbytes
        self.state: dict[str, Tensor] = {}

    def __call__(self, buffer: Tensor, group: Group) -> None:
        self.wire.copy_(buffer.div_(group.size))
        self.mean_(self.wire, group)
        buffer.copy_(self.wire).mul_(group.size)


@codec("fp16")
class Float16(Rounded):
    """More digits than bf16, less range."""

    dtype = torch.float16


@codec("bf16")
class BFloat16(Rounded):
    """The range of float32, fewer digits."""

    dtype = torch.bfloat16


@codec("int8")
class Int8:
    """Every rank owns a shard: it receives it encoded from all, averages in full precision, encodes and sends the mean.

    A shard's largest magnitude becomes 127. A value between two integers is rounded up with a probability equal to its
    distance from the lower one, so that the error is zero on average. The random numbers depend on seed, buffer, rank
    and step only.
    """

    def __init__(self, mean_: Mean, info: BufferInfo, number: float) -> None:
        group = info.group
        self.seed = (info.seed, info.number, group.rank)
        self.plan = plan_for("direct", group.rank, group.size)
        lengths = [len(shard) for shard in split(torch.empty(info.length, device="meta"), group.size)]
        self.payloads = [_empty_payload(n) for n in lengths]
        self.received = [_empty_payload(lengths[group.rank]) for _ in range(1, group.size)]
        self.draws = torch.empty(max(lengths))
        self.size = sum(payload.nbytes for payload in self.payloads)
        self.state = {"steps": torch.zeros((), dtype=torch.int64)}

    def __call__(self, buffer: Tensor, group: Group) -> None:
        shards, mine = split(buffer, group.size), group.rank
        random = generator(*self.seed, int(self.state["steps"]))
        self.state["steps"] += 1
        for number, (shard, payload) in enumerate(zip(shards, self.payloads, strict=True)):
            if number != mine:
                self._encode(shard, payload, random)
        exchange_shards(self.plan.reduce[0], self.payloads, self.received, group)
        for payload in self.received:
            shards[mine].add_(payload[SCALE_BYTES:], alpha=_scale(payload))
        shards[mine].div_(group.size)
        self._encode(shards[mine], self.payloads[mine], random)
        gather = self.plan.gather[0]
        exchange_shards(gather, self.payloads, [self.payloads[hop.shard] for hop in gather.receives], group)
        for shard, payload in zip(shards, self.payloads, strict=True):
            shard.copy_(payload[SCALE_BYTES:]).mul_(_scale(payload))

    def _encode(self, shard: Tensor, payload: Tensor, random: torch.Generator) -> None:
        if not len(shard):
            return
        least, most = torch.aminmax(shard)
        payload[:SCALE_BYTES].view(torch.float32).copy_(torch.maximum(most, -least) / MAX_INT8)
        scale = _scale(payload)
        draws = self.draws[: len(shard)].uniform_(generator=random)
        # With a scale of zero, inf or nan every decoded value is that scale, so any integers will do.
        draws.add_(shard, alpha=1 / scale if 1e-37 < scale < math.inf else 0.0)
        payload[SCALE_BYTES:].copy_(draws.floor_().clamp_(-MAX_INT8, MAX_INT8))


def _empty_payload(length: int) -> Tensor:
    """Memory for a shard's integers and their scale; none for a shard without elements."""
    return torch.empty(SCALE_BYTES + length if length else 0, dtype=torch.int8)


def _scale(payload: Tensor) -> float:
    return float(payload[:SCALE_BYTES].view(torch.float32)) if len(payload) else 0.0


@codec("topk")
class TopK:
    """The k largest elements and their indices go to all ranks; the rest is kept and added to the next gradient.

    Every rank sends N-1 payloads, so this saves bytes only if F N is small.
    """

    def __init__(self, mean_: Mean, info: BufferInfo, fraction: float) -> None:
        group = info.group
        self.plan = plan_for("direct", group.rank, group.size)
        self.count = math.ceil(fraction * info.length)
        # Indices (int32), then values (float32), in one message.
        self.payloads = [torch.empty(2 * self.count, dtype=torch.int32) for _ in range(group.size)]
        self.size = self.payloads[0].nbytes
        self.state = {"residual": torch.zeros(info.length, dtype=info.dtype)}

    def __call__(self, buffer: Tensor, group: Group) -> None:
        residual = self.state["residual"].add_(buffer)
        chosen = largest(torch.abs(residual, out=buffer), self.count)
        indices, values = self._open(group.rank)
        indices.copy_(chosen)
        values.copy_(residual[chosen])
        residual.index_add_(0, chosen, values.to(residual.dtype), alpha=-1)
        gather = self.plan.gather[0]
        exchange_shards(gather, self.payloads, [self.payloads[hop.shard] for hop in gather.receives], group)
        buffer.zero_()
        for rank in range(group.size):  # the same order on all ranks
            indices, values = self._open(rank)
            buffer.index_add_(0, indices, values.to(buffer.dtype))
        buffer.div_(group.size)

    def _open(self, rank: int) -> tuple[Tensor, Tensor]:
        """Indices and values in the payload of a rank."""
        payload = self.payloads[rank]
        return payload[: self.count], payload[self.count :].view(torch.float32)


def largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest. A sample excludes most of the others first, which is four times as fast."""
    sample = values[::SAMPLE_STRIDE]
    some = count * 6 // 5 // SAMPLE_STRIDE  # a fifth more than the sample's share, so that enough are left
    if some >= 100:
        floor = torch.topk(sample, some, sorted=False).values.min()
        near = (~(values < floor)).nonzero().squeeze(1)  # not `>=`, which drops nan: nan must be sent
        if len(near) >= count:
            return near[torch.topk(values[near], count, sorted=False).indices]
    return torch.topk(values, count, sorted=False).indices


@dataclass(frozen=True)
class Matrix:
    """A tensor of the buffer as a matrix: a row per index of the outermost dimension, all others in the row."""

    begin: int
    rows: int
    columns: int
    rank: int

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.begin : self.begin + self.rows * self.columns].view(self.rows, self.columns)


@codec("powersgd")
class LowRank:
    """PowerSGD (Vogels, Karimireddy, Jaggi 2019): each matrix is sent as a product of two thin ones, P Q^T.

    A training step makes one step of the power method, which starts from the Q of the step before. Any algorithm can
    average the two factors. The difference between gradient and product is kept and added to the next gradient.
    Vectors, and matrices that would not get smaller, are sent uncompressed together with the P's.
    """

    def __init__(self, mean_: Mean, info: BufferInfo, rank: float) -> None:
        self.mean_ = mean_
        self.matrices, self.raw_ranges = _select_matrices(info.shapes, int(rank))
        dtype, random = info.dtype, generator(info.seed, info.number)
        p_sizes = [m.rows * m.rank for m in self.matrices]
        q_sizes = [m.columns * m.rank for m in self.matrices]
        raw_sizes = [end - begin for begin, end in self.raw_ranges]
        self.first = torch.empty(sum(p_sizes) + sum(raw_sizes), dtype=dtype)  # all P's and what is sent uncompressed
        self.second = torch.empty(sum(q_sizes), dtype=dtype).normal_(generator=random)  # all Q's, seeded
        slices = list(self.first.split([*p_sizes, *raw_sizes]))
        self.p = [each.view(m.rows, m.rank) for each, m in zip(slices, self.matrices, strict=False)]
        self.q = [each.view(-1, m.rank) for each, m in zip(self.second.split(q_sizes), self.matrices, strict=True)]
        self.raw = slices[len(p_sizes) :]
        self.size = self.first.nbytes + self.second.nbytes
        self.state = {"residual": torch.zeros(info.length, dtype=dtype), "q": self.second}

    def __call__(self, buffer: Tensor, group: Group) -> None:
        residual = self.state["residual"]
        for m, p, q in zip(self.matrices, self.p, self.q, strict=True):
            gradient = m.of(buffer).add_(m.of(residual))
            m.of(residual).copy_(gradient)
            torch.mm(gradient, _orthogonal(q), out=p)
        for raw, (begin, end) in zip(self.raw, self.raw_ranges, strict=True):
            raw.copy_(buffer[begin:end])
        self.mean_(self.first, group)
        for m, p, q in zip(self.matrices, self.p, self.q, strict=True):
            torch.mm(m.of(buffer).t(), p.copy_(_orthogonal(p)), out=q)
        self.mean_(self.second, group)
        for m, p, q in zip(self.matrices, self.p, self.q, strict=True):
            torch.mm(p, q.t(), out=m.of(buffer))
            m.of(residual).sub_(m.of(buffer))
        for raw, (begin, end) in zip(self.raw, self.raw_ranges, strict=True):
            buffer[begin:end].copy_(raw)


def _orthogonal(tall: Tensor) -> Tensor:
    """An orthonormal basis of the columns; the same bits where the input has the same bits."""
    basis: Tensor = torch.linalg.qr(tall).Q
    return basis


def _select_matrices(shapes: list[torch.Size], rank: int) -> tuple[list[Matrix], list[tuple[int, int]]]:
    """Return the tensors that are sent as products, and the ranges of those that are sent uncompressed."""
    matrices: list[Matrix] = []
    raw_ranges: list[tuple[int, int]] = []
    begin = 0
    for shape in shapes:
        length = shape.numel()
        rows = shape[0] if len(shape) > 1 else 1
        columns = length // rows if rows else 0
        if (rows + columns) * min(rank, rows, columns) < length:
            matrices.append(Matrix(begin, rows, columns, min(rank, rows, columns)))
        else:
            raw_ranges.append((begin, begin + length))
        begin += length
    return matrices, raw_ranges
