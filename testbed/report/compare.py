"""Compare result A with result B, cell by cell, with a 95 % interval of the ratio B/A.

A cell is worse in B if its step takes longer by more than the fraction `threshold` and the whole interval is above 1.
So a small or uncertain difference does not count. B is also worse if a run of A is missing in B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.report import findings
from testbed.report.load import Skipped, load
from testbed.report.model import Cell, chapters, condition, value_of
from testbed.report.sentences import COMPARE_STEPS
from testbed.report.stats import ratio
from testbed.results.table import NO_COLUMN, PLACES, flatten, varying_places
from testbed.spec.errors import UsageError


@dataclass(frozen=True)
class Change:
    """One cell in both results. `ratio` is B over A."""

    name: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: str  # "slower", "faster", "same", "too few steps"
    worse: bool
    loss: tuple[float | None, float | None]
    sent: float | None  # bytes per step: B over A


@dataclass(frozen=True)
class Comparison:
    """All changes, the runs of one side only, and what differs in all cells: keys of two single runs, or the place."""

    changes: list[Change]
    lost: list[str]  # runs that are in A and not in B, each with the reason if B has one
    only: list[str]  # runs that only B has
    differences: list[str]
    skipped: list[Skipped]
    notes: list[str]  # on how to read the intervals

    @property
    def worse(self) -> list[Change]:
        return [change for change in self.changes if change.worse]


def compare(a: Path, b: Path, threshold: float) -> Comparison:
    """Compare cells of equal spec, or two single runs even if their specs differ. Raise UsageError without cells."""
    one, two = load([a]), load([b])
    sides = [[cell for chapter in chapters(each) for cell in chapter.cells] for each in (one, two)]
    several = list(dict.fromkeys(p for cells in sides for p in varying_places([c.first.summary for c in cells])))
    before, after = ({key(cell, several): cell for cell in cells} for cells in sides)
    skipped = [*one.skipped, *two.skipped]
    for path, cells, loaded in ((a, before, one), (b, after, two)):
        if not cells:
            reason = f" ({loaded.skipped[0].reason})" if loaded.skipped else ""
            raise UsageError(f"{path}: no run that can be compared{reason}. Give a folder with a finished run.")
    if len(before) == len(after) == 1:
        (left,), (right,) = before.values(), after.values()
        return Comparison(
            [_change(left, right, threshold)], [], [], differences(left, right), skipped, _notes([left, right])
        )
    both = [name for name in before if name in after]
    if not both:
        raise UsageError(
            f"{a} and {b} have no run of equal spec in common. Give two run folders to compare runs of other specs."
        )
    reasons = {each.path.name: each.reason for each in two.skipped}
    lost = [_lost(cell, reasons, several) for name, cell in before.items() if name not in after]
    only = [f"only in {b}: {cell.spec.name}{_on(cell, several)}" for name, cell in after.items() if name not in before]
    changes = [_change(before[name], after[name], threshold, several) for name in both]
    first, second = before[both[0]], after[both[0]]
    moved = [line for place in PLACES if place not in several for line in _changed(place, first, second)]
    notes = _notes([side[name] for name in both for side in (before, after)])
    return Comparison(changes, lost, only, moved, skipped, notes)


def _lost(cell: Cell, reasons: dict[str, str], several: Sequence[str]) -> str:
    """Return the name of a cell that B does not have, with the reason from a folder of that name in B, if any."""
    names = [run.folder.path.name for run in cell.runs]
    why = next((reasons[name] for name in names if name in reasons), "not there")
    return f"{cell.spec.name}{_on(cell, several)}: {why}"


def key(cell: Cell, several: Sequence[str]) -> str:
    """Return a string that is equal for two cells to compare: the spec without names, and `_on`."""
    return condition(cell.spec) + _on(cell, several)


def _on(cell: Cell, several: Sequence[str]) -> str:
    """Return the substrate and the machine in words, each only if one side has several."""
    return "".join(f" on {value_of(cell, place)}" for place in several)


def differences(a: Cell, b: Cell) -> list[str]:
    """Return the differences of two cells, e.g. `link.rate: 500mbit -> 200mbit`."""
    left, right = flatten(a.spec), flatten(b.spec)
    keys = [k for k in {**left, **right} if k in ("mode", "placement") or k not in NO_COLUMN]
    if (a.spec.script is None) != (b.spec.script is None):  # a script and our own loop have few keys in common
        keys = [key for key in keys if key in left and key in right]
    changed = [f"{k}: {left.get(k)} -> {right.get(k)}" for k in keys if left.get(k) != right.get(k)]
    return [*changed, *(line for place in PLACES for line in _changed(place, a, b))]


def _changed(place: str, a: Cell, b: Cell) -> list[str]:
    """Return e.g. `on: compose -> netns` if two cells were measured in different places."""
    known = varying_places([cell.first.summary for cell in (a, b)])
    return [f"{place}: {value_of(a, place)} -> {value_of(b, place)}"] if place in known else []


def _notes(cells: Sequence[Cell]) -> list[str]:
    """Return notes on how to read the intervals."""
    return [findings.ONE_RUN] if any(len(cell.runs) == 1 for cell in cells) else []


def _change(a: Cell, b: Cell, threshold: float, several: Sequence[str] = ()) -> Change:
    value, low, high = ratio(b.samples, a.samples, a.by_mean or b.by_mean)
    enough = min(a.n, b.n) >= COMPARE_STEPS  # the interval of one step has no width
    real = enough and (low > 1 or high < 1)
    names = list(dict.fromkeys(cell.spec.name for cell in (a, b)))
    verdict = "same" if not real else "slower" if value > 1 else "faster"
    verdict = verdict if enough else "too few steps"
    return Change(
        name=" -> ".join(names) + _on(a, several),
        before=a.seconds.centre,
        after=b.seconds.centre,
        ratio=value,
        low=low,
        high=high,
        verdict=verdict,
        worse=enough and value > 1 + threshold and low > 1,
        loss=(a.first.summary.test_loss, b.first.summary.test_loss),
        sent=_total(b.sent()) / _total(a.sent()) if _total(a.sent()) else None,
    )


def _total(sent: Sequence[float | None]) -> float:
    return sum(float(value or 0.0) for value in sent)
