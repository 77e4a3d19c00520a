"""Algorithms: `mean_(buffer, group)` replaces a flat buffer by its mean over all ranks, in place.

Each of them ends with bit-identical buffers on all ranks: each element is summed by one rank, in one order, and copied.
What each one sends, and the time it needs at least, is in its row in spec/mode.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from testbed.rank.group import Group, Work
from testbed.rank.own_code import execute_file
from testbed.rank.sync.buckets import split
from testbed.spec.errors import SpecError, refuse
from testbed.spec.fabric import Racks
from testbed.spec.mode import ALGORITHMS, RING_SEGMENTS, Round, Transfer, hierarchical_rounds
from testbed.spec.own_files import SIGNATURE, method_path, own_method

SEGMENT_BYTES = RING_SEGMENTS.size  # a ring's shard is sent in segments: one is added while the next is sent
MAX_TOLERANCE = 0.25  # of a user's method; a sum that was not divided is off by more than that

Mean = Callable[[Tensor, Group], None]
MEANS: dict[str, Mean] = {}


def algorithm(name: str) -> Callable[[Mean], Mean]:
    """Register the function of an algorithm under the name of its row."""

    def register(mean_: Mean) -> Mean:
        MEANS[name] = mean_
        return mean_

    return register


@dataclass(frozen=True)
class OwnMethod:
    """A user's algorithm: a `Mean`. `tolerance`: TOLERANCE of its file, for a method that rounds on purpose."""

    path: Path
    mean_: Mean
    tolerance: float = 0.0  # of the largest number

    def __call__(self, buffer: Tensor, group: Group) -> None:
        return self.mean_(buffer, group)


def find_mean(name: str) -> Mean:
    """Return the function of a built-in algorithm, or the user's own from its file; SpecError if there is none."""
    return MEANS[name] if name in MEANS else _load_method(name, method_path(name))


def _load_method(name: str, path: Path) -> OwnMethod:
    """Execute the file of a user's algorithm."""
    if not path.is_file():
        raise SpecError(f"algorithm {name!r}: no file {path} on this node. Copy it there, or set TESTBED_METHODS.")
    shown = own_method(name).path
    module = execute_file(path, f"algorithm {name!r}", shown)
    if not callable(getattr(module, "mean_", None)):
        raise SpecError(f"algorithm {name!r}: {shown} defines no {SIGNATURE}. Add it.")
    tolerance = getattr(module, "TOLERANCE", 0.0)
    if not isinstance(tolerance, int | float) or not 0 <= tolerance <= MAX_TOLERANCE:
        rule = f"TOLERANCE in {shown} must be a number from 0 to {MAX_TOLERANCE:g}, a share of the largest number"
        raise refuse("TOLERANCE", tolerance, rule, "Leave it out for a method that does not round on purpose.")
    return OwnMethod(path, cast(Mean, module.mean_), float(tolerance))


@algorithm("gather")
def gather_mean_(buffer: Tensor, group: Group) -> None:
    """All ranks send to rank 0, rank 0 sends the mean back to all."""
    collect_(buffer, group)
    if group.rank == 0:
        buffer.div_(group.size)
    broadcast_(buffer, group)


def collect_(buffer: Tensor, group: Group) -> None:
    """Rank 0's buffer becomes the sum over all ranks, added in rank order."""
    if group.rank != 0:
        return group.wait(group.send(buffer, to=0))
    received = [torch.empty_like(buffer) for _ in range(1, group.size)]
    works = [group.receive(theirs, source) for source, theirs in enumerate(received, start=1)]
    for work, theirs in zip(works, received, strict=True):
        group.wait(work)
        buffer.add_(theirs)
    return None


def broadcast_(buffer: Tensor, group: Group) -> None:
    """Every rank's buffer becomes rank 0's; rank 0 sends to each."""
    if group.rank != 0:
        return group.wait(group.receive(buffer, source=0))
    return group.wait(*[group.send(buffer, to) for to in range(1, group.size)])


@algorithm("allreduce")
def allreduce_mean_(buffer: Tensor, group: Group) -> None:
    """torch.distributed.all_reduce."""
    group.all_reduce(buffer)
    buffer.div_(group.size)


@algorithm("ring")
def ring_mean_(buffer: Tensor, group: Group) -> None:
    """N-1 hops of scatter-reduce leave each rank the mean of one shard; N-1 hops of all-gather pass it round.

    A shard is sent in segments: while one is added, the next is on the wire, and receives are posted a hop ahead.
    """
    n, rank = group.size, group.rank
    left, right = (rank - 1) % n, (rank + 1) % n
    # All shards have the same number of segments, so that both ends of a link agree.
    shard_bytes = buffer.numel() * buffer.element_size() // n
    count = RING_SEGMENTS.count(shard_bytes)
    shards = [split(shard, count) for shard in split(buffer, n)]
    longest = max(len(segment) for segments in shards for segment in segments)
    scratch = [torch.empty(count, longest, dtype=buffer.dtype) for _ in range(2)]
    hops = 2 * (n - 1)
    sends: list[list[Work]] = []

    def outgoing(hop: int) -> list[Tensor]:
        return shards[(rank - hop) % n]

    def incoming(hop: int) -> list[Tensor]:
        """Where a hop's segments are received: in scratch if they are to be added, in place if they are the mean."""
        segments = shards[(rank - hop - 1) % n]
        if hop >= n - 1:
            return segments
        return [space[: len(segment)] for space, segment in zip(scratch[hop % 2], segments, strict=True)]

    def post_receives(hop: int) -> list[Work]:
        if hop >= n - 1:  # an earlier hop sends from the same memory, and must have finished
            group.wait(*sends[hop - n + 1])
        return [group.receive(segment, left, tag) for tag, segment in enumerate(incoming(hop))]

    receives = [post_receives(0)]
    sends.append([group.send(segment, right, tag) for tag, segment in enumerate(outgoing(0))])
    for hop in range(hops):
        if hop + 1 < hops:
            receives.append(post_receives(hop + 1))
            sends.append([])
        for tag, (received, mine) in enumerate(zip(incoming(hop), outgoing(hop + 1), strict=True)):
            group.wait(receives[hop][tag])
            if hop < n - 1:
                mine.add_(received)
            if hop == n - 2:
                mine.div_(n)
            if hop + 1 < hops:
                sends[hop + 1].append(group.send(mine, right, tag))
    for works in sends[n - 1 :]:  # the earlier ones were awaited when their memory was reused
        group.wait(*works)


@algorithm("direct")
def direct_mean_(buffer: Tensor, group: Group) -> None:
    """Every rank owns a shard: it receives that shard from all others, and sends the mean of it to all others."""
    plan, shards = plan_for("direct", group.rank, group.size), split(buffer, group.size)
    mine = shards[group.rank]
    received = [torch.empty_like(mine) for _ in range(1, group.size)]
    exchange_shards(plan.reduce[0], shards, received, group)
    for theirs in received:
        mine.add_(theirs)
    mine.div_(group.size)
    exchange_shards(plan.gather[0], shards, [shards[hop.shard] for hop in plan.gather[0].receives], group)


@algorithm("ring-reduce")
def ring_reduce_mean_(buffer: Tensor, group: Group) -> None:
    """Partial sums go 1 -> 2 -> ... -> 0; rank 0 computes the mean, which goes 0 -> 1 -> ... -> N-1."""
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    if group.rank != 1:
        partial = torch.empty_like(buffer)
        group.wait(group.receive(partial, left))
        buffer.add_(partial)
    if group.rank == 0:
        buffer.div_(group.size)
        return group.wait(group.send(buffer, right))
    group.wait(group.send(buffer, right))
    group.wait(group.receive(buffer, left))
    if right != 0:
        group.wait(group.send(buffer, right))
    return None


@algorithm("tree")
def tree_mean_(buffer: Tensor, group: Group) -> None:
    """Binomial tree: in round k, ranks 2^k apart form pairs, and the higher rank sends its sum to the lower rank.

    The mean is then sent back between the same pairs.
    """
    rounds = [1 << k for k in range((group.size - 1).bit_length())]
    partial = torch.empty_like(buffer)
    for distance in rounds:
        if group.rank % (2 * distance) == distance:
            group.wait(group.send(buffer, group.rank - distance))
        elif group.rank % (2 * distance) == 0 and group.rank + distance < group.size:
            group.wait(group.receive(partial, group.rank + distance))
            buffer.add_(partial)
    if group.rank == 0:
        buffer.div_(group.size)
    for distance in reversed(rounds):
        if group.rank % (2 * distance) == distance:
            group.wait(group.receive(buffer, group.rank - distance))
        elif group.rank % (2 * distance) == 0 and group.rank + distance < group.size:
            group.wait(group.send(buffer, group.rank + distance))


@algorithm("halving")
def halving_mean_(buffer: Tensor, group: Group) -> None:
    """Recursive halving, then doubling, among the largest power of two of ranks; the others send to a partner."""
    core = 1 << (group.size.bit_length() - 1)
    extra = group.size - core
    if group.rank >= core:
        group.wait(group.send(buffer, group.rank - core))
        return group.wait(group.receive(buffer, group.rank - core))
    partial = torch.empty_like(buffer)
    if group.rank < extra:
        group.wait(group.receive(partial, group.rank + core))
        buffer.add_(partial)
    _halve_and_double(buffer, partial, group, core)
    if group.rank < extra:
        group.wait(group.send(buffer, group.rank + core))
    return None


def _halve_and_double(buffer: Tensor, partial: Tensor, group: Group, core: int) -> None:
    low, high = 0, len(buffer)
    steps: list[tuple[int, tuple[int, int], tuple[int, int]]] = []  # peer, range that was kept, range that was sent
    distance = core // 2
    while distance:
        middle = (low + high) // 2
        lower, upper = (low, middle), (middle, high)
        keep, give = (upper, lower) if group.rank & distance else (lower, upper)
        peer = group.rank ^ distance
        incoming = partial[keep[0] : keep[1]]
        group.exchange(buffer[give[0] : give[1]], incoming, peer)
        buffer[keep[0] : keep[1]].add_(incoming)
        steps.append((peer, keep, give))
        (low, high), distance = keep, distance // 2
    buffer[low:high].div_(group.size)
    for peer, keep, give in reversed(steps):
        group.exchange(buffer[keep[0] : keep[1]], buffer[give[0] : give[1]], peer)


@algorithm("hierarchical")
def hierarchical_mean_(buffer: Tensor, group: Group) -> None:
    """Reduce-scatter inside the rack, a ring across racks for each shard, all-gather inside; `group.racks` are given.

    After the reduce each number's sum is on one rank: on the one that has not sent it. Sums are added in the order of
    the rounds, so they do not depend on which message arrives first.
    """
    plan = _rack_plan(group.racks or (tuple(range(group.size)),), group.rank)

    def cut(begin: Fraction, end: Fraction) -> Tensor:
        return buffer[int(begin * len(buffer)) : int(end * len(buffer))]

    for sends, receives in plan.reduce:
        received = [torch.empty_like(cut(t.begin, t.end)) for _, t in receives]
        works = [group.receive(theirs, t.sender, tag) for theirs, (tag, t) in zip(received, receives, strict=True)]
        works += [group.send(cut(t.begin, t.end), t.receiver, tag) for tag, t in sends]
        group.wait(*works)
        for theirs, (_, t) in zip(received, receives, strict=True):
            cut(t.begin, t.end).add_(theirs)
    for begin, end in plan.owned:
        cut(begin, end).div_(group.size)
    for sends, receives in plan.gather:
        works = [group.receive(cut(t.begin, t.end), t.sender, tag) for tag, t in receives]
        group.wait(*works, *[group.send(cut(t.begin, t.end), t.receiver, tag) for tag, t in sends])


Numbered = tuple[tuple[int, Transfer], ...]  # with a tag, which both ends of a message have


@dataclass(frozen=True)
class RackPlan:
    """What one rank sends and receives in each round, and the parts of the buffer whose sum it has in between."""

    reduce: tuple[tuple[Numbered, Numbered], ...]
    owned: tuple[tuple[Fraction, Fraction], ...]
    gather: tuple[tuple[Numbered, Numbered], ...]


@cache
def _rack_plan(racks: Racks, rank: int) -> RackPlan:
    def own(round_: Round) -> tuple[Numbered, Numbered]:
        tagged = list(enumerate(round_))
        sends = tuple((tag, t) for tag, t in tagged if t.sender == rank)
        return sends, tuple((tag, t) for tag, t in tagged if t.receiver == rank)

    rounds = hierarchical_rounds(racks)
    owned, position = [], Fraction(0)
    for t in sorted((t for round_ in rounds.reduce for t in round_ if t.sender == rank), key=lambda t: t.begin):
        owned += [(position, t.begin)] if position < t.begin else []
        position = max(position, t.end)
    owned += [(position, Fraction(1))] if position < 1 else []
    return RackPlan(tuple(map(own, rounds.reduce)), tuple(owned), tuple(map(own, rounds.gather)))


# --- the rounds of an algorithm as one rank carries them out ---------------------------------------------------------


@dataclass(frozen=True)
class Hop:
    """One shard to, or from, one peer."""

    peer: int
    shard: int


@dataclass(frozen=True)
class RankRound:
    """What a rank sends and receives at the same time."""

    sends: tuple[Hop, ...]
    receives: tuple[Hop, ...]


@dataclass(frozen=True)
class Plan:
    """An algorithm's rounds for one rank, where rank k owns shard k.

    After `reduce` the owner holds the sum of its shard over all ranks; after `gather` every rank holds all shards.
    """

    reduce: tuple[RankRound, ...]
    gather: tuple[RankRound, ...]


@cache
def plan_for(name: str, rank: int, n: int) -> Plan:
    """The plan of a pipelined algorithm, from the rounds in its row."""
    make = ALGORITHMS[name].rounds
    assert make is not None, f"{name} has no rounds"
    rounds = make(n)
    return Plan(tuple(_of_rank(r, rank, n) for r in rounds.reduce), tuple(_of_rank(r, rank, n) for r in rounds.gather))


def _of_rank(round_: Round, rank: int, n: int) -> RankRound:
    """Return what one rank sends and receives in a round.

    Peers are in the order rank + 1, rank + 2, ..., so that no two ranks begin with the same peer.
    """
    sends = [Hop(t.receiver, int(t.begin * n)) for t in round_ if t.sender == rank]
    receives = [Hop(t.sender, int(t.begin * n)) for t in round_ if t.receiver == rank]

    def distance(hop: Hop) -> int:
        return (hop.peer - rank) % n

    return RankRound(tuple(sorted(sends, key=distance)), tuple(sorted(receives, key=distance)))


def exchange_shards(round_: RankRound, shards: list[Tensor], received: list[Tensor], group: Group) -> None:
    """Carry out one round; `received` is where its receives go, in their order."""
    works = [group.receive(space, hop.peer) for hop, space in zip(round_.receives, received, strict=True)]
    group.wait(*[group.send(shards[hop.shard], hop.peer) for hop in round_.sends], *works)
