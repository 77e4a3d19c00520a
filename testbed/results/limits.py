"""What shaped links allow, from the records alone: a run that was faster than its links is not valid.

Two checks of every rank, over all steps of an attempt together, because a single short step says little:

- the bytes that the interface counted as sent fit through its link in that time;
- the bytes that its mode must bring to it, and have it send (results/theory.py), do so too; of a user's script those
  of its observed collectives.

The first needs no theory, so it holds for codecs and for a user's method. Bytes counted as received are not used: the
interface counts a packet before the ingress bucket drops it. The second holds for both directions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from testbed.results import theory
from testbed.results.records import Record, Start, Step
from testbed.spec.run import RunSpec
from testbed.spec.units import burst_bytes, format_rate

MAX_USE = 1.03  # of a link's rate by the bytes over all steps; also how far a time may be below its lower bound
# A step's end and its byte counter are read one after the other; on a busy machine the rank may wait in between.
READING_S = 0.1
CARRIED = 1  # synchronisations that may end after the last step, because a pipeline carries work into the next one


def impossible(spec: RunSpec, ranks: Sequence[Sequence[Record]]) -> str:
    """Return why the network cannot have been the requested one; empty if it can. `ranks` are all ranks' records."""
    for rank, records in enumerate(ranks):
        rate = fastest_rate(spec, rank)
        start = next((record for record in records if isinstance(record, Start)), None)
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
    requested = spec.link_of(rank).rate
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
    first, last, count = steps[0], steps[-1], len(steps) - 1
    seconds = max((last.at + last.total) - (first.at + first.total), sum(step.total for step in steps[1:]))
    room = MAX_USE * (rate / 8 * (seconds + READING_S) + burst_bytes(rate))  # bytes
    rank, during = start.rank, f"{count} steps in {seconds:.3g} s"
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


def _needed(spec: RunSpec, start: Start, first: int, last: int) -> tuple[float, str]:
    """Payload bytes that theory requires of a rank in these steps, in the direction with more; 0 if it is unknown.

    The root of a mode without overlap sends after it has received (theory.turnaround).
    """
    mode = spec.mode
    shares = None if mode.codec else theory.shares(mode, spec.world, start.rank)  # with a codec S is not known here
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
