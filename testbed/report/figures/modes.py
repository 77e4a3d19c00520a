"""Plots that set methods side by side under one condition: where a step goes, bytes, lower bounds."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.patches import Patch

from testbed.report import findings, stats
from testbed.report.figures.style import (
    COLOURS,
    Canvas,
    Plot,
    canvas,
    colour,
    plot,
)
from testbed.report.model import Cell, Chapter

INK, MUTED = COLOURS["ink"][0], COLOURS["muted"][0]
COMPUTE, EXPOSED, REST, BOUND = (COLOURS[name][0] for name in ("compute", "exposed", "rest", "bound"))
ROW = 0.42  # inches per bar


def rows(cells: Sequence[Cell], names: Sequence[str], per_row: float = ROW, extra: float = 1.25) -> Canvas:
    """Strips for methods, with their names in their colours."""
    made = strips(names, per_row, extra)
    for tick, cell in zip(made.axes.get_yticklabels(), cells, strict=True):
        tick.set_color(colour(cell.spec.mode.algorithm))
        tick.set_fontweight("bold")
    return made


def strips(names: Sequence[str], per_row: float, extra: float) -> Canvas:
    """A plot of horizontal rows, first on top, with the names at the left."""
    longest = max(len(name) for name in names)
    small = longest > 26
    left = 0.25 + (0.072 if small else 0.09) * longest
    made = canvas(extra + per_row * len(names), left=min(left, 2.6))
    made.axes.set_yticks(range(len(names)), names, fontsize=8 if small else 10)
    made.axes.set_ylim(len(names) - 0.45, -0.55)
    made.axes.tick_params(axis="y", length=0)
    made.axes.grid(axis="y", visible=False)
    made.axes.spines["left"].set_visible(False)
    return made


def legend_below(made: Canvas, keys: Sequence[Artist]) -> None:
    """A line of keys under the axes, which make room for it."""
    columns = 2 if sum(len(str(key.get_label())) + 6 for key in keys) > 95 else 3
    style = {"ncols": columns, "columnspacing": 1.2, "handlelength": 1.4, "labelspacing": 0.3}
    made.figure.legend(handles=list(keys), loc="lower left", bbox_to_anchor=(0.0, -0.01), **style)
    box, lift = made.axes.get_position(), (0.14 + 0.19 * -(-len(keys) // columns)) / made.figure.get_size_inches()[1]
    made.axes.set_position((box.x0, box.y0 + lift, box.width, box.height - lift))


def legend_above(made: Canvas) -> None:
    """Names over the axes, as many to a line as fit; the axes make room."""
    names = made.axes.get_legend_handles_labels()[1]
    columns = max(1, min(len(names), int(58 / (max(map(len, names)) + 7))))
    lines = -(-len(names) // columns)
    box, drop = made.axes.get_position(), 0.2 * lines / made.figure.get_size_inches()[1]
    made.axes.set_position((box.x0, box.y0, box.width, box.height - drop))
    style = {"ncols": columns, "columnspacing": 1.3, "handlelength": 2.0, "borderaxespad": 0.2}
    made.axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), **style)


def where_time_goes(chapter: Chapter, cells: Sequence[Cell], names: Sequence[str]) -> Plot:
    """Compute, with what was hidden under it, then exposed and the rest: together one step."""
    made = rows(cells, names)
    longest = max(cell.split.step for cell in cells)
    for y, (cell, name) in enumerate(zip(cells, names, strict=True)):
        s = cell.split
        hidden = min(s.hidden, s.compute)
        parts = (
            (0.0, s.compute, COMPUTE),
            (s.compute, s.exposed, EXPOSED),
            (s.compute + s.exposed, max(s.rest, 0), REST),
        )
        for left, width, tint in parts:
            made.axes.barh(y, width, left=left, height=0.62, color=tint)
        if hidden > 0.002 * longest:
            made.axes.barh(y, hidden, left=s.compute - hidden, height=0.62, color="none", hatch="////", linewidth=0)
        whole = made.axes.barh(y, s.step, height=0.62, alpha=0.0)[0]
        share = f", {100 * s.hidden_share:.0f} % of communication hidden" if s.hidden_share is not None else ""
        made.tip(
            whole,
            f"{name}: {s.step:.3f} s = {s.compute:.3f} computing + {s.exposed:.3f} blocked + {s.rest:.3f} rest{share}",
        )
        made.axes.text(s.step + 0.012 * longest, y, stats.seconds(s.step), va="center", color=INK, fontsize=9.5)
    made.axes.set_xlim(0, longest * 1.19)
    made.axes.set_xlabel("seconds of an average step")
    keys = [
        Patch(facecolor=COMPUTE, label="computing"),
        Patch(facecolor=COMPUTE, hatch="////", label="computing while sending (hidden)"),
        Patch(facecolor=EXPOSED, label="blocked by communication"),
        Patch(facecolor=REST, label="rest"),
    ]
    legend_below(made, keys)
    return plot(made, "where-time-goes", findings.where_time_goes(chapter, cells), findings.WHERE_TIME_GOES)


def bytes_per_rank(chapter: Chapter, cells: Sequence[Cell], names: Sequence[str]) -> Plot | None:
    """What each rank sent in a step, and the line that theory draws."""
    shown = [
        (cell, name) for cell, name in zip(cells, names, strict=True) if any(cell.sent()) and not cell.spec.mode.silent
    ]
    if not shown:
        return None
    most = max(cell.world for cell, _ in shown)
    made = rows([cell for cell, _ in shown], [name for _, name in shown], 0.3 + 0.085 * min(most, 8))
    for y, (cell, name) in enumerate(shown):
        height = 0.8 / cell.world
        for rank, (sent, needed) in enumerate(zip(cell.sent(), cell.needed(), strict=True)):
            place = y - 0.4 + height * (rank + 0.5)
            bar = made.axes.barh(
                place, (sent or 0) / 1e6, height=height * 0.82, color=colour(cell.spec.mode.algorithm), alpha=0.85
            )[0]
            least = f", theory {needed / 1e6:.1f} MB" if needed is not None else ""
            made.tip(bar, f"{name}, rank {rank}: {(sent or 0) / 1e6:.1f} MB sent per step{least}")
            if needed:
                made.axes.plot(
                    [needed / 1e6] * 2, [place - height * 0.55, place + height * 0.55], color=BOUND, linewidth=1.6
                )
    made.axes.set_xlabel("MB per step, a bar per rank; | is theory")
    return plot(made, "bytes-per-rank", findings.bytes_per_rank(chapter, [cell for cell, _ in shown]), findings.BYTES)


def roofline(chapter: Chapter, cells: Sequence[Cell], names: Sequence[str]) -> Plot | None:
    """Seconds that communication took against the least its bytes need on the network that was measured."""
    shown = [(cell, name) for cell, name in zip(cells, names, strict=True) if cell.bound and cell.split.busy > 0]
    if not shown:
        return None
    made = rows([cell for cell, _ in shown], [name for _, name in shown])
    longest = max(max(cell.split.busy, cell.bound or 0) for cell, _ in shown)
    for y, (cell, name) in enumerate(shown):
        busy, least = cell.split.busy, cell.bound or 0.0
        bar = made.axes.barh(y, busy, height=0.5, color=colour(cell.spec.mode.algorithm), alpha=0.8)[0]
        made.tip(bar, f"{name}: {busy:.3f} s communicating per step, at least {least:.3f} s needed")
        made.axes.plot([least] * 2, [y - 0.4, y + 0.4], color=BOUND, linewidth=2.4, solid_capstyle="butt")
        made.axes.text(
            max(busy, least) + 0.012 * longest, y, f"{findings.times(busy / least)}×", va="center", fontsize=9.5
        )
    made.axes.set_xlim(0, longest * 1.16)
    made.axes.set_xlabel("s of communication per step; | is the least")
    return plot(made, "roofline", findings.roofline(chapter, [cell for cell, _ in shown]), findings.ROOFLINE)


def slow_ranks(chapter: Chapter) -> list[Plot]:
    """Rank by rank where a straggler was found: computing, waiting for the last to join, moving bytes."""
    found = [cell for cell in chapter.cells if cell.stragglers][:3]
    return [_ranks(cell, f"ranks-{number}") for number, cell in enumerate(found, start=1)]


def _ranks(cell: Cell, name: str) -> Plot:
    slow = {each.rank for each in cell.stragglers}
    made = rows(
        [cell] * cell.world, [f"rank {rank}{' (slow)' * (rank in slow)}" for rank in range(cell.world)], 0.36, 1.5
    )
    compute, w = cell.per_rank("compute"), cell.waiting
    for rank in range(cell.world):
        left = 0.0
        for width, tint in (
            (compute[rank], COMPUTE),
            (w.waiting[rank], COLOURS["data"][0]),
            (w.transfer[rank], EXPOSED),
        ):
            made.axes.barh(rank, width, left=left, height=0.6, color=tint)
            left += width
        whole = made.axes.barh(rank, left, height=0.6, alpha=0.0)[0]
        parts = f"{compute[rank]:.2f} s computing, {w.waiting[rank]:.2f} waiting, {w.transfer[rank]:.2f} transfer"
        made.tip(whole, f"rank {rank}: {parts}")
    made.axes.set_xlabel("seconds per step (hidden communication counts)")
    keys = [
        Patch(facecolor=COMPUTE, label="computing"),
        Patch(facecolor=COLOURS["data"][0], label="waiting for the last"),
        Patch(facecolor=EXPOSED, label="bytes moving"),
    ]
    legend_below(made, keys)
    first = cell.stragglers[0].sentence
    return plot(made, name, f"{first[0].upper()}{first[1:]}", f"Run {cell.spec.name}. {findings.STRAGGLER}")
