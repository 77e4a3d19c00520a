"""Faults: what was done to runs on purpose and what became of them. Runs that failed are told of only here.

Times are on the one clock of this machine. Runs on hosts have no place in a plot: their nodes' clocks are not the
controller's, which injects.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from testbed.report.foreign import MAX_FAULTS, MAX_RECORDS, check_inside, check_size
from testbed.spec.folder import RunFolder
from testbed.spec.history import MAX_EVENTS, Story, fault_table, read_story
from testbed.spec.intervals import Interval
from testbed.spec.records import read, read_lines
from testbed.spec.run import RunSpec
from testbed.spec.summary import Summary


@dataclass(frozen=True)
class Episode:
    """One fault, from when it was done until it was over (None: it was never undone)."""

    fault: str
    rank: int
    begin: float
    end: float | None


@dataclass(frozen=True)
class Faulted:
    """One run with faults, whatever became of it."""

    folder: RunFolder
    summary: Summary
    story: Story
    episodes: list[Episode]
    saw: list[tuple[int, float]]  # rank, when it ended because of another
    ended: list[tuple[int, float, int]]  # rank, when, exit code
    steps: list[list[Interval]]  # per rank, of all attempts
    one_clock: bool
    row: tuple[str, ...]  # of the table
    knew: float | None  # seconds from the first fault until the last of the others had noticed; None: nobody did

    @property
    def spec(self) -> RunSpec:
        return self.summary.spec


def read_faulted(folder: RunFolder) -> Faulted | None:
    """The history of a run to which something was to be done; None where nothing was, or it did not begin."""
    if not folder.faults.is_file() or not folder.summary.is_file():
        return None
    check_inside(folder)
    check_size([folder.faults], MAX_FAULTS)
    story = read_story(folder)
    summary = Summary.read(folder)
    rows = fault_table([(folder, summary.spec, summary.status)])
    if not rows:  # it did not begin, or its spec knows nothing of this history
        return None
    events = list(itertools.islice(read_lines(folder.faults, "event"), MAX_EVENTS))
    return Faulted(
        folder=folder,
        summary=summary,
        story=story,
        episodes=_episodes(events),
        saw=[(int(e["rank"]), float(e["at"])) for e in events if e["event"] == "saw" and e["at"]],
        ended=[(int(e["rank"]), float(e["at"]), int(e["code"])) for e in events if e["event"] == "ended" and e["at"]],
        steps=[_steps(folder, rank) for rank in range(summary.spec.world)],
        one_clock=summary.substrate != "hosts",
        row=rows[0],
        knew=_knew(events),
    )


def _episodes(events: Sequence[dict[str, Any]]) -> list[Episode]:
    found = []
    for number, event in enumerate(events):
        if event["event"] == "injected":
            over = (e for e in events[number:] if e["event"] == "over" and e["fault"] == event["fault"])
            end = next((float(e["at"]) for e in over), None)
            found.append(Episode(str(event["fault"]), int(event["rank"]), float(event["begun"]), end))
    return found


def _knew(events: Sequence[dict[str, Any]]) -> float | None:
    """Of the attempt in which the first fault was done; what its own rank saw is nobody's notice."""
    later = itertools.dropwhile(lambda e: e["event"] != "injected", events)
    attempt = list(itertools.takewhile(lambda e: e["event"] != "again", later))
    saw = [e for e in attempt if e["event"] == "saw" and e["at"] and e.get("guilty") is not None]
    times = [float(e["at"]) - float(attempt[0]["begun"]) for e in saw if e["rank"] != attempt[0]["rank"]]
    return max(times, default=None)


def _steps(folder: RunFolder, rank: int) -> list[Interval]:
    """When each step of a rank began and ended, those of attempts that failed included."""
    paths = [*folder.attempts(rank).values(), folder.records(rank)]
    check_size((path for path in paths if path.is_file()), MAX_RECORDS)
    rows = [record for path in paths for record in read(path) if record["kind"] == "step"]
    return [(float(row["at"]), float(row["at"]) + float(row["total"])) for row in rows]
