"""The book of a soak: one JSON file per part, kept in the repository, so that a soak goes on where it stopped."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.results.folder import write_whole
from tests.support.provenance import ROOT, code_commit, current

FOLDER = ROOT / "results" / "soak"

SOAKED = (
    "testbed/spec",
    "testbed/results",
    "testbed/net",
    "testbed/rank",
    "testbed/control",
    "tests/soak",
)  # a change here: all anew
SUMMED = ("named", "left", "identical", "started", "tabled", "by_hand", "resumed")
UNAVAILABLE = "unavailable"  # why a case could not be tried here: a miss, and not kept
MINUTES = 25.0  # that any part may take

Outcome = dict[str, Any]  # "ok": whether the case was as it must be; the rest explains it


@dataclass(frozen=True)
class Promise:
    """What a part must show: so many cases, all of them ok, and limits of its counts."""

    words: str
    cases: int
    least: Mapping[str, float] = field(default_factory=dict)  # a count that was not kept is missed
    most: Mapping[str, float] = field(default_factory=dict)
    also: tuple[str, ...] = ()  # what this part soaks beside SOAKED

    def missed(self, counts: Mapping[str, Any]) -> list[str]:
        """One line for each limit that does not hold."""
        least = {"of": self.cases, "ok": self.cases, **self.least}
        most = {"of": self.cases, "minutes": MINUTES, **self.most}
        below = [(key, "at least", limit) for key, limit in least.items() if not counts.get(key, -1) >= limit]
        above = [(key, "at most", limit) for key, limit in most.items() if not counts.get(key, limit + 1) <= limit]
        return [f"{key} {counts.get(key, 'unknown')}, promised {how} {limit:g}" for key, how, limit in below + above]


class Book:
    """Cases of one part by their name; those of another commit do not count, nor those of a tree with changes: which
    changes they were made with nobody knows."""

    def __init__(self, part: str, promise: Promise, folder: Path = FOLDER) -> None:
        self.path = folder / f"{part}.json"
        self.promise = promise
        self.head = {"part": part, "promise": promise.words, "commit": code_commit(*SOAKED, *promise.also)}
        self.cases: dict[str, Outcome] = {}
        if self.path.is_file():
            kept = json.loads(self.path.read_text())
            cases = kept["cases"] if current(kept["commit"], self.head["commit"]) else {}
            self.cases = {name: outcome for name, outcome in cases.items() if UNAVAILABLE not in outcome}

    def run(self, cases: Iterable[tuple[str, Callable[[], Outcome]]]) -> None:
        """Do what is missing, print a line each, write after each."""
        for name, case in cases:
            if name in self.cases:
                continue
            begun = time.monotonic()
            outcome = case()
            outcome["took"] = round(time.monotonic() - begun, 2)
            self.cases[name] = outcome
            self.write()
            print(f"{'ok  ' if outcome['ok'] else 'MISS'} {name}: {_line(outcome)}", flush=True)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        counts = self.counts()
        whole = {**self.head, **counts, "missed": self.promise.missed(counts), "cases": self.cases}
        write_whole(self.path, json.dumps(whole, indent=1))

    def counts(self) -> dict[str, Any]:
        ok = sum(outcome["ok"] for outcome in self.cases.values())
        seconds = [outcome["seconds"] for outcome in self.cases.values() if outcome.get("seconds") is not None]
        found: dict[str, Any] = {"ok": ok, "of": len(self.cases)}
        if seconds:
            found |= {"median_seconds": round(statistics.median(seconds), 2), "most_seconds": max(seconds)}
        found["minutes"] = round(sum(outcome["took"] for outcome in self.cases.values()) / 60, 1)
        for key in SUMMED:
            values = [outcome[key] for outcome in self.cases.values() if key in outcome]
            if values:
                found[key] = sum(int(value) for value in values)
        return found

    def close(self) -> bool:
        """Print the counts and every limit that was missed; True when none was."""
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
