"""Whether what a run measured can be true, from the records alone: was its network possible, was its machine quiet?

`impossible`: a run that was faster than its shaped links is not valid. Two checks of every rank, over all steps of an
attempt together, because a single short step says little:

- the bytes that the interface counted as sent fit through its link in that time;
- the bytes that its mode must bring to it, and have it send (results/theory.py), do so too; of a user's script those
  of its observed collectives.

The first needs no theory, so it holds for codecs and for a user's method. Bytes counted as received are not used: the
interface counts a packet before the ingress bucket drops it. The second holds for both directions.

`machine_loads`: a run is measured alone, because a second run, a build or a video on the same cores makes its steps
longer. Every rank records the processor time of its machine and its own (rank/counters.py). What is left after all
ranks of a machine are subtracted was used by others. A run beside heavy load stays in the table, with a footnote.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from testbed.results import theory
from testbed.results.records import End, Record, Start, Step
from testbed.spec.base import Spec
from testbed.spec.fabric import rack_numbers
from testbed.spec.run import RunSpec
from testbed.spec.units import burst_bytes, format_rate

MAX_OTHERS_SHARE = 0.1  # of a machine's cores that others may use; a quiet machine has 0.01: see docs/report.md
MAX_EMULATED_SHARE = 0.75  # of a machine's cores that ranks with emulated compute may use; planned is half of them
MIN_MEASURED_S = 1.0  # the kernel counts ticks of 1 to 10 ms: over a shorter time the result is too coarse


class MachineLoad(Spec):
    """One machine during the measured steps of a run."""

    ranks: list[int]  # that ran on it
    cores: int
    others: float | None  # cores that other processes used on average over the measured steps; None if too short
    own: float | None = None  # cores that its ranks used on average; None if the time is too short
    load_at_start: float | None = None  # its load average over the last minute when the first rank started

    @property
    def limit(self) -> float:
        """Cores that others may use."""
        return MAX_OTHERS_SHARE * self.cores

    @property
    def is_busy(self) -> bool:
        return self.others is not None and self.others > self.limit


def machine_loads(ranks: Sequence[Sequence[Record]]) -> list[MachineLoad]:
    """Return the load of every machine, from the records of all ranks in rank order.

    Empty if a rank has no such record: it may have run on the same machine, and would count as another process.
    """
    by_machine: dict[str, list[tuple[int, Start, End]]] = defaultdict(list)
    for rank, records in enumerate(ranks):
        start = next((r for r in records if isinstance(r, Start)), None)
        end = next((r for r in records if isinstance(r, End)), None)
        if start is None or end is None or not end.machine:
            return []
        by_machine[end.machine].append((rank, start, end))
    return [_load(found) for found in by_machine.values()]


def _load(found: Sequence[tuple[int, Start, End]]) -> MachineLoad:
    """The ranks' intervals differ by part of a step, so each rank's times are divided by its own interval."""
    ends = [end for _, _, end in found]
    others: float | None = None
    own: float | None = None
    if all((end.measured or 0.0) >= MIN_MEASURED_S for end in ends):
        busy = sum((end.machine_cpu or 0.0) / (end.measured or 1.0) for end in ends) / len(ends)
        ours = sum((end.own_cpu or 0.0) / (end.measured or 1.0) for end in ends)
        others, own = round(max(0.0, busy - ours), 3), round(ours, 3)
    environment = found[0][1].environment
    load = environment.get("load")
    return MachineLoad(
        ranks=[rank for rank, _, _ in found],
        cores=int(environment.get("cores") or 1),
        others=others,
        own=own,
        load_at_start=load if isinstance(load, float | int) else None,
    )


def overloaded(machines: Iterable[MachineLoad]) -> str:
    """Why ranks with emulated compute cannot have kept their recorded times; empty if they can."""
    for machine in machines:
        if machine.own is not None and machine.own > MAX_EMULATED_SHARE * machine.cores:
            used = f"the ranks with emulated compute used {machine.own:.2f} of {machine.cores} cores"
            return f"{used}, more than {100 * MAX_EMULATED_SHARE:g} %: they were not woken in time"
    return ""


def busy_note(runs: Iterable[Sequence[MachineLoad]]) -> str:
    """The footnote for runs that were measured beside heavy load, given their machines; empty if there is none."""
    busy = [(m.others or 0.0, m, len(machines)) for machines in runs for m in machines if m.is_busy]
    if not busy:
        return ""
    others, worst, machines = max(busy, key=lambda each: each[0] / each[1].cores)
    names = ", ".join(map(str, worst.ranks))
    where = f" on the machine of rank{'s' * (len(worst.ranks) > 1)} {names}" if machines > 1 else ""
    most = "up to " if len(busy) > 1 else ""
    used = f"other processes used {most}{others:.2f} of {worst.cores} cores{where} during the steps"
    return f"{used}; limit {worst.limit:.2g}; run it alone"


MAX_USE = 1.03  # of a link's rate by the bytes over all steps; also how far a time may be below its lower bound
# A step's end and its byte counter are read one after the other; on a busy machine the rank may wait in between.
READING_S = 0.1
CARRIED = 1  # synchronisations that may end after the last step, because a pipeline carries work into the next one


def impossible(spec: RunSpec, ranks: Sequence[Sequence[Record]]) -> str:
    """Return why the network cannot have been the requested one; empty if it can. `ranks` are all ranks' records."""
    for rank, records in enumerate(ranks):
        rate = fastest_rate(spec, rank)
        start = next((record for record in records if isinstance(record, Start)), None)
        if start is not None and spec.fabric.shared_uplinks:
            reason = _through_uplink(spec, start, [record for record in records if isinstance(record, Step)])
            if reason:
                return reason
        if rate is None or start is None:
            continue
        steps = (record for record in records if isinstance(record, Step))
        for _, attempt in itertools.groupby(steps, key=lambda step: step.attempt):
            reason = _too_fast(spec, start, list(attempt), rate)
            if reason:
                return reason
    return ""


def fastest_rate(spec: RunSpec, rank: int) -> int | None:
    """The highest rate in bit/s that a node's link had in the run, faults included; None if it was not limited."""
    requested, uplink = spec.link_of(rank).rate, spec.topology.uplink
    if uplink is not None and (rank,) in spec.topology.racks and spec.fabric.shared_uplinks:  # all it sends passes it
        return min(uplink, uplink if requested is None else requested)
    if requested is None:
        return None
    faults = [fault.rate for fault in spec.fault_schedule() if fault.kind == "rate" and fault.rank == rank]
    return max([requested, *(rate for rate in faults if rate is not None)])


def counted(records: Iterable[Record]) -> tuple[int, int]:
    """Bytes that a rank sent and received in the steps of its last attempt after the first; 0 where nothing counts."""
    steps = [record for record in records if isinstance(record, Step) and record.attempt is None]
    if not steps:
        return 0, 0
    first, last = steps[0], steps[-1]
    return (last.sent or 0) - (first.sent or 0), (last.received or 0) - (first.received or 0)


def _too_fast(spec: RunSpec, start: Start, steps: Sequence[Step], rate: int) -> str:
    """The reason for one attempt of one rank; its first step only begins the count."""
    if len(steps) < 2:
        return ""
    first, last = steps[0], steps[-1]
    seconds, during = _duration(steps)
    room = MAX_USE * (rate / 8 * (seconds + READING_S) + burst_bytes(rate))  # bytes
    rank = start.rank
    if first.sent is not None and last.sent is not None and start.counter.startswith("interface"):
        sent = last.sent - first.sent
        if sent > room:
            return f"rank {rank} sent {_mb(sent)} during {during}: {_arithmetic(sent, rate, seconds)}"
    if spec.script is None:
        needed, direction = _needed(spec, start, first.step + 1, last.step)
    else:
        needed, direction = _observed(start, steps[1:])
    if needed > room:
        who = str(spec.mode) if spec.script is None else f"{spec.script.name} by its collectives"
        must = f"{who} must {direction} {_mb(needed)} during them"
        return f"rank {rank} did {during}, and {must}: {_arithmetic(needed, rate, seconds)}"
    return ""


def _through_uplink(spec: RunSpec, start: Start, steps: Sequence[Step]) -> str:
    """Why a rank's steps were faster than its rack's uplink allows; empty if they were not, or if it is unknown."""
    uplink, mode, racks = spec.topology.uplink, spec.mode, spec.topology.racks
    shares = None if mode.codec or spec.script else theory.rack_shares(mode, spec.world, racks)
    if shares is None or uplink is None:
        return ""
    number = rack_numbers(racks, spec.world)[start.rank]
    share, direction = max((shares[number][0], "send"), (shares[number][1], "receive"))
    for _, group in itertools.groupby(steps, key=lambda step: step.attempt):
        attempt = list(group)
        if len(attempt) < 2:
            continue
        seconds, during = _duration(attempt)
        first, last = attempt[0].step + 1, attempt[-1].step
        syncs = theory.syncs_per_step(mode, range(first, last + 1)) * (last - first + 1) - CARRIED
        needed = max(0.0, syncs) * share * start.gradient_bytes
        if needed > MAX_USE * (uplink / 8 * (seconds + READING_S) + burst_bytes(uplink)):
            must = f"{mode} must {direction} {_mb(needed)} through the uplink of rack {number} during them"
            return f"rank {start.rank} did {during}, and {must}: {_arithmetic(needed, uplink, seconds)}"
    return ""


def _duration(steps: Sequence[Step]) -> tuple[float, str]:
    """The seconds of these steps without the first, and a sentence with their number."""
    first, last = steps[0], steps[-1]
    seconds = max((last.at + last.total) - (first.at + first.total), sum(step.total for step in steps[1:]))
    return seconds, f"{len(steps) - 1} steps in {seconds:.3g} s"


def _needed(spec: RunSpec, start: Start, first: int, last: int) -> tuple[float, str]:
    """Payload bytes that theory requires of a rank in these steps, in the direction with more; 0 if it is unknown.

    The root of a mode without overlap sends after it has received (theory.turnaround).
    """
    mode = spec.mode
    shares = (
        None if mode.codec else theory.shares(mode, spec.world, start.rank, spec.topology.racks)
    )  # with a codec S is not known here
    if shares is None:
        return 0.0, ""
    syncs = theory.syncs_per_step(mode, range(first, last + 1)) * (last - first + 1) - CARRIED
    in_turn = (theory.turnaround(mode, spec.world) or 0.0) if start.rank == 0 else 0.0
    share, direction = max((shares[0], "send"), (shares[1], "receive"), (in_turn, "receive and send in turn"))
    return max(0.0, syncs) * share * start.gradient_bytes, direction


def _observed(start: Start, steps: Sequence[Step]) -> tuple[float, str]:
    """The same from the collectives that were observed in these steps; 0 if one of them is unknown."""
    loads = [theory.observed_load(step.comm, start.rank, max(1, start.world)) for step in steps]
    known = [load for load in loads if load is not None]
    if len(known) < len(loads):
        return 0.0, ""
    sent, received = [load.sent for load in known], [load.received for load in known]
    return max((sum(way) - CARRIED * max(way), word) for way, word in ((sent, "send"), (received, "receive")))


def _arithmetic(size: float, rate: int, seconds: float) -> str:
    least = size * 8 / rate
    used = f"{100 * least / seconds:.0f} %" if seconds > 0 else "more"
    limit = f"at most {100 * MAX_USE:.0f} % is possible"
    return f"at {format_rate(rate)} that takes at least {least:.3g} s, so {used} of the link was used, and {limit}"


def _mb(size: float) -> str:
    return f"{size / 1e6:.4g} MB"
