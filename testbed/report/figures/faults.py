"""Figures of runs with injected faults: how fast each was detected, and what it did to every rank, on one clock."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from testbed.report import findings
from testbed.report.faulted import FaultedRun
from testbed.report.figures.style import COLOURS, Plot, colour, legend_below, plot, strips

MAX_RUNS = 6  # runs that get a figure of their own
BEFORE_S, AFTER_S = 4.0, 2.0  # shown before the fault and after the last rank ended
STEP, FAULT, INK = COLOURS["backward"][0], COLOURS["exposed"][0], COLOURS["ink"][0]
NOTE = (
    "Bars are steps. The dashed line is the time of the fault, the red bar its duration. A diamond is a rank that ended"
    " because it lost another, a cross is any other end with an error."
)


def draw(runs: Sequence[FaultedRun]) -> list[Plot]:
    """One figure of all runs if several were detected; then one run of each kind of fault."""
    timed = [run for run in runs if run.one_clock and run.episodes]
    noticed = [run for run in timed if run.history.last_notice_s is not None]
    kinds: dict[str, FaultedRun] = {}
    for run in timed:
        kinds.setdefault(f"{run.episodes[0].fault.split(':')[0]} {run.row[-1]}", run)
    single_runs = [_run(run, f"fault-{number}") for number, run in enumerate(list(kinds.values())[:MAX_RUNS], start=1)]
    return [*([_noticed(noticed)] if len(noticed) > 1 else []), *single_runs]


def _noticed(runs: Sequence[FaultedRun]) -> Plot:
    """A row per fault, a dot per mode: seconds until the last of the other ranks detected it."""
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
        made.tip(dot, f"{run.spec.mode}, {run.row[1]}: all others detected it after {x:.2f} s, {right}")
    made.axes.set_xlim(0, None)
    made.axes.set_xlabel("seconds from the fault until the last other rank detected it")
    tints = {mode: colour(mode.split("/")[0]) for mode in modes}
    legend_below(made, [Patch(facecolor=tint, label=mode) for mode, tint in tints.items()])
    return plot(made, "faults-noticed", findings.faults_noticed(runs), "Hollow dot: another rank was named, or none.")


def _run(run: FaultedRun, name: str) -> Plot:
    """Steps, fault and ends of every rank of one run."""
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
