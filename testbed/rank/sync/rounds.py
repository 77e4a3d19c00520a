"""Rounds: how the parts of a buffer travel, as a description that a schedule carries out.

A buffer has N parts and rank k owns part k. After the rounds of `reduce` the owner holds the sum of its part over all
ranks; after those of `gather` everybody holds every owner's part. Both send (N-1)/N of the buffer from every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
