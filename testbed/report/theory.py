"""Theory: the bytes that a method must send and the least time they need, rank by rank.

S is the size of the gradient, N the number of ranks, B a link's payload rate in byte/s, a the delay of one hop in
seconds, m the number of buffers that travel one after the other: those the gradient is cut into, but 1 in `ddp` and
`pipeline`, whose buffers are on their way together. The first term is what the busiest link needs, the second is what
the longest chain of messages, each of which waits for the one before, needs even if it were empty:

    gather, server           2(N-1) S/B   + 2 m a        everything passes rank 0's link, in and then out
    allreduce, ring, ddp     2(N-1)/N S/B + 2(N-1) m a   each rank sends and receives alike
    direct                   2(N-1)/N S/B + 2 m a        the same bytes in two hops
    tree                     2 ceil(log2 N) S/B + 2 ceil(log2 N) m a
    halving                  2(N-1)/N S/B + 2 log2(N) m a, and 2 S/B + 2 m a more when N is no power of two
    ring-reduce              2(N-1) S/B   + 2(N-1) m a   one hop after the other
With a codec S is what it makes of the gradient; topk is the one that sends it otherwise:
    direct/topk              (N-1) S/B    + m a          everybody's to everybody, and that is all
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from testbed.spec.mode import SyncMode


@dataclass(frozen=True)
class Cost:
    """Of synchronising once: hops one after the other, and multiples of S on the busiest link."""

    load: float  # S/B
    hops: float  # a, per buffer
    formula: str


def log2(n: int) -> int:
    """Rounds of a binomial tree over n ranks."""
    return (n - 1).bit_length()


def _halving(n: int) -> Cost:
    core = 1 << (n.bit_length() - 1)
    extra = 2.0 if core < n else 0.0
    formula = "2(N-1)/N S/B" if core == n else "2(P-1)/P S/B + 2 S/B, P the largest power of two below N"
    return Cost(2 * (core - 1) / core + extra, 2 * math.log2(core) + extra, formula)


COSTS: dict[str, Callable[[int], Cost]] = {
    "gather": lambda n: Cost(2 * (n - 1), 2, "2(N-1) S/B"),
    "server": lambda n: Cost(2 * (n - 1), 2, "2(N-1) S/B"),
    "allreduce": lambda n: Cost(2 * (n - 1) / n, 2 * (n - 1), "2(N-1)/N S/B"),
    "direct": lambda n: Cost(2 * (n - 1) / n, 2, "2(N-1)/N S/B"),
    "ring": lambda n: Cost(2 * (n - 1) / n, 2 * (n - 1), "2(N-1)/N S/B"),
    "ddp": lambda n: Cost(2 * (n - 1) / n, 2 * (n - 1), "2(N-1)/N S/B"),
    "tree": lambda n: Cost(2 * log2(n), 2 * log2(n), "2 log2(N) S/B"),
    "halving": _halving,
    "ring-reduce": lambda n: Cost(2 * (n - 1), 2 * (n - 1), "2(N-1) S/B"),
}
TOPK = "topk"
# No method that ends with the mean on every rank can do with less (Patarasuk and Yuan, 2009).
LEAST = COSTS["ring"]


def together(mode: SyncMode) -> bool:
    """True where buffers are on their way at the same time, so that their delays pass at the same time too."""
    return mode.is_reference or mode.schedule == "pipeline"


def cost(mode: SyncMode, ranks: int) -> Cost | None:
    """Of a built-in method; of a user's own nobody knows more than the least."""
    if mode.codec == TOPK:
        return Cost(ranks - 1, 1, "(N-1) S/B")
    known = COSTS.get(mode.algorithm)
    return None if mode.silent or known is None else known(ranks)


def syncs_per_step(mode: SyncMode, first: int, last: int) -> float:
    """How often steps first..last synchronise, per step: 1, and for every:K about 1/K."""
    if mode.silent:
        return 0.0
    if mode.every == 1 or last < first:
        return 1.0
    local = [step for step in range(first, last + 1) if step >= mode.every_from]
    averaged = sum((step + 1 - mode.every_from) % mode.every == 0 for step in local)
    return (last - first + 1 - len(local) + averaged) / (last - first + 1)


def bound(mode: SyncMode, ranks: int, size: float, rate: float, delay: float, buffers: float) -> float | None:
    """Least seconds to synchronise once; None for methods without a formula."""
    known = cost(mode, ranks)
    turns = 1.0 if together(mode) else buffers
    return None if known is None else known.load * size / rate + known.hops * turns * delay


def sent_share(mode: SyncMode, ranks: int, rank: int) -> float | None:
    """Multiples of S that a rank sends when it synchronises once."""
    kind, n = mode.algorithm, ranks
    if mode.silent:
        return 0.0
    if mode.codec == TOPK:
        return float(n - 1)
    if mode.rooted:
        return float(n - 1) if rank == 0 else 1.0
    if kind in ("allreduce", "ring", "direct", "ddp"):
        return 2 * (n - 1) / n
    if kind == "tree":
        return (rank > 0) + _children(n, rank)
    if kind == "ring-reduce":  # rank 1 starts, rank 0 has the mean; the last rank has nobody left to tell
        return 1.0 if rank in (0, n - 1) else 2.0
    if kind == "halving":
        core = 1 << (n.bit_length() - 1)
        return 1.0 if rank >= core else 2 * (core - 1) / core + (rank < n - core)
    return None


def _children(n: int, rank: int) -> float:
    """Of a rank in the binomial tree: those it sends the mean to."""
    below = [1 << k for k in range(log2(n)) if rank % (2 << k) == 0 and rank + (1 << k) < n]
    return float(len(below))
