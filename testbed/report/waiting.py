"""Waiting: how much of communication is transfer and how much is waiting for the slowest rank; and why it is slowest.

For each buffer of each step all ranks have a flight. From its own begin to the latest begin over all ranks a rank
waits (at most until its own flight ends); after that bytes move. On hosts each rank's clock is first set to rank 0's.

A rank is a straggler, and the cause is
    its CPU   when its compute per image is at least SLOW_CPU times the median of the other ranks, over all and in
              MOSTLY of the steps, so that one hiccup names nobody; or
    its link  when the rate of its node (receipt, or what was asked where there is none) is at most SLOW_LINK of the
              median of the other nodes, and at that rate the bytes need at least MATTERS of the time that
              communication takes (on loopback they do not, whatever the probe found).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from testbed.report import theory
from testbed.report.load import Run
from testbed.report.stats import seconds
from testbed.spec.units import Interval, length

SLOW_CPU = 1.25
MOSTLY = 0.75
SLOW_LINK = 0.8
MATTERS = 0.2
ROUNDED = 1e-5  # seconds; records keep microseconds


@dataclass(frozen=True)
class Flight:
    """One buffer's way, begun in a step and perhaps ended in the next; seconds on rank 0's clock."""

    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class Waiting:
    """Of one run, seconds per step."""

    waiting: list[float]  # per rank: before the last rank joined
    transfer: list[float]  # per rank: the rest of its communication
    last: list[float]  # per rank: share of all exchanges that it was the last to join
    held_up: list[float]  # per rank: by how much it was later than the next to last
    exchanges: int

    @property
    def slowest(self) -> int | None:
        """The rank that the others wait for most."""
        return max(range(len(self.held_up)), key=lambda rank: self.held_up[rank]) if self.exchanges else None


@dataclass(frozen=True)
class Straggler:
    """A rank that slows the others, and by which rule it was found."""

    rank: int
    cause: str  # "CPU" or "link"
    factor: float  # how many times slower than the median of the others
    sentence: str


def waiting(run: Run) -> Waiting:
    """Lay all ranks' flights over one another, buffer by buffer."""
    ranks = range(len(run.ranks))
    waits: list[list[Interval]] = [[] for _ in ranks]
    late: dict[tuple[int, int], float] = {}  # (step, rank that was last) -> by how much, at most
    lasts: Counter[int] = Counter()
    for exchange in _exchanges(run):
        begins = [flight.begin for flight in exchange]
        latest = max(begins)
        slowest = begins.index(latest)
        lasts[slowest] += 1
        key = (exchange[0].step, slowest)
        late[key] = max(late.get(key, 0.0), latest - sorted(begins)[-2])
        for rank, flight in enumerate(exchange):
            waits[rank].append((flight.begin, min(latest, flight.end)))
    steps, exchanges = len(run.kept[0].total), sum(lasts.values())
    mean = [length(each) / steps for each in waits]
    busy = [float(each.busy.mean()) for each in run.kept]
    return Waiting(
        waiting=mean,
        transfer=[max(0.0, b - w) for b, w in zip(busy, mean, strict=True)],
        last=[lasts[rank] / exchanges if exchanges else 0.0 for rank in ranks],
        held_up=[sum(seconds for (_, last), seconds in late.items() if last == rank) / steps for rank in ranks],
        exchanges=exchanges,
    )


def _exchanges(run: Run) -> Iterator[list[Flight]]:
    """Each buffer's flight on all ranks, where rank 0 began it in a step that counts.

    The n-th flight of a name in the whole run is the n-th on every rank; that of a step need not be, because one rank
    may begin before the end of its step what another begins after. A name that ranks have seen unequally often is out.
    """
    ranks = [_flights(run, rank) for rank in range(len(run.ranks))]
    first, last = int(run.kept[0].step[0]), run.kept[0].last
    for name, own in ranks[0].items():
        others = [flights.get(name, []) for flights in ranks[1:]]
        if others and all(len(each) == len(own) for each in others):
            found = zip(own, *others, strict=True)
            yield from (list(each) for each in found if first <= each[0].step <= last)


def _flights(run: Run, rank: int) -> dict[str, list[Flight]]:
    """A rank's flights by name, on rank 0's clock; one that a step's end cut in two is whole again.

    What began between two steps is marked as a rest too, but of no flight that was cut: it is one of its own.
    """
    steps, found, cut = run.ranks[rank].steps, dict[str, list[Flight]](), set[str]()
    for index, comms in enumerate(steps.comm):
        zero = float(steps.at[index]) - run.network.offsets.get(rank, 0.0)
        for each in sorted(comms, key=lambda comm: comm.offset):
            begin, flights = zero + each.offset, found.setdefault(each.buffer, [])
            if each.continued and each.buffer in cut:
                flights[-1] = replace(flights[-1], end=begin + each.seconds)
            else:
                flights.append(Flight(int(steps.step[index]), begin, begin + each.seconds))
        cut = {each.buffer for each in comms if each.offset + each.seconds > float(steps.total[index]) - ROUNDED}
    return found


def stragglers(run: Run) -> list[Straggler]:
    """Ranks that the rules above name, the worst first."""
    if run.spec.world < 2:
        return []
    found = [*_slow_cpus(run), *_slow_links(run)]
    return sorted(found, key=lambda each: -each.factor)


def _slow_cpus(run: Run) -> list[Straggler]:
    compute = np.array([steps.compute / run.spec.local_batch(rank) for rank, steps in enumerate(run.kept)])
    found = []
    for rank, own in enumerate(compute):
        others = np.delete(compute, rank, axis=0)
        usual = float(np.median(np.median(others, axis=1)))
        slower = own >= SLOW_CPU * np.median(others, axis=0)
        if usual > 0 and float(np.median(own)) >= SLOW_CPU * usual and slower.mean() >= MOSTLY:
            images, mine = run.spec.local_batch(rank), float(np.median(own))
            sentence = (
                f"rank {rank} is slow to compute: {seconds(mine * images)} a step where the others need "
                f"{seconds(usual * images)}, so everybody waits for its CPU"
            )
            found.append(Straggler(rank, "CPU", mine / usual, sentence))
    return found


def _slow_links(run: Run) -> list[Straggler]:
    rates = [_rate(run, rank) for rank in range(run.spec.world)]
    found = []
    for rank, own in enumerate(rates):
        others = [rate for rate in rates[:rank] + rates[rank + 1 :] if rate]
        if not own or not others:
            continue
        usual = statistics.median(others)
        if own <= SLOW_LINK * usual and _matters(run, own):
            sentence = (
                f"rank {rank} has a slow link: {own * 8e-6:.0f} Mbit/s of payload where the others have "
                f"{usual * 8e-6:.0f}, and every exchange runs at its pace"
            )
            found.append(Straggler(rank, "link", usual / own, sentence))
    return found


def _matters(run: Run, rate: float) -> bool:
    """True where a link of this rate can explain the time that communication takes."""
    least = theory.bound(run.spec.mode, run.spec.world, run.buffers[1], rate, 0.0, 1)
    syncs = theory.syncs_per_step(run.spec.mode, int(run.kept[0].step[0]), run.kept[0].last)
    busy = statistics.fmean(float(steps.busy.mean()) for steps in run.kept)
    return least is None or least * syncs >= MATTERS * busy


def _rate(run: Run, rank: int) -> float | None:
    """A node's rate in byte/s: measured, else asked. Between two nodes only what was asked can tell them apart."""
    link = run.spec.link_of(rank)
    asked = link.rate / 8 if link.rate else None
    return (run.network.node(rank) if run.spec.world > 2 else None) or asked
