"""Figures that compare modes side by side under one condition: parts of a step, bytes, lower bounds, slow ranks."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Patch

from testbed.report import findings, stats
from testbed.report.figures.style import COLOURS, ROW_INCHES, Canvas, Plot, colour, legend_below, plot, rows
from testbed.report.model import Cell, Chapter

COMPUTE, COPIES, EXPOSED, REST, WAITING, BOUND, INK = (
    COLOURS[name][0] for name in ("compute", "copies", "exposed", "rest", "data", "bound", "ink")
)


def rows_of(cells: Sequence[Cell], names: Sequence[str], per_row: float = ROW_INCHES, extra: float = 1.25) -> Canvas:
    """Return a canvas with one row per cell, whose name has the colour of its algorithm."""
    return rows([cell.spec.mode.algorithm for cell in cells], names, per_row, extra)


def where_time_goes(cells: Sequence[Cell], names: Sequence[str]) -> Plot:
    """Draw the parts of a step: compute with the hidden communication marked in it, copies, exposed, rest."""
    made = rows_of(cells, names)
    longest = max(cell.split.step for cell in cells)
    for y, (cell, name) in enumerate(zip(cells, names, strict=True)):
        s = cell.split
        hidden = min(s.hidden, s.compute)
        left = 0.0
        for width, tint in ((s.compute, COMPUTE), (s.copies, COPIES), (s.exposed, EXPOSED), (max(s.rest, 0), REST)):
            made.axes.barh(y, width, left=left, height=0.62, color=tint)
            left += width
        if hidden > 0.002 * longest:
            made.axes.barh(y, hidden, left=s.compute - hidden, height=0.62, color="none", hatch="////", linewidth=0)
        whole = made.axes.barh(y, s.step, height=0.62, alpha=0.0)[0]
        share = f", {100 * s.hidden_share:.0f} % of communication hidden" if s.hidden_share is not None else ""
        parts = f"{s.compute:.3f} computing + {s.copies:.3f} copying + {s.exposed:.3f} blocked + {s.rest:.3f} rest"
        made.tip(whole, f"{name}: {s.step:.3f} s = {parts}{share}")
        made.axes.text(s.step + 0.012 * longest, y, stats.seconds(s.step), va="center", color=INK, fontsize=9.5)
    made.axes.set_xlim(0, longest * 1.19)
    made.axes.set_xlabel("seconds of an average step")
    keys = [
        Patch(facecolor=COMPUTE, label="computing"),
        Patch(facecolor=COMPUTE, hatch="////", label="computing while sending (hidden)"),
        Patch(facecolor=COPIES, label="copying gradients, hooks"),
        Patch(facecolor=EXPOSED, label="blocked by communication"),
        Patch(facecolor=REST, label="rest"),
    ]
    legend_below(made, keys)
    return plot(made, "where-time-goes", findings.where_time_goes(cells), findings.WHERE_TIME_GOES)


def bytes_per_rank(cells: Sequence[Cell], names: Sequence[str]) -> Plot | None:
    """Draw the bytes that each rank sent in a step, and the payload in theory as a line; None without bytes."""
    shown = [
        (cell, name) for cell, name in zip(cells, names, strict=True) if any(cell.sent()) and not cell.spec.mode.silent
    ]
    if not shown:
        return None
    most = max(cell.world for cell, _ in shown)
    made = rows_of([cell for cell, _ in shown], [name for _, name in shown], 0.3 + 0.085 * min(most, 8))
    for y, (cell, name) in enumerate(shown):
        height = 0.8 / cell.world
        for rank, (sent, needed) in enumerate(zip(cell.sent(), cell.needed(), strict=True)):
            at = y - 0.4 + height * (rank + 0.5)
            bar = made.axes.barh(
                at, (sent or 0) / 1e6, height=height * 0.82, color=colour(cell.spec.mode.algorithm), alpha=0.85
            )[0]
            theory = f", theory {findings.megabytes(needed)}" if needed is not None else ""
            made.tip(bar, f"{name}, rank {rank}: {findings.megabytes(sent or 0)} sent per step{theory}")
            if needed:
                made.axes.plot([needed / 1e6] * 2, [at - height * 0.55, at + height * 0.55], color=BOUND, linewidth=1.6)
    made.axes.set_xlabel("MB per step, a bar per rank; | is theory")
    return plot(made, "bytes-per-rank", findings.bytes_per_rank([cell for cell, _ in shown]), findings.BYTES)


def roofline(cells: Sequence[Cell], names: Sequence[str]) -> Plot | None:
    """Draw seconds of communication and their lower bound on the measured network; None without a bound."""
    shown = [(cell, name) for cell, name in zip(cells, names, strict=True) if cell.bound and cell.split.busy > 0]
    if not shown:
        return None
    made = rows_of([cell for cell, _ in shown], [name for _, name in shown])
    longest = max(max(cell.split.busy, cell.bound or 0) for cell, _ in shown)
    for y, (cell, name) in enumerate(shown):
        busy, least = cell.split.busy, cell.bound or 0.0
        bar = made.axes.barh(y, busy, height=0.5, color=colour(cell.spec.mode.algorithm), alpha=0.8)[0]
        made.tip(bar, f"{name}: {busy:.3f} s of communication per step, lower bound {least:.3f} s")
        made.axes.plot([least] * 2, [y - 0.4, y + 0.4], color=BOUND, linewidth=2.4, solid_capstyle="butt")
        made.axes.text(
            max(busy, least) + 0.012 * longest, y, f"{findings.times(busy / least)}×", va="center", fontsize=9.5
        )
    made.axes.set_xlim(0, longest * 1.16)
    made.axes.set_xlabel("s of communication per step; | is the lower bound")
    return plot(made, "roofline", findings.roofline([cell for cell, _ in shown]), findings.ROOFLINE)


def slow_ranks(chapter: Chapter) -> list[Plot]:
    """Draw computing, waiting and transfer of every rank, for each of the first three cells with a straggler."""
    found = [cell for cell in chapter.cells if cell.stragglers][:3]
    return [_ranks(cell, f"ranks-{number}") for number, cell in enumerate(found, start=1)]


def _ranks(cell: Cell, name: str) -> Plot:
    slow = {each.rank for each in cell.stragglers}
    made = rows_of(
        [cell] * cell.world,
        [f"rank {rank}{' (slow)' if rank in slow else ''}" for rank in range(cell.world)],
        0.36,
        1.5,
    )
    compute, w = cell.per_rank("compute"), cell.waiting
    for rank in range(cell.world):
        left = 0.0
        for width, tint in (
            (compute[rank], COMPUTE),
            (w.waiting[rank], WAITING),
            (w.transfer[rank], EXPOSED),
        ):
            made.axes.barh(rank, width, left=left, height=0.6, color=tint)
            left += width
        whole = made.axes.barh(rank, left, height=0.6, alpha=0.0)[0]
        parts = f"{compute[rank]:.2f} s computing, {w.waiting[rank]:.2f} waiting, {w.transfer[rank]:.2f} transfer"
        made.tip(whole, f"rank {rank}: {parts}")
    made.axes.set_xlabel("seconds per step (hidden communication included)")
    keys = [
        Patch(facecolor=COMPUTE, label="computing"),
        Patch(facecolor=WAITING, label="waiting for the last rank"),
        Patch(facecolor=EXPOSED, label="transfer"),
    ]
    legend_below(made, keys)
    return plot(made, name, findings.straggler(cell), f"Run {cell.spec.name}. {findings.STRAGGLER}")


DETAILED = (where_time_goes,)  # for runs that recorded spans
SIDE_BY_SIDE = (bytes_per_rank, roofline)  # for all modes
