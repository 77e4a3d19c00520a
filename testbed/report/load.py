"""Run folders in, runs out. A folder that cannot be read is named with the reason and skipped; nothing else is trusted.

Folders may come from strangers: whatever is wrong with a file is one sentence about its folder, never a traceback.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from testbed.results.conclude import Summary
from testbed.results.faults import FaultedRun, read_faulted
from testbed.results.folder import (
    EXPERIMENT,
    MAX_JSON_BYTES,
    MAX_RECORDS_BYTES,
    RunFolder,
    check_size,
    read_bounded,
    read_json,
)
from testbed.results.receipt import Network, read_network
from testbed.results.records import CONTINUED, End, Eval, Start, Step, read
from testbed.spec.errors import SpecError, TestbedError, one_line
from testbed.spec.experiment import Experiment
from testbed.spec.run import RunSpec

# Steps: one rank's steps as columns, and the one arithmetic that splits a step.
#
# step    = compute + exposed + rest           a check: exposed is what the rank summed up, the others use its intervals
# busy    = exposed + hidden                   seconds in which at least one buffer was on its way
# compute = data + forward + backward + update, less the stalls that lie inside the first three
# rest    = the loop's own book-keeping, and work inside `sync` that is neither update nor a stall

Column = NDArray[np.float64]
Interval = tuple[float, float]  # offset from the step's begin, seconds
COMPUTING = ("data", "forward", "backward")
WAY_BACK = (" gather", " down")  # how the name of a buffer ends whose way there has a name of its own
NUMBERS = ("step", "epoch", "at", "data", "forward", "backward", "sync", "update", "total", "blocked", "busy", "hidden")


@dataclass(frozen=True)
class Comm:
    """One buffer's way through the network, as one rank saw it."""

    name: str
    offset: float
    seconds: float
    size: int  # bytes of the buffer on this rank

    @property
    def continued(self) -> bool:
        """The rest of a flight that the end of the step before cut in two."""
        return self.name.endswith(CONTINUED)

    @property
    def buffer(self) -> str:
        """The name without the mark of a rest."""
        return self.name.removesuffix(CONTINUED)

    @property
    def outward(self) -> bool:
        """True once for every buffer of a synchronisation: neither a rest nor the way back."""
        return not self.name.endswith((CONTINUED, *WAY_BACK))


@dataclass(frozen=True)
class Steps:
    """Columns of equal length, one entry per step."""

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
    loss: Column
    images: Column
    sent: Column  # bytes since the start of the attempt or before, nan where nothing counts them
    received: Column
    cpu: Column  # seconds of the loop's own thread, nan where nobody recorded them
    attempt: Column  # the earlier one that did the step, nan where it was the last
    phases: list[list[tuple[str, float, float]]]
    comm: list[list[Comm]]
    stalls: list[list[Interval]]

    @classmethod
    def of(cls, records: Sequence[Step], where: str) -> Steps:
        """From the lines of rankN.jsonl; times that no clock can show are refused."""
        columns = {
            key: _column(records, key) for key in (*NUMBERS, "loss", "images", "sent", "received", "cpu", "attempt")
        }
        for key in NUMBERS:
            if not (np.isfinite(columns[key]).all() and (columns[key] >= 0).all()):
                raise SpecError(f"{where}: {key} has a value that is negative or no number. The file is damaged")
        if len(records) > 1 and not (np.diff(columns["step"]) == 1).all():
            raise SpecError(f"{where}: steps are missing or out of order. The file is damaged")
        return cls(
            **columns,
            phases=[record.phases for record in records],
            comm=[[Comm(*buffer) for buffer in record.comm] for record in records],
            stalls=[record.stalls for record in records],
        )

    @property
    def last(self) -> int:
        """The number of the last step, -1 without any."""
        return int(self.step[-1]) if len(self.step) else -1

    def between(self, first: int, last: int) -> Steps:
        """Only the steps first..last, both included."""
        chosen = [k for k, number in enumerate(self.step) if first <= number <= last]
        cut = slice(chosen[0], chosen[-1] + 1) if chosen else slice(0, 0)
        return replace(self, **{field.name: getattr(self, field.name)[cut] for field in fields(self)})

    @property
    def blocked_in_sync(self) -> Column:
        """Seconds of the sync phase in which the loop was blocked."""
        return self._blocked_in(("sync",))

    def _blocked_in(self, names: Sequence[str]) -> Column:
        pairs = zip(self.phases, self.stalls, strict=True)
        return np.array([_blocked_in(phases, stalls, names) for phases, stalls in pairs], dtype=np.float64)

    @property
    def compute(self) -> Column:
        return self.data + self.forward + self.backward + self.update - self._blocked_in(COMPUTING)

    @property
    def rest(self) -> Column:
        between = self.total - (self.data + self.forward + self.backward + self.sync)
        return between + (self.sync - self.update - self.blocked_in_sync)


def _blocked_in(phases: list[tuple[str, float, float]], stalls: list[Interval], names: Sequence[str]) -> float:
    spans = [(begin, begin + seconds) for name, begin, seconds in phases if name in names]
    return sum(
        max(0.0, min(end, offset + seconds) - max(begin, offset)) for begin, end in spans for offset, seconds in stalls
    )


def _column(records: Sequence[Step], key: str) -> Column:
    """One key of every record; None becomes nan."""
    values = (getattr(record, key) for record in records)
    return np.array([float("nan") if value is None else value for value in values], dtype=np.float64)


DEEPEST = 3  # folders below the one that was named
# What reading a stranger's file may raise; anything else is a bug of ours and must be seen.
DAMAGE = (TestbedError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


@dataclass(frozen=True)
class Rank:
    """What one rank wrote down."""

    number: int
    start: Start | None  # None: it did not get that far
    steps: Steps
    evals: list[Eval]
    end: End | None  # None: it did not finish
    profile: dict[str, float]  # shares of torch.profiler, where it was on


@dataclass(frozen=True)
class Run:
    """One run folder, read."""

    folder: RunFolder
    summary: Summary
    ranks: list[Rank]
    network: Network

    @property
    def spec(self) -> RunSpec:
        return self.summary.spec

    @cached_property
    def kept(self) -> list[Steps]:
        """Each rank's steps that count: warm-up left out, and only steps that every rank finished."""
        last = min((rank.steps.last for rank in self.ranks), default=-1)
        return [rank.steps.between(self.spec.warmup, last) for rank in self.ranks]

    @property
    def gradient(self) -> float:
        """Bytes of the whole gradient, before any codec."""
        start = self.ranks[0].start
        return float(start.gradient_bytes) if start else 0.0

    @cached_property
    def buffers(self) -> tuple[float, float]:
        """How many buffers one synchronisation takes, and S: their bytes together, as rank 0 recorded them."""
        steps = [{c.name: c.size for c in comm if c.outward} for comm in self.kept[0].comm]
        busy = [(len(sizes), float(sum(sizes.values()))) for sizes in steps if sizes]
        if not busy:
            return (1.0, self.gradient)
        return statistics.median(count for count, _ in busy), statistics.median(size for _, size in busy)


@dataclass(frozen=True)
class Skipped:
    """A folder that is in no table, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Loaded:
    """Everything that was found."""

    runs: list[Run]
    skipped: list[Skipped]
    experiments: dict[str, Experiment]  # by name; what the sweep left beside its runs
    faulted: list[FaultedRun]  # runs to which something was done on purpose, however they ended


def load(paths: Sequence[Path]) -> Loaded:
    """All runs below the paths, in the order of their names, numbers as numbers."""
    runs: list[Run] = []
    skipped: list[Skipped] = []
    experiments: dict[str, Experiment] = {}
    faulted: list[FaultedRun] = []
    for path in _distinct(folder for named in paths for folder in find(named)):
        try:
            history = read_faulted(RunFolder(path))
            faulted += [history] if history else []
            run = read_run(RunFolder(path))
        except DAMAGE as error:
            skipped.append(Skipped(path, _sentence(error)))
            continue
        runs.append(run)
        _read_experiment(run, experiments)
    return Loaded(runs, skipped, experiments, faulted)


def find(path: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """Run folders at or below a path; hidden folders (what a sweep set aside) are left alone."""
    if not path.is_dir():
        raise SpecError(f"{path}: no such folder. Give run folders, or a folder of runs such as runs/quick.")
    if _is_run(path):
        yield path
    elif depth:
        for inner in sorted(path.iterdir(), key=lambda each: natural(each.name)):
            if inner.is_dir() and not inner.name.startswith("."):
                yield from find(inner, depth - 1)


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key under which `n10` comes after `n2`."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdecimal() and len(part) < 19 else (1, 0, part) for part in parts]


def _is_run(path: Path) -> bool:
    folder = RunFolder(path)
    return folder.spec.exists() or folder.records(0).exists()


def _distinct(paths: Iterable[Path]) -> list[Path]:
    seen: dict[Path, Path] = {}
    for path in paths:
        seen.setdefault(path.resolve(), path)
    return list(seen.values())


def read_run(folder: RunFolder, whole: bool = True) -> Run:
    """A run that ended well; whatever speaks against showing it is raised. Not `whole`: what there is of any run."""
    spec = folder.read_spec()
    if not folder.summary.is_file():
        raise SpecError("it has no summary.json: the run is still going on, or it was killed")
    summary = Summary.read(folder)
    if whole and summary.status != "ok":
        raise SpecError(f"{summary.status}: {summary.reason or 'no reason given'}")
    if summary.spec != spec:
        raise SpecError("its spec.json and summary.json tell of different runs")
    folder.check_no_links(allow_top=True)
    ranks = [_read_rank(folder, rank, whole) for rank in range(spec.world)]
    run = Run(folder, summary, ranks, read_network(folder.receipt, spec))
    if whole and not len(run.kept[0].total):
        raise SpecError("no step is left after warm-up")
    return run


def _read_rank(folder: RunFolder, rank: int, whole: bool) -> Rank:
    path = folder.records(rank)
    check_size([path], MAX_RECORDS_BYTES)
    records = list(read(path))
    start = next((record for record in records if isinstance(record, Start)), None)
    end = next((record for record in reversed(records) if isinstance(record, End)), None)
    if whole and not (start and end):
        raise SpecError(f"{path.name} has no {'end' if start else 'start'}: rank {rank} did not finish")
    steps = Steps.of([record for record in records if isinstance(record, Step)], path.name)
    evals = [record for record in records if isinstance(record, Eval)]
    return Rank(rank, start, steps, evals, end, _profile(folder, rank))


def _profile(folder: RunFolder, rank: int) -> dict[str, float]:
    """Shares of the step by torch.profiler; absent unless it was asked for."""
    path = folder.shares(rank)
    if not path.is_file():
        return {}
    values = read_json(path)
    return {str(key): float(value) for key, value in values.items() if isinstance(value, int | float)}


def _read_experiment(run: Run, known: dict[str, Experiment]) -> None:
    """The question that the sweep wrote beside its runs; a damaged one is no reason to lose the runs."""
    name, path = run.spec.experiment, run.folder.path.parent / EXPERIMENT
    if name in known or not path.is_file():
        return
    try:
        known[name] = Experiment.model_validate_json(read_bounded(path, MAX_JSON_BYTES))
    except DAMAGE:
        return


def _sentence(error: BaseException) -> str:
    """One line about what is wrong; it quotes the files."""
    text = one_line(next(iter(str(error).splitlines()), "")) or type(error).__name__
    return f"damaged ({type(error).__name__}: {text})" if not isinstance(error, TestbedError) else text
