"""Search for the bucket size and schedule with the shortest step, for this model on this network, by measuring.

The search is a series of rounds of short runs. The first round tries every schedule with bucket sizes a factor of
four apart. Each later round repeats the faster candidates and those that may still be the fastest, one run each in
turn, and tries half and twice the bucket size of the leader. The search ends when the leader is certain enough
(statistics.py) and has no untried neighbour, or when the time is over.

The spec may have a script of the user's: then every candidate replaces its synchronisation (`testbed exec --instead`),
and the script itself, with its own, is the reference.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.control.runs.nodes import NodesOfRuns, shared_nodes
from testbed.control.runs.progress import Progress
from testbed.control.runs.run import execute
from testbed.control.runs.select import SubstrateChoice
from testbed.control.tuning.statistics import MIN_PROBABILITY, REQUIRED_CERTAINTY, SPREAD, TOLERANCE, Race
from testbed.results.folder import RunFolder, fresh_folder, runs_dir, write_whole
from testbed.results.table import format_table
from testbed.spec.errors import (
    AllocationLost,
    EngineLost,
    Interrupted,
    NetworkInvalid,
    SpecError,
    TestbedError,
    UsageError,
    refuse,
)
from testbed.spec.experiment import run_name
from testbed.spec.mode import REFERENCE, SCHEDULES, SCRIPT, SyncMode
from testbed.spec.run import RunSpec
from testbed.spec.script import command_line
from testbed.spec.units import format_size

FIRST_LINE = "# Written by `testbed tune`"  # a file that begins so may be overwritten
MIN_BUCKET_BYTES = 4 << 10  # smaller messages are mostly overhead
FIRST_FRACTIONS = (32, 8, 2)  # the first bucket sizes are the gradient divided by these
MAX_RUNS = 8  # of one candidate
MAX_TRIES = 3  # of one run, until the network is the requested one
BAR_WIDTH = 30  # characters of the bar of the slowest candidate


@dataclass
class Search:
    """What is searched, and everything that was found so far."""

    spec: RunSpec
    folder: Path
    out: Path = Path("tuned.toml")
    options: Sequence[str] = ()  # of `testbed exec`, with which the winner is used
    race: Race = field(default_factory=Race)
    gradient: int = 0  # bytes; known after the first run
    runs: int = 0
    dropped: dict[str, str] = field(default_factory=dict)  # candidate -> reason
    round: list[str] = field(default_factory=list)  # candidates of the current round
    ended: str = "interrupted"
    written: bool = False  # whether the experiment file `out` has been written

    @property
    def certainty(self) -> float:
        """The probability that no candidate is faster than the leader by more than the tolerance."""
        return self.race.probability_best()[self.race.leader()]

    @property
    def reference(self) -> list[str]:
        """DDP with its default buckets, or the script itself, if it was timed."""
        if self.spec.script is not None:
            return [SCRIPT] if SCRIPT in self.race.times else []
        modes = (SyncMode.parse(name) for name in self.race.times)
        return [str(mode) for mode in modes if mode.is_reference and not mode.bucket]

    @property
    def untried(self) -> list[str]:
        """Candidates of the current round that have not run."""
        return [name for name in self.round if name not in self.race.times and name not in self.dropped]


def new_search(spec: RunSpec, out: Path, options: Sequence[str] = ()) -> Search:
    """Return a search with its own folder. Raises UsageError or SpecError for what cannot be tuned or written."""
    if spec.script is None:
        _check_file(out)
    first_mode(spec.mode)
    return Search(spec, fresh_folder(runs_dir(), "tune"), out, options)


def _check_file(out: Path) -> None:
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}. Make it, or give another file.")
    if out.exists() and not out.read_text(encoding="utf-8", errors="replace").startswith(FIRST_LINE):
        raise UsageError(f"--out {out}: exists and was not written by `testbed tune`. Give another file.")


def tune_modes(search: Search, choice: SubstrateChoice, progress: Progress, timeout_s: float) -> None:
    """Run rounds until the leader is certain enough, then write the experiment file.

    `search` has the results also if this raises or is interrupted.
    """
    with shared_nodes(choice, progress.stage) as nodes:
        begun, start = time.monotonic(), str(first_mode(search.spec.mode))

        def run_round(names: list[str], number: int) -> bool:
            return _run_round(names, number, search, choice, progress, begun + timeout_s, nodes)

        run_round([start], 1)
        names, number = candidates(SyncMode.parse(start), search.gradient), 2
        if search.spec.script is not None:
            names.insert(0, SCRIPT)
        while names:
            if not run_round(names, number):
                search.ended = f"time is up ({timeout_s / 60:g} minutes)"
                break
            names, number = _next_round(search), number + 1
        else:
            rest = " or was dropped" if search.dropped else ""
            limit = f"each candidate that could be the fastest had {MAX_RUNS} runs{rest}"
            search.ended = "certain enough" if search.certainty >= REQUIRED_CERTAINTY else limit
    if search.spec.script is None:
        write_experiment(search, choice)


# What is tried


def first_mode(mode: SyncMode) -> SyncMode:
    """Return the first candidate: one flat buffer after backward. SpecError if `mode` has a bucket or a schedule."""
    if mode.granularity == "bucket" or mode.schedule != "after" or mode.every > 1:
        rule = "granularity and schedule are what `testbed tune` searches"
        raise refuse("mode", str(mode), rule, "Give the algorithm alone, or with a codec: ring, direct/int8.")
    if mode.silent:
        raise refuse("mode", str(mode), "has nothing to tune", "Use ring.")
    words = [mode.algorithm, *(["flat"] if not mode.is_reference else []), *_codec(mode)]
    return SyncMode.parse("/".join(words))


def candidates(mode: SyncMode, gradient: int) -> list[str]:
    """Return the second round: the reference, and every legal schedule with bucket sizes a factor of four apart."""
    sizes = [max(MIN_BUCKET_BYTES, _power_of_two_below(gradient // fraction)) for fraction in FIRST_FRACTIONS]
    schedules = [[]] if mode.is_reference else [[name] for name in SCHEDULES if name != "after"]
    words = [(REFERENCE, *_codec(mode))]
    words += [(mode.algorithm, f"bucket:{format_size(s)}", *w, *_codec(mode)) for w in schedules for s in sizes]
    return [name for name in dict.fromkeys(_legal(words)) if name != str(mode)]


def neighbours(mode: SyncMode, gradient: int) -> list[str]:
    """Return the mode with half and with twice the bucket size, between MIN_BUCKET_BYTES and the whole gradient."""
    if mode.bucket is None:
        return []
    sizes = [size for size in (mode.bucket // 2, mode.bucket * 2) if MIN_BUCKET_BYTES <= size < gradient]
    schedule = [mode.schedule] if mode.schedule != "after" else []
    return list(_legal([(mode.algorithm, f"bucket:{format_size(s)}", *schedule, *_codec(mode)) for s in sizes]))


def _next_round(search: Search) -> list[str]:
    """Return the candidates of the next round.

    These are the untried neighbours of the leader, the candidates whose next run is due and, until the leader is
    certain enough, every candidate that may still be the fastest. The search ends when there are none.
    """
    race, leader = search.race, search.race.leader()
    untried = [name for name in neighbours(SyncMode.parse(leader), search.gradient) if name not in race.times]
    probability = race.probability_best()
    possible = [name for name in race.times if name == leader or probability[name] >= MIN_PROBABILITY]
    doubtful = [] if probability[leader] >= REQUIRED_CERTAINTY else possible
    again = [name for name in dict.fromkeys([*race.due(), *doubtful]) if len(race.times[name]) < MAX_RUNS]
    return [name for name in [*untried, *again] if name not in search.dropped]


def _codec(mode: SyncMode) -> list[str]:
    return [str(mode).rpartition("/")[2]] if mode.codec else []


def _power_of_two_below(size: int) -> int:
    return 1 << max(0, size.bit_length() - 1)


def _legal(words: list[tuple[str, ...]]) -> Iterator[str]:
    for each in words:
        with contextlib.suppress(SpecError):
            yield str(SyncMode.parse("/".join(each)))


# The runs


def _run_round(
    names: list[str],
    number: int,
    search: Search,
    choice: SubstrateChoice,
    progress: Progress,
    until: float,
    nodes: NodesOfRuns,
) -> bool:
    """Run each candidate once; False if the time is over. Raises TestbedError if no candidate is left."""
    search.round = names
    for turn, name in enumerate(names, start=1):
        if time.monotonic() > until and search.race.times:
            return False
        best = ""
        if search.race.times:
            leader = search.race.leader()
            best = f"; best so far {leader}, {search.race.centre(leader):.3f} s"
        progress.headline(f"[round {number}, {turn}/{len(names)}] {name}{best}")
        _run_candidate(name, search, choice, progress, nodes)
    if not search.race.times:
        raise TestbedError(
            "no candidate could be timed: " + "; ".join(f"{n} failed: {why}" for n, why in search.dropped.items())
        )
    return True


def _run_candidate(name: str, search: Search, choice: SubstrateChoice, progress: Progress, nodes: NodesOfRuns) -> None:
    """Time one run of a candidate.

    A candidate that fails is dropped together with its earlier times; nodes that are lost end the search. If the
    network is not as requested MAX_TRIES times, the candidate is dropped and keeps its earlier times; NetworkInvalid
    is raised if nothing was timed yet.
    """
    for _ in range(MAX_TRIES):
        search.runs += 1
        spec = trial(search.spec, name, search.runs, search.folder.name)
        try:
            summary = execute(spec, choice, RunFolder(search.folder / spec.name), progress, nodes=nodes)
        except (Interrupted, AllocationLost, EngineLost):  # without its nodes no other candidate can start
            raise
        except TestbedError as error:
            if isinstance(error, UsageError) and not (search.spec.script is not None and search.race.times):
                raise  # but once a mode could replace a script's synchronisation, a refusal is of one candidate alone
            search.race.times.pop(name, None)  # a mode that fails sometimes must not become the leader
            search.dropped[name] = str(error)
            progress.stage(f"dropped: {error}")
            return
        if summary.status == "ok" and summary.seconds_per_step:
            search.gradient = summary.gradient_bytes or 0
            search.race.add(name, summary.seconds_per_step)
            return
        progress.stage(f"does not count: {summary.reason}")
    why = f"{summary.reason}, {MAX_TRIES} times. Stop other work on this machine."
    if not search.race.times:
        raise NetworkInvalid(f"{name}: {why} What was measured is in {search.folder}")
    search.dropped[name] = why
    progress.stage(f"dropped: {why}")


def trial(spec: RunSpec, mode: str, number: int, experiment: str) -> RunSpec:
    """Return the spec of a run that times one candidate, without evaluation."""
    own = {"experiment": experiment, "name": f"{number:03d}-{run_name(mode, spec.nodes)}", "evaluate": "never"}
    return RunSpec.load(spec.model_dump(mode="json", by_alias=True) | own | {"mode": mode}, where="")


# The result


def write_experiment(search: Search, choice: SubstrateChoice) -> None:
    """Write an experiment file that compares the winner with the first candidate and the reference."""
    leader = search.race.leader()
    certainty = f"the fastest with a probability of {100 * search.certainty:.0f} %"
    facts = f"{search.race.centre(leader):.3f} s/iter, {certainty}, {search.runs} runs on {choice.name}"
    base = search.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    base = {key: value for key, value in base.items() if key not in ("mode", "name", "experiment", "schema", "steps")}
    first = [name for name in search.race.times if name == str(first_mode(search.spec.mode))]
    lines = [
        f"{FIRST_LINE}: {facts}.",
        f"title = {json.dumps(f'Is {leader} the fastest here?')}",
        "",
        "[base]",
        *(f"{key} = {_toml(value)}" for key, value in base.items()),
        "",
        "[axes]",
        f"mode = {_toml(list(dict.fromkeys([*first, *search.reference, leader])))}",
    ]
    write_whole(search.out, "\n".join(lines))
    search.written = True


def _toml(value: Any) -> str:
    """A TOML value on one line; strings, numbers and booleans are written as in JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items() if inner is not None) + " }"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def curve(search: Search) -> str:
    """Return a table with a row per candidate and a bar whose length is the time of a step."""
    race, probability = search.race, search.race.probability_best()
    best, slowest = race.centre(race.leader()), max(race.centre(name) for name in race.times)
    header = ("mode", "s/iter", "95 % interval", "runs", "/ best", "chance", "")
    rows = []
    for name in sorted(race.times, key=_order):
        low, high = race.interval(name)
        seconds = race.centre(name)
        bar = "#" * max(1, round(BAR_WIDTH * seconds / slowest))
        figures = (f"{seconds:.3f}", f"{low:.3f}-{high:.3f}", str(len(race.times[name])), f"{seconds / best:.2f}")
        rows.append((name, *figures, _percent(probability[name]), bar.ljust(BAR_WIDTH)))
    return format_table(header, rows)


def conclusion(search: Search) -> list[str]:
    """Return lines about the winner, its certainty, what was dropped or not tried, and the folder."""
    race, leader = search.race, search.race.leader()
    low, high = race.interval(leader)
    won = "best so far" if search.untried else "winner"
    certainty = f"{_percent(search.certainty)} sure that nothing tried is more than {_percent(TOLERANCE)} faster"
    lines = [
        f"{won}: {_named(search, leader)}, {race.centre(leader):.3f} s/iter (95 %: {low:.3f} to {high:.3f})",
        f"{certainty}; {search.runs} runs; ended: {search.ended}",
    ]
    for name in search.reference:
        if name != leader:
            lines.append(f"{_named(search, name)} takes {race.centre(name) / race.centre(leader):.2f} times as long")
    if not race.repeated():
        lines.append(
            f"every candidate ran only once: a spread of {_percent(SPREAD)} between runs is assumed, not measured"
        )
    if search.untried:
        lines.append(f"not tried: {', '.join(search.untried)}")
    lines += [f"dropped: {name}: {why}" for name, why in search.dropped.items()]
    lines.append(f"all files are in {search.folder}")
    if use := command(search):
        lines.append(f"use it: {use}")
    return lines + ([f"compare them in longer runs: testbed sweep {search.out}"] if search.written else [])


def command(search: Search) -> str:
    """The command that runs the script with the winner; empty if it is no script, or is the fastest by itself."""
    leader = search.race.leader()
    if search.spec.script is None or leader == SCRIPT:
        return ""
    return command_line(["testbed", "exec", "--instead", leader, *search.options, "--", *search.spec.script.argv])


def _named(search: Search, name: str) -> str:
    """A candidate in words: the script with its own synchronisation has no mode of ours."""
    return f"{search.spec.script.name} itself" if search.spec.script is not None and name == SCRIPT else name


def document(search: Search) -> dict[str, Any]:
    """Return the result as one JSON document."""
    race, probability = search.race, search.race.probability_best()
    points = []
    for name in sorted(race.times, key=_order):
        low, high = race.interval(name)
        found = {"seconds_per_step": race.centre(name), "low": low, "high": high, "chance": probability[name]}
        points.append({"mode": name, **found, "runs": race.times[name]})
    facts = {"winner": race.leader(), "sure": search.certainty, "tolerance": TOLERANCE, "ended": search.ended}
    where: dict[str, str | None] = {"file": str(search.out) if search.written else None, "folder": str(search.folder)}
    where |= {"command": command(search)} if search.spec.script is not None else {}
    return {**facts, "curve": points, "dropped": search.dropped, "untried": search.untried, **where}


def _order(name: str) -> tuple[str, str, int]:
    """Return the sort key of a mode: schedule, algorithm, bucket size."""
    mode = SyncMode.parse(name)
    return "" if mode.is_reference else mode.schedule, mode.algorithm, mode.bucket or 0


def _percent(share: float) -> str:
    """Return a probability in percent, at most "> 99 %": a few runs cannot prove certainty."""
    return f"{100 * share:.0f} %" if share < 0.995 else "> 99 %"
