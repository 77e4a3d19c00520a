"""Split communication into waiting for the last rank and transfer. Find stragglers and the cause of each.

An exchange is the transfer of one buffer in one step, on all ranks; in a user's script it is one collective. A rank
waits from the begin of its own transfer until the last rank begins (at most until its own end); the rest is transfer.
On hosts all times are first converted to rank 0's clock.

A rank is a straggler because of
    its CPU   if its compute per image is at least SLOW_CPU times the median of the other ranks, overall and in at
              least CPU_STEPS of the steps, so that a single slow step does not count; or
    its link  if the rate of its node (measured, or requested if there is no receipt) is at most SLOW_LINK of the
              median of the other nodes, and the mode's bytes need at least LINK_MATTERS of the time of communication
              at that rate. On loopback they need less, whatever the probe measured.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from testbed.report.load import LoadedRun
from testbed.report.stats import seconds
from testbed.results import theory
from testbed.results.timeline import Observed
from testbed.spec.units import Interval, covered_length

SLOW_CPU = 1.25
CPU_STEPS = 0.75
MIN_STEPS = 4  # with fewer steps a slow rank and a slow step look the same
SLOW_LINK = 0.8
LINK_MATTERS = 0.2
ROUNDING_S = 1e-5  # tolerance: times in records are rounded to microseconds


@dataclass(frozen=True)
class Transfer:
    """The transfer of one buffer on one rank, begun in `step` and perhaps ended later; seconds on rank 0's clock."""

    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class Waiting:
    """Waiting and transfer in one run, in seconds per step."""

    waiting: list[float]  # per rank: until the last rank began
    transfer: list[float]  # per rank: the rest of its communication
    last: list[float]  # per rank: share of all exchanges in which it began last
    delay: list[float]  # per rank: by how much it began later than the rank before it, when it began last
    exchanges: int

    @property
    def slowest(self) -> int | None:
        """The rank for which the others wait longest; None without an exchange."""
        return max(range(len(self.delay)), key=lambda rank: self.delay[rank]) if self.exchanges else None


@dataclass(frozen=True)
class Straggler:
    """A rank that slows the others, and the cause."""

    rank: int
    cause: str  # "CPU" or "link"
    factor: float  # how many times slower than the median of the others
    sentence: str


def waiting(run: LoadedRun) -> Waiting:
    """Return waiting and transfer, from the transfers of all ranks, buffer by buffer."""
    ranks = range(len(run.ranks))
    waits: list[list[Interval]] = [[] for _ in ranks]
    late: dict[tuple[int, int], float] = {}  # (step, rank that began last) -> largest delay in that step
    lasts: Counter[int] = Counter()
    for exchange in _exchanges(run):
        begins = [transfer.begin for transfer in exchange]
        latest = max(begins)
        slowest = begins.index(latest)
        lasts[slowest] += 1
        key = (exchange[0].step, slowest)
        late[key] = max(late.get(key, 0.0), latest - sorted(begins)[-2])
        for rank, transfer in enumerate(exchange):
            waits[rank].append((transfer.begin, min(latest, transfer.end)))
    steps, exchanges = len(run.kept[0].total), sum(lasts.values())
    mean = [covered_length(each) / steps for each in waits]
    busy = [float(each.busy.mean()) for each in run.kept]
    return Waiting(
        waiting=mean,
        transfer=[max(0.0, b - w) for b, w in zip(busy, mean, strict=True)],
        last=[lasts[rank] / exchanges if exchanges else 0.0 for rank in ranks],
        delay=[sum(seconds for (_, last), seconds in late.items() if last == rank) / steps for rank in ranks],
        exchanges=exchanges,
    )


def _exchanges(run: LoadedRun) -> Iterator[list[Transfer]]:
    """Yield for each exchange that rank 0 began in a step that counts the transfers of all ranks, in rank order.

    The n-th transfer of a name on one rank belongs to the n-th on every other. Steps are not compared, because one rank
    may begin a transfer before the end of its step and another after it. The last transfer of a name may be missing on
    a rank, if it began there after the last recorded step. Other names with unequal counts are left out.
    """
    ranks = [_transfers(run, rank) for rank in range(len(run.ranks))]
    counted, last = set(run.kept[0].numbers), int(run.ranks[0].steps.step[-1])
    for name in ranks[0]:
        found = [transfers.get(name, []) for transfers in ranks]
        fewest = min(map(len, found))
        ended = all(len(each) > fewest or each[-1].step < last for each in found) if fewest else False
        if len(found) > 1 and all(len(each) <= fewest + ended for each in found):
            yield from (list(each) for each in zip(*found, strict=False) if each[0].step in counted)


def _transfers(run: LoadedRun, rank: int) -> dict[str, list[Transfer]]:
    """Return a rank's transfers by name, on rank 0's clock. Join the two parts of a transfer over the end of a step.

    A transfer that began between two steps is marked as continued, too, but has no first part and is kept unchanged.
    """
    steps, found, cut = run.ranks[rank].steps, dict[str, list[Transfer]](), set[str]()
    for index, comms in enumerate(steps.comm):
        zero = float(steps.at[index]) - run.network.offsets.get(rank, 0.0)
        for each in sorted(comms, key=lambda comm: comm.offset):
            name = _exchange(each.buffer) if run.spec.mode.is_script else each.buffer
            begin, transfers = zero + each.offset, found.setdefault(name, [])
            if each.continued and each.buffer in cut:
                transfers[-1] = replace(transfers[-1], end=begin + each.seconds)
            else:
                transfers.append(Transfer(int(steps.step[index]), begin, begin + each.seconds))
        cut = {each.buffer for each in comms if each.offset + each.seconds > float(steps.total[index]) - ROUNDING_S}
    return found


def _exchange(name: str) -> str:
    """Return a collective's name without the line, which may differ between ranks, e.g. at the root."""
    return str(replace(Observed.parse(name), site=""))


def stragglers(run: LoadedRun) -> list[Straggler]:
    """Return the stragglers by the rules in the module's docstring, the slowest first."""
    if run.spec.world < 2 or len(run.kept[0].total) < MIN_STEPS:
        return []
    found = [*_slow_cpus(run), *_slow_links(run)]
    return sorted(found, key=lambda each: -each.factor)


def _slow_cpus(run: LoadedRun) -> list[Straggler]:
    batches = [run.images(rank) or 1.0 for rank in range(len(run.kept))]
    compute = np.array([steps.compute / images for images, steps in zip(batches, run.kept, strict=True)])
    found = []
    for rank, own in enumerate(compute):
        others = np.delete(compute, rank, axis=0)
        usual = float(np.median(np.median(others, axis=1)))
        slower = own >= SLOW_CPU * np.median(others, axis=0)
        if usual > 0 and float(np.median(own)) >= SLOW_CPU * usual and slower.mean() >= CPU_STEPS:
            images, mine = batches[rank], float(np.median(own))
            sentence = (
                f"rank {rank} is slow to compute: {seconds(mine * images)} a step where the others need "
                f"{seconds(usual * images)}, so all others wait for its CPU"
            )
            found.append(Straggler(rank, "CPU", mine / usual, sentence))
    return found


def _slow_links(run: LoadedRun) -> list[Straggler]:
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
                f"{usual * 8e-6:.0f}, and it limits every exchange"
            )
            found.append(Straggler(rank, "link", usual / own, sentence))
    return found


def _matters(run: LoadedRun, rate: float) -> bool:
    """Return True if a link of this rate can explain the time of communication."""
    if run.observed is not None:
        steps = [max(load.seconds(rate, 0.0) for load in row) for row in zip(*run.observed, strict=True)]
        return statistics.fmean(steps) >= LINK_MATTERS * statistics.fmean(float(s.busy.mean()) for s in run.kept)
    least = theory.bound(
        run.spec.mode, run.spec.world, run.buffers[1], rate, 0.0, 1, theory.Uplinks(run.spec.topology.racks, 0.0)
    )
    syncs = theory.syncs_per_step(run.spec.mode, run.kept[0].numbers)
    busy = statistics.fmean(float(steps.busy.mean()) for steps in run.kept)
    return least is None or least * syncs >= LINK_MATTERS * busy


def _rate(run: LoadedRun, rank: int) -> float | None:
    """Return a node's rate in byte/s: measured, else requested. With two nodes, which share one link: requested."""
    link = run.spec.link_of(rank)
    requested = link.rate / 8 if link.rate else None
    alone = (rank,) in run.spec.topology.racks and run.spec.topology.uplink  # then all its links pass the uplink
    return (run.network.node(rank) if run.spec.world > 2 and not alone else None) or requested
