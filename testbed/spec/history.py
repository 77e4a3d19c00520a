"""History: what faults.jsonl tells of a run, as a row: what was done, who noticed when, what became of it."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from testbed.spec.errors import plain
from testbed.spec.folder import RunFolder
from testbed.spec.records import read_lines
from testbed.spec.run import RunSpec

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
        named = [event["guilty"] for event in self.seen if event.get("guilty") is not None]
        if not named or not self.injected:
            return None
        return named.count(self.injected[0]["rank"]) > len(named) / 2


def read_story(folder: RunFolder) -> Story:
    """From faults.jsonl; empty where there is none."""
    events = list(itertools.islice(read_lines(folder.faults, "event"), MAX_EVENTS))
    codes: dict[int, int] = {}
    for event in itertools.takewhile(lambda event: event["event"] != "again", events):
        if event["event"] == "ended":
            codes.setdefault(event["rank"], event["code"])
    return Story(
        injected=[event for event in events if event["event"] == "injected"],
        seen=[event for event in events if event["event"] == "saw" and event.get("guilty") is not None],
        codes=codes,
    )


def fault_table(runs: Sequence[tuple[RunFolder, RunSpec, str | None]]) -> list[tuple[str, ...]]:
    """One row per run that had faults and began: its folder, its spec, and how it ended."""
    told = [(read_story(folder), spec, status) for folder, spec, status in runs if spec.faults]
    return [_row(story, spec, status) for story, spec, status in told if story.injected or story.codes]


def _row(story: Story, spec: RunSpec, status: str | None) -> tuple[str, ...]:
    retried = any(code != 0 for code in story.codes.values())
    recovered = {True: "restarted" if retried else "went on", False: "no"}[status == "ok"]
    done = [plain(str(event["fault"])) for event in story.injected]
    missed = (Counter(map(str, spec.schedule())) - Counter(done)).elements()
    return (
        spec.name,
        " ".join([*done, *(f"{fault} (not injected)" for fault in missed)]),
        "-" if story.noticed is None else f"{story.noticed:.2f} s",
        {True: "yes", False: "NO", None: "-"}[story.named_right],
        " ".join(plain(str(story.codes.get(rank, "stopped"))) for rank in range(spec.world)),
        recovered if done else "-",
    )
