"""Codecs whose payloads cannot be added up: each goes straight to whom it concerns (the rounds of `direct`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import Mean, exchange_shards, plan_for
from testbed.rank.sync.buckets import split
from testbed.spec.mode import SyncMode

# Random numbers of a mode's own: the experiment's generators must not notice that a codec draws.


def generator(*numbers: int) -> torch.Generator:
    """A generator that depends on these numbers and on nothing else."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)


# Codecs: how one flat buffer is averaged when something smaller travels in its place.
#
# A coder is a `Mean` for one buffer: it wraps the algorithm's (what travels can be added up on its way) or replaces it
# (payloads go straight to the others), and knows how many bytes it makes of the buffer. What it keeps from one step to
# the next are tensors in `state`. All ranks end with the same bits: what a rank decodes, all ranks decode.


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


SCALE_BYTES = 4  # a float32 in front of an int8 payload
SAMPLED = 61  # a prime, so that it does not fall in step with rows
STEPS = 127  # int8 on either side of zero


class Int8:
    """Every rank owns a shard: it gets it encoded from all, averages in full precision, encodes the mean, sends it.

    A shard's largest magnitude is step 127; what lies between two steps is rounded up with the probability of its
    distance to the lower one, so that the error is zero on average. The draws depend on seed, buffer, rank and step
    only, and touch no other generator.
    """

    def __init__(self, length: int, group: Group, seed: tuple[int, ...]) -> None:
        self.seed = (*seed, group.rank)
        self.rounds = plan_for("direct", group.rank, group.size)
        lengths = [len(part) for part in split(torch.empty(length, device="meta"), group.size)]
        self.payloads = [_empty_payload(n) for n in lengths]
        self.landing = [_empty_payload(lengths[group.rank]) for _ in range(1, group.size)]
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
        exchange_shards(self.rounds.reduce[0], self.payloads, self.landing, group)
        for payload in self.landing:
            shards[mine].add_(payload[SCALE_BYTES:], alpha=_scale(payload))
        shards[mine].div_(group.size)
        self._encode(shards[mine], self.payloads[mine], random)
        gather = self.rounds.gather[0]
        exchange_shards(gather, self.payloads, [self.payloads[hop.shard] for hop in gather.receives], group)
        for shard, payload in zip(shards, self.payloads, strict=True):
            shard.copy_(payload[SCALE_BYTES:]).mul_(_scale(payload))

    def _encode(self, shard: Tensor, payload: Tensor, random: torch.Generator) -> None:
        if not len(shard):
            return
        least, most = torch.aminmax(shard)
        payload[:SCALE_BYTES].view(torch.float32).copy_(torch.maximum(most, -least) / STEPS)
        scale = _scale(payload)
        draws = self.draws[: len(shard)].uniform_(generator=random)
        # Where nothing is to be divided (all zero) or the scale says it all (inf, nan), the steps do not matter.
        draws.add_(shard, alpha=1 / scale if 1e-37 < scale < math.inf else 0.0)
        payload[SCALE_BYTES:].copy_(draws.floor_().clamp_(-STEPS, STEPS))


def _empty_payload(length: int) -> Tensor:
    """Room for a shard's steps and their scale; none for a shard without elements."""
    return torch.empty(SCALE_BYTES + length if length else 0, dtype=torch.int8)


def _scale(payload: Tensor) -> float:
    return float(payload[:SCALE_BYTES].view(torch.float32)) if len(payload) else 0.0


class TopK:
    """The largest k elements and their places go to everybody; the rest stays here and is added to the next gradient.

    Every rank sends (N-1) payloads, so this pays where F N is small.
    """

    def __init__(self, length: int, dtype: torch.dtype, group: Group, fraction: float) -> None:
        self.rounds = plan_for("direct", group.rank, group.size)
        self.count = math.ceil(fraction * length)
        # Places (int32), then values (float32), in one message.
        self.payloads = [torch.empty(2 * self.count, dtype=torch.int32) for _ in range(group.size)]
        self.size = self.payloads[0].nbytes
        self.state = {"residual": torch.zeros(length, dtype=dtype)}

    def __call__(self, buffer: Tensor, group: Group) -> None:
        residual = self.state["residual"].add_(buffer)
        chosen = largest(torch.abs(residual, out=buffer), self.count)
        places, values = self._parts(group.rank)
        places.copy_(chosen)
        values.copy_(residual[chosen])
        residual.index_add_(0, chosen, values.to(residual.dtype), alpha=-1)
        gather = self.rounds.gather[0]
        exchange_shards(gather, self.payloads, [self.payloads[hop.shard] for hop in gather.receives], group)
        buffer.zero_()
        for rank in range(group.size):  # the same order everywhere
            places, values = self._parts(rank)
            buffer.index_add_(0, places, values.to(buffer.dtype))
        buffer.div_(group.size)

    def _parts(self, rank: int) -> tuple[Tensor, Tensor]:
        payload = self.payloads[rank]
        return payload[: self.count], payload[self.count :].view(torch.float32)


def largest(values: Tensor, count: int) -> Tensor:
    """Places of the `count` largest. A look at every 61st leaves most of the others out first: four times as fast."""
    sample = values[::SAMPLED]
    some = count * 6 // 5 // SAMPLED  # a fifth more than the share of the sample, to be on the safe side
    if some >= 100:
        floor = torch.topk(sample, some, sorted=False).values.min()
        near = (~(values < floor)).nonzero().squeeze(1)  # nan is not less: it must travel, too
        if len(near) >= count:
            return near[torch.topk(values[near], count, sorted=False).indices]
    return torch.topk(values, count, sorted=False).indices


# PowerSGD (Vogels, Karimireddy, Jaggi 2019): each matrix travels as a product of two thin ones, P Q^T.


@dataclass(frozen=True)
class Matrix:
    """A tensor of the buffer as rows x columns: the first dimension against all others."""

    begin: int
    rows: int
    columns: int
    rank: int

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.begin : self.begin + self.rows * self.columns].view(self.rows, self.columns)


class LowRank:
    """One step of the power method a step, from where the last one ended; both factors go through any algorithm.

    What the product misses stays here and is added to the next gradient. Vectors, and matrices that would not get
    smaller, travel whole beside the P's.
    """

    def __init__(
        self, mean_: Mean, shapes: list[torch.Size], dtype: torch.dtype, rank: int, seed: tuple[int, ...]
    ) -> None:
        self.mean_ = mean_
        self.matrices, self.whole = _sort(shapes, rank)
        p_sizes = [m.rows * m.rank for m in self.matrices]
        q_sizes = [m.columns * m.rank for m in self.matrices]
        whole_sizes = [end - begin for begin, end in self.whole]
        self.first = torch.empty(sum(p_sizes) + sum(whole_sizes), dtype=dtype)  # all P's and what travels whole
        self.second = torch.empty(sum(q_sizes), dtype=dtype).normal_(generator=generator(*seed))  # all Q's, same start
        parts = list(self.first.split([*p_sizes, *whole_sizes]))
        self.p = [part.view(m.rows, m.rank) for part, m in zip(parts, self.matrices, strict=False)]
        self.q = [part.view(-1, m.rank) for part, m in zip(self.second.split(q_sizes), self.matrices, strict=True)]
        self.raw = parts[len(p_sizes) :]
        self.size = self.first.nbytes + self.second.nbytes
        length = sum(shape.numel() for shape in shapes)
        self.state = {"residual": torch.zeros(length, dtype=dtype), "q": self.second}

    def __call__(self, buffer: Tensor, group: Group) -> None:
        residual = self.state["residual"]
        for m, p, q in zip(self.matrices, self.p, self.q, strict=True):
            gradient = m.of(buffer).add_(m.of(residual))
            m.of(residual).copy_(gradient)
            torch.mm(gradient, _orthogonal(q), out=p)
        for raw, (begin, end) in zip(self.raw, self.whole, strict=True):
            raw.copy_(buffer[begin:end])
        self.mean_(self.first, group)
        for m, p, q in zip(self.matrices, self.p, self.q, strict=True):
            torch.mm(m.of(buffer).t(), p.copy_(_orthogonal(p)), out=q)
        self.mean_(self.second, group)
        for m, p, q in zip(self.matrices, self.p, self.q, strict=True):
            torch.mm(p, q.t(), out=m.of(buffer))
            m.of(residual).sub_(m.of(buffer))
        for raw, (begin, end) in zip(self.raw, self.whole, strict=True):
            buffer[begin:end].copy_(raw)


def _orthogonal(tall: Tensor) -> Tensor:
    """An orthonormal basis of the columns; the same bits wherever the input has the same bits."""
    basis: Tensor = torch.linalg.qr(tall).Q
    return basis


def _sort(shapes: list[torch.Size], rank: int) -> tuple[list[Matrix], list[tuple[int, int]]]:
    """Which tensors travel as products, and where those lie that travel whole."""
    matrices: list[Matrix] = []
    whole: list[tuple[int, int]] = []
    begin = 0
    for shape in shapes:
        length = shape.numel()
        rows = shape[0] if len(shape) > 1 else 1
        columns = length // rows if rows else 0
        if (rows + columns) * min(rank, rows, columns) < length:
            matrices.append(Matrix(begin, rows, columns, min(rank, rows, columns)))
        else:
            whole.append((begin, begin + length))
        begin += length
    return matrices, whole
