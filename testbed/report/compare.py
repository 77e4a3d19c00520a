"""Compare result A with result B, cell by cell, with a 95 % interval of the ratio B/A.

A cell is worse in B if its step takes more than `threshold` longer and the whole interval is above 1, so that a
difference that is too small or too uncertain does not count. B is also worse if a run of A is missing in B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.report import findings
from testbed.report.load import Skipped, load
from testbed.report.model import Cell, chapters, condition
from testbed.report.stats import ratio
from testbed.results.table import NO_COLUMN, flatten
from testbed.spec.errors import UsageError


@dataclass(frozen=True)
class Change:
    """One cell in both results; `ratio` is B over A."""

    name: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: str  # "slower", "faster", "same"
    worse: bool
    loss: tuple[float | None, float | None]
    sent: float | None  # ratio of bytes per step


@dataclass(frozen=True)
class Comparison:
    """All changes, what only one side has, and what differs in all cells: keys of two single runs, or the substrate."""

    changes: list[Change]
    lost: list[str]  # runs that A has and B does not have, each with B's reason if there is one
    only: list[str]  # runs that only B has
    differences: list[str]
    skipped: list[Skipped]
    notes: list[str]  # on how to read the intervals

    @property
    def worse(self) -> list[Change]:
        return [change for change in self.changes if change.worse]


def compare(a: Path, b: Path, threshold: float) -> Comparison:
    """Compare cells of equal spec; two single runs are compared even if their specs differ."""
    one, two = load([a]), load([b])
    sides = [[cell for chapter in chapters(each) for cell in chapter.cells] for each in (one, two)]
    substrates = [list(dict.fromkeys(cell.substrate for cell in cells)) for cells in sides]
    several = any(len(each) > 1 for each in substrates)
    before, after = ({key(cell, several): cell for cell in cells} for cells in sides)
    skipped = [*one.skipped, *two.skipped]
    for path, cells in ((a, before), (b, after)):
        if not cells:
            raise UsageError(
                f"{path}: no run that can be compared" + (f"; {skipped[0].reason}" if skipped else "") + "."
            )
    if len(before) == len(after) == 1:
        (left,), (right,) = before.values(), after.values()
        return Comparison(
            [_change(left, right, threshold)], [], [], differences(left, right), skipped, _notes([left, right])
        )
    both = [name for name in before if name in after]
    if not both:
        raise UsageError(
            f"{a} and {b} have no run of equal spec in common. Name two run folders to compare them anyway."
        )
    reasons = {each.path.name: each.reason for each in two.skipped}
    lost = [_lost(cell, reasons, several) for name, cell in before.items() if name not in after]
    only = [f"only in {b}: {cell.spec.name}{_on(cell, several)}" for name, cell in after.items() if name not in before]
    changes = [_change(before[name], after[name], threshold, several) for name in both]
    moved = [] if several else _changed_substrate(*(each[0] for each in substrates))
    notes = _notes([side[name] for name in both for side in (before, after)])
    return Comparison(changes, lost, only, moved, skipped, notes)


def _lost(cell: Cell, reasons: dict[str, str], several: bool) -> str:
    """A cell of A that B does not have, with the reason from a folder of the same name in B, if there is one."""
    names = [run.folder.path.name for run in cell.runs]
    why = next((reasons[name] for name in names if name in reasons), "not there")
    return f"{cell.spec.name}{_on(cell, several)}: {why}"


def key(cell: Cell, several: bool) -> str:
    """Equal for two cells that are compared: the spec without names, and the substrate if there are several."""
    return condition(cell.spec) + _on(cell, several)


def _on(cell: Cell, several: bool) -> str:
    """The substrate, if there are several."""
    return f" on {cell.substrate}" if several else ""


def differences(a: Cell, b: Cell) -> list[str]:
    """`link.rate: 500mbit -> 200mbit`."""
    left, right = flatten(a.spec), flatten(b.spec)
    keys = [k for k in {**left, **right} if k in ("mode", "placement") or k not in NO_COLUMN]
    changed = [f"{k}: {left.get(k)} -> {right.get(k)}" for k in keys if left.get(k) != right.get(k)]
    return [*changed, *_changed_substrate(a.substrate, b.substrate)]


def _changed_substrate(a: str, b: str) -> list[str]:
    return [f"on: {a} -> {b}"] if a != b else []


def _notes(cells: Sequence[Cell]) -> list[str]:
    """Notes on how to read the intervals."""
    return [findings.ONE_RUN] if any(len(cell.runs) == 1 for cell in cells) else []


def _change(a: Cell, b: Cell, threshold: float, several: bool = False) -> Change:
    value, low, high = ratio(b.samples, a.samples, a.by_mean or b.by_mean)
    real = low > 1 or high < 1
    names = list(dict.fromkeys(cell.spec.name for cell in (a, b)))
    verdict = "same" if not real else "slower" if value > 1 else "faster"
    return Change(
        name=" -> ".join(names) + _on(a, several),
        before=a.seconds.centre,
        after=b.seconds.centre,
        ratio=value,
        low=low,
        high=high,
        verdict=verdict,
        worse=value > 1 + threshold and low > 1,
        loss=(a.first.summary.test_loss, b.first.summary.test_loss),
        sent=_total(b.sent()) / _total(a.sent()) if _total(a.sent()) else None,
    )


def _total(sent: Sequence[float | None]) -> float:
    return sum(float(value or 0.0) for value in sent)
