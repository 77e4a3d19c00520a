"""The book of a soak: one JSON file per part, kept in the repository, so that a soak goes on where it stopped."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "soak"

Outcome = dict[str, Any]  # "ok": whether the case was as it must be; the rest explains it


def code_commit() -> str:
    """The last commit that changed what is soaked; `+` where there are changes beside it."""
    paths = ["testbed", "tests/soak"]
    found = _git("log", "-1", "--format=%h", "--", *paths)
    return found + ("+" if _git("status", "--porcelain", "--", *paths) else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


class Book:
    """Cases of one part by their name; those of another commit do not count."""

    def __init__(self, part: str, promise: str, folder: Path = FOLDER) -> None:
        self.path = folder / f"{part}.json"
        self.head = {"part": part, "promise": promise, "commit": code_commit()}
        self.cases: dict[str, Outcome] = {}
        if self.path.is_file():
            kept = json.loads(self.path.read_text())
            self.cases = kept["cases"] if kept["commit"] == self.head["commit"] else {}

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
        self.path.write_text(json.dumps({**self.head, **self.counts(), "cases": self.cases}, indent=1) + "\n")

    def counts(self) -> dict[str, Any]:
        ok = sum(outcome["ok"] for outcome in self.cases.values())
        seconds = [outcome["seconds"] for outcome in self.cases.values() if outcome.get("seconds") is not None]
        found: dict[str, Any] = {"ok": ok, "of": len(self.cases)}
        if seconds:
            found |= {"median_seconds": round(statistics.median(seconds), 2), "most_seconds": max(seconds)}
        for key in ("named", "left", "identical"):
            values = [outcome[key] for outcome in self.cases.values() if key in outcome]
            if values:
                found[key] = sum(int(value) for value in values)
        return found

    def close(self) -> bool:
        """Print the counts; True when every case was as promised."""
        self.write()
        counts = self.counts()
        print(f"{self.head['part']}: {counts['ok']} of {counts['of']}; {_line(counts)}; commit {self.head['commit']}")
        print(f"  promised: {self.head['promise']}", flush=True)
        return bool(counts["ok"] == counts["of"])


def _line(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if key != "ok")
