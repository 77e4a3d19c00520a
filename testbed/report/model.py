"""The data model of the report.

A cell pools the repeats of one spec. A chapter has the cells of one experiment. A curve has the cells along one swept
quantity. A focus has the cells that fit in one figure.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from testbed.report.load import Column, Loaded, LoadedRun, Steps
from testbed.report.stats import Samples, Stat, describe
from testbed.report.waiting import Straggler, Waiting, stragglers, waiting
from testbed.results import theory
from testbed.results.conclude import Summary
from testbed.results.folder import natural
from testbed.results.table import (
    NO_COLUMN,
    baselines,
    flatten,
    label,
    machine,
    row_note,
    short_key,
    varying_keys,
    varying_places,
)
from testbed.spec.datasets import dataset_info
from testbed.spec.experiment import Experiment
from testbed.spec.mode import ALGORITHMS
from testbed.spec.run import RunSpec
from testbed.spec.script import command_line
from testbed.spec.units import format_rate

REPEAT_KEYS = NO_COLUMN - {"mode", "placement", "spans"}  # keys in which repeats of one cell may differ
MAX_SHOWN = 10  # most rows or lines of one figure


@dataclass(frozen=True)
class Split:
    """Seconds of the average step: means over steps and ranks. The docstring of load.py defines the parts."""

    step: float
    compute: float
    copies: float
    exposed: float
    hidden: float
    busy: float
    rest: float
    work: float  # processor time of computing alone; nan where it was not recorded

    @property
    def hidden_share(self) -> float | None:
        """The share of communication during which the loop did not wait."""
        return self.hidden / self.busy if self.busy > 0 else None

    @property
    def overlap(self) -> float:
        """The share of computing during which a buffer was in flight."""
        return min(1.0, self.hidden / self.compute) if self.compute > 0 else 0.0

    @property
    def step_gap(self) -> float:
        """The difference between compute + copies + exposed + rest and the step, as a fraction of the step."""
        parts = self.compute + self.copies + self.exposed + self.rest
        return abs(parts - self.step) / self.step if self.step else 0.0

    @property
    def rest_share(self) -> float:
        """The share of the step that is neither computing, copying nor waiting."""
        return self.rest / self.step if self.step else 0.0

    @property
    def busy_gap(self) -> float:
        """The difference between exposed + hidden and busy, as a fraction of busy."""
        return abs(self.exposed + self.hidden - self.busy) / self.busy if self.busy else 0.0


class Cell:
    """All repeats of one spec on one substrate of one machine."""

    def __init__(self, runs: Sequence[LoadedRun]) -> None:
        self.runs = list(runs)
        self.first = self.runs[0]
        self.spec: RunSpec = self.first.spec
        self.substrate = self.first.summary.substrate
        self.machine = machine(self.first.summary)
        self.label = label(self.spec)

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The spec with dotted keys."""
        return flatten(self.spec)

    @cached_property
    def same_spec(self) -> str:
        """A string that is equal for cells which differ in substrate or machine only."""
        return condition(self.spec)

    @cached_property
    def waiting(self) -> Waiting:
        """Waiting and transfer in the first repeat."""
        return waiting(self.first)

    @cached_property
    def stragglers(self) -> list[Straggler]:
        """Slow ranks of the first repeat, with the cause of each."""
        return stragglers(self.first)

    @property
    def world(self) -> int:
        return self.spec.world

    @property
    def note(self) -> str:
        """A note on how many steps of all repeats were left out, and why; empty if none was."""
        return row_note([run.summary for run in self.runs])

    @property
    def disturbed(self) -> bool:
        """True if a fault was injected while steps were measured. The time of the whole run is not used then."""
        return any(run.under_fault for run in self.runs)

    @property
    def by_mean(self) -> bool:
        """True for every:K: the centre is the mean, because the median would leave out the steps that synchronise."""
        return self.spec.mode.every > 1

    @cached_property
    def samples(self) -> Samples:
        """Seconds of each step, mean over ranks; one array per repeat."""
        return [np.mean([steps.total for steps in run.kept], axis=0) for run in self.runs]

    @cached_property
    def n(self) -> int:
        """The number of steps of all repeats that count."""
        return sum(map(len, self.samples))

    @cached_property
    def seconds(self) -> Stat:
        return describe(self.samples, self.by_mean)

    @cached_property
    def batch(self) -> float:
        """Images per step over all ranks. For a user's script as observed; 0 if none was observed."""
        return sum(self.first.images(rank) for rank in range(self.world))

    @property
    def images_per_second(self) -> float | None:
        return self.batch / self.seconds.centre if self.batch else None

    @cached_property
    def split(self) -> Split:
        def mean(column: str) -> float:
            return statistics.fmean(float(getattr(s, column).mean()) for run in self.runs for s in run.kept)

        columns = {"step": "total", "exposed": "blocked"}
        names = ("step", "compute", "copies", "exposed", "hidden", "busy", "rest", "work")
        return Split(**{name: mean(columns.get(name, name)) for name in names})

    def per_rank(self, column: str) -> list[float]:
        """Return the mean of a column for each rank, over repeats and steps."""
        ranks = range(self.world)
        return [statistics.fmean(float(getattr(run.kept[r], column).mean()) for run in self.runs) for r in ranks]

    def rank_spread(self, column: str) -> float:
        """Return the largest difference between two ranks' means of a column, as a fraction of the mean over ranks."""
        values = self.per_rank(column)
        return (max(values) - min(values)) / statistics.fmean(values)

    @cached_property
    def steps(self) -> list[Steps]:
        """The steps of the first repeat that count, one entry per rank."""
        return self.first.kept

    @property
    def buffers(self) -> tuple[float, float]:
        """The number of buffers of one synchronisation, and S, the sum of their bytes."""
        return self.first.buffers

    @cached_property
    def syncs(self) -> float:
        """Synchronisations per step that counts."""
        return theory.syncs_per_step(self.spec.mode, self.steps[0].numbers)

    @cached_property
    def bound(self) -> float | None:
        """Lower bound in s of the communication of a step on the measured network; None if it is not known."""
        network = self.first.network
        if self.observed is not None:
            rates = [network.node(rank) or network.slowest for rank in range(self.world)]
            return self._observed_bound([rate for rate in rates if rate])
        rate = network.node(0) if self.spec.mode.rooted else network.slowest
        if not rate or self.spec.mode.silent:
            return None
        count, size = self.buffers
        once = theory.bound(self.spec.mode, self.world, size, rate, network.delay, count, network.rack_uplinks)
        return None if once is None else once * self.syncs

    @property
    def observed(self) -> list[list[theory.Load]] | None:
        """The loads of a user's script by its observed collectives; None for our own loop or unknown loads."""
        return self.first.observed

    def _observed_bound(self, rates: Sequence[float]) -> float | None:
        """Return the mean over steps of the time that the slowest link needs; None if a rate or load is unknown."""
        steps = list(zip(*self.observed, strict=True)) if self.observed else []
        if len(rates) < self.world or not steps:
            return None
        delay = self.first.network.delay
        least = [max(load.seconds(rate, delay) for load, rate in zip(row, rates, strict=True)) for row in steps]
        return statistics.fmean(least) or None

    def sent(self) -> list[float | None]:
        """Return the bytes that each rank of the first repeat sent per step, as the kernel counted them."""
        return self.first.summary.sent_per_step

    def received(self) -> list[float | None]:
        """Return the bytes that each rank of the first repeat received per step, as the kernel counted them."""
        return self.first.summary.received_per_step

    def needed(self) -> list[float | None]:
        """Return the bytes that each rank must send per step in theory: payload, without headers.

        For a user's script they follow from its collectives. Its first step is left out, because bytes are counted
        between the ends of steps.
        """
        if self.observed is not None:
            return [statistics.fmean(load.sent for load in row[1:] or row) if row else None for row in self.observed]
        size = self.buffers[1]
        racks = self.spec.topology.racks
        shares = [theory.sent_share(self.spec.mode, self.world, rank, racks) for rank in range(self.world)]
        return [None if share is None else share * size * self.syncs for share in shares]

    def sent_over_theory(self) -> float | None:
        """Return the bytes that all ranks sent, divided by the payload in theory; None for a mode without a formula."""
        sent, needed = self.sent(), self.needed()
        payload = sum(n for n in needed if n is not None)
        if not payload or None in sent or None in needed:
            return None
        return sum(float(s or 0) for s in sent) / payload

    def losses(self) -> Column:
        """Return the training loss of each step of the first repeat, mean over ranks."""
        return np.array(self.first.summary.losses, dtype=np.float64)

    def seconds_so_far(self) -> Column:
        """Return when each step of rank 0 ended: seconds since the first began, with evaluations in between."""
        steps = self.first.ranks[0].steps
        ends = steps.at + steps.total - steps.at[0]
        return np.asarray(ends[: len(self.losses())], dtype=np.float64)


@dataclass(frozen=True)
class Chapter:
    """The cells of one experiment, in reading order, and what varies among them."""

    name: str
    experiment: Experiment | None
    cells: list[Cell]
    unmeasured: list[Cell] = field(default_factory=list)  # cells without times: all steps were under a fault

    @property
    def title(self) -> str:
        return self.experiment.title if self.experiment else f"runs of {self.name}"

    @cached_property
    def summaries(self) -> list[Summary]:
        return [cell.first.summary for cell in self.cells]

    def with_cells(self, cells: list[Cell]) -> Chapter:
        """Return the chapter with these of its cells. The others become `unmeasured`, so that the same keys vary."""
        return replace(self, cells=cells, unmeasured=[*self.unmeasured, *(c for c in self.cells if c not in cells)])

    @cached_property
    def _rows(self) -> list[Summary]:
        return [*self.summaries, *(cell.first.summary for cell in self.unmeasured)]

    @cached_property
    def varying(self) -> list[str]:
        """Keys of the spec that differ between rows, except the mode."""
        return [key for key in varying_keys(self._rows) if key not in ("mode", "placement")]

    @property
    def unit(self) -> str:
        """What a batch consists of: images, or sequences of tokens."""
        units = {dataset_info(cell.spec.data.name).unit for cell in self.cells}
        return units.pop() if len(units) == 1 else "samples"

    @property
    def substrates(self) -> list[str]:
        return list(dict.fromkeys(cell.substrate for cell in self.cells))

    @cached_property
    def keys(self) -> list[str]:
        """The keys that vary besides the mode. "on" (substrate) and "machine" are not keys of the spec."""
        return [*self.varying, *varying_places(self._rows)]

    @cached_property
    def _singles(self) -> dict[int, Cell | None]:
        of = {id(cell.first.summary): cell for cell in self.cells}
        found = baselines(self.summaries)
        return {id(cell): of[id(s)] if s else None for cell, s in zip(self.cells, found, strict=True)}

    def single(self, cell: Cell) -> Cell | None:
        """Return the single-node cell that is the baseline of a cell's speed-up; None if there is none."""
        return self._singles[id(cell)]

    def speed_up(self, cell: Cell) -> float | None:
        single = self.single(cell)
        return single.seconds.centre / cell.seconds.centre if single else None


def chapters(loaded: Loaded) -> list[Chapter]:
    """Return one chapter per experiment, in whose cells the runs of one condition, substrate and machine are pooled."""
    cells, unmeasured = _pooled(loaded.runs), _pooled(loaded.unmeasured)
    return [
        Chapter(name, loaded.experiments.get(name), _ordered(own, loaded, name), unmeasured.get(name, []))
        for name, own in cells.items()
    ]


def _pooled(runs: Sequence[LoadedRun]) -> dict[str, list[Cell]]:
    """Return the cells of each experiment."""
    groups: dict[str, dict[str, list[LoadedRun]]] = {}
    for run in runs:
        key = f"{condition(run.spec)} on {run.summary.substrate} of {machine(run.summary)}"
        groups.setdefault(run.spec.experiment, {}).setdefault(key, []).append(run)
    return {name: [Cell(pooled) for pooled in cells.values()] for name, cells in groups.items()}


def condition(spec: RunSpec) -> str:
    """Return a string that is equal for repeats of a run: for specs that differ in REPEAT_KEYS only."""
    values = flatten(spec)
    return repr([(key, values[key]) for key in sorted(values) if key not in REPEAT_KEYS])


def _ordered(cells: list[Cell], loaded: Loaded, name: str) -> list[Cell]:
    """Sort cells: single first, then by mode in the experiment's order, or the usual one, then by what varies."""
    experiment = loaded.experiments.get(name)
    listed = [str(value) for value in (experiment.axes.get("mode", []) if experiment else [])]
    usual = list(ALGORITHMS)

    def key(cell: Cell) -> tuple[Any, ...]:
        mode = str(cell.spec.mode)
        return (
            cell.spec.mode.distributed,
            listed.index(mode) if mode in listed else len(listed),
            usual.index(cell.spec.mode.algorithm) if cell.spec.mode.algorithm in usual else len(usual),
            natural(cell.label),
            cell.spec.nodes,
            cell.spec.link.rate or float("inf"),
            cell.spec.global_batch,
            repr(cell.spec.overrides) if cell.spec.overrides else "",  # equal nodes first
            cell.substrate,
            cell.spec.name,
        )

    return sorted(cells, key=key)


Curve = list[tuple[float, Cell]]


@dataclass(frozen=True)
class Axis:
    """One swept quantity: its keys in the spec, its value in a cell, and the name of the cell's curve."""

    keys: tuple[str, ...]
    value: Callable[[Cell], float | None]
    family: Callable[[Cell], str] = lambda cell: cell.label


def _without(prefix: str) -> Callable[[Cell], str]:
    """Return a function that returns a cell's mode without the word that begins with `prefix`."""
    return lambda cell: "/".join(word for word in cell.label.split("/") if not word.startswith(prefix))


def _rate(cell: Cell) -> float | None:
    return float(cell.spec.link.rate) if cell.spec.link.rate and cell.spec.mode.distributed else None


def _bucket(cell: Cell) -> float | None:
    return float(cell.spec.mode.bucket) if cell.spec.mode.bucket else None


NODES = Axis(("nodes",), lambda cell: float(cell.world) if cell.spec.mode.distributed else None)
# The same batch per rank on more nodes; either of two keys of the spec may set the batch.
WEAK = Axis(
    ("nodes", "batch", "batch_per_rank"),
    NODES.value,
    lambda cell: f"{cell.label}, {cell.first.images(0):g} per rank",
)
RATE = Axis(("link.rate",), _rate)
BUCKET = Axis((), _bucket, _without("bucket:"))
EVERY = Axis((), lambda cell: float(cell.spec.mode.every) if cell.spec.mode.distributed else None, _without("every:"))


def curves(chapter: Chapter, axis: Axis) -> dict[str, Curve]:
    """Return curves by name. The cells of a curve differ along the axis only; each curve has at least two points."""
    found: dict[tuple[str, str], Curve] = {}
    others = [key for key in chapter.keys if key not in axis.keys]
    for cell in chapter.cells:
        value = axis.value(cell)
        if value is None or cell.spec.mode.is_control:
            continue
        others_text = [words_for(key, value_of(cell, key), others) for key in others]
        found.setdefault((axis.family(cell), ", ".join(others_text)), []).append((value, cell))
    long = {key: curve for key, curve in found.items() if len({x for x, _ in curve}) > 1}
    families = Counter(family for family, _ in long)
    named = {
        family if families[family] == 1 else f"{family}, {condition_text}": sorted(curve, key=lambda pair: pair[0])
        for (family, condition_text), curve in long.items()
    }
    return dict(list(named.items())[:MAX_SHOWN])


def from_one_node(chapter: Chapter, curve: Curve) -> Curve:
    """Return a curve over nodes with its single-node baseline, if there is one, as the first point."""
    single = chapter.single(curve[0][1])
    return [(1.0, single), *curve] if single else curve


@dataclass(frozen=True)
class Crossing:
    """The point at which two curves cross. `left` is faster at smaller values, `right` at larger ones."""

    at: float
    seconds: float
    left: str
    right: str


def crossings(names: Sequence[str], lines: Sequence[Sequence[tuple[float, float]]]) -> list[Crossing]:
    """Return the crossings of all pairs of lines, interpolated linearly between points on logarithmic axes."""
    found = []
    for (one, first), (two, second) in itertools.combinations(zip(names, lines, strict=True), 2):
        ours, theirs = dict(first), dict(second)
        gaps = [(x, math.log(ours[x]) - math.log(theirs[x])) for x in sorted(set(ours) & set(theirs))]
        for (x0, g0), (x1, g1) in itertools.pairwise(gaps):
            if g0 * g1 < 0:
                t = g0 / (g0 - g1)
                at = math.exp(math.log(x0) + t * (math.log(x1) - math.log(x0)))
                seconds = math.exp(math.log(ours[x0]) + t * (math.log(ours[x1]) - math.log(ours[x0])))
                left, right = (one, two) if g0 < 0 else (two, one)
                found.append(Crossing(at, seconds, left, right))
    return sorted(found, key=lambda each: each.at)


@dataclass(frozen=True)
class Focus:
    """The cells that a side-by-side figure shows, their names, and a sentence on which cells were left out."""

    cells: list[Cell]
    names: list[str]
    shown: str = ""

    def only(self, wanted: Callable[[Cell], bool]) -> Focus:
        """Return a Focus with the cells for which `wanted` returns True, with the same names."""
        kept = [(c, n) for c, n in zip(self.cells, self.names, strict=True) if wanted(c)]
        return Focus([cell for cell, _ in kept], [name for _, name in kept], self.shown)


def focus(chapter: Chapter) -> Focus:
    """Return all cells, or if these are over MAX_SHOWN the condition with most modes and its single-node baseline."""
    cells = chapter.cells
    shown = ""
    if len(cells) > MAX_SHOWN:
        chosen = _main_condition(chapter, cells)
        values = [value_of(chosen[0], key) for key in chapter.keys]
        singles = [single for cell in chosen if (single := chapter.single(cell)) and single not in chosen]
        cells = [*dict.fromkeys(singles), *chosen][:MAX_SHOWN]
        shown_text = ", ".join(words_for(key, value) for key, value in zip(chapter.keys, values, strict=True))
        shown = f"Of {len(chapter.cells)} conditions these figures show {shown_text or f'the first {MAX_SHOWN}'}."
    return Focus(cells, names(cells), shown)


def _main_condition(chapter: Chapter, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of the condition with most modes; of several such conditions the last."""
    conditions = [
        (*(str(cell.flat.get(key, value_of(cell, key))) for key in chapter.keys), trained_in_numbers(cell, chapter))
        for cell in cells
    ]
    counts = Counter(c for c, cell in zip(conditions, cells, strict=True) if cell.spec.mode.distributed)
    most = max(counts or Counter(conditions), key=lambda c: (counts[c], conditions.index(c)))
    return [cell for cell, c in zip(cells, conditions, strict=True) if c == most]


def trained_in_numbers(cell: Cell, chapter: Chapter) -> str:
    """Return what a cell trains as a string: bytes of the gradient, and images.

    In a chapter with scripts and with our own loop, only cells with an equal string are compared with each other. In
    other chapters the string is empty.
    """
    if len({each.spec.script is None for each in chapter.cells}) < 2:
        return ""
    return f"{cell.first.gradient:.0f} bytes, {cell.batch:g} images"


def comparable(chapter: Chapter) -> list[Cell]:
    """Return cells that differ in their mode only: those of the condition with most modes.

    Cells on equal nodes and without faults are preferred. A headline compares these cells only, so it never mixes two
    substrates, rates, numbers of nodes or machines.
    """
    calm = [cell for cell in chapter.cells if not cell.disturbed] or chapter.cells
    return _main_condition(chapter, [cell for cell in calm if not cell.spec.overrides] or calm)


CONDITIONS = ("nodes", "node.", "link.", "overrides", "faults", "on", "machine")  # keys, and prefixes of keys


def names(cells: Sequence[Cell]) -> list[str]:
    """Return the name of each cell: its mode, and its values of the keys in which the cells differ.

    If each cell has another mode, only keys of the network, the nodes and the place are added to the name.
    """
    summaries = [cell.first.summary for cell in cells]
    varies = [key for key in varying_keys(summaries) if key not in ("mode", "placement")] + varying_places(summaries)
    if len({cell.label for cell in cells}) == len(cells):
        varies = [key for key in varies if key.startswith(CONDITIONS)]
    return [name_of(cell, varies) for cell in cells]


def name_of(cell: Cell, keys: Sequence[str]) -> str:
    """Return a cell's mode and its values of these keys, e.g. `ring on netns, 4 nodes`."""
    on = f" on {cell.substrate}" if "on" in keys else ""
    others = [key for key in keys if key != "on"]
    return ", ".join([f"{cell.label}{on}", *(words_for(key, value_of(cell, key), others) for key in others)])


def value_of(cell: Cell, key: str) -> Any:
    """Return a cell's value of a key, as it is printed."""
    if key == "on":
        return cell.substrate
    if key == "machine":
        return cell.machine or "unknown machine"
    if key == "faults":
        return " ".join(map(str, cell.spec.faults)) or "none"
    if key == "nodes":
        return cell.world
    if key == "script.argv" and cell.spec.script:
        return command_line(cell.spec.script.argv)
    if key == "overrides":
        return overrides_in_words(cell) or "none"
    return cell.flat.get(key)


def overrides_in_words(cell: Cell) -> str:
    """Return a cell's overrides in words, e.g. `node2 0.2 cores` or `node2 125mbit`."""
    parts = []
    for node, own in cell.spec.overrides.items():
        what = [f"{own.cpus:g} cores"] if own.cpus else []
        what += [format_rate(own.link.rate)] if own.link and own.link.rate else []
        parts.append(f"{node} {' and '.join(what)}")
    return ", ".join(parts)


def words_for(key: str, value: Any, among: Sequence[str] = ()) -> str:
    """Return a key and its value in words, e.g. `4 nodes`, `200mbit`, `batch 64`. `among`: all printed keys."""
    if key == "nodes":
        return f"{value} node{'' if value == 1 else 's'}"
    if key == "faults":
        return "no faults" if value == "none" else str(value)
    if key in ("link.rate", "overrides", "on", "machine"):
        return "unshaped" if value is None else "equal nodes" if value == "none" else str(value)
    return f"{short_key(key, among or [key]).replace('_', ' ')} {value}"
