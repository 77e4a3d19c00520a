"""Outcomes of a soak: one JSON file per part in results/soak/, committed with the code, so that a soak can resume."""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.results.folder import write_whole
from testbed.spec.errors import Interrupted
from tests.support.provenance import ROOT, code_commit, current

FOLDER = ROOT / "results" / "soak"
SOAKED = (  # a change in one of these paths makes all outcomes stale
    "testbed/spec",
    "testbed/results",
    "testbed/net",
    "testbed/rank",
    "testbed/control",
    "tests/soak",
)
SUMMED = ("named", "left", "identical", "started", "tabled", "by_hand", "resumed", "injected", "recovered")
UNAVAILABLE = "unavailable"  # key: why a case could not run on this machine. Such a case is a miss and is not stored
MAX_MINUTES = 25.0  # of any part

Outcome = dict[str, Any]  # "ok": whether the case did what it must; the other keys explain it
Cases = Iterator[tuple[str, Callable[[], Outcome]]]  # name, function that runs the case


@dataclass(frozen=True)
class Promise:
    """What a part must show: a number of cases, all of them ok, and limits on its counts."""

    words: str
    cases: int
    least: Mapping[str, float] = field(default_factory=dict)  # a count that is absent misses its limit
    most: Mapping[str, float] = field(default_factory=dict)
    also: tuple[str, ...] = ()  # paths beside SOAKED that make this part stale

    def missed(self, counts: Mapping[str, Any]) -> list[str]:
        """Return one line for each limit that is missed."""
        least = {"of": self.cases, "ok": self.cases, **self.least}
        most = {"of": self.cases, "minutes": MAX_MINUTES, **self.most}
        below = [(key, "at least", limit) for key, limit in least.items() if not counts.get(key, -1) >= limit]
        above = [(key, "at most", limit) for key, limit in most.items() if not counts.get(key, limit + 1) <= limit]
        return [f"{key} {counts.get(key, 'unknown')}, promised {how} {limit:g}" for key, how, limit in below + above]


class Outcomes:
    """The outcomes of one part, by the name of the case.

    Stored outcomes of another commit are not used, nor those of a tree with uncommitted changes.
    """

    def __init__(self, part: str, promise: Promise, folder: Path = FOLDER) -> None:
        self.path = folder / f"{part}.json"
        self.promise = promise
        self.head = {"part": part, "promise": promise.words, "commit": code_commit(*SOAKED, *promise.also)}
        self.cases: dict[str, Outcome] = {}
        if self.path.is_file():
            stored = json.loads(self.path.read_text())
            cases = stored["cases"] if current(stored["commit"], self.head["commit"]) else {}
            self.cases = {name: outcome for name, outcome in cases.items() if UNAVAILABLE not in outcome}

    def run(self, cases: Iterable[tuple[str, Callable[[], Outcome]]]) -> None:
        """Run the cases that have no outcome yet. Print one line and write the file after each.

        A case that raises, e.g. because its command hangs or left a damaged file, is a miss; the others follow.
        """
        for name, case in cases:
            if name in self.cases:
                continue
            begun = time.monotonic()
            try:
                outcome = case()
            except Interrupted:
                raise
            except Exception as error:
                outcome = {"ok": False, "raised": "".join(traceback.format_exception(error))}
            outcome["took"] = round(time.monotonic() - begun, 2)
            self.cases[name] = outcome
            self.write()
            print(f"{'ok  ' if outcome['ok'] else 'MISS'} {name}: {_line(outcome)}", flush=True)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        counts = self.counts()
        content = {**self.head, **counts, "missed": self.promise.missed(counts), "cases": self.cases}
        write_whole(self.path, json.dumps(content, indent=1))

    def counts(self) -> dict[str, Any]:
        ok = sum(outcome["ok"] for outcome in self.cases.values())
        seconds = [outcome["seconds"] for outcome in self.cases.values() if outcome.get("seconds") is not None]
        counts: dict[str, Any] = {"ok": ok, "of": len(self.cases)}
        if seconds:
            counts |= {"median_seconds": round(statistics.median(seconds), 2), "most_seconds": max(seconds)}
        counts["minutes"] = round(sum(outcome["took"] for outcome in self.cases.values()) / 60, 1)
        for key in SUMMED:
            values = [outcome[key] for outcome in self.cases.values() if key in outcome]
            if values:
                counts[key] = sum(int(value) for value in values)
        return counts

    def close(self) -> bool:
        """Print the counts and every missed limit. Return True if none is missed."""
        self.write()
        counts = self.counts()
        missed = self.promise.missed(counts)
        print(f"{self.head['part']}: {counts['ok']} of {counts['of']}; {_line(counts)}; commit {self.head['commit']}")
        print(f"  promised: {self.head['promise']}{'' if missed else ': kept'}", flush=True)
        for line in missed:
            print(f"  MISSED: {line}", flush=True)
        return not missed


def _line(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if key != "ok")
