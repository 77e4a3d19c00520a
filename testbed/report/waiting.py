"""Waiting: how much of communication is transfer and how much is waiting for the slowest rank; and why it is slowest.

For each buffer of each step all ranks have an interval. From its own begin to the latest begin over all ranks a rank
waits (at most until its own interval ends); after that bytes move. On hosts each rank's clock is first set to rank 0's.

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
from dataclasses import dataclass

import numpy as np

from testbed.report import theory
from testbed.report.load import Run
from testbed.report.words import seconds
from testbed.spec.intervals import Interval, length

SLOW_CPU = 1.25
MOSTLY = 0.75
SLOW_LINK = 0.8
MATTERS = 0.2

Key = tuple[str, int]  # a buffer's name, and which of its intervals in the step


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
    """Overlap all ranks' intervals, step by step."""
    ranks = range(len(run.ranks))
    total, late = [0.0 for _ in ranks], [0.0 for _ in ranks]
    lasts: Counter[int] = Counter()
    exchanges = 0
    for index in range(len(run.kept[0].total)):
        spans = [_spans(run, rank, index) for rank in ranks]
        shared = [key for key in spans[0] if all(key in each for each in spans)]
        if len(ranks) < 2 or not shared:
            continue
        waits: list[list[Interval]] = [[] for _ in ranks]
        lags = [0.0 for _ in ranks]
        for key in shared:
            begins = [each[key][0] for each in spans]
            latest = max(begins)
            slowest = begins.index(latest)
            lasts[slowest] += 1
            lags[slowest] = max(lags[slowest], latest - sorted(begins)[-2])
            for rank in ranks:
                waits[rank].append((begins[rank], min(latest, spans[rank][key][1])))
        exchanges += len(shared)
        for rank in ranks:
            total[rank] += length(waits[rank])
            late[rank] += lags[rank]
    steps = len(run.kept[0].total)
    mean = [seconds / steps for seconds in total]
    busy = [float(each.busy.mean()) for each in run.kept]
    return Waiting(
        waiting=mean,
        transfer=[max(0.0, b - w) for b, w in zip(busy, mean, strict=True)],
        last=[lasts[rank] / exchanges if exchanges else 0.0 for rank in ranks],
        held_up=[seconds / steps for seconds in late],
        exchanges=exchanges,
    )


def _spans(run: Run, rank: int, index: int) -> dict[Key, tuple[float, float]]:
    """A rank's intervals of one step, on rank 0's clock."""
    steps = run.kept[rank]
    zero = float(steps.at[index]) - run.network.offsets.get(rank, 0.0)
    found: dict[Key, tuple[float, float]] = {}
    count: Counter[str] = Counter()
    for each in steps.comm[index]:
        found[each.name, count[each.name]] = (zero + each.offset, zero + each.offset + each.seconds)
        count[each.name] += 1
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
    size = float(run.ranks[0].start.get("gradient_bytes") or 0)
    least = theory.bound(run.spec.mode, run.spec.world, size, rate, 0.0, 1)
    syncs = theory.syncs_per_step(run.spec.mode, int(run.kept[0].step[0]), run.kept[0].last)
    busy = statistics.fmean(float(steps.busy.mean()) for steps in run.kept)
    return least is None or least * syncs >= MATTERS * busy


def _rate(run: Run, rank: int) -> float | None:
    """A node's rate in byte/s: measured, else asked. Between two nodes only what was asked can tell them apart."""
    own = run.spec.overrides.get(f"node{rank}")
    link = own.link if own and own.link else run.spec.link
    asked = link.rate / 8 if link.rate else None
    return (run.network.node(rank) if run.spec.world > 2 else None) or asked
