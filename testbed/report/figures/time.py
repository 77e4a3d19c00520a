"""Figures over time: one step as a strip, loss against iteration and against seconds, seconds against iteration.

For runs with injected faults: how fast each fault was detected, and its effect on every rank, on one clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from testbed.report import findings
from testbed.report.figures.modes import rows_of
from testbed.report.figures.style import (
    COLOURS,
    DASHES,
    Canvas,
    Plot,
    canvas,
    colour,
    legend_above,
    legend_below,
    plot,
    strips,
)
from testbed.report.load import Column, FaultedRun
from testbed.report.model import Cell

PHASES = ("data", "forward", "backward", "update")
MAX_POINTS = 300  # of one line; a longer line is averaged in blocks


def timeline(cells: Sequence[Cell], names: Sequence[str]) -> Plot:
    """Draw the step of rank 0 nearest to the median, for every mode: the loop above, the buffers on the wire below."""
    made = rows_of(cells, names, 0.56, 1.5)
    copies, exposed = COLOURS["copies"][0], COLOURS["exposed"][0]
    for y, cell in enumerate(cells):
        steps = cell.steps[0]
        k = int(np.argmin(np.abs(steps.total - np.median(steps.total))))
        for name in PHASES:
            spans = [(o, s) for phase, o, s in steps.phases[k] if phase == name]
            made.axes.broken_barh(spans, (y - 0.36, 0.36), facecolor=COLOURS[name][0])
        made.axes.broken_barh(steps.copying[k], (y - 0.36, 0.36), facecolor=copies)
        made.axes.broken_barh(steps.stalls[k], (y - 0.36, 0.36), facecolor=exposed)
        tint = colour(cell.spec.mode.algorithm)
        comm = [(c.offset, c.seconds) for c in steps.comm[k]]
        made.axes.broken_barh(comm, (y + 0.04, 0.28), facecolor=tint, edgecolor=COLOURS["card"][0], linewidth=0.5)
    made.axes.set_xlim(0, None)
    made.axes.set_xlabel("seconds since the step began (rank 0)")
    keys = [Patch(facecolor=COLOURS[name][0], label=name) for name in PHASES]
    keys += [
        Patch(facecolor=copies, label="copies"),
        Patch(facecolor=exposed, label="blocked"),
        Patch(facecolor=COLOURS["muted"][0], label="buffers on the wire"),
    ]
    legend_below(made, keys)
    return plot(made, "timeline", findings.timeline(cells), findings.TIMELINE)


def _lines(made: Canvas, curves: Sequence[tuple[Column, Column]], cells: Sequence[Cell], names: Sequence[str]) -> None:
    """Draw one line per cell. The first line is the widest, so that lines which cover each other are all visible."""
    seen: dict[str, int] = {}
    for number, ((x, y), cell, name) in enumerate(zip(curves, cells, names, strict=True)):
        kind = cell.spec.mode.algorithm
        dash = DASHES[seen.get(kind, 0) % len(DASHES)]
        seen[kind] = seen.get(kind, 0) + 1
        width = 1.5 + 2.4 * (len(cells) - 1 - number) / max(1, len(cells) - 1)
        x, y = thin(x), thin(y)
        (line,) = made.axes.plot(x, y, color=colour(kind), linewidth=width, linestyle=dash, label=name, alpha=0.9)
        made.tip(line, name)
    legend_above(made)


def thin(values: Column) -> Column:
    """Return at most MAX_POINTS values, each the mean of a block; nan if all values of the block are nan."""
    if len(values) <= MAX_POINTS:
        return values
    known = [block[~np.isnan(block)] for block in np.array_split(values, MAX_POINTS)]
    return np.array([block.mean() if len(block) else np.nan for block in known])


def loss_by_step(cells: Sequence[Cell], names: Sequence[str]) -> Plot:
    """Draw loss against iteration. Modes that train the same model have the same line."""
    made = canvas(3.3)
    _lines(made, [(np.arange(1, len(c.losses()) + 1, dtype=np.float64), c.losses()) for c in cells], cells, names)
    made.axes.set_xlabel("iteration")
    made.axes.set_ylabel("training loss")
    return plot(
        made,
        "loss-by-iteration",
        findings.loss_by_step(cells),
        "Mean over ranks, weighted by their share of the batch.",
    )


def loss_by_time(cells: Sequence[Cell], names: Sequence[str]) -> Plot | None:
    """Draw the same losses against time, of runs without injected faults; None if there are none."""
    shown = [(cell, name) for cell, name in zip(cells, names, strict=True) if not cell.disturbed]
    if not shown:
        return None
    cells, names = [cell for cell, _ in shown], [name for _, name in shown]
    made = canvas(3.3)
    curves = [(c.seconds_so_far(), c.losses()) for c in cells]
    _lines(made, curves, cells, names)
    made.axes.set_xlabel("seconds of training")
    made.axes.set_ylabel("training loss")
    return plot(
        made,
        "loss-by-time",
        findings.loss_by_time(cells),
        "Time includes warm-up steps and evaluation, as a user waits for them.",
    )


def seconds_by_step(cells: Sequence[Cell], names: Sequence[str]) -> Plot:
    """Draw every step's time, warm-up included, with a gap where steps were under an injected fault."""
    made = canvas(3.3)
    series = [_step_seconds(cell) for cell in cells]
    _lines(made, [(np.arange(1, len(y) + 1, dtype=np.float64), y) for y in series], cells, names)
    made.axes.set_ylim(0, None)
    warmup = max(c.spec.warmup for c in cells)
    made.axes.axvspan(0.5, warmup + 0.5, color=COLOURS["grid"][0], alpha=0.55, linewidth=0)
    marks = ["shaded: warm-up"] if warmup else []
    marks += ["gap: under a fault"] if any(cell.disturbed for cell in cells) else []
    made.axes.set_xlabel(f"iteration ({', '.join(marks)}; not counted)" if marks else "iteration")
    made.axes.set_ylabel("seconds, mean over ranks")
    return plot(made, "seconds-by-iteration", findings.seconds_by_step(cells), "")


def _step_seconds(cell: Cell) -> Column:
    """Return the seconds of each step of the first repeat, mean over ranks; nan under a fault."""
    steps = [rank.steps for rank in cell.first.ranks]
    length = min(len(each.total) for each in steps)
    mean = np.mean([each.total[:length] for each in steps], axis=0)
    under = np.isin(steps[0].step[:length], list(cell.first.under_fault))
    return np.where(under, np.nan, mean)


DETAILED = (timeline,)  # for runs that recorded spans
SIDE_BY_SIDE = (seconds_by_step,)  # for all modes
LEARNING = (loss_by_time, loss_by_step)  # for modes whose ranks train one model


MAX_RUNS = 6  # runs that get a figure of their own
BEFORE_S, AFTER_S = 4.0, 2.0  # shown before the fault and after the last rank ended
STEP, FAULT, INK = COLOURS["backward"][0], COLOURS["exposed"][0], COLOURS["ink"][0]
NOTE = (
    "Bars are steps. The dashed line is the time of the fault, the red bar its duration. A diamond is a rank that ended"
    " because it lost another, a cross is any other end with an error."
)


def draw_faults(runs: Sequence[FaultedRun]) -> list[Plot]:
    """Draw one figure of all runs with a detected fault, if there are several, then one run of each kind of fault."""
    timed = [run for run in runs if run.one_clock and run.episodes]
    noticed = [run for run in timed if run.history.last_notice_s is not None]
    kinds: dict[str, FaultedRun] = {}
    for run in timed:
        kinds.setdefault(f"{run.episodes[0].fault.split(':')[0]} {run.row[-1]}", run)
    single_runs = [_run(run, f"fault-{number}") for number, run in enumerate(list(kinds.values())[:MAX_RUNS], start=1)]
    return [*([_noticed(noticed)] if len(noticed) > 1 else []), *single_runs]


def _noticed(runs: Sequence[FaultedRun]) -> Plot:
    """Draw a row per fault and a dot per mode: seconds until the last of the other ranks detected the fault."""
    faults = list(dict.fromkeys(run.row[1] for run in runs))
    made = strips(faults, 0.42, 1.5)
    modes = list(dict.fromkeys(str(run.spec.mode) for run in runs))
    for run in runs:
        spread = 0.12 * (modes.index(str(run.spec.mode)) - (len(modes) - 1) / 2)
        x, y = run.history.last_notice_s or 0.0, faults.index(run.row[1]) + spread
        tint = colour(run.spec.mode.algorithm)
        fill = tint if run.history.named_right else COLOURS["card"][0]
        (dot,) = made.axes.plot([x], [y], "o", markersize=6, markeredgecolor=tint, markerfacecolor=fill)
        right = {True: "named the right rank", False: "named another rank", None: "named no rank"}[
            run.history.named_right
        ]
        made.tip(dot, f"{run.spec.mode}, {run.row[1]}: all others detected the fault after {x:.2f} s, {right}")
    made.axes.set_xlim(0, None)
    made.axes.set_xlabel("seconds from the fault until the last other rank detected it")
    tints = {mode: colour(mode.split("/")[0]) for mode in modes}
    legend_below(made, [Patch(facecolor=tint, label=mode) for mode, tint in tints.items()])
    return plot(made, "faults-noticed", findings.faults_noticed(runs), "Hollow dot: another rank was named, or none.")


def _run(run: FaultedRun, name: str) -> Plot:
    """Draw the steps, the faults and the end of every rank of one run."""
    zero = run.episodes[0].begin
    made = strips([f"rank {rank}" for rank in range(run.spec.world)], 0.36, 1.5)
    ends = [at - zero for _, at, _ in run.ended] + [end - zero for steps in run.steps for _, end in steps]
    last = max([*ends, 0.5])
    for rank, steps in enumerate(run.steps):
        bars = [(begin - zero, end - begin) for begin, end in steps if end - zero >= -BEFORE_S]
        made.axes.broken_barh(bars, (rank - 0.3, 0.6), facecolor=STEP, edgecolor=COLOURS["card"][0], linewidth=0.3)
    for episode in run.episodes:
        made.axes.axvline(episode.begin - zero, color=FAULT, linestyle="--", linewidth=1.4)
        if episode.end is not None:
            span = (episode.begin - zero, min(episode.end - zero, last) - (episode.begin - zero))
            made.axes.broken_barh([span], (episode.rank - 0.3, 0.6), facecolor=FAULT, alpha=0.45)
    for rank, at in set(run.noticed):
        made.axes.plot([at - zero], [rank], "D", color=INK, markersize=6)
    for rank, at, code in run.ended:
        if code not in (0, 6):
            made.axes.plot([at - zero], [rank], "X", color=FAULT, markersize=9)
    first = min((begin for steps in run.steps for begin, _ in steps), default=zero) - zero
    made.axes.set_xlim(max(first, -BEFORE_S), last + min(AFTER_S, 0.05 * (last + BEFORE_S)))
    made.axes.set_xlabel("seconds since the fault")
    keys = [
        Patch(facecolor=STEP, label="steps"),
        Line2D([], [], color=FAULT, linestyle="--", label="the fault"),
        Line2D([], [], color=INK, marker="D", linestyle="", label="lost another rank"),
        Line2D([], [], color=FAULT, marker="X", linestyle="", label="ended with an error"),
    ]
    legend_below(made, keys)
    return plot(made, name, findings.one_fault(run), f"Run {run.spec.name}. {NOTE}")
