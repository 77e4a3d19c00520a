"""The plan of a probe, pure: who sends to whom when, for how long, and how much may be under way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.net.wire import bottleneck, burst

STALL = 10.0  # seconds without a byte after which a flow has failed
Pairs = Sequence[tuple[int, int]]  # (src, dst)
CUT = 0.25  # seconds of slow start that are not counted
SLICE = 0.1  # seconds; at least three are counted. Both grow where a burst takes long
CUT_BURSTS, SLICE_BURSTS = 20, 17  # so that three slices are more than 50 bursts
UNSHAPED_CUT, UNSHAPED_SLICE = 0.1, 0.067
FEWEST, MOST = 3, 9  # slices
STEADY = 0.01  # standard error of the slices' mean, as a part of it, at which counting ends
IN_FLIGHT = 0.02  # seconds of the rate: keeps the link busy and the queue, 0.05 s by default, from overflowing
MIN_IN_FLIGHT = 4 * 1024  # bytes, about three frames
MAX_IN_FLIGHT = 200_000  # bytes; fast links do well without a bound
NEAR = 0.002  # seconds of round trip; with more, what is under way is on the path and not in the queue


@dataclass(frozen=True)
class Pace:
    """How long a step cuts off, counts, and may last; in seconds."""

    cut: float
    slice: float
    most: int = MOST  # slices

    @property
    def longest(self) -> float:
        """Far beyond what a healthy step takes."""
        return 2 * (self.cut + self.most * self.slice) + STALL


def schedule(n: int) -> list[Pairs]:
    """What is sent at the same time, step by step: the halves of N-1 rounds, then the fan-in."""
    halves = [half for number in range(1, n) for half in _halves(n, number)]
    return [*halves, [(src, 0) for src in range(1, n)]] if n > 1 else []


def _halves(n: int, number: int) -> list[Pairs]:
    """Round `number` in parts where nobody both sends and receives; a ring of odd length needs a third."""
    parts: list[list[tuple[int, int]]] = [[], [], []]
    for ring in range(math.gcd(n, number)):  # the round is made of this many separate rings
        length = n // math.gcd(n, number)
        for place in range(length):
            src = (ring + place * number) % n
            last_of_odd = length % 2 == 1 and place == length - 1
            parts[2 if last_of_odd else place % 2].append((src, (src + number) % n))
    return [part for part in parts if part]


def pace(rates: Sequence[int | None], pairs: Pairs) -> Pace:
    """The slowest link of a step sets its length: at least 50 bursts are counted."""
    limits = [bottleneck(rates[dst], [rates[src] for src, to in pairs if to == dst]) for _, dst in pairs]
    spans = [burst(rate) * 8 / rate for rate in limits if rate is not None]
    if not spans:
        return Pace(UNSHAPED_CUT, UNSHAPED_SLICE, most=FEWEST)
    return Pace(max(CUT, CUT_BURSTS * max(spans)), max(SLICE, SLICE_BURSTS * max(spans)))


def window(rates: Sequence[int | None], pairs: Pairs, dst: int, round_trip: float) -> int | None:
    """Bytes a connection may have under way into `dst`; None leaves that to the kernel.

    On a slow link TCP's first window alone overflows the queue: frames are lost, and the bytes behind the gap are
    counted late. Bounded from the start, nothing is lost, and the link is still busy all the time.
    """
    sources = [src for src, to in pairs if to == dst]
    rate = bottleneck(rates[dst], [rates[src] for src in sources])
    if rate is None or round_trip > NEAR:
        return None
    size = max(MIN_IN_FLIGHT, round(rate / len(sources) * IN_FLIGHT / 8))
    return size if size <= MAX_IN_FLIGHT else None


def steady(rates: Sequence[float], most: int) -> bool:
    """Enough slices counted: their mean is known well, or there is no time for more.

    On a busy machine a slice may be short of bytes; it stays in the mean, and more are counted beside it. The rate
    that was asked plays no part: an instrument must not stop when it likes what it reads.
    """
    if len(rates) < FEWEST:
        return False
    error = statistics.stdev(rates) / math.sqrt(len(rates)) / statistics.fmean(rates)
    return error <= STEADY or len(rates) >= most
