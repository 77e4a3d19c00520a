"""Run folders in, runs out. A folder that cannot be read is named with the reason and skipped; nothing else is trusted.

Folders may come from strangers: whatever is wrong with a file is one sentence about its folder, never a traceback.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from testbed.report.faults import Faulted, read_faulted
from testbed.report.foreign import MAX_RECORDS, MAX_SMALL, check_inside, check_size, read_json
from testbed.report.network import Network, read_network
from testbed.report.steps import Steps
from testbed.spec.errors import SpecError, TestbedError, plain
from testbed.spec.experiment import Experiment
from testbed.spec.folder import EXPERIMENT, RunFolder, read_bounded
from testbed.spec.records import read
from testbed.spec.run import RunSpec
from testbed.spec.summary import Summary

DEEPEST = 3  # folders below the one that was named
# What reading a stranger's file may raise; anything else is a bug of ours and must be seen.
DAMAGE = (TestbedError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


@dataclass(frozen=True)
class Rank:
    """What one rank wrote down."""

    number: int
    start: dict[str, Any]
    steps: Steps
    evals: list[dict[str, Any]]
    end: dict[str, Any]
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
        return float(self.ranks[0].start.get("gradient_bytes") or 0)

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
    faulted: list[Faulted]  # runs to which something was done on purpose, however they ended


def load(paths: Sequence[Path]) -> Loaded:
    """All runs below the paths, in the order of their names, numbers as numbers."""
    runs: list[Run] = []
    skipped: list[Skipped] = []
    experiments: dict[str, Experiment] = {}
    faulted: list[Faulted] = []
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
    check_inside(folder)
    ranks = [_read_rank(folder, rank, whole) for rank in range(spec.world)]
    run = Run(folder, summary, ranks, read_network(folder.receipt, spec))
    if whole and not len(run.kept[0].total):
        raise SpecError("no step is left after warm-up")
    return run


def _read_rank(folder: RunFolder, rank: int, whole: bool) -> Rank:
    path = folder.records(rank)
    check_size([path], MAX_RECORDS)
    records = list(read(path))
    of = {kind: [r for r in records if r["kind"] == kind] for kind in ("start", "step", "eval", "end")}
    if whole and not (of["start"] and of["end"]):
        raise SpecError(f"{path.name} has no {'start' if not of['start'] else 'end'}: rank {rank} did not finish")
    start, end = (of["start"] or [{}])[0], (of["end"] or [{}])[-1]
    return Rank(rank, start, Steps.of(of["step"], path.name), of["eval"], end, _profile(folder, rank))


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
        known[name] = Experiment.model_validate_json(read_bounded(path, MAX_SMALL))
    except DAMAGE:
        return


def _sentence(error: BaseException) -> str:
    """One line about what is wrong; it quotes the files."""
    text = plain(next(iter(str(error).splitlines()), "")) or type(error).__name__
    return f"damaged ({type(error).__name__}: {text})" if not isinstance(error, TestbedError) else text
