"""Codecs whose payloads cannot be added up: each goes straight to whom it concerns (the rounds of `direct`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import exchange_parts
from testbed.rank.sync.chunks import split
from testbed.rank.sync.codecs_seed import generator
from testbed.rank.sync.rounds import direct

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
        self.rounds = direct(group.rank, group.size)
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
        exchange_parts(self.rounds.reduce[0], self.payloads, self.landing, group)
        for payload in self.landing:
            shards[mine].add_(payload[SCALE_BYTES:], alpha=_scale(payload))
        shards[mine].div_(group.size)
        self._encode(shards[mine], self.payloads[mine], random)
        gather = self.rounds.gather[0]
        exchange_parts(gather, self.payloads, [self.payloads[hop.part] for hop in gather.receives], group)
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
        self.rounds = direct(group.rank, group.size)
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
        exchange_parts(gather, self.payloads, [self.payloads[hop.part] for hop in gather.receives], group)
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
