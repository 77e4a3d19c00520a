"""Cells: runs of one condition, pooled; and chapters: the cells that answer one question."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from testbed.report import theory
from testbed.report.load import Loaded, Run, natural
from testbed.report.stats import Samples, Stat, describe
from testbed.report.steps import Column, Steps
from testbed.report.waiting import Straggler, Waiting, stragglers, waiting
from testbed.spec.experiment import Experiment
from testbed.spec.mode import ALGORITHMS
from testbed.spec.run import RunSpec
from testbed.spec.summary import Summary
from testbed.spec.table import UNTOLD, baselines, flatten, label, varying_keys

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
