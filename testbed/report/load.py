"""Read run folders.

A folder may come from another user. A damaged folder is skipped with one sentence on the reason, without a traceback.
The order of this file: one rank's steps as columns, a run, and all runs below some paths. Runs with injected faults
are read with every step and every fault on one clock (`read_faulted`).

The parts of a step (all in seconds, as one rank measured them):

    step    = compute + copies + exposed + rest
    busy    = exposed + hidden            time in which at least one buffer was in flight
    compute = data + forward + backward + update, without the stalls and copies inside the first three
    copies  = copying gradients to or from the buffers that are sent, and the mode's hooks
    exposed = the loop waited for communication
    rest    = the loop's own bookkeeping, and other work inside `sync`

Exposed and copies are sums that the rank recorded; compute and rest are calculated from recorded intervals. So the
report checks that the parts add up to the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testbed.results.conclude import Summary, faulted_steps, sampled_steps
from testbed.results.faults import Event, FaultHistory, TimedStep, fault_table, read_history
from testbed.results.folder import (
    EXPERIMENT,
    MAX_JSON_BYTES,
    MAX_RECORDS_BYTES,
    RunFolder,
    check_size,
    find_runs,
    read_bounded,
    read_json,
)
from testbed.results.receipt import Network, read_network
from testbed.results.records import End, Eval, Record, Start, Step, read
from testbed.results.table import row_note
from testbed.results.theory import Load, observed_load
from testbed.results.timeline import CONTINUED
from testbed.spec.errors import SpecError, TestbedError, one_line
from testbed.spec.experiment import Experiment
from testbed.spec.run import RunSpec
from testbed.spec.units import Interval, covered_length

Column = NDArray[np.float64]
Span = tuple[float, float]  # offset from the begin of the step, length; seconds
COMPUTING = ("data", "forward", "backward")
SECOND_HALF = (" gather", " down")  # endings of buffer names: the second half of a synchronisation
NUMBERS = (
    *("step", "epoch", "at", "data", "forward", "backward", "sync", "update", "total"),
    *("blocked", "busy", "hidden", "copies", "copies_cpu", "observing", "kernel"),
)
OTHERS = ("loss", "images", "sent", "received", "cpu", "attempt")


@dataclass(frozen=True)
class Comm:
    """The communication of one buffer, as one rank recorded it."""

    name: str
    offset: float
    seconds: float
    size: int  # bytes of the buffer on this rank

    @property
    def continued(self) -> bool:
        """True for the second part of a transfer that was still running when the step before ended."""
        return self.name.endswith(CONTINUED)

    @property
    def buffer(self) -> str:
        """The name without the suffix CONTINUED."""
        return self.name.removesuffix(CONTINUED)

    @property
    def first_half(self) -> bool:
        """True for one transfer of each buffer in a synchronisation: not for its way back, not for its continuation."""
        return not self.name.endswith((CONTINUED, *SECOND_HALF))


@dataclass(frozen=True)
class Steps:
    """One rank's steps as columns of equal length, one entry per step."""

    step: Column
    epoch: Column
    at: Column
    data: Column
    forward: Column
    backward: Column
    sync: Column
    update: Column
    total: Column
    blocked: Column
    busy: Column
    hidden: Column
    copies: Column
    copies_cpu: Column
    observing: Column
    kernel: Column
    loss: Column
    images: Column
    sent: Column  # bytes, cumulative; nan if they are not counted
    received: Column
    cpu: Column  # processor time of the loop's own thread while it computed; nan if not recorded
    attempt: Column  # number of the earlier attempt that did the step; nan if the last attempt did it
    phases: list[list[tuple[str, float, float]]]
    comm: list[list[Comm]]
    stalls: list[list[Span]]
    copying: list[list[Span]]

    @classmethod
    def of(cls, records: Sequence[Step], where: str) -> Steps:
        """Return the columns of the step records of rankN.jsonl. Raise SpecError for a negative or infinite time."""
        columns = {key: _column(records, key) for key in (*NUMBERS, *OTHERS)}
        for key in NUMBERS:
            if not (np.isfinite(columns[key]).all() and (columns[key] >= 0).all()):
                raise SpecError(f"{where}: {key} has a value that is negative or not a number. The file is damaged")
        if len(records) > 1 and not (np.diff(columns["step"]) == 1).all():
            raise SpecError(f"{where}: steps are missing or out of order. The file is damaged")
        return cls(
            **columns,
            phases=[record.phases for record in records],
            comm=[[Comm(*buffer) for buffer in record.comm] for record in records],
            stalls=[record.stalls for record in records],
            copying=[record.copying for record in records],
        )

    @property
    def last(self) -> int:
        """The number of the last step; -1 without any."""
        return int(self.step[-1]) if len(self.step) else -1

    @property
    def numbers(self) -> list[int]:
        return [int(number) for number in self.step]

    def only(self, wanted: Callable[[int], bool]) -> Steps:
        """Return only the steps for whose number `wanted` returns True."""
        chosen = [k for k, number in enumerate(self.numbers) if wanted(number)]
        columns: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, column in columns.items():
            columns[name] = column[chosen] if isinstance(column, np.ndarray) else [column[k] for k in chosen]
        return replace(self, **columns)

    @property
    def compute(self) -> Column:
        """Seconds of computing, without waits and copies."""
        whole = self.data + self.forward + self.backward + self.update
        return whole - self._inside(COMPUTING, self.stalls) - self._copied_inside(COMPUTING)

    @property
    def work(self) -> Column:
        """Processor time of computing, without update, copies, page faults and interrupts; nan if not recorded."""
        return self.cpu - self.copies_cpu - self.kernel

    @property
    def rest(self) -> Column:
        """Seconds that are neither computing, copying nor waiting."""
        between = self.total - (self.data + self.forward + self.backward + self.sync)
        copied = self.copies - self._copied_inside(COMPUTING)
        return between + (self.sync - self.update - self.blocked_in_sync) - copied

    @property
    def blocked_in_sync(self) -> Column:
        """Seconds of the sync phase in which the loop was blocked."""
        return self._inside(("sync",), self.stalls)

    def _copied_inside(self, names: Sequence[str]) -> Column:
        """Return the seconds of copying in these phases, without time that was also recorded as blocked."""
        pairs = zip(self.copying, self.stalls, strict=True)
        both = [[*copies, *stalls] for copies, stalls in pairs]
        return self._inside(names, both) - self._inside(names, self.stalls)

    def _inside(self, names: Sequence[str], spans: list[list[Span]]) -> Column:
        """Return for each step the seconds of the spans inside phases of these names. Overlaps count once."""
        rows = zip(self.phases, spans, strict=True)
        return np.array([_overlap(phases, own, names) for phases, own in rows], dtype=np.float64)


def _overlap(phases: list[tuple[str, float, float]], own: list[Span], names: Sequence[str]) -> float:
    within = [(begin, begin + seconds) for name, begin, seconds in phases if name in names]
    cut = [(max(begin, a), min(end, a + seconds)) for begin, end in within for a, seconds in own]
    return covered_length([(a, b) for a, b in cut if a < b])


def _column(records: Sequence[Step], key: str) -> Column:
    """Return the values of one key of all records. None becomes nan."""
    values = (getattr(record, key) for record in records)
    return np.array([float("nan") if value is None else value for value in values], dtype=np.float64)


# Exceptions that a damaged file can cause. Any other exception is a bug of this module and is not caught.
DAMAGE = (TestbedError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


@dataclass(frozen=True)
class Rank:
    """The records of one rank."""

    number: int
    start: Start | None  # None: the rank failed before its first record
    steps: Steps
    evals: list[Eval]
    end: End | None  # None: the rank did not finish
    profile: dict[str, float]  # shares that torch.profiler measured; empty if it was off
    records: list[Record] = field(default_factory=list)  # all records of a user's script, else empty


@dataclass(frozen=True)
class LoadedRun:
    """One run folder."""

    folder: RunFolder
    summary: Summary
    ranks: list[Rank]
    network: Network
    under_fault: dict[int, list[str]] = field(default_factory=dict)  # step -> kinds of the injected faults

    @property
    def spec(self) -> RunSpec:
        return self.summary.spec

    @cached_property
    def counted(self) -> list[Steps]:
        """Each rank's steps without warm-up and faults, up to the last step that every rank finished."""
        last = min((rank.steps.last for rank in self.ranks), default=-1)
        counts = range(self.spec.warmup, last + 1)
        return [rank.steps.only(lambda n: n in counts and n not in self.under_fault) for rank in self.ranks]

    @cached_property
    def sampled(self) -> set[int]:
        """Steps of a user's script that are longer because the observer took samples."""
        rows = [zip(s.numbers, s.observing.tolist(), s.total.tolist(), strict=True) for s in self.counted]
        return sampled_steps([list(each) for each in rows])

    @cached_property
    def kept(self) -> list[Steps]:
        """Each rank's steps whose times count: `counted` without `sampled`."""
        return [steps.only(lambda n: n not in self.sampled) for steps in self.counted]

    @cached_property
    def observed(self) -> list[list[Load]] | None:
        """The load of every counted step on each rank's link, for a user's script; None if it is not known."""
        if self.spec.script is None:
            return None
        loads = [
            [
                observed_load([(c.name, c.offset, c.seconds, c.size) for c in comm], rank.number, self.spec.world)
                for comm in steps.comm
            ]
            for rank, steps in zip(self.ranks, self.counted, strict=True)
        ]
        known = [[load for load in row if load is not None] for row in loads]
        return known if all(len(a) == len(b) for a, b in zip(known, loads, strict=True)) else None

    def images(self, rank: int) -> float:
        """Return a rank's images per step: as requested, or as a user's script fetched them; 0 if none was seen."""
        if self.spec.script is None:
            return float(self.spec.local_batch(rank))
        return float(self.kept[rank].images.mean()) if len(self.kept[rank].images) else 0.0

    @property
    def measured(self) -> bool:
        """False if no step counts, because all were under an injected fault."""
        return len(self.kept[0].total) > 0

    @property
    def gradient(self) -> float:
        """Bytes of the whole gradient, before any codec."""
        start = self.ranks[0].start
        return float(start.gradient_bytes) if start else 0.0

    @cached_property
    def buffers(self) -> tuple[float, float]:
        """The number of buffers of one synchronisation, and S, the sum of their bytes, as rank 0 recorded them."""
        if not self.spec.mode.is_script:
            steps = [list({c.name: c.size for c in comm if c.first_half}.values()) for comm in self.kept[0].comm]
        else:  # one line of a script may make several collectives
            steps = [[c.size for c in comm if not c.continued] for comm in self.kept[0].comm]
        busy = [(len(sizes), float(sum(sizes))) for sizes in steps if sizes]
        if not busy:
            return (1.0, self.gradient)
        return statistics.median(count for count, _ in busy), statistics.median(size for _, size in busy)


@dataclass(frozen=True)
class Skipped:
    """A folder that is left out of all tables, and the reason."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Loaded:
    """The content of all run folders below some paths."""

    runs: list[LoadedRun]
    skipped: list[Skipped]
    experiments: dict[str, Experiment]  # by name; a sweep writes its experiment to the folder of its runs
    faulted: list[FaultedRun]  # runs with injected faults, whatever their status
    unmeasured: list[LoadedRun] = field(default_factory=list)  # no step counts: all were under a fault


def load(paths: Sequence[Path]) -> Loaded:
    """Return all runs below the paths, sorted by name. Numbers inside names are compared as numbers."""
    runs: list[LoadedRun] = []
    skipped: list[Skipped] = []
    experiments: dict[str, Experiment] = {}
    faulted: list[FaultedRun] = []
    unmeasured: list[LoadedRun] = []
    distinct: dict[Path, Path] = {}  # real path -> path, because two paths may lead to one folder
    for path in (found for named in paths for found in find_runs(named)):
        distinct.setdefault(path.resolve(), path)
    for path in distinct.values():
        try:
            history = read_faulted(RunFolder(path))
            faulted += [history] if history else []
            run = read_run(RunFolder(path))
        except DAMAGE as error:
            skipped.append(Skipped(path, sentence(error)))
            continue
        if not run.measured:
            skipped.append(Skipped(path, f"no figure: {row_note([run.summary])}"))
            unmeasured.append(run)
            continue
        runs.append(run)
        _read_experiment(run, experiments)
    return Loaded(runs, skipped, experiments, faulted, unmeasured)


def read_run(folder: RunFolder, whole: bool = True) -> LoadedRun:
    """Read a run folder. With `whole`, raise SpecError if the run has not ended with status "ok"."""
    spec = folder.read_spec()
    if not folder.summary.is_file():
        raise SpecError("the folder has no summary.json: the run has not ended, or it was killed")
    summary = Summary.read(folder)
    if whole and summary.status != "ok":
        raise SpecError(f"{summary.status}: {summary.reason or 'no reason given'}")
    if summary.spec != spec:
        raise SpecError("spec.json and summary.json are of different runs")
    folder.check_no_links(allow_top=True)
    ranks = [_read_rank(folder, rank, whole, spec) for rank in range(spec.world)]
    faults = faulted_steps(folder, spec, [_timed(rank.steps) for rank in ranks], summary.one_clock)
    run = LoadedRun(folder, summary, ranks, read_network(folder.receipt, spec), faults)
    if whole and not run.measured and not faults:
        raise SpecError("no step is left after warm-up")
    return run


def _timed(steps: Steps) -> list[TimedStep]:
    rows = zip(steps.numbers, steps.at.tolist(), (steps.at + steps.total).tolist(), steps.attempt.tolist(), strict=True)
    return [TimedStep(n, begin, end, None if np.isnan(attempt) else int(attempt)) for n, begin, end, attempt in rows]


def _read_rank(folder: RunFolder, rank: int, whole: bool, spec: RunSpec) -> Rank:
    path = folder.records(rank)
    check_size([path], MAX_RECORDS_BYTES)
    records = list(read(path))
    start = next((record for record in records if isinstance(record, Start)), None)
    end = next((record for record in reversed(records) if isinstance(record, End)), None)
    if whole and not (start and end):
        raise SpecError(f"{path.name} has no {'end' if start else 'start'}: rank {rank} did not finish")
    steps = Steps.of([record for record in records if isinstance(record, Step)], path.name)
    if spec.emulated:  # emulated ranks sleep, which takes no processor time
        steps = replace(steps, cpu=np.full_like(steps.cpu, np.nan))
    evals = [record for record in records if isinstance(record, Eval)]
    return Rank(rank, start, steps, evals, end, _read_profile(folder, rank), records if spec.script else [])


def _read_profile(folder: RunFolder, rank: int) -> dict[str, float]:
    path = folder.profile(rank)
    if not path.is_file():
        return {}
    values = read_json(path)
    return {str(key): float(value) for key, value in values.items() if isinstance(value, int | float)}


def _read_experiment(run: LoadedRun, known: dict[str, Experiment]) -> None:
    """Add the experiment that the sweep wrote to the folder of its runs to `known`. Ignore a damaged file."""
    name, path = run.spec.experiment, run.folder.path.parent / EXPERIMENT
    if name in known or not path.is_file():
        return
    try:
        known[name] = Experiment.model_validate_json(read_bounded(path, MAX_JSON_BYTES))
    except DAMAGE:
        return


def sentence(error: BaseException) -> str:
    """Return an error as one line. Control characters are replaced, because the line may quote the file."""
    text = one_line(next(iter(str(error).splitlines()), "")) or type(error).__name__
    return f"damaged ({type(error).__name__}: {text})" if not isinstance(error, TestbedError) else text


@dataclass(frozen=True)
class Episode:
    """One fault, from its begin to its end. `end` is None for a fault that was not undone."""

    fault: str
    rank: int
    begin: float
    end: float | None


@dataclass(frozen=True)
class FaultedRun:
    """One run with faults, with any status, as the report draws it."""

    folder: RunFolder
    summary: Summary
    history: FaultHistory
    row: tuple[str, ...]  # of the table of faults
    episodes: list[Episode]
    noticed: list[tuple[int, float]]  # rank, time at which it ended because it lost another rank
    ended: list[tuple[int, float, int]]  # rank, time, exit code
    steps: list[list[Interval]]  # begin and end of every step of each rank, of all attempts
    one_clock: bool  # False on real hosts

    @property
    def spec(self) -> RunSpec:
        return self.summary.spec


def read_faulted(folder: RunFolder) -> FaultedRun | None:
    """Return a run with faults; None if no fault was requested, or the run did not begin. Raise SpecError."""
    if not folder.faults.is_file() or not folder.summary.is_file():
        return None
    folder.check_no_links(allow_top=True)
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
        one_clock=summary.one_clock,
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
    """Return begin and end of every step of a rank, also of failed attempts."""
    paths = [*folder.attempts(rank).values(), folder.records(rank)]
    check_size((path for path in paths if path.is_file()), MAX_RECORDS_BYTES)
    steps = [record for path in paths for record in read(path) if isinstance(record, Step)]
    return [(step.at, step.at + step.total) for step in steps]
