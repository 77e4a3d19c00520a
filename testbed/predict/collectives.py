"""How long one synchronisation of a buffer takes, from the rounds in its mode's row (spec/mode.py).

No algorithm is named here: what a round loads is `results.theory.round_loads`. For equal nodes that start together

    a round            t = max((link share + c x share the other way) S/B, uplink share x S/U) + o x messages
    in a pipeline      each segment takes at least what the thread of its transport needs for it, beside the wire
    a message          is one segment, or is cut into p of them with w in flight at the same time
    rounds of a kind   n = count x p segments of s = t/p each:  n s + a                             if w s >= s + a
                                                                floor((n-1)/w)(s + a) + ((n-1) mod w + 1) s + a   else

with S bytes of the buffer, B and U byte/s of a link and an uplink, a the latency of one message and of waking its
receiver, o what a message costs the thread that sends it, c the bytes of acknowledgements for each byte that arrives.
The two cases are the solution of the recurrence `end[k] = max(end[k-1], end[k-w] + a) + s`.

Two oracles solve the same message by message (tests/unit/predict/test_collectives.py): the recurrence for ranks that
start when they like on links of any rate, and SimGrid.
A duration has two parts: `wire`, in which the busiest link cannot carry anything else, and the rest, in which it could.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from testbed.results.theory import RoundLoad, round_loads
from testbed.spec.fabric import Racks
from testbed.spec.mode import Segments, SyncMode

SEGMENT_BYTES = 1448  # payload of a TCP segment at an MTU of 1500
GOODPUT = 1448 / 1514  # payload of what is on the wire
LOSS_FACTOR = 1.22  # of Mathis et al. 1997: the rate of one connection is 1.22 segments per round trip and sqrt(loss)


@dataclass(frozen=True)
class Wire:
    """The network between equal nodes, as collectives see it."""

    rate: float  # payload byte/s of a link, each way
    latency: float = 0.0  # seconds of the way, one way, delay included
    wakeup: float = 0.0  # seconds from a message's arrival until its receiver uses it
    message: float = 0.0  # seconds of the sending thread for each message, in which its link carries nothing
    segment: float = 0.0  # seconds of the thread that serves a pipeline for each segment, while its link carries others
    acks: float = 0.0  # bytes that a link sends to acknowledge each byte that it receives
    uplink: float | None = None  # payload byte/s that all nodes of a rack share, each way
    uplink_latency: float = 0.0  # seconds more from rack to rack
    window: float = math.inf  # the most bytes that a TCP connection has in flight
    loss: float = 0.0  # share of packets
    credit: float = 0.0  # seconds of the rate that a token bucket lets pass at once after a pause

    @property
    def payload(self) -> float:
        """The rate of one connection: the link's, or less by its window or by lost packets."""
        turn = 2 * self.latency
        limits = [self.rate]
        if turn > 0:
            limits += [self.window / turn]
            limits += [LOSS_FACTOR * SEGMENT_BYTES / turn / math.sqrt(self.loss)] if self.loss > 0 else []
        return min(limits)


@dataclass(frozen=True)
class Duration:
    """Seconds of one synchronisation, and the part of it in which the wire is full."""

    seconds: float = 0.0
    wire: float = 0.0

    @property
    def use(self) -> float:
        """The share of the wire that it takes."""
        return self.wire / self.seconds if self.seconds > 0 else 1.0


def duration(
    loads: Sequence[RoundLoad], segments: Segments | None, size: float, wire: Wire, pipelined: bool = False
) -> Duration:
    """The duration of these rounds with a buffer of `size` bytes on equal nodes, alone or as part of a pipeline."""
    total = busy = 0.0
    for load in loads:
        link = (float(load.link) + wire.acks * float(load.back)) * size / wire.payload
        answered = 1.0 + wire.acks * float(load.back / load.link) if load.link else 1.0
        uplink = float(load.uplink) * answered * size / wire.uplink if wire.uplink else 0.0
        parts = parts_of(load, segments, size)
        window = min(parts, (segments.in_flight if segments else None) or parts)
        own = max(link, uplink) / parts
        own = max(own, wire.segment) if pipelined else own + wire.message * load.messages
        latency = wire.latency + wire.wakeup + (wire.uplink_latency if load.uplink else 0.0)
        total += chain(load.count * parts, own, window, latency)
        busy += load.count * parts * own
    return Duration(total, busy)


def parts_of(load: RoundLoad, segments: Segments | None, size: float) -> int:
    """Into how many segments a message of this round is cut."""
    return segments.count(float(load.link) * size) if segments is not None and load.messages == 1 else 1


def messages_of(loads: Sequence[RoundLoad], segments: Segments | None, size: float) -> int:
    """Messages that the busiest rank sends or receives in these rounds."""
    return sum(load.count * load.messages * parts_of(load, segments, size) for load in loads)


def chain(count: int, own: float, window: int, latency: float) -> float:
    """Seconds of `count` segments of `own` seconds, of which `window` are under way at the same time."""
    if window * own >= own + latency:
        return count * own + latency
    turns, rest = divmod(count - 1, window)
    return turns * (own + latency) + (rest + 1) * own + latency


def loads_of(mode: SyncMode, ranks: int, racks: Racks = ()) -> tuple[RoundLoad, ...]:
    """The loads of a mode's rounds; none if nothing is sent. Raises ValueError if its messages are unknown."""
    if mode.silent or ranks < 2:
        return ()
    loads = round_loads(mode, ranks, racks)
    if loads is None:
        raise ValueError(f"{mode}: its messages are unknown")
    return loads


def halves(mode: SyncMode, ranks: int, racks: Racks = ()) -> tuple[tuple[RoundLoad, ...], tuple[RoundLoad, ...]]:
    """The loads of the reduce and of the gather, of a mode that does other work between them."""
    loads, rounds = loads_of(mode, ranks, racks), mode.rounds(ranks, racks)
    first = len(rounds.reduce) if rounds else 0
    reduce: list[RoundLoad] = []
    gather: list[RoundLoad] = []
    for load in loads:
        before = min(load.count, max(0, first - sum(each.count for each in reduce)))
        reduce += [replace(load, count=before)] if before else []
        gather += [replace(load, count=load.count - before)] if load.count > before else []
    return tuple(reduce), tuple(gather)
