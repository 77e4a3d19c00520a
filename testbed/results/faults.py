"""Runs with injected faults: which faults faults.jsonl records, which ranks detected them when, how the run ended.

The controller writes faults.jsonl while it injects (control/runs/faults.py). The command line prints `fault_table`; the
report also draws the times. This is the only table that shows failed runs. Times are on the monotonic clock of the
controller; on real hosts the nodes have other clocks, so those runs have no times to draw.

Events: injected (a fault), over (a fault that lasts for some time), saw (a rank ended because it lost another),
ended (a rank, with its exit code), again (all ranks start again).
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
from testbed.results.folder import MAX_FAULTS_BYTES, MAX_RECORDS_BYTES, RunFolder, check_size
from testbed.results.records import Step, complete_lines, read
from testbed.spec.errors import SpecError, one_line
from testbed.spec.run import RunSpec
from testbed.spec.units import Interval

MAX_EVENTS = 10_000  # of one run; a controller writes some dozen
HEADER = ("run", "fault", "detected after", "named right", "exit codes, rank 0 first", "recovered")

Event = dict[str, Any]


@dataclass(frozen=True)
class FaultHistory:
    """The events of one run. If it has several faults, times and names are compared with the first."""

    events: list[Event]

    @property
    def injected(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "injected"]

    @property
    def noticed(self) -> list[Event]:
        """Events of ranks that ended because they lost another rank, and that name it."""
        return [event for event in self.events if event["event"] == "saw" and event.get("failed_rank") is not None]

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes of the first attempt by rank."""
        codes: dict[int, int] = {}
        for event in itertools.takewhile(lambda event: event["event"] != "again", self.events):
            if event["event"] == "ended":
                codes.setdefault(event["rank"], event["code"])
        return codes

    @property
    def median_notice_s(self) -> float | None:
        """Seconds from the fault until a rank detected it; median over the ranks that did."""
        injected = self.injected
        times = [event["at"] - injected[0]["begun"] for event in self.noticed if event["at"]] if injected else []
        return statistics.median(times) if times else None

    @property
    def last_notice_s(self) -> float | None:
        """Seconds from the fault until the last other rank detected it, in the same attempt."""
        later = itertools.dropwhile(lambda event: event["event"] != "injected", self.events)
        attempt = FaultHistory(list(itertools.takewhile(lambda event: event["event"] != "again", later)))
        if not attempt.events:
            return None
        fault = attempt.events[0]
        others = [event for event in attempt.noticed if event["at"] and event["rank"] != fault["rank"]]
        return max((float(event["at"]) - float(fault["begun"]) for event in others), default=None)

    @property
    def named_right(self) -> bool | None:
        """Whether most of the ranks that detected the fault named its rank; None if none detected it."""
        named, injected = [event["failed_rank"] for event in self.noticed], self.injected
        if not named or not injected:
            return None
        return named.count(injected[0]["rank"]) > len(named) / 2


def read_history(folder: RunFolder) -> FaultHistory:
    """Read faults.jsonl; empty if there is none. SpecError if a line is damaged."""
    events = []
    for number, line in itertools.islice(complete_lines(folder.faults), MAX_EVENTS):
        try:
            event = json.loads(line)
            event["event"]  # every event has a name
        except (ValueError, KeyError, TypeError, RecursionError):
            raise SpecError(f"{folder.faults}: line {number} is damaged (no event). Run it again.") from None
        events.append(event)
    return FaultHistory(events)


def fault_table(runs: Sequence[tuple[RunFolder, RunSpec, str | None]]) -> list[tuple[str, ...]]:
    """One row per run that has faults and began, from its folder, its spec and its status."""
    histories = [(read_history(folder), spec, status) for folder, spec, status in runs if spec.faults]
    return [_row(history, spec, status) for history, spec, status in histories if history.injected or history.codes]


def _row(history: FaultHistory, spec: RunSpec, status: str | None) -> tuple[str, ...]:
    injected = [one_line(str(event["fault"])) for event in history.injected]
    missed = (Counter(map(str, spec.fault_schedule())) - Counter(injected)).elements()
    retried = any(code != 0 for code in history.codes.values())
    recovered = ("restarted" if retried else "went on") if status == "ok" else "no"
    return (
        spec.name,
        " ".join([*injected, *(f"{fault} (not injected)" for fault in missed)]),
        "-" if history.median_notice_s is None else f"{history.median_notice_s:.2f} s",
        {True: "yes", False: "NO", None: "-"}[history.named_right],
        " ".join(one_line(str(history.codes.get(rank, "stopped"))) for rank in range(spec.world)),
        recovered if injected else "-",
    )


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
    check_size([folder.faults], MAX_FAULTS_BYTES)
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
        one_clock=summary.substrate != "hosts",
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
