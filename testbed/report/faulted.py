"""Runs with injected faults as the report draws them: every step and every fault, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testbed.results.conclude import Summary, has_one_clock
from testbed.results.faults import Event, FaultHistory, fault_table, read_history
from testbed.results.folder import MAX_RECORDS_BYTES, RunFolder, check_size
from testbed.results.records import Step, read
from testbed.spec.run import RunSpec
from testbed.spec.units import Interval


@dataclass(frozen=True)
class Episode:
    """One fault, from its beginning to its end; `end` is None for a fault that was never undone."""

    fault: str
    rank: int
    begin: float
    end: float | None


@dataclass(frozen=True)
class FaultedRun:
    """One run with faults, however it ended, as the report draws it."""

    folder: RunFolder
    summary: Summary
    history: FaultHistory
    row: tuple[str, ...]  # of the table
    episodes: list[Episode]
    noticed: list[tuple[int, float]]  # rank, time at which it ended because it lost another rank
    ended: list[tuple[int, float, int]]  # rank, time, exit code
    steps: list[list[Interval]]  # begin and end of every step of each rank, of all attempts
    one_clock: bool  # False on real hosts

    @property
    def spec(self) -> RunSpec:
        return self.summary.spec


def read_faulted(folder: RunFolder) -> FaultedRun | None:
    """Read a run with faults; None if it has none, or did not begin."""
    if not folder.faults.is_file() or not folder.summary.is_file():
        return None
    folder.check_no_links(allow_top=True)
    history, summary = read_history(folder), Summary.read(folder)
    rows = fault_table([(folder, summary.spec, summary.status)])
    if not rows:
        return None
    saw = [event for event in history.events if event["event"] == "saw" and event["at"]]
    ended = [event for event in history.events if event["event"] == "ended" and event["at"]]
    return FaultedRun(
        folder=folder,
        summary=summary,
        history=history,
        row=rows[0],
        episodes=_episodes(history.events),
        noticed=[(int(event["rank"]), float(event["at"])) for event in saw],
        ended=[(int(event["rank"]), float(event["at"]), int(event["code"])) for event in ended],
        steps=[_steps(folder, rank) for rank in range(summary.spec.world)],
        one_clock=has_one_clock(summary.substrate),
    )


def _episodes(events: Sequence[Event]) -> list[Episode]:
    found = []
    for number, event in enumerate(events):
        if event["event"] == "injected":
            over = (e for e in events[number:] if e["event"] == "over" and e["fault"] == event["fault"])
            end = next((float(e["at"]) for e in over), None)
            found.append(Episode(str(event["fault"]), int(event["rank"]), float(event["begun"]), end))
    return found


def _steps(folder: RunFolder, rank: int) -> list[Interval]:
    """Begin and end of every step of a rank, those of failed attempts included."""
    paths = [*folder.attempts(rank).values(), folder.records(rank)]
    check_size((path for path in paths if path.is_file()), MAX_RECORDS_BYTES)
    steps = [record for path in paths for record in read(path) if isinstance(record, Step)]
    return [(step.at, step.at + step.total) for step in steps]
