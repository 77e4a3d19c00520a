"""`testbed tune`: search, say what was found, write it down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from testbed.control.machine import alone
from testbed.control.place import Place
from testbed.control.progress import open_progress
from testbed.control.tune_race import SPREAD, TOLERANCE
from testbed.control.tune_search import Tuning, check_file, open_tuning, search, write_file
from testbed.spec.mode import SyncMode
from testbed.spec.run import RunSpec
from testbed.spec.table import format_table

BAR = 30  # characters of the slowest candidate


def tune(spec: RunSpec, place: Place, out: Path, seconds: float, console: Console, as_json: bool) -> None:
    """The command; whatever ends the search, what it had found by then is printed."""
    check_file(out)
    tuning = open_tuning(spec)
    progress = open_progress(console, quiet=as_json)
    progress.headline(f"on {place.name}: {place.why}")
    file = None
    try:
        with alone(place):
            search(tuning, place, progress, seconds)
        write_file(out, tuning, place)
        file = out
    finally:
        progress.end()
        if tuning.race.times:
            _print(tuning, file, console, as_json)


def _print(tuning: Tuning, file: Path | None, console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps(document(tuning, file), indent=1))
        return
    console.print(f"\n{curve(tuning)}\n")
    for line in conclusion(tuning):
        console.print(line)
    console.print(f"everything is in {tuning.folder}")
    if file:
        console.print(f"compare them at length: testbed sweep {file}")


def order(name: str) -> tuple[str, str, int]:
    """One schedule after the other, sizes rising: a curve."""
    mode = SyncMode.parse(name)
    return "" if mode.is_reference else mode.schedule, mode.algorithm, mode.bucket or 0


def curve(tuning: Tuning) -> str:
    """A row for each candidate, with a bar as long as its step."""
    race, chances = tuning.race, tuning.race.chances()
    best, slowest = race.centre(race.leader()), max(race.centre(name) for name in race.times)
    header = ("mode", "s/iter", "95 % interval", "runs", "/ best", "chance", "")
    rows = []
    for name in sorted(race.times, key=order):
        low, high = race.interval(name)
        seconds = race.centre(name)
        bar = "#" * max(1, round(BAR * seconds / slowest))
        figures = (f"{seconds:.3f}", f"{low:.3f}-{high:.3f}", str(len(race.times[name])), f"{seconds / best:.2f}")
        rows.append((name, *figures, percent(chances[name]), bar.ljust(BAR)))
    return format_table(header, rows)


def conclusion(tuning: Tuning) -> list[str]:
    """The winner, how sure it is, what it is worth, and who fell out."""
    race, leader = tuning.race, tuning.race.leader()
    low, high = race.interval(leader)
    won = "best so far" if tuning.untried else "winner"
    lines = [
        f"{won}: {leader}, {race.centre(leader):.3f} s/iter (95 %: {low:.3f} to {high:.3f})",
        f"{percent(tuning.sure)} sure that nothing tried is more than {percent(TOLERANCE)} faster; {tuning.runs} runs; "
        f"ended: {tuning.stopped}",
    ]
    for name in tuning.reference:
        if name != leader:
            lines.append(f"{name} takes {race.centre(name) / race.centre(leader):.2f} times as long")
    if not race.repeated():
        lines.append(f"every candidate ran once only: that runs differ by {percent(SPREAD)} is assumed, not measured")
    if tuning.untried:
        lines.append(f"not tried: {', '.join(tuning.untried)}")
    return lines + [f"dropped: {name}: {why}" for name, why in tuning.dropped.items()]


def percent(share: float) -> str:
    """Of few runs nothing is certain."""
    return f"{100 * share:.0f} %" if share < 0.995 else "> 99 %"


def document(tuning: Tuning, file: Path | None) -> dict[str, Any]:
    """The same for a script."""
    race, chances = tuning.race, tuning.race.chances()
    points = []
    for name in sorted(race.times, key=order):
        low, high = race.interval(name)
        found = {"seconds_per_step": race.centre(name), "low": low, "high": high, "chance": chances[name]}
        points.append({"mode": name, **found, "runs": race.times[name]})
    facts = {"winner": race.leader(), "sure": tuning.sure, "tolerance": TOLERANCE, "ended": tuning.stopped}
    where = {"file": str(file) if file else None, "folder": str(tuning.folder)}
    return {**facts, "curve": points, "dropped": tuning.dropped, "untried": tuning.untried, **where}
