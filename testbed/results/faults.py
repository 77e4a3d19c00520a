"""Runs with injected faults: which faults faults.jsonl records, which ranks detected them when, how the run ended.

The controller writes faults.jsonl while it injects faults (control/runs/faults.py). The command line prints
`fault_table`; the report also draws the times (report/load.py). No other table shows failed runs. Times are of the
controller's monotonic clock. Real hosts have other clocks, so the times of their runs are not drawn.

Steps under a fault are left out of medians; `steps_under_fault` returns them.

Events: injected (a fault), over (a fault with a duration has ended), saw (a rank ended because it lost another rank),
ended (a rank, with its exit code), again (all ranks start again).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from testbed.results.folder import MAX_FAULTS_BYTES, RunFolder, check_size
from testbed.results.records import complete_lines
from testbed.spec.errors import SpecError, one_line
from testbed.spec.fault import KINDS
from testbed.spec.run import RunSpec

MAX_EVENTS = 10_000  # of one run; a controller writes some dozen events
HEADER = ("run", "fault", "detected after", "named right", "exit codes, rank 0 first", "recovered")

Event = dict[str, Any]


@dataclass(frozen=True)
class FaultHistory:
    """The events of one run. If there are several faults, times and names refer to the fault that ranks detected."""

    events: list[Event]

    @property
    def attempts(self) -> list[list[Event]]:
        """The events of each attempt. An attempt ends with `again`, or before a rank ends for the second time."""
        found: list[list[Event]] = [[]]
        ended: set[Any] = set()
        for event in self.events:
            if event["event"] == "ended" and event["rank"] in ended:
                found, ended = [*found, []], set()
            found[-1].append(event)
            if event["event"] == "again":
                found, ended = [*found, []], set()
            elif event["event"] == "ended":
                ended.add(event["rank"])
        return found

    @property
    def injected(self) -> list[Event]:
        return _injected(self.events)

    @property
    def _cause(self) -> tuple[Event | None, list[Event]]:
        """The fault that ranks detected first, and the events of its attempt from then on.

        In an attempt with several faults it is the first fault on the rank that most ranks named. If no rank detected a
        fault, it is the first fault of the run.
        """
        faulted = [events for events in self.attempts if _injected(events)]
        for events in faulted:
            if names := Counter(event["failed_rank"] for event in _noticed(events)):
                (named, _), *_ = names.most_common(1)
                faults = _injected(events)
                cause = next((fault for fault in faults if fault["rank"] == named), faults[0])
                return cause, events[events.index(cause) :]
        return (_injected(faulted[0])[0], faulted[0]) if faulted else (None, [])

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
        """Seconds from the fault until a rank detected it; median over the ranks that detected it."""
        cause, events = self._cause
        times = [event["at"] - cause["begun"] for event in _noticed(events) if event["at"]] if cause else []
        return statistics.median(times) if times else None

    @property
    def last_notice_s(self) -> float | None:
        """Seconds from the fault until the last other rank detected it, in the same attempt."""
        cause, events = self._cause
        if cause is None:
            return None
        others = [event for event in _noticed(events) if event["at"] and event["rank"] != cause["rank"]]
        return max((float(event["at"]) - float(cause["begun"]) for event in others), default=None)

    @property
    def named_right(self) -> bool | None:
        """True if most ranks that detected the fault named the right rank; None if no rank detected it."""
        cause, events = self._cause
        named = [event["failed_rank"] for event in _noticed(events)]
        if not named or cause is None:
            return None
        return named.count(cause["rank"]) > len(named) / 2


def _injected(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["event"] == "injected"]


def _noticed(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["event"] == "saw" and event.get("failed_rank") is not None]


def read_history(folder: RunFolder) -> FaultHistory:
    """Return the events in faults.jsonl; none if there is no file. Raises SpecError if a line is damaged."""
    events = []
    check_size([folder.faults] if folder.faults.is_file() else [], MAX_FAULTS_BYTES)
    for number, line in itertools.islice(complete_lines(folder.faults), MAX_EVENTS):
        try:
            event = json.loads(line)
            event["event"]  # every event has a name
        except (ValueError, KeyError, TypeError, RecursionError):
            raise SpecError(f"{folder.faults}: line {number} is damaged (no event). Run it again.") from None
        events.append(event)
    return FaultHistory(events)


def fault_table(runs: Sequence[tuple[RunFolder, RunSpec, str | None]]) -> list[tuple[str, ...]]:
    """Return one row for each run with faults that began. A run is given as folder, spec and status."""
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


class TimedStep(NamedTuple):
    """When a rank did a step, on its monotonic clock. `attempt` is None for the last attempt."""

    number: int
    begin: float
    end: float
    attempt: int | None


def steps_under_fault(
    history: FaultHistory, ranks: Sequence[Sequence[TimedStep]], one_clock: bool
) -> dict[int, list[str]]:
    """Return the steps under a fault by number, with the kinds of their faults.

    A step is under a fault if the two overlap on any rank, because all ranks wait for the slowest. A fault without a
    duration lasts until its attempt ends. If nodes have their own clocks, only the step in which a fault began is
    known; then this step and all later ones of the attempt count as under the fault.
    """
    found: dict[int, list[str]] = {}
    attempts = history.attempts
    for attempt, events in enumerate(attempts, start=1):
        for kind, fault, until in _in_force(events):
            for step in itertools.chain.from_iterable(ranks):
                if one_clock:
                    hit = step.begin < until and step.end > float(fault["begun"])
                else:
                    hit = (step.attempt or len(attempts)) == attempt and step.number >= int(fault["step"])
                if hit and kind not in found.setdefault(step.number, []):
                    found[step.number].append(kind)
    return {number: kinds for number, kinds in found.items() if kinds}


def _in_force(events: Sequence[Event]) -> Iterator[tuple[str, Event, float]]:
    """Yield each fault of an attempt: its kind, its event, and the latest time at which it was over."""
    for number, event in enumerate(events):
        if event["event"] == "injected":
            later = events[number + 1 :]
            over = (float(e["at"]) for e in later if e["event"] == "over" and e["fault"] == event["fault"])
            ends = [float(e["at"]) for e in later if e["event"] in ("ended", "again") and e.get("at")]
            kind = str(event["fault"]).partition(":")[0]
            yield kind if kind in KINDS else "unknown", event, next(over, max(ends, default=math.inf))
