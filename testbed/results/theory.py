"""Theory: the bytes that a mode must send and the least time they need, from the rounds in its row (spec/mode.py).

S is the size of the gradient (with a codec: of what is sent in its place), N the number of ranks, B a link's payload
rate in byte/s, a the delay of one hop in seconds, m the number of buffers that are sent one after the other: the
buckets of the gradient, but 1 in `ddp` and `pipeline`, whose buckets are in flight at the same time.

    least time = S/B x (sum over rounds of what the busiest link sends or receives) + a x m x (number of rounds)

Links are full duplex. The first term is what the wire needs, the second what empty messages would need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from testbed.spec.mode import MakeRounds, SyncMode


@dataclass(frozen=True)
class Cost:
    """The cost of synchronising once: the load of the busiest link in multiples of S, and the hops in sequence."""

    load: float  # S/B
    hops: int  # a, per buffer
    formula: str


def log2(n: int) -> int:
    """Rounds of a binomial tree over n ranks."""
    return (n - 1).bit_length()


@cache
def _traffic(make: MakeRounds, ranks: int) -> tuple[float, int, list[tuple[float, float]]]:
    """Load of the busiest link, number of rounds, and what each rank sends and receives; shares of S."""
    rounds = make(ranks)
    every_round = (*rounds.reduce, *rounds.gather)
    load, whole = Fraction(), [(Fraction(), Fraction())] * ranks
    for round_ in every_round:
        sent, received = [Fraction()] * ranks, [Fraction()] * ranks
        for transfer in round_:
            sent[transfer.sender] += transfer.share
            received[transfer.receiver] += transfer.share
        load += max(*sent, *received)
        whole = [(out + o, into + i) for (out, into), o, i in zip(whole, sent, received, strict=True)]
    return float(load), len(every_round), [(float(out), float(into)) for out, into in whole]


def concurrent_buffers(mode: SyncMode) -> bool:
    """True if several buffers are in flight at the same time, so that their delays overlap."""
    return mode.is_reference or mode.schedule == "pipeline"


def cost(mode: SyncMode, ranks: int) -> Cost | None:
    """The cost of a built-in algorithm; None for a user's algorithm (rounds unknown) and if nothing is sent."""
    if mode.rounds is None:
        return None
    load, hops, _ = _traffic(mode.rounds, ranks)
    return Cost(load, hops, mode.time)


def syncs_per_step(mode: SyncMode, steps: Sequence[int]) -> float:
    """How often these steps synchronise, per step: 1, and for every:K about 1/K."""
    if mode.silent:
        return 0.0
    if mode.every == 1 or not steps:
        return 1.0
    exact = sum(step < mode.every_from for step in steps)
    averaged = sum(step >= mode.every_from and (step + 1 - mode.every_from) % mode.every == 0 for step in steps)
    return (exact + averaged) / len(steps)


def bound(mode: SyncMode, ranks: int, size: float, rate: float, delay: float, buffers: float) -> float | None:
    """Least seconds to synchronise once; None where the rounds are unknown."""
    known = cost(mode, ranks)
    turns = 1.0 if concurrent_buffers(mode) else buffers
    return None if known is None else known.load * size / rate + known.hops * turns * delay


def sent_share(mode: SyncMode, ranks: int, rank: int) -> float | None:
    """Multiples of S that a rank sends when it synchronises once; None where the rounds are unknown."""
    found = shares(mode, ranks, rank)
    return None if found is None else found[0]


def shares(mode: SyncMode, ranks: int, rank: int) -> tuple[float, float] | None:
    """Multiples of S that a rank sends and receives when it synchronises once; None where the rounds are unknown."""
    if mode.silent:
        return 0.0, 0.0
    return None if mode.rounds is None else _traffic(mode.rounds, ranks)[2][rank]


def turnaround(mode: SyncMode, ranks: int) -> float | None:
    """Multiples of S that the root's link carries in turn, at least, from one synchronisation's end to the next one's.

    The rank that receives last sends its next part only then, and the root sends when it has that part. What the other
    ranks send may arrive before, while sockets and queues still hold what the root has sent, so this is less than
    `Cost.load`, and no run is faster. None where rank 0 is not the root, or where buffers overlap.
    """
    if mode.rounds is None or concurrent_buffers(mode) or mode.schedule != "after":
        return None
    rounds = mode.rounds(ranks)
    reduce, gather = ([each for round_ in half for each in round_] for half in (rounds.reduce, rounds.gather))
    received = [each.share for each in reduce if each.receiver == 0]
    if not received or any(each.sender == 0 for each in reduce) or any(each.receiver == 0 for each in gather):
        return None
    return float(min(received) + sum(each.share for each in gather if each.sender == 0))
