"""Findings: the sentence that each plot is titled with, and the words it is made of; words.py says how to read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from testbed.report.cells import Cell, Chapter
from testbed.report.faults import Faulted
from testbed.report.focus import names
from testbed.report.steps import Column

EXACTLY = 3  # steps in which exact methods agree before anybody says that rounding parted them


def namer(cells: Sequence[Cell]) -> Callable[[Cell], str]:
    """What to call each of these cells: the mode alone where that says it."""
    known = {id(cell): name for cell, name in zip(cells, names(cells), strict=True)}
    return lambda cell: known.get(id(cell), cell.label)


def fastest(cells: Sequence[Cell]) -> Cell:
    """The cell with the shortest step, among those that synchronise (where any does)."""
    real = [cell for cell in cells if not cell.spec.mode.silent] or list(cells)
    return min(real, key=lambda cell: cell.seconds.centre)


def slowest(cells: Sequence[Cell]) -> Cell:
    """The distributed cell with the longest step."""
    real = [cell for cell in cells if not cell.spec.mode.silent] or list(cells)
    return max(real, key=lambda cell: cell.seconds.centre)


def rate_in_words(value: float, digits: int = 4) -> str:
    """180_000_000 -> '180 Mbit/s'."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded / 1e9:g} Gbit/s" if rounded >= 1e9 else f"{rounded / 1e6:g} Mbit/s"


def megabytes(value: float) -> str:
    """111_050_000 -> '111 MB', 390_000 -> '0.39 MB'."""
    return f"{value / 1e6:.0f} MB" if value >= 1e7 else f"{value / 1e6:.2g} MB"


def times(value: float) -> str:
    """1.054 -> '1.05', 139.2 -> '139'."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def percent(share: float) -> str:
    """0.256 -> '26 %'; small shares keep a digit."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * max(share, 0.001):.1f} %"


def where_time_goes(chapter: Chapter, cells: Sequence[Cell]) -> str:
    name = namer(cells)
    best, worst = fastest(cells), slowest(cells)
    share = worst.split.exposed / worst.split.step
    if best is worst:
        return f"{name(best)} is blocked by communication for {percent(share)} of a step"
    hidden = best.split.hidden_share
    tail = f", and hides {percent(hidden)} of what it sends" if hidden and hidden > 0.05 else ""
    own = percent(best.split.exposed / best.split.step)
    return f"{name(worst)} is blocked by the network for {percent(share)} of its step, {name(best)} for {own}{tail}"


def bytes_per_rank(chapter: Chapter, cells: Sequence[Cell]) -> str:
    name = namer(cells)

    def busiest(cell: Cell) -> float:
        return max(float(sent or 0.0) for sent in cell.sent())

    most, least = max(cells, key=busiest), min(cells, key=busiest)
    high, low = busiest(most), busiest(least)
    rank = cell_rank(most, high)
    if high < 1.15 * low:
        return f"Every method sends about {megabytes(high)} per rank and step"
    return (
        f"{name(most)} pushes {megabytes(high)} a step through rank {rank}'s link, {name(least)} {megabytes(low)} "
        f"through each: {high / low:.1f} times as much"
    )


def cell_rank(cell: Cell, value: float) -> int:
    """The rank that sent so much."""
    return next(rank for rank, sent in enumerate(cell.sent()) if float(sent or 0.0) == value)


def roofline(chapter: Chapter, cells: Sequence[Cell]) -> str:
    name = namer(cells)
    ratios = {name(cell): cell.split.busy / cell.bound for cell in cells if cell.bound}
    good = [each for each, ratio in ratios.items() if ratio <= 1.1]
    worst = max(ratios, key=lambda each: ratios[each])
    if len(good) == len(ratios):
        most = percent(max(ratios.values()) - 1)
        return f"Every wire runs within {most} of its bound: faster needs fewer bytes or more overlap"
    best = min(ratios, key=lambda each: ratios[each])
    return f"{worst} takes {times(ratios[worst])} times what its bytes need, {best} {times(ratios[best])} times"


def timeline(cells: Sequence[Cell]) -> str:
    name = namer(cells)
    overlapping = [cell for cell in cells if (cell.split.hidden_share or 0.0) > 0.1]
    after = [cell for cell in cells if cell.split.busy > 0 and (cell.split.hidden_share or 0.0) <= 0.1]
    if overlapping and after:
        best = max(overlapping, key=lambda cell: cell.split.hidden_share or 0.0)
        others = listed([name(cell) for cell in after])
        return f"{name(best)} sends while it computes; {others} compute first and then wait for the wire"
    if overlapping:
        return f"{listed([name(c) for c in overlapping])} send while they compute"
    return "Every method computes first and then waits for the wire" if after else "One step, phase by phase"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`; long lists are cut."""
    names = list(dict.fromkeys(names))
    names = [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def loss_by_step(cells: Sequence[Cell]) -> str:
    """Do all that average gradients walk the same path? One node may not: its BatchNorm sees the whole batch."""
    name = namer(cells)
    cells = [cell for cell in cells if cell.spec.mode.distributed] or cells
    length = min(len(cell.losses()) for cell in cells)
    if len(cells) < 2 or length < 2:
        return f"The loss goes from {cells[0].losses()[0]:.2f} to {cells[0].losses()[-1]:.2f}"
    table = np.array([cell.losses()[:length] for cell in cells])
    if not np.isfinite(table).all():
        lost = [name(cell) for cell, row in zip(cells, table, strict=True) if not np.isfinite(row).all()]
        return f"The loss of {listed(lost)} is no number any more: it diverged"
    final = table[:, -max(1, length // 10) :].mean(axis=1)
    if _spread(final):
        return f"All {len(cells)} walk the same path: after {length} steps their losses are within {_gap(final):.3f}"
    late = np.array([cell.spec.placement == "after-step" for cell in cells])
    if late.any() and (~late).sum() > 1 and _spread(final[~late]):
        right, wrong = final[~late].mean(), final[late].mean()
        together = listed([name(cell) for cell in cells if cell.spec.placement == "before-step"])
        return (
            f"{together} train the same model (loss {right:.2f}); synchronising after the step does not ({wrong:.2f})"
        )
    common = _together(table)
    exact = all(cell.spec.mode.codec is None and cell.spec.mode.every == 1 for cell in cells)
    if exact and not late.any() and common >= EXACTLY:
        ends = f"{final.min():.2f} to {final.max():.2f}"
        return (
            f"All {len(cells)} walk the same path for {common} steps; then rounding, which grows, parts them ({ends})"
        )
    high, low = name(cells[int(final.argmax())]), name(cells[int(final.argmin())])
    ends = f"{high} is at {final.max():.2f}, {low} at {final.min():.2f}"
    return f"They do not train the same model: after {length} steps {ends}"


def _together(table: Column) -> int:
    """How many steps from the first on all losses are as close as rounding leaves them."""
    apart = [not _spread(table[:, step]) for step in range(table.shape[1])]
    return apart.index(True) if True in apart else len(apart)


def _gap(final: Column) -> float:
    return float(final.max() - final.min())


def _spread(final: Column) -> bool:
    """Losses so close that rounding explains it."""
    return _gap(final) <= 0.02 * float(np.abs(final).mean()) + 0.005


def loss_by_time(cells: Sequence[Cell], curves: Sequence[tuple[Column, Column]]) -> str:
    """The loss that all reach, and who is there first."""
    name = namer(cells)
    settled = [(x, _smooth(y)) for x, y in curves]
    if not all(len(y) and np.isfinite(y).all() for _, y in settled):
        return "Loss against time"
    level = max(float(y.min()) for _, y in settled)
    reached = {name(cell): float(x[int(np.argmax(y <= level))]) for cell, (x, y) in zip(cells, settled, strict=True)}
    first, last = min(reached, key=lambda n: reached[n]), max(reached, key=lambda n: reached[n])
    if len(reached) < 2 or reached[first] <= 0 or first == last:
        return f"The loss falls to {level:.2f} in {reached[first]:.0f} s"
    return f"{first} is at a loss of {level:.2f} after {reached[first]:.0f} s, {last} only after {reached[last]:.0f} s"


def _smooth(values: Column) -> Column:
    width = max(1, len(values) // 20)
    return np.convolve(values, np.ones(width) / width, mode="valid") if len(values) else values


def seconds_by_step(cells: Sequence[Cell], series: Sequence[Column]) -> str:
    """How steady the steps are once warm-up is over."""
    name = namer(cells)
    spreads = {}
    for cell in cells:
        pooled = np.concatenate(list(cell.samples))
        middle = float(np.median(pooled))
        spreads[name(cell)] = (
            float(np.quantile(pooled, 0.95) - np.quantile(pooled, 0.05)) / 2 / middle if middle else 0.0
        )
    worst = max(spreads, key=lambda each: spreads[each])
    if spreads[worst] <= 0.05:
        return f"Steps are steady: nine of ten lie within ±{percent(spreads[worst])} of the median in every mode"
    return f"{worst} is the least steady: nine of ten steps lie within ±{percent(spreads[worst])} of its median"


def faults(runs: Sequence[Faulted]) -> str:
    """How many, how fast noticed, how often named right, what became of them."""
    stopped = [run for run in runs if run.knew is not None]
    named = [run.story.named_right for run in stopped if run.story.named_right is not None]
    on = sum(run.row[-1] == "went on" for run in runs)
    again = sum(run.row[-1] == "restarted" for run in runs)
    spared = sum(not run.episodes for run in runs)
    said = [f"{len(runs)} run{'s' * (len(runs) != 1)} with faults on purpose"]
    if stopped:
        slowest = max(run.knew or 0.0 for run in stopped)
        said.append(f"{len(stopped)} ended by it, noticed by all others within {slowest:.1f} s")
        said.append(f"the right rank was named in {sum(named)} of {len(named)}")
    if on:
        said.append(f"{on} went on")
    if again:
        said.append(f"{again} restarted and finished")
    if spared:
        said.append(f"in {spared} nothing was injected")
    return "; ".join(said)
