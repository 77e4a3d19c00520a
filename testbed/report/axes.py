"""Axes: what an experiment may sweep besides the method, and the curves that come of it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from testbed.report.cells import Cell, Chapter
from testbed.report.focus import MOST, keys, value_of, words_for

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
