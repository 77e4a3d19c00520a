"""Faults: what was done to runs on purpose and what became of them. Runs that failed are told of only here.

Times are on the one clock of this machine. Runs on hosts have no place in a plot: their nodes' clocks are not the
controller's, which injects.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from testbed.results.conclude import Summary
from testbed.results.folder import (
    MAX_FAULTS_BYTES,
    MAX_RECORDS_BYTES,
    RunFolder,
    check_size,
)
from testbed.results.records import Step, complete_lines, read
from testbed.spec.errors import SpecError, one_line
from testbed.spec.run import RunSpec
from testbed.spec.units import Interval

# History: what faults.jsonl tells of a run, as a row: what was done, who noticed when, what became of it.

MAX_EVENTS = 10_000  # of one run; a controller writes some dozen
HEADER = ("run", "fault", "noticed after", "named right", "exit codes, rank 0 first", "recovered")


@dataclass(frozen=True, kw_only=True)
class Story:
    """One run with faults; the first of them is the one that is told."""

    injected: list[dict[str, Any]]
    seen: list[dict[str, Any]]  # what ranks said that ended because of others
    codes: dict[int, int]  # the first attempt's

    @property
    def noticed(self) -> float | None:
        """Seconds from the fault to the middle one of those who noticed."""
        times = [event["at"] - self.injected[0]["begun"] for event in self.seen if event["at"]] if self.injected else []
        return statistics.median(times) if times else None

    @property
    def named_right(self) -> bool | None:
        """Whether most who noticed named the rank that the fault was done to; None where nobody did."""
        named = [event["failed_rank"] for event in self.seen if event.get("failed_rank") is not None]
        if not named or not self.injected:
            return None
        return named.count(self.injected[0]["rank"]) > len(named) / 2


def read_story(folder: RunFolder) -> Story:
    """From faults.jsonl; empty where there is none."""
    events = _read_events(folder)
    codes: dict[int, int] = {}
    for event in itertools.takewhile(lambda event: event["event"] != "again", events):
        if event["event"] == "ended":
            codes.setdefault(event["rank"], event["code"])
    return Story(
        injected=[event for event in events if event["event"] == "injected"],
        seen=[event for event in events if event["event"] == "saw" and event.get("failed_rank") is not None],
        codes=codes,
    )


def _read_events(folder: RunFolder) -> list[dict[str, Any]]:
    events = []
    for number, line in itertools.islice(complete_lines(folder.faults), MAX_EVENTS):
        try:
            event = json.loads(line)
            event["event"]  # it has one
        except (ValueError, KeyError, TypeError, RecursionError):
            raise SpecError(f"{folder.faults}: line {number} is damaged, no event. Run it again.") from None
        events.append(event)
    return events


def fault_table(runs: Sequence[tuple[RunFolder, RunSpec, str | None]]) -> list[tuple[str, ...]]:
    """One row per run that had faults and began: its folder, its spec, and how it ended."""
    told = [(read_story(folder), spec, status) for folder, spec, status in runs if spec.faults]
    return [_row(story, spec, status) for story, spec, status in told if story.injected or story.codes]


def _row(story: Story, spec: RunSpec, status: str | None) -> tuple[str, ...]:
    retried = any(code != 0 for code in story.codes.values())
    recovered = {True: "restarted" if retried else "went on", False: "no"}[status == "ok"]
    done = [one_line(str(event["fault"])) for event in story.injected]
    missed = (Counter(map(str, spec.schedule())) - Counter(done)).elements()
    return (
        spec.name,
        " ".join([*done, *(f"{fault} (not injected)" for fault in missed)]),
        "-" if story.noticed is None else f"{story.noticed:.2f} s",
        {True: "yes", False: "NO", None: "-"}[story.named_right],
        " ".join(one_line(str(story.codes.get(rank, "stopped"))) for rank in range(spec.world)),
        recovered if done else "-",
    )


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
    folder.check_no_links(allow_top=True)
    check_size([folder.faults], MAX_FAULTS_BYTES)
    story = read_story(folder)
    summary = Summary.read(folder)
    rows = fault_table([(folder, summary.spec, summary.status)])
    if not rows:  # it did not begin, or its spec knows nothing of this history
        return None
    events = _read_events(folder)
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
    saw = [e for e in attempt if e["event"] == "saw" and e["at"] and e.get("failed_rank") is not None]
    times = [float(e["at"]) - float(attempt[0]["begun"]) for e in saw if e["rank"] != attempt[0]["rank"]]
    return max(times, default=None)


def _steps(folder: RunFolder, rank: int) -> list[Interval]:
    """When each step of a rank began and ended, those of attempts that failed included."""
    paths = [*folder.attempts(rank).values(), folder.records(rank)]
    check_size((path for path in paths if path.is_file()), MAX_RECORDS_BYTES)
    rows = [record for path in paths for record in read(path) if isinstance(record, Step)]
    return [(row.at, row.at + row.total) for row in rows]
