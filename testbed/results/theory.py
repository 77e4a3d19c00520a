"""Theory: the bytes that a mode must send and the least time they need, from the rounds in its row (spec/mode.py).

S is the size of the gradient (with a codec: of what is sent in its place), N the number of ranks, B a link's payload
rate in byte/s, a the delay of one hop in seconds, m the number of buffers that are sent one after the other: the
buckets of the gradient, but 1 in `ddp` and `pipeline`, whose buckets are in flight at the same time.

    least time = S/B x (sum over rounds of what the busiest link sends or receives) + a x m x (number of rounds)

Links are full duplex. With racks, a round takes as long as its busiest link or its busiest uplink (rate U), whichever
needs longer, so the formula is "a S/B + b S/U". The first term is what the wire needs, the second what empty messages
would need.

Of a user's script nothing is known beforehand. The collectives that were observed have bytes by Gloo's algorithms
(COLLECTIVES), and least times per rank: collectives that are in flight together need the larger of what the rank's link
sends and receives, those that follow each other need the sum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from testbed.results.timeline import CONTINUED, Observed
from testbed.spec.fabric import Racks, rack_numbers
from testbed.spec.mode import Rotated, Round, SyncMode, bucket_bounds


@dataclass(frozen=True)
class Uplinks:
    """The racks of a network, and how many times longer than a link an uplink takes for the same bytes (B/U)."""

    racks: Racks
    slower: float


@dataclass(frozen=True)
class Cost:
    """The cost of synchronising once: the load of the busiest link in multiples of S, and the hops in sequence."""

    load: float  # S/B; what waits for an uplink is multiplied by B/U
    hops: int  # a, per buffer
    formula: str


def log2(n: int) -> int:
    """Rounds of a binomial tree over n ranks."""
    return (n - 1).bit_length()


@dataclass(frozen=True)
class RoundLoad:
    """Rounds in sequence that load the network alike: shares of S, and messages, of the busiest in one of them."""

    link: Fraction  # what it sends or receives
    back: Fraction  # what passes the same link the other way
    uplink: Fraction
    messages: int  # that one rank sends or receives
    count: int = 1  # of such rounds


@cache
def round_loads(mode: SyncMode, ranks: int, racks: Racks = ()) -> tuple[RoundLoad, ...] | None:
    """The loads of a mode's rounds in their order, equal neighbours as one; None where the rounds are unknown."""
    rounds = mode.rounds(ranks, racks)
    if rounds is None:
        return None
    rack_of = rack_numbers(racks, ranks)
    known: dict[object, RoundLoad] = {}  # a ring's rounds differ in the shards that are sent, not in their loads
    found: list[RoundLoad] = []
    for number, round_ in enumerate((*rounds.reduce, *rounds.gather)):
        alike = tuple((t.receiver, t.share) for t in round_.first) if isinstance(round_, Rotated) else number
        if alike not in known:
            known[alike] = _load(round_, rack_of)
        load = known[alike]
        if found and replace(found[-1], count=1) == load:
            load = replace(load, count=found.pop().count + 1)
        found.append(load)
    return tuple(found)


def _load(round_: Round, rack_of: Sequence[int]) -> RoundLoad:
    if isinstance(round_, Rotated) and not any(rack_of):
        sent = sum((t.share for t in round_.first), Fraction())
        return RoundLoad(sent, sent, Fraction(), len(round_.first))
    links: Counter[tuple[bool, int]] = Counter()  # by direction and rank
    messages: Counter[tuple[bool, int]] = Counter()
    uplinks: Counter[tuple[bool, int]] = Counter()
    for t in round_:
        share = t.share
        for end in ((True, t.sender), (False, t.receiver)):
            links[end] += share  # type: ignore[assignment]
            messages[end] += 1
            if rack_of[t.sender] != rack_of[t.receiver]:
                uplinks[end[0], rack_of[end[1]]] += share  # type: ignore[assignment]
    outward, rank = max(links, key=lambda end: (links[end], links[not end[0], end[1]]))
    link, back = Fraction(links[outward, rank]), Fraction(links[not outward, rank])
    return RoundLoad(link, back, Fraction(max(uplinks.values(), default=0)), max(messages.values()))


@dataclass(frozen=True)
class Traffic:
    """What one synchronisation sends, in shares of S."""

    links: float  # of the busiest link, summed over the rounds that wait for a link
    uplinks: float  # of the busiest uplink, summed over the rounds that wait for an uplink
    rounds: int
    ranks: list[tuple[float, float]]  # what each rank sends and receives
    racks: list[tuple[float, float]]  # what leaves and enters each rack


@cache
def _traffic(mode: SyncMode, ranks: int, uplinks: Uplinks) -> Traffic | None:
    """The traffic of a mode; None where its rounds are unknown."""
    rounds = mode.rounds(ranks, uplinks.racks)
    if rounds is None:
        return None
    every_round = (*rounds.reduce, *rounds.gather)
    rack_of, slower = rack_numbers(uplinks.racks, ranks), Fraction(uplinks.slower)
    links, waiting = Fraction(), Fraction()
    for load in round_loads(mode, ranks, uplinks.racks) or ():
        if load.uplink * slower > load.link:
            waiting += load.uplink * load.count
        else:
            links += load.link * load.count
    whole = [(Fraction(), Fraction())] * ranks
    crossed = [(Fraction(), Fraction())] * max(1, len(uplinks.racks))
    for round_ in every_round:
        sent, received = [Fraction()] * ranks, [Fraction()] * ranks
        leaves, enters = [Fraction()] * len(crossed), [Fraction()] * len(crossed)
        for transfer in round_:
            sent[transfer.sender] += transfer.share
            received[transfer.receiver] += transfer.share
            source, target = rack_of[transfer.sender], rack_of[transfer.receiver]
            if source != target:
                leaves[source] += transfer.share
                enters[target] += transfer.share
        whole = _plus(whole, sent, received)
        crossed = _plus(crossed, leaves, enters)
    return Traffic(float(links), float(waiting), len(every_round), _floats(whole), _floats(crossed))


Shares = list[tuple[Fraction, Fraction]]


def _plus(so_far: Shares, out: list[Fraction], into: list[Fraction]) -> Shares:
    return [(a + o, b + i) for (a, b), o, i in zip(so_far, out, into, strict=True)]


def _floats(shares: Shares) -> list[tuple[float, float]]:
    return [(float(out), float(into)) for out, into in shares]


ONE_SWITCH = Uplinks((), 0.0)


def concurrent_buffers(mode: SyncMode) -> bool:
    """True if several buffers are in flight at the same time, so that their delays overlap."""
    return mode.is_reference or mode.schedule == "pipeline"


def cost(mode: SyncMode, ranks: int, uplinks: Uplinks = ONE_SWITCH) -> Cost | None:
    """The cost of a built-in algorithm; None for a user's algorithm (rounds unknown) and if nothing is sent."""
    traffic = _traffic(mode, ranks, uplinks)
    if traffic is None:
        return None
    terms = [f"{load:.3g} S/{rate}" for load, rate in ((traffic.links, "B"), (traffic.uplinks, "U")) if load]
    formula = " + ".join(terms) if uplinks.racks else mode.time
    return Cost(traffic.links + traffic.uplinks * uplinks.slower, traffic.rounds, formula)


def syncs_per_step(mode: SyncMode, steps: Sequence[int]) -> float:
    """How often these steps synchronise, per step: 1, and for every:K about 1/K."""
    if mode.silent:
        return 0.0
    if mode.every == 1 or not steps:
        return 1.0
    exact = sum(step < mode.every_from for step in steps)
    averaged = sum(step >= mode.every_from and (step + 1 - mode.every_from) % mode.every == 0 for step in steps)
    return (exact + averaged) / len(steps)


def bound(
    mode: SyncMode,
    ranks: int,
    size: float,
    rate: float,
    delay: float,
    buffers: float,
    uplinks: Uplinks = ONE_SWITCH,
) -> float | None:
    """Least seconds to synchronise once; None where the rounds are unknown."""
    known = cost(mode, ranks, uplinks)
    turns = 1.0 if concurrent_buffers(mode) else buffers
    return None if known is None else known.load * size / rate + known.hops * turns * delay


# What the transport of a pipeline needs (rank/sync/transport.py)
# Processor time of a rank for a segment, whatever its size: to receive, add or copy, and send it. An estimate:
# `python -m tests.bench.models` fits it to the steps that `make bench ARGS=sizes` has measured.
SEGMENT_S = 4e-4
CODE_S_PER_BYTE = 2.0e-9  # assumed: seconds of a rank's processor to encode and decode, per byte of gradient
# Bytes that the kernel accepts and has not sent yet; there is room again when half of them are sent. More would delay
# what is urgent, on every hop.
UNSENT_BYTES = 128 << 10
# The bucket size of a pipeline that is given none
MIN_PIPELINE_BYTES, MAX_PIPELINE_BYTES = 256 << 10, 8 << 20
LEAST_BUCKETS = 8  # of a gradient: what is in flight in one bucket does not overlap
UNKNOWN_RATE = 125e6  # byte/s (1 Gbit/s), where no rate was requested or measured


def pipeline_bucket(size: int, ranks: int, rate: float | None) -> int:
    """Return the bytes of a bucket for a gradient of `size` bytes on links of `rate` byte/s: a power of two.

    Buckets of b bytes make 2(N-1) S/b segments a rank, and each takes SEGMENT_S of its processor. Nothing hides the
    time of the bucket that is launched last, about 2(N-1)/N b/B. The sum of both is least at b = sqrt(SEGMENT_S S N B).
    """
    best = math.sqrt(SEGMENT_S * size * ranks * (rate or UNKNOWN_RATE))
    most = max(MIN_PIPELINE_BYTES, min(MAX_PIPELINE_BYTES, size / LEAST_BUCKETS))
    return 1 << round(math.log2(min(max(best, MIN_PIPELINE_BYTES), most)))


def pipeline_segments(mode: SyncMode, size: int, ranks: int, rate: float | None) -> int:
    """Segments that a rank sends in a step of a pipeline: one in each round of a bucket.

    `rate` decides the size of the buckets if the mode leaves that open.
    """
    known = cost(mode, ranks)
    buckets = len(bucket_bounds(size, mode.bucket or pipeline_bucket(size, ranks, rate))) - 1
    return buckets * (known.hops if known else 0)


def sent_share(mode: SyncMode, ranks: int, rank: int, racks: Racks = ()) -> float | None:
    """Multiples of S that a rank sends when it synchronises once; None where the rounds are unknown."""
    found = shares(mode, ranks, rank, racks)
    return None if found is None else found[0]


def shares(mode: SyncMode, ranks: int, rank: int, racks: Racks = ()) -> tuple[float, float] | None:
    """What a rank sends and receives in one synchronisation, in multiples of the gradient's size S; None if unknown."""
    if mode.silent:
        return 0.0, 0.0
    traffic = _traffic(mode, ranks, Uplinks(racks, 0.0))
    return None if traffic is None else traffic.ranks[rank]


def rack_shares(mode: SyncMode, ranks: int, racks: Racks) -> list[tuple[float, float]] | None:
    """Multiples of S that leave and enter each rack in one synchronisation; None where the rounds are unknown."""
    traffic = None if mode.silent else _traffic(mode, ranks, Uplinks(racks, 0.0))
    return None if traffic is None else traffic.racks


def turnaround(mode: SyncMode, ranks: int) -> float | None:
    """Multiples of S that the root's link carries in turn, at least, from one synchronisation's end to the next one's.

    The rank that receives last sends its next part only then, and the root sends when it has that part. What the other
    ranks send may arrive before, while sockets and queues still hold what the root has sent, so this is less than
    `Cost.load`, and no run is faster. None where rank 0 is not the root, or where buffers overlap.
    """
    rounds = mode.rounds(ranks)
    if rounds is None or mode.row.follows_racks or concurrent_buffers(mode) or mode.schedule != "after":
        return None
    reduce, gather = ([each for round_ in half for each in round_] for half in (rounds.reduce, rounds.gather))
    received = [each.share for each in reduce if each.receiver == 0]
    if not received or any(each.sender == 0 for each in reduce) or any(each.receiver == 0 for each in gather):
        return None
    return float(min(received) + sum(each.share for each in gather if each.sender == 0))


# --- the collectives of a user's script, as Gloo sends them -----------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """What one rank sends and receives in one collective, in multiples of its size (attach/events.py)."""

    shares: Callable[[int, int], tuple[float, float]]  # of ranks, and of the rank's place; 0 is the root
    hops: Callable[[int], int]  # messages in sequence


def _ring(turns: int) -> Callable[[int, int], tuple[float, float]]:
    return lambda n, place: (turns * (n - 1) / n, turns * (n - 1) / n)


def _broadcast(n: int, place: int) -> tuple[float, float]:
    """Binomial tree: in round k the first 2^k ranks send to the ranks 2^k after them."""
    sends = sum(place < 1 << k and place + (1 << k) < n for k in range(log2(n)))
    return float(sends), float(place > 0)


def _reduce(n: int, place: int) -> tuple[float, float]:
    """A ring that leaves one shard of the sum on every rank, then each sends its shard to the root."""
    return ((n - 1) / n, 1.0)[place > 0], ((n - 1) / n) * (1 if place else 2)


def _to_root(n: int, place: int) -> tuple[float, float]:
    return (1.0, 0.0) if place else (0.0, float(n - 1))


# Measured with torch 2.13 at N = 3, 4 and 5; reduce_scatter is a ring all-reduce of the whole input there.
COLLECTIVES = {
    "all_reduce": Collective(_ring(2), lambda n: 2 * (n - 1)),
    "reduce_scatter": Collective(_ring(2), lambda n: 2 * (n - 1)),
    "all_gather": Collective(_ring(1), lambda n: n - 1),
    "all_to_all": Collective(_ring(1), lambda n: 1),
    "broadcast": Collective(_broadcast, log2),
    "reduce": Collective(_reduce, lambda n: n),
    "gather": Collective(_to_root, lambda n: 1),
    "scatter": Collective(lambda n, place: _to_root(n, place)[::-1], lambda n: 1),
    "send": Collective(lambda n, place: (1.0, 0.0), lambda n: 1),
    "recv": Collective(lambda n, place: (0.0, 1.0), lambda n: 1),
    "barrier": Collective(lambda n, place: (0.0, 0.0), lambda n: 2 * log2(n)),
}


@dataclass(frozen=True)
class Load:
    """What the observed collectives of one step need of one rank's link."""

    sent: float = 0.0  # bytes of payload
    received: float = 0.0
    in_turn: float = 0.0  # bytes that the link carries one after the other, at least
    hops: int = 0  # messages in sequence

    def seconds(self, rate: float, delay: float) -> float:
        """The least time on a link of `rate` byte/s with this delay per hop."""
        return self.in_turn / rate + self.hops * delay


def observed_load(comm: Iterable[tuple[str, float, float, int]], rank: int, world: int) -> Load | None:
    """The load of a step of a script, from its `Step.comm`; None if one of the collectives is not known."""
    sent = received = in_turn = end = 0.0
    hops = 0
    together = (0.0, 0.0, 0)  # sent, received and hops of what is in flight at the same time
    for name, offset, seconds, size in sorted(comm, key=lambda each: each[1]):
        if name.endswith(CONTINUED):
            continue  # it was counted in the step in which it began
        shares = observed_shares(name, rank, world)
        if shares is None:
            return None
        out, into, turns = shares[0] * size, shares[1] * size, shares[2]
        if offset >= end:
            in_turn, hops = in_turn + max(together[:2]), hops + together[2]
            together = (0.0, 0.0, 0)
        together = (together[0] + out, together[1] + into, max(together[2], turns))
        sent, received, end = sent + out, received + into, max(end, offset + seconds)
    return Load(sent, received, in_turn + max(together[:2]), hops + together[2])


@cache
def observed_shares(name: str, rank: int, world: int) -> tuple[float, float, int] | None:
    """Multiples of its size that a rank sends and receives in a collective of this name, and its hops."""
    observed = Observed.parse(name)
    ranks = observed.ranks or tuple(range(world))
    known = COLLECTIVES.get(observed.operation)
    if known is None or rank not in ranks or observed.root not in (*ranks, 0):
        return None
    root = ranks.index(observed.root) if observed.root in ranks else 0
    place = (ranks.index(rank) - root) % len(ranks)
    return (*known.shares(len(ranks), place), known.hops(len(ranks)))
