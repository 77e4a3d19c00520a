"""How much of each machine other processes used while the steps were measured.

A run is measured alone: a second run, a build or a video on the same cores makes its steps longer. Every rank records
the processor time of its machine and its own (rank/cpu_time.py). What is left after all ranks of a machine are
subtracted was used by others. A run beside heavy load stays in the table, with a footnote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from testbed.results.records import End, Record, Start
from testbed.spec.base import Spec

MAX_OTHERS_SHARE = 0.1  # of a machine's cores that others may use; a quiet machine has 0.01: see docs/report.md
MIN_MEASURED_S = 1.0  # the kernel counts ticks of 1 to 10 ms: over a shorter time the result is too coarse


class MachineLoad(Spec):
    """One machine during the measured steps of a run."""

    ranks: list[int]  # that ran on it
    cores: int
    others: float | None  # cores that other processes used on average over the measured steps; None if too short
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
    if all((end.measured or 0.0) >= MIN_MEASURED_S for end in ends):
        busy = sum((end.machine_cpu or 0.0) / (end.measured or 1.0) for end in ends) / len(ends)
        ours = sum((end.own_cpu or 0.0) / (end.measured or 1.0) for end in ends)
        others = round(max(0.0, busy - ours), 3)
    environment = found[0][1].environment
    load = environment.get("load")
    return MachineLoad(
        ranks=[rank for rank, _, _ in found],
        cores=int(environment.get("cores") or 1),
        others=others,
        load_at_start=load if isinstance(load, float | int) else None,
    )


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
