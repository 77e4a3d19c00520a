"""Figures along a swept quantity: nodes, batch, bandwidth, bucket size, steps between synchronisations, substrate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from testbed.report import findings, model, stats
from testbed.report.figures.modes import rows_of
from testbed.report.figures.style import COLOURS, DASHES, MARKERS, Canvas, Plot, canvas, colour, legend_above, plot
from testbed.report.model import Cell, Chapter, Curve
from testbed.spec.units import format_rate, format_size

Value = Callable[[Cell], float | None]


def seconds(cell: Cell) -> float:
    return cell.seconds.centre


def draw_curves(made: Canvas, curves: dict[str, Curve], value: Value, bars: bool = True) -> None:
    """Draw one line with markers per curve. With `bars`, whiskers show the 95 % interval of the seconds."""
    seen: dict[str, int] = {}
    for name, curve in curves.items():
        kind = next((cell.spec.mode.algorithm for _, cell in curve if cell.spec.mode.distributed), "single")
        number = seen.get(kind, 0)
        seen[kind] = number + 1
        points = [(x, y, cell) for x, cell in curve if (y := value(cell)) is not None]
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        spread = [
            [max(0.0, c.seconds.centre - c.seconds.low) for *_, c in points],
            [max(0.0, c.seconds.high - c.seconds.centre) for *_, c in points],
        ]
        style = {
            "color": colour(kind),
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": DASHES[number % len(DASHES)],
        }
        made.axes.errorbar(xs, ys, yerr=spread if bars else None, capsize=2.5, elinewidth=1.0, label=name, **style)
        for x, y, cell in points:
            (spot,) = made.axes.plot([x], [y], marker="o", markersize=12, alpha=0.0, linestyle="none")
            made.tip(spot, f"{name}: {y:.3f} at {x:g} ({cell.seconds.n} steps)")
    legend_above(made)


def nodes(chapter: Chapter) -> list[Plot]:
    """Draw seconds per step and efficiency against the number of nodes, with the same batch over all ranks."""
    fixed = {
        name: curve
        for name, curve in model.curves(chapter, model.NODES).items()
        if len({cell.batch for _, cell in curve}) == 1 and curve[0][1].batch
    }
    found = {name: model.from_one_node(chapter, curve) for name, curve in fixed.items()}
    if not found:
        return []
    made = canvas(3.4)
    draw_curves(made, found, seconds)
    _whole_numbers(made, found)
    made.axes.set_ylim(0, None)
    made.axes.set_ylabel("seconds per step")
    drawn = [
        plot(
            made,
            "nodes",
            findings.nodes(found),
            "Strong scaling: the batch over all ranks is the same for every number of nodes.",
        )
    ]
    efficient = {name: curve for name, curve in found.items() if curve[0][0] == 1.0}
    if efficient:
        made = canvas(3.4, left=0.85)
        draw_curves(made, efficient, lambda cell: (chapter.speed_up(cell) or 0.0) / cell.world, bars=False)
        _whole_numbers(made, efficient)
        made.axes.set_ylim(0, 1.08)
        made.axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f} %"))
        made.axes.set_ylabel("efficiency: speed-up / nodes")
        drawn.append(
            plot(
                made,
                "efficiency",
                findings.efficiency(chapter, efficient),
                "At 100 %, N nodes are N times as fast as one node.",
            )
        )
    return drawn


def weak(chapter: Chapter) -> list[Plot]:
    """Draw images per second against the number of nodes, with the same batch per rank."""
    if len({cell.batch for cell in chapter.cells}) < 2:
        return []
    found = {}
    for name, curve in model.curves(chapter, model.WEAK).items():
        per_rank = curve[0][1].first.images(0)
        if not per_rank:
            continue
        single = next(
            (
                c
                for c in chapter.cells
                if c.world == 1
                and c.batch == per_rank
                and (c.spec.script is None) == (curve[0][1].spec.script is None)
                and (c.substrate, c.machine) == (curve[0][1].substrate, curve[0][1].machine)
            ),
            None,
        )
        found[name] = [(1.0, single), *curve] if single else curve
    if not found:
        return []
    made = canvas(3.4)
    draw_curves(made, found, lambda cell: cell.images_per_second, bars=False)
    _whole_numbers(made, found)
    made.axes.set_ylim(0, None)
    made.axes.set_ylabel(f"{chapter.unit} per second")
    return [
        plot(
            made,
            "weak-scaling",
            findings.weak(found),
            "Weak scaling: the batch per rank is the same, the batch over all ranks grows.",
        )
    ]


def _whole_numbers(made: Canvas, curves: dict[str, Curve]) -> None:
    """Set an axis of nodes with a tick at each value that occurs."""
    made.axes.xaxis.set_major_locator(FixedLocator(sorted({x for curve in curves.values() for x, _ in curve})))
    made.axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    made.axes.set_xlabel("nodes")


def _log_ticks(made: Canvas, curves: dict[str, Curve], spell: Callable[[int], str]) -> None:
    """Set a logarithmic axis with a tick at each value that occurs."""
    made.axes.set_xscale("log")
    made.axes.xaxis.set_major_locator(FixedLocator(sorted({x for curve in curves.values() for x, _ in curve})))
    made.axes.xaxis.set_minor_locator(NullLocator())
    made.axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: spell(round(x))))


def bandwidth(chapter: Chapter) -> list[Plot]:
    """Draw seconds per step against the rate of the links, with the time of one node and the curves' crossings."""
    found = model.curves(chapter, model.RATE)
    if not found:
        return []
    made = canvas(3.7)
    draw_curves(made, found, seconds)
    names = list(found)
    lines = [[(x, cell.seconds.centre) for x, cell in curve] for curve in found.values()]
    single = next((s for curve in found.values() for _, cell in curve if (s := chapter.single(cell))), None)
    if single:
        level = single.seconds.centre
        _level(made, level, "one node", colour("single"))
        names.append("one node")
        lines.append([(x, level) for x in sorted({x for line in lines for x, _ in line})])
    met = model.crossings(names, lines)
    for each in met:
        (spot,) = made.axes.plot(
            [each.at],
            [each.seconds],
            marker="o",
            markersize=10,
            markerfacecolor="none",
            color=COLOURS["ink"][0],
            linestyle="none",
        )
        made.tip(spot, f"at {findings.rough_rate(each.at)} {each.right} overtakes {each.left}")
    made.axes.set_yscale("log")
    _plain_seconds(made)
    _log_ticks(made, found, format_rate)
    made.axes.set_xlabel("rate of every link, each way (○: crossing)")
    made.axes.set_ylabel("seconds per step")
    return [plot(made, "bandwidth", findings.bandwidth(found, met=met, single=single), "Both axes are logarithmic.")]


def _level(made: Canvas, seconds: float, name: str, tint: str) -> None:
    """Draw a dashed horizontal line with its name at the right end."""
    made.axes.axhline(seconds, color=tint, linestyle=(0, (4, 3)), linewidth=1.4)
    across = made.axes.get_yaxis_transform()
    made.axes.text(1.0, seconds, name, transform=across, ha="right", va="bottom", fontsize=9, color=tint)


def _plain_seconds(made: Canvas) -> None:
    """Set ticks at 1, 2 and 5 of each decade of a logarithmic axis, as decimal numbers."""
    low, high = made.axes.get_ylim()
    ticks = [m * 10.0**e for e in range(-4, 5) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    made.axes.yaxis.set_major_locator(FixedLocator(ticks))
    made.axes.yaxis.set_minor_locator(NullLocator())
    made.axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def buckets(chapter: Chapter) -> list[Plot]:
    """Draw seconds per step against the bucket size. Modes without buckets are horizontal lines."""
    found = model.curves(chapter, model.BUCKET)
    if not found:
        return []
    made = canvas(3.4)
    draw_curves(made, found, seconds)
    levels = [cell for cell in chapter.cells if not cell.spec.mode.silent and not cell.spec.mode.bucket]
    for cell in levels[:4]:
        _level(made, cell.seconds.centre, cell.label, colour(cell.spec.mode.algorithm))
    _log_ticks(made, found, format_size)
    made.axes.tick_params(axis="x", labelsize=9)
    made.axes.set_ylim(0, None)
    made.axes.set_xlabel("bucket size")
    made.axes.set_ylabel("seconds per step")
    return [plot(made, "buckets", findings.buckets(found, levels=levels), "Dashed: modes without a bucket size.")]


def skipping(chapter: Chapter) -> list[Plot]:
    """Draw seconds per step and accuracy against the number of steps between synchronisations."""
    found = model.curves(chapter, model.EVERY)
    if not found:
        return []
    made = canvas(3.4)
    draw_curves(made, found, seconds)
    _log_ticks(made, found, str)
    made.axes.set_ylim(0, None)
    made.axes.set_xlabel("synchronise every K steps")
    made.axes.set_ylabel("seconds per step")
    drawn = [plot(made, "skipping-speed", findings.skipping_speed(found), "")]
    if any(accuracy(cell) is not None for curve in found.values() for _, cell in curve):
        made = canvas(3.4)
        draw_curves(made, found, lambda cell: None if (a := accuracy(cell)) is None else 100 * a, bars=False)
        _log_ticks(made, found, str)
        made.axes.set_xlabel("synchronise every K steps")
        made.axes.set_ylabel("test accuracy in %")
        drawn.append(plot(made, "skipping-accuracy", findings.skipping_accuracy(found), ""))
    return drawn


def accuracy(cell: Cell) -> float | None:
    known = [run.summary.test_accuracy for run in cell.runs if run.summary.test_accuracy is not None]
    return statistics.fmean(known) if known else None


def substrates(chapter: Chapter) -> list[Plot]:
    """Draw seconds per step of equal specs on several substrates."""
    if len(chapter.substrates) < 2:
        return []
    by_spec: dict[str, dict[str, Cell]] = {}
    for cell in chapter.cells:
        by_spec.setdefault(f"{cell.same_spec} of {cell.machine}", {})[cell.substrate] = cell
    both = [cells for cells in by_spec.values() if len(cells) > 1][:10]
    if not both:
        return []
    firsts = [next(iter(cells.values())) for cells in both]
    made = rows_of(firsts, [cell.label for cell in firsts], 0.5)
    tints = dict(zip(chapter.substrates, np.linspace(0.95, 0.45, len(chapter.substrates)), strict=True))
    height = 0.76 / len(chapter.substrates)
    for y, cells in enumerate(both):
        for number, (substrate, cell) in enumerate(cells.items()):
            at = y - 0.38 + height * (number + 0.5)
            bar = made.axes.barh(
                at,
                cell.seconds.centre,
                height * 0.86,
                color=colour(cell.spec.mode.algorithm),
                alpha=float(tints[substrate]),
            )[0]
            made.tip(bar, f"{cell.label} on {substrate}: {cell.seconds.centre:.3f} s")
            text = f" {stats.seconds(cell.seconds.centre)}, {substrate}"
            made.axes.text(cell.seconds.centre, at, text, va="center", fontsize=8.8)
    made.axes.set_xlim(0, 1.3 * max(c.seconds.centre for cells in both for c in cells.values()))
    made.axes.set_xlabel("seconds per step")
    return [
        plot(
            made,
            "substrates",
            findings.substrates(both),
            "The same spec and the same code on different substrates.",
        )
    ]


ALONG: Sequence[Callable[[Chapter], list[Plot]]] = (nodes, weak, bandwidth, buckets, skipping, substrates)
