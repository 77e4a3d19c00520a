"""Focus: which cells a side-by-side plot shows, and what to call them, so that no plot holds more than one can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.report.cells import Cell, Chapter
from testbed.spec.table import short_key, varying_keys
from testbed.spec.units import format_rate

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
