"""Algorithms: `mean_(buffer, group)` replaces a flat buffer by its mean over all ranks, in place.

Every one ends with bit-identical buffers on all ranks: each element is summed by one rank, in one order, and copied.
Costs for a buffer of S bytes on links of B byte/s, N ranks:
    gather       2(N-1) S/B at rank 0      tree      2 log2(N) S/B
    ring         2(N-1)/N S/B              halving   2(N-1)/N S/B (plus 2 S/B when N is no power of two)
    ring-reduce  2(N-1) S/B                direct    2(N-1)/N S/B, in two rounds
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from testbed.rank.group import Group, Work
from testbed.rank.sync.buckets import split
from testbed.spec.errors import SpecError
from testbed.spec.mode import methods_dir

# Rounds: how the parts of a buffer travel, as a description that a schedule carries out.
#
# A buffer has N parts and rank k owns part k. After the rounds of `reduce` the owner holds the sum of its part over all
# ranks; after those of `gather` everybody holds every owner's part. Both send (N-1)/N of the buffer from every rank.


@dataclass(frozen=True)
class Hop:
    """One part to, or from, one peer."""

    peer: int
    part: int


@dataclass(frozen=True)
class Round:
    """What a rank sends and receives at once; the next round sends what this one received."""

    sends: tuple[Hop, ...]
    receives: tuple[Hop, ...]


@dataclass(frozen=True)
class Rounds:
    """An algorithm as rounds, for one rank."""

    reduce: tuple[Round, ...]
    gather: tuple[Round, ...]


def ring(rank: int, n: int) -> Rounds:
    """Everything goes to the right neighbour, in N-1 rounds each way."""
    left, right = (rank - 1) % n, (rank + 1) % n

    def turn(hop: int, first: int) -> Round:
        """In its first round a rank sends part `first`, in every later one the part that it received before."""
        return Round((Hop(right, (first - hop) % n),), (Hop(left, (first - hop - 1) % n),))

    return Rounds(
        reduce=tuple(turn(hop, first=rank - 1) for hop in range(n - 1)),
        gather=tuple(turn(hop, first=rank) for hop in range(n - 1)),
    )


def direct(rank: int, n: int) -> Rounds:
    """Every owner gets its part from everybody, and sends it to everybody: one round each way."""
    others = [(rank + k) % n for k in range(1, n)]  # no two ranks begin with the same peer
    theirs = tuple(Hop(peer, part=peer) for peer in others)
    mine = tuple(Hop(peer, part=rank) for peer in others)
    return Rounds(reduce=(Round(theirs, mine),), gather=(Round(mine, theirs),))


ROUNDS: dict[str, Callable[[int, int], Rounds]] = {"ring": ring, "direct": direct}


Mean = Callable[[Tensor, Group], None]
SEGMENT_BYTES = 2 << 20  # a ring's chunk travels in pieces of about this size, so that adding hides behind the wire
MAX_SEGMENTS = 8


def gather_mean_(buffer: Tensor, group: Group) -> None:
    """Everybody sends to rank 0, rank 0 sends the mean back to everybody."""
    collect_(buffer, group)
    if group.rank == 0:
        buffer.div_(group.size)
    spread_(buffer, group)


def collect_(buffer: Tensor, group: Group) -> None:
    """Rank 0's buffer becomes the sum over all ranks, added in rank order."""
    if group.rank != 0:
        return group.wait(group.send(buffer, to=0))
    parts = [torch.empty_like(buffer) for _ in range(1, group.size)]
    works = [group.receive(part, source) for source, part in enumerate(parts, start=1)]
    for work, part in zip(works, parts, strict=True):
        group.wait(work)
        buffer.add_(part)
    return None


def spread_(buffer: Tensor, group: Group) -> None:
    """Everybody's buffer becomes rank 0's; rank 0 sends to each."""
    if group.rank != 0:
        return group.wait(group.receive(buffer, source=0))
    return group.wait(*[group.send(buffer, to) for to in range(1, group.size)])


def allreduce_mean_(buffer: Tensor, group: Group) -> None:
    """torch.distributed.all_reduce."""
    group.all_reduce(buffer)
    buffer.div_(group.size)


def ring_mean_(buffer: Tensor, group: Group) -> None:
    """N-1 hops of scatter-reduce leave each rank the mean of one chunk, N-1 hops of all-gather hand it round.

    A chunk travels in segments: while one is added, the next is on the wire, and receives are posted a hop ahead.
    """
    n, rank = group.size, group.rank
    left, right = (rank - 1) % n, (rank + 1) % n
    pieces = _segment_count(buffer, n)
    chunks = [split(chunk, pieces) for chunk in split(buffer, n)]
    scratch = [torch.empty(pieces, max(len(s) for c in chunks for s in c), dtype=buffer.dtype) for _ in range(2)]
    hops = 2 * (n - 1)
    sends: list[list[Work]] = []

    def sent(hop: int) -> list[Tensor]:
        return chunks[(rank - hop) % n]

    def arriving(hop: int) -> list[Tensor]:
        """Where hop's segments land: in scratch while they are to be added, in place once they are the mean."""
        place = chunks[(rank - hop - 1) % n]
        if hop >= n - 1:
            return place
        return [space[: len(part)] for space, part in zip(scratch[hop % 2], place, strict=True)]

    def post(hop: int) -> list[Work]:
        if hop >= n - 1:  # the place was the source of an earlier send: that one must be over
            group.wait(*sends[hop - n + 1])
        return [group.receive(part, left, tag) for tag, part in enumerate(arriving(hop))]

    coming = [post(0)]
    sends.append([group.send(part, right, tag) for tag, part in enumerate(sent(0))])
    for hop in range(hops):
        if hop + 1 < hops:
            coming.append(post(hop + 1))
            sends.append([])
        for tag, (part, mine) in enumerate(zip(arriving(hop), sent(hop + 1), strict=True)):
            group.wait(coming[hop][tag])
            if hop < n - 1:
                mine.add_(part)
            if hop == n - 2:
                mine.div_(n)
            if hop + 1 < hops:
                sends[hop + 1].append(group.send(mine, right, tag))
    for works in sends[n - 1 :]:  # the earlier ones were awaited when their place was reused
        group.wait(*works)


def direct_mean_(buffer: Tensor, group: Group) -> None:
    """Every rank owns a part: it gets that part from everybody, and sends the mean of it to everybody."""
    rounds, parts = direct(group.rank, group.size), split(buffer, group.size)
    mine = parts[group.rank]
    landing = [torch.empty_like(mine) for _ in range(1, group.size)]
    exchange_parts(rounds.reduce[0], parts, landing, group)
    for part in landing:
        mine.add_(part)
    mine.div_(group.size)
    exchange_parts(rounds.gather[0], parts, [parts[hop.part] for hop in rounds.gather[0].receives], group)


def exchange_parts(round_: Round, parts: list[Tensor], landing: list[Tensor], group: Group) -> None:
    """Carry out one round; what is received lands in `landing`, in the order of the round's receives."""
    coming = [group.receive(place, hop.peer) for hop, place in zip(round_.receives, landing, strict=True)]
    group.wait(*[group.send(parts[hop.part], hop.peer) for hop in round_.sends], *coming)


def ring_reduce_mean_(buffer: Tensor, group: Group) -> None:
    """Partial sums go round, 1 -> 2 -> ... -> 0; rank 0 has the mean and sends it round again."""
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


def tree_mean_(buffer: Tensor, group: Group) -> None:
    """Binomial tree: in round k, ranks 2^k apart pair up and one half falls silent; then the same way back."""
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


def halving_mean_(buffer: Tensor, group: Group) -> None:
    """Recursive halving, then doubling, among the largest power of two of ranks; the rest hand theirs to a partner."""
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
    steps: list[tuple[int, tuple[int, int], tuple[int, int]]] = []  # peer, what we kept, what we gave
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


def _segment_count(buffer: Tensor, parts: int) -> int:
    """How many segments each of `parts` chunks has: the same for all, so that both ends of a link agree."""
    chunk_bytes = buffer.numel() * buffer.element_size() // parts
    return min(MAX_SEGMENTS, max(1, -(-chunk_bytes // SEGMENT_BYTES)))


MEANS: dict[str, Mean] = {
    "gather": gather_mean_,
    "allreduce": allreduce_mean_,
    "ring": ring_mean_,
    "direct": direct_mean_,
    "ring-reduce": ring_reduce_mean_,
    "tree": tree_mean_,
    "halving": halving_mean_,
}


def find_mean(name: str) -> Mean:
    """A built-in algorithm, or the user's own from its file."""
    return MEANS[name] if name in MEANS else _load_own(name)


def _load_own(name: str) -> Mean:
    path = methods_dir() / f"{name.replace('-', '_')}.py"
    spec = importlib.util.spec_from_file_location(f"methods.{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SpecError(f"algorithm {name!r}: no file {path} on this node. Copy it there, or set TESTBED_METHODS.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "mean_", None)):
        raise SpecError(f"algorithm {name!r}: {path} defines no mean_(buffer, group). Add it.")
    return cast(Mean, module.mean_)
