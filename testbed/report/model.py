"""Cells: runs of one condition, pooled; and chapters: the cells that answer one question."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from testbed.report import theory
from testbed.report.load import Column, Loaded, Run, Steps, natural
from testbed.report.stats import Samples, Stat, describe
from testbed.report.waiting import Straggler, Waiting, stragglers, waiting
from testbed.results.conclude import Summary
from testbed.results.table import (
    UNTOLD,
    baselines,
    flatten,
    label,
    short_key,
    varying_keys,
)
from testbed.spec.experiment import Experiment
from testbed.spec.mode import ALGORITHMS
from testbed.spec.run import RunSpec
from testbed.spec.units import format_rate

NO_CONDITION = UNTOLD - {"mode", "placement", "spans"}  # keys in which repeats of one cell may differ


@dataclass(frozen=True)
class Split:
    """Seconds of the average step, mean over steps and ranks; steps.py says what each part is."""

    step: float
    compute: float
    exposed: float
    hidden: float
    busy: float
    rest: float
    cpu: float  # processor time of the loop while it computed; nan where nobody recorded it

    @property
    def hidden_share(self) -> float | None:
        """Of the communication: how much of it went on under computation."""
        return self.hidden / self.busy if self.busy > 0 else None

    @property
    def step_gap(self) -> float:
        """How far compute + exposed + rest is from the step, as a fraction."""
        return abs(self.compute + self.exposed + self.rest - self.step) / self.step if self.step else 0.0

    @property
    def rest_share(self) -> float:
        """Of the step: what is neither computing nor waiting."""
        return self.rest / self.step if self.step else 0.0

    @property
    def busy_gap(self) -> float:
        """How far exposed + hidden is from busy, as a fraction."""
        return abs(self.exposed + self.hidden - self.busy) / self.busy if self.busy else 0.0


class Cell:
    """All repeats of one spec at one place."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.first = self.runs[0]
        self.spec: RunSpec = self.first.spec
        self.substrate = self.first.summary.substrate
        self.label = label(self.spec)

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The spec with dotted keys."""
        return flatten(self.spec)

    @cached_property
    def same_spec(self) -> str:
        """Equal for cells that differ in their place only."""
        return condition(self.spec)

    @cached_property
    def waiting(self) -> Waiting:
        """Transfer against waiting, of the first repeat."""
        return waiting(self.first)

    @cached_property
    def stragglers(self) -> list[Straggler]:
        """Ranks that are named as slow, and why."""
        return stragglers(self.first)

    @property
    def world(self) -> int:
        return self.spec.world

    @property
    def by_mean(self) -> bool:
        """Where only some steps synchronise, the median would leave out those that do."""
        return self.spec.mode.every > 1

    @cached_property
    def samples(self) -> Samples:
        """Seconds per step, mean over ranks; one array per repeat."""
        return [np.mean([steps.total for steps in run.kept], axis=0) for run in self.runs]

    @cached_property
    def seconds(self) -> Stat:
        return describe(self.samples, self.by_mean)

    @property
    def images_per_second(self) -> float:
        return self.spec.global_batch / self.seconds.centre

    @cached_property
    def split(self) -> Split:
        def mean(column: str) -> float:
            return statistics.fmean(float(getattr(s, column).mean()) for run in self.runs for s in run.kept)

        columns = {"step": "total", "exposed": "blocked"}
        names = ("step", "compute", "exposed", "hidden", "busy", "rest", "cpu")
        return Split(**{name: mean(columns.get(name, name)) for name in names})

    def per_rank(self, column: str) -> list[float]:
        """Mean of a column for each rank, over repeats and steps."""
        ranks = range(self.world)
        return [statistics.fmean(float(getattr(run.kept[r], column).mean()) for run in self.runs) for r in ranks]

    @cached_property
    def steps(self) -> list[Steps]:
        """The first repeat's steps that count, rank by rank."""
        return self.first.kept

    @property
    def buffers(self) -> tuple[float, float]:
        """How many buffers one synchronisation takes, and S, their bytes together."""
        return self.first.buffers

    @cached_property
    def syncs(self) -> float:
        """Synchronisations per step that counts."""
        return theory.syncs_per_step(self.spec.mode, int(self.steps[0].step[0]), self.steps[0].last)

    @cached_property
    def bound(self) -> float | None:
        """Least seconds of communication per step on the network that was measured; None without a receipt."""
        network = self.first.network
        rate = network.node(0) if self.spec.mode.rooted else network.slowest
        if not rate or self.spec.mode.silent:
            return None
        count, size = self.buffers
        once = theory.bound(self.spec.mode, self.world, size, rate, network.delay, count)
        return None if once is None else once * self.syncs

    def sent(self) -> list[float | None]:
        """Bytes per step that the kernel counted, for each rank; repeats agree, so the first stands for all."""
        return self.first.summary.sent_per_step

    def received(self) -> list[float | None]:
        """As `sent`, the other way."""
        return self.first.summary.received_per_step

    def needed(self) -> list[float | None]:
        """Bytes per step that theory asks of each rank: payload, without headers."""
        size = self.buffers[1]
        shares = [theory.sent_share(self.spec.mode, self.world, rank) for rank in range(self.world)]
        return [None if share is None else share * size * self.syncs for share in shares]

    def losses(self) -> Column:
        """Per step, mean over ranks: of the first repeat."""
        return np.array(self.first.summary.losses, dtype=np.float64)


@dataclass(frozen=True)
class Chapter:
    """One experiment's cells, in reading order, and what varies among them."""

    name: str
    experiment: Experiment | None
    cells: list[Cell]

    @property
    def title(self) -> str:
        return self.experiment.title if self.experiment else f"runs of {self.name}"

    @cached_property
    def summaries(self) -> list[Summary]:
        return [cell.first.summary for cell in self.cells]

    @cached_property
    def varying(self) -> list[str]:
        """Keys of the spec that differ; the mode has its own place."""
        return [key for key in varying_keys(self.summaries) if key not in ("mode", "placement")]

    @property
    def substrates(self) -> list[str]:
        return list(dict.fromkeys(cell.substrate for cell in self.cells))

    @cached_property
    def _singles(self) -> dict[int, Cell | None]:
        of = {id(cell.first.summary): cell for cell in self.cells}
        found = baselines(self.summaries)
        return {id(cell): of[id(s)] if s else None for cell, s in zip(self.cells, found, strict=True)}

    def single(self, cell: Cell) -> Cell | None:
        """The single-node cell that a cell's speed-up is over."""
        return self._singles[id(cell)]

    def speed_up(self, cell: Cell) -> float | None:
        single = self.single(cell)
        return single.seconds.centre / cell.seconds.centre if single else None


def chapters(loaded: Loaded) -> list[Chapter]:
    """Runs grouped by experiment, pooled where only the name differs, worker counts in numeric order."""
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in loaded.runs:
        key = f"{condition(run.spec)} on {run.summary.substrate}"
        groups.setdefault(run.spec.experiment, {}).setdefault(key, []).append(run)
    return [
        Chapter(name, loaded.experiments.get(name), _ordered([Cell(runs) for runs in cells.values()], loaded, name))
        for name, cells in groups.items()
    ]


def condition(spec: RunSpec) -> str:
    """What makes two runs repeats of one another: the same spec but for names and ports."""
    values = flatten(spec)
    return repr([(key, values[key]) for key in sorted(values) if key not in NO_CONDITION])


def _ordered(cells: list[Cell], loaded: Loaded, name: str) -> list[Cell]:
    """As the experiment lists them; without one, single first and then by mode, with numbers as numbers."""
    experiment = loaded.experiments.get(name)
    asked = [str(value) for value in (experiment.axes.get("mode", []) if experiment else [])]

    def key(cell: Cell) -> tuple[Any, ...]:
        mode = str(cell.spec.mode)
        place = asked.index(mode) if mode in asked else len(asked)
        usual = list(ALGORITHMS)
        kind = usual.index(cell.spec.mode.algorithm) if cell.spec.mode.algorithm in usual else len(usual)
        rate, size = cell.spec.link.rate or float("inf"), cell.spec.global_batch
        return (
            cell.spec.mode.distributed,
            place,
            kind,
            natural(cell.label),
            cell.spec.nodes,
            rate,
            size,
            repr(cell.spec.overrides) if cell.spec.overrides else "",  # equal nodes first
            cell.substrate,
            cell.spec.name,
        )

    return sorted(cells, key=key)


def sent_over_theory(cell: Cell) -> float | None:
    """All ranks' bytes, as the kernel counted them, over the payload of theory; None where it has no formula."""
    sent, needed = cell.sent(), cell.needed()
    payload = sum(n for n in needed if n is not None)
    if not payload or None in sent or None in needed:
        return None
    return sum(float(s or 0) for s in sent) / payload


# Axes: what an experiment may sweep besides the method, and the curves that come of it.

Curve = list[tuple[float, Cell]]


@dataclass(frozen=True)
class Axis:
    """One swept quantity: which keys of the spec it is, its value in a cell, and what a curve along it is called."""

    keys: tuple[str, ...]
    value: Callable[[Cell], float | None]
    family: Callable[[Cell], str] = lambda cell: cell.label


def _bucket_family(cell: Cell) -> str:
    words = [word for word in cell.label.split("/") if not word.startswith("bucket:")]
    return "/".join(words)


def _every_family(cell: Cell) -> str:
    return "/".join(word for word in cell.label.split("/") if not word.startswith("every:"))


def _rate(cell: Cell) -> float | None:
    return float(cell.spec.link.rate) if cell.spec.link.rate and cell.spec.mode.distributed else None


def _bucket(cell: Cell) -> float | None:
    return float(cell.spec.mode.bucket) if cell.spec.mode.bucket else None


BATCH = ("batch", "batch_per_rank")
NODES = Axis(("nodes",), lambda cell: float(cell.world) if cell.spec.mode.distributed else None)
# The same batch per rank on more nodes, whatever key it was written with.
WEAK = Axis(("nodes", *BATCH), NODES.value, lambda cell: f"{cell.label}, {cell.spec.local_batch(0)} per rank")
RATE = Axis(("link.rate",), _rate)
BUCKET = Axis((), _bucket, _bucket_family)
EVERY = Axis((), lambda cell: float(cell.spec.mode.every) if cell.spec.mode.distributed else None, _every_family)


def curves(chapter: Chapter, axis: Axis) -> dict[str, Curve]:
    """Cells that differ along the axis only, in its order; curves of one point are none."""
    found: dict[tuple[str, str], Curve] = {}
    others = [key for key in keys(chapter) if key not in axis.keys]
    for cell in chapter.cells:
        value = axis.value(cell)
        if value is None or cell.spec.mode.is_control:
            continue
        told = [words_for(key, value_of(cell, key), others) for key in others]
        found.setdefault((axis.family(cell), ", ".join(told)), []).append((value, cell))
    long = {key: curve for key, curve in found.items() if len({x for x, _ in curve}) > 1}
    families = Counter(family for family, _ in long)
    named = {
        family if families[family] == 1 else f"{family}, {told}": sorted(curve, key=lambda pair: pair[0])
        for (family, told), curve in long.items()
    }
    return dict(list(named.items())[:MOST])


def from_one_node(chapter: Chapter, curve: Curve) -> Curve:
    """A curve over nodes that begins at its single-node run, where there is one."""
    single = chapter.single(curve[0][1])
    return [(1.0, single), *curve] if single else curve


@dataclass(frozen=True)
class Crossing:
    """Where two curves meet: left of it `left` is faster, right of it `right`."""

    at: float
    seconds: float
    left: str
    right: str


def crossings(names: Sequence[str], lines: Sequence[Sequence[tuple[float, float]]]) -> list[Crossing]:
    """Of every pair of lines, by straight lines between points on logarithmic axes."""
    found = []
    for i in range(len(lines)):
        for j in range(i + 1, len(lines)):
            found += _meet(names[i], lines[i], names[j], lines[j])
    return sorted(found, key=lambda each: each.at)


def _meet(
    name: str, line: Sequence[tuple[float, float]], other: str, second: Sequence[tuple[float, float]]
) -> list[Crossing]:
    shared = sorted({x for x, _ in line} & {x for x, _ in second})
    one, two = dict(line), dict(second)
    gaps = [(x, math.log(one[x]) - math.log(two[x])) for x in shared]
    found = []
    for (x0, g0), (x1, g1) in itertools.pairwise(gaps):
        if g0 * g1 < 0:
            t = g0 / (g0 - g1)
            at = math.exp(math.log(x0) + t * (math.log(x1) - math.log(x0)))
            seconds = math.exp(math.log(one[x0]) + t * (math.log(one[x1]) - math.log(one[x0])))
            found.append(Crossing(at, seconds, name if g0 < 0 else other, other if g0 < 0 else name))
    return found


# Focus: which cells a side-by-side plot shows, and what to call them, so that no plot holds more than one can read.

MOST = 10  # rows or lines of one plot


@dataclass(frozen=True)
class Focus:
    """Cells, their names, and in words what was left out."""

    cells: list[Cell]
    names: list[str]
    shown: str = ""

    def only(self, wanted: Callable[[Cell], bool]) -> Focus:
        """Some of the cells under the same names."""
        kept = [(c, n) for c, n in zip(self.cells, self.names, strict=True) if wanted(c)]
        return Focus([cell for cell, _ in kept], [name for _, name in kept], self.shown)


def focus(chapter: Chapter) -> Focus:
    """All cells while they fit; else those that differ in the mode only, under the most crowded condition."""
    cells = chapter.cells
    shown = ""
    if len(cells) > MOST:
        conditions = [_condition(chapter, cell) for cell in cells]
        counts = Counter(c for c, cell in zip(conditions, cells, strict=True) if cell.spec.mode.distributed)
        most = max(counts or Counter(conditions), key=lambda c: (counts[c], conditions.index(c)))
        chosen = [cell for cell, c in zip(cells, conditions, strict=True) if c == most]
        singles = [single for cell in chosen if (single := chapter.single(cell)) and single not in chosen]
        cells = [*dict.fromkeys(singles), *chosen][:MOST]
        told = ", ".join(words_for(key, value) for key, value in zip(keys(chapter), most, strict=True))
        shown = f"Of {len(chapter.cells)} conditions this shows {told or f'the first {MOST}'}."
    return Focus(cells, names(cells), shown)


def keys(chapter: Chapter) -> list[str]:
    """What varies besides the mode; a place to run is no key of the spec and comes last."""
    return [*chapter.varying, *(["on"] if len(chapter.substrates) > 1 else [])]


def _condition(chapter: Chapter, cell: Cell) -> tuple[str, ...]:
    return tuple(str(value_of(cell, key)) for key in keys(chapter))


def value_of(cell: Cell, key: str) -> Any:
    """A cell's value of a key as people read it."""
    if key == "on":
        return cell.substrate
    if key == "nodes":
        return cell.world
    if key == "overrides":
        return overrides_in_words(cell) or "none"
    return cell.flat.get(key)


def overrides_in_words(cell: Cell) -> str:
    """`node2: 0.2 cores` or `node2: 125mbit`."""
    parts = []
    for node, own in cell.spec.overrides.items():
        what = [f"{own.cpus:g} cores"] if own.cpus else []
        what += [format_rate(own.link.rate)] if own.link and own.link.rate else []
        parts.append(f"{node} {' and '.join(what)}")
    return ", ".join(parts)


def names(cells: Sequence[Cell]) -> list[str]:
    """The mode, and whatever else tells these cells apart."""
    varies = [key for key in varying_keys([cell.first.summary for cell in cells]) if key not in ("mode", "placement")]
    if len({cell.substrate for cell in cells}) > 1:
        varies.append("on")
    if len({cell.label for cell in cells}) == len(cells):
        varies = []  # the mode alone says it
    return [", ".join([cell.label, *(words_for(key, value_of(cell, key), varies) for key in varies)]) for cell in cells]


def words_for(key: str, value: Any, among: Sequence[str] = ()) -> str:
    """`4 nodes`, `200mbit`, `batch 64`."""
    if key == "nodes":
        return f"{value} nodes"
    if key in ("link.rate", "overrides", "on"):
        return "unshaped" if value is None else "equal nodes" if value == "none" else str(value)
    return f"{short_key(key, among or [key]).replace('_', ' ')} {value}"
