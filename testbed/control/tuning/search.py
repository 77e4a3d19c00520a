"""Tune: the bucket size and schedule with the shortest step, for this network and this model, found by measuring.

Rounds of short runs, each a whole run through `execute`. The first round tries every schedule with sizes a factor of
four apart. Every later one runs again the faster ones and whoever may still be the fastest, in turn, and the
neighbours in size of the leader. It ends when the leader is sure enough (tune_race.py) and has no untried neighbour,
or when time is up.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from testbed.control.cli.progress import Progress, open_progress
from testbed.control.runs.locks import alone
from testbed.control.runs.run import execute
from testbed.control.runs.select import Place
from testbed.control.tuning.statistics import OUT, SPREAD, SURE, TOLERANCE, Race
from testbed.results.folder import RunFolder, runs_dir, write_whole
from testbed.results.table import format_table
from testbed.spec.errors import Interrupted, NetworkInvalid, SpecError, TestbedError, UsageError, refuse
from testbed.spec.experiment import run_name
from testbed.spec.mode import REFERENCE, SCHEDULES, SyncMode
from testbed.spec.run import RunSpec
from testbed.spec.units import format_size

MARK = "# Written by `testbed tune`"  # the first line of a file that may be written over
SMALLEST = 4 << 10  # bytes: below that, messages are all overhead
PARTS = (32, 8, 2)  # of the gradient, for the first sizes
MOST_RUNS = 8  # of one candidate
TRIES = 3  # for a run on the network that was asked for


@dataclass
class Tuning:
    """What is sought, and all that was found so far."""

    spec: RunSpec
    folder: Path
    race: Race = field(default_factory=Race)
    gradient: int = 0  # bytes; known after the first run
    runs: int = 0
    dropped: dict[str, str] = field(default_factory=dict)  # candidate -> why
    wanted: list[str] = field(default_factory=list)  # of this round
    stopped: str = "interrupted"

    @property
    def sure(self) -> float:
        return self.race.chances()[self.race.leader()]

    @property
    def reference(self) -> list[str]:
        """What one would have taken, with buckets of its own choice; nobody, where it was not timed."""
        modes = (SyncMode.parse(name) for name in self.race.times)
        return [str(mode) for mode in modes if mode.is_reference and not mode.bucket]

    @property
    def untried(self) -> list[str]:
        """Who should have run and did not."""
        return [name for name in self.wanted if name not in self.race.times and name not in self.dropped]


def first_mode(mode: SyncMode) -> SyncMode:
    """What the search begins with: one flat buffer after backward; a mode that says more than that is refused."""
    if mode.granularity == "bucket" or mode.schedule != "after" or mode.every > 1:
        rule = "granularity and schedule are what is sought"
        raise refuse("mode", str(mode), rule, "Give the algorithm alone, or with a codec: ring, direct/int8.")
    if mode.silent:
        raise refuse("mode", str(mode), "has nothing to tune", "Use ring.")
    words = [mode.algorithm, *(["flat"] if not mode.is_reference else []), *_codec(mode)]
    return SyncMode.parse("/".join(words))


def candidates(mode: SyncMode, gradient: int) -> list[str]:
    """The first round: the reference, and every legal schedule at sizes a factor of four apart."""
    sizes = [_round_size(gradient // part) for part in PARTS]
    words = [(REFERENCE, *_codec(mode))]
    words += [(mode.algorithm, f"bucket:{format_size(s)}", *w, *_codec(mode)) for w in _schedules(mode) for s in sizes]
    return [name for name in dict.fromkeys(_legal(words)) if name != str(mode)]


def neighbours(mode: SyncMode, gradient: int) -> list[str]:
    """The same with half and with twice the bucket, as long as that means something."""
    if mode.bucket is None:
        return []
    sizes = [size for size in (mode.bucket // 2, mode.bucket * 2) if SMALLEST <= size < gradient]
    schedule = [mode.schedule] if mode.schedule != "after" else []
    return list(_legal([(mode.algorithm, f"bucket:{format_size(s)}", *schedule, *_codec(mode)) for s in sizes]))


def _schedules(mode: SyncMode) -> list[list[str]]:
    return [[]] if mode.is_reference else [[name] for name in SCHEDULES if name != "after"]


def _codec(mode: SyncMode) -> list[str]:
    return [str(mode).rpartition("/")[2]] if mode.codec else []


def _round_size(size: int) -> int:
    """The power of two below."""
    return max(SMALLEST, 1 << max(0, size.bit_length() - 1))


def _legal(words: list[tuple[str, ...]]) -> Iterator[str]:
    for each in words:
        with contextlib.suppress(SpecError):
            yield str(SyncMode.parse("/".join(each)))


def search(tuning: Tuning, place: Place, progress: Progress, seconds: float) -> None:
    """Run rounds until the answer is good enough; what was found stands in `tuning`, however this ends."""
    begun, start = time.monotonic(), str(first_mode(tuning.spec.mode))
    _round([start], 1, tuning, place, progress, begun + seconds)
    wanted, number = candidates(SyncMode.parse(start), tuning.gradient), 2
    while wanted:
        if not _round(wanted, number, tuning, place, progress, begun + seconds):
            tuning.stopped = f"time is up ({seconds / 60:g} minutes)"
            return
        wanted, number = _next(tuning), number + 1
    gone = " or was dropped" if tuning.dropped else ""
    had = f"each that could be the fastest had {MOST_RUNS} runs{gone}"
    tuning.stopped = "sure enough" if tuning.sure >= SURE else had


def _next(tuning: Tuning) -> list[str]:
    """Who runs in the next round; nobody when the answer is good enough."""
    race, leader = tuning.race, tuning.race.leader()
    untried = [
        name
        for name in neighbours(SyncMode.parse(leader), tuning.gradient)
        if name not in race.times and name not in tuning.dropped
    ]
    chances = race.chances()
    doubtful = [] if chances[leader] >= SURE else [n for n in race.times if n == leader or chances[n] >= OUT]
    again = [name for name in dict.fromkeys([*race.due(), *doubtful]) if len(race.times[name]) < MOST_RUNS]
    return untried + [name for name in again if name not in tuning.dropped]


def _round(names: list[str], number: int, tuning: Tuning, place: Place, progress: Progress, until: float) -> bool:
    """Each of them once; False when time ran out on the way. An error when nobody is left."""
    tuning.wanted = names
    for turn, name in enumerate(names, start=1):
        if time.monotonic() > until and tuning.race.times:
            return False
        best = ""
        if tuning.race.times:
            leader = tuning.race.leader()
            best = f"; best so far {leader}, {tuning.race.centre(leader):.3f} s"
        progress.headline(f"[round {number}, {turn}/{len(names)}] {name}{best}")
        _try(name, tuning, place, progress)
    if not tuning.race.times:
        raise TestbedError("nothing to tune: " + "; ".join(f"{n} failed: {why}" for n, why in tuning.dropped.items()))
    return True


def _try(name: str, tuning: Tuning, place: Place, progress: Progress) -> None:
    """One run of one candidate; one that fails is dropped, and its earlier times with it.

    One whose network was off is repeated, then dropped, too, but keeps its times. Where nothing has been timed yet, it
    is the network that cannot be had, and the search ends.
    """
    for _ in range(TRIES):
        tuning.runs += 1
        spec = trial(tuning.spec, name, tuning.runs, tuning.folder.name)
        try:
            summary = execute(spec, place, RunFolder(tuning.folder / spec.name), progress)
        except (Interrupted, UsageError):
            raise
        except TestbedError as error:
            tuning.race.times.pop(name, None)  # nobody wants a mode that breaks now and then, however fast
            _drop(name, str(error), tuning, progress)
            return
        if summary.status == "ok" and summary.seconds_per_step:
            tuning.gradient = summary.gradient_bytes or 0
            tuning.race.add(name, summary.seconds_per_step)
            return
        progress.stage(f"does not count: {summary.reason}")
    why = f"{summary.reason}, {TRIES} times. Is the machine busy?"
    if not tuning.race.times:
        raise NetworkInvalid(f"{name}: {why} What was measured is in {tuning.folder}")
    _drop(name, why, tuning, progress)


def _drop(name: str, why: str, tuning: Tuning, progress: Progress) -> None:
    tuning.dropped[name] = why
    progress.stage(f"dropped: {why}")


def trial(spec: RunSpec, mode: str, number: int, experiment: str) -> RunSpec:
    """The run that times one candidate; nobody asks what it has learnt."""
    values = spec.model_dump(mode="json", by_alias=True)
    own = {"mode": mode, "experiment": experiment, "name": f"{number:03d}-{run_name(mode, spec.nodes)}"}
    return RunSpec.load(values | own | {"evaluate": "never"}, where="")


def check_file(path: Path) -> None:
    """Refuse before the search what could not be written after it."""
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}. Make it, or give another.")
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise UsageError(f"--out {path}: exists and was not written by `testbed tune`. Give another.")


def write_file(path: Path, tuning: Tuning, place: Place) -> None:
    """The winner as an experiment, beside what one would have taken without it."""
    leader = tuning.race.leader()
    told = (
        f"{tuning.race.centre(leader):.3f} s/iter, {100 * tuning.sure:.0f} % sure, {tuning.runs} runs on {place.name}"
    )
    base = tuning.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    base = {key: value for key, value in base.items() if key not in ("mode", "name", "experiment", "schema", "steps")}
    plain = [name for name in tuning.race.times if name == str(first_mode(tuning.spec.mode))]
    modes = dict.fromkeys([*plain, *tuning.reference, leader])
    lines = [
        f"{MARK}: {told}.",
        f"title = {json.dumps(f'Is {leader} the fastest here?')}",
        "",
        "[base]",
        *(f"{key} = {_toml(value)}" for key, value in base.items()),
        "",
        "[axes]",
        f"mode = {_toml(list(modes))}",
    ]
    write_whole(path, "\n".join(lines))


def _toml(value: Any) -> str:
    """A value on one line; text, numbers and truth are spelled as in JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items() if inner is not None) + " }"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def open_tuning(spec: RunSpec) -> Tuning:
    """A search with a folder of its own."""
    first_mode(spec.mode)
    return Tuning(spec, runs_dir() / f"tune-{time.strftime('%Y%m%d-%H%M%S')}")


# `testbed tune`: search, say what was found, write it down.

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
