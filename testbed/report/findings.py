"""Verdict: the first thing a reader sees. Who wins and by how much, what limits it, and whether the numbers add up."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from testbed.report import theory
from testbed.report.load import Column
from testbed.report.model import (
    NO_CONDITION,
    Cell,
    Chapter,
    Crossing,
    Curve,
    Focus,
    names,
    overrides_in_words,
    sent_over_theory,
)
from testbed.report.stats import seconds
from testbed.results.faults import FaultedRun

# How to read each table and plot: the small print, in one place; and how seconds are spelled.

ONE_RUN = "The interval of a cell with one run is of steps within that run: it knows nothing of how runs differ."
MODES = (
    "s/iter is the median (every:K: the mean) over steps of the mean over ranks, warm-up left out, repeats pooled; its"
    " interval is a bootstrap's, which with one run knows nothing of how runs differ. Speed-up is over one node with"
    " the same batch and the same share of the machine."
)
SPLIT = (
    "Seconds, mean over steps and ranks. Exposed: the loop stood still for communication. Hidden: communication went on"
    " while the loop computed. Of all communication, waiting is before the last rank joined, transfer is after."
    " Last to join: the rank that the others waited for most, and how often it was the last."
    " A run with spans = false recorded none of it."
)
TRAFFIC = (
    "MB (10^6 bytes) per rank and step. Theory is payload; the kernel counts headers too: 0.2 % where it sees packets"
    " before they are cut into frames, up to 4.6 % where it sees frames. Shares: what all that was sent from the"
    " first step on was made of (of a restarted run: the first of its last attempt), and the MB per rank that went"
    " before it (probe, rendezvous, a first broadcast)."
    " Headers and control (heartbeats, agreement) are what is left; no counter tells them apart, because the kernel may"
    " count packets before or after they are cut into frames."
)
WIRE = (
    "S: bytes of the gradient, B: payload rate of the slowest link on the receipt (gather and server: of rank 0's)."
    " Algorithm bandwidth is S over the time of communication; bus bandwidth is that times 2(N-1)/N, what a ring would"
    " move over each link. Used of the link: what the busiest rank sent or received, whichever is more, over the time"
    " of communication and its rate on the receipt; a link that is used one way at a time reaches half."
)
NETWORK = "On the wire, each way, headers included; measured on every directed link and on the fan-in before training."
WHERE_TIME_GOES = (
    "Mean over steps and ranks. Blocked is timed in the training loop, communication in the layer that sends. Hatched"
    " is communication that ran while the loop computed, and so cost nothing."
)
BYTES = "Counted by the kernel at the node's interface, headers included; theory is payload alone."
ROOFLINE = (
    "The least is the bytes over the busiest link, divided by the payload rate that the probe measured before training,"
    " plus the delay of each hop. Waiting for a slower rank counts as communication here."
)
TIMELINE = (
    "The step nearest to the median, as rank 0 saw it. Upper strip: the training loop. Lower strip: each buffer, from"
    " the moment it was handed to the network until it was back. Under backward it is free, under red it is not."
)
RANKS = (
    "As R0 prints it: losses are of the step itself on this rank; times leave warm-up out. Shares are torch.profiler's,"
    " where it was on."
)
EPOCH_TIME = (
    "Seconds per epoch are extrapolated: images of the training set over images per second of the steps that counted."
    " Speed-up is by images per second over one worker with the same batch per worker."
)
STRAGGLER = (
    "A rank is named for its CPU when it computes an image at least 1.25 times as long as the median of the others,"
    " over all and in three of four steps; for its link when its rate on the receipt is at most 0.8 of the others'."
)

FAULTS = (
    "Noticed after: seconds from the fault to the middle one of the ranks that ended because of it. Named right: most"
    " of them blamed the rank that it was done to. Codes are those of the first attempt: -9 is SIGKILL, 6 a rank that"
    " lost another, stopped one that the controller ended. Recovered: `went on` by itself, or `restarted` from a"
    " checkpoint. A fault whose moment never came was not injected, and says so."
)


# Findings: the sentence that each plot is titled with, and the words it is made of; words.py says how to read it.

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


def faults(runs: Sequence[FaultedRun]) -> str:
    """How many, how fast noticed, how often named right, what became of them."""
    stopped = [run for run in runs if run.history.last_notice_s is not None]
    named = [run.history.named_right for run in stopped if run.history.named_right is not None]
    on = sum(run.row[-1] == "went on" for run in runs)
    again = sum(run.row[-1] == "restarted" for run in runs)
    spared = sum(not run.episodes for run in runs)
    said = [f"{len(runs)} run{'s' * (len(runs) != 1)} with faults on purpose"]
    if stopped:
        slowest = max(run.history.last_notice_s or 0.0 for run in stopped)
        said.append(f"{len(stopped)} ended by it, noticed by all others within {slowest:.1f} s")
        said.append(f"the right rank was named in {sum(named)} of {len(named)}")
    if on:
        said.append(f"{on} went on")
    if again:
        said.append(f"{again} restarted and finished")
    if spared:
        said.append(f"in {spared} nothing was injected")
    return "; ".join(said)


# Findings along a swept quantity: where scaling stops, where curves cross, what the best setting wins.

REAL = 0.02  # a change smaller than this share is no change
MOST = 4  # methods that a sentence names one by one


def rate(value: float) -> str:
    """As exact as a point between two measurements can be."""
    return rate_in_words(value, 2)


def nodes(curves: dict[str, Curve]) -> str:
    """Who falls at every step, and where the others stop."""
    falls, stops = [], []
    for name, curve in curves.items():
        times = [(int(x), cell.seconds.centre) for x, cell in curve]
        worse = next(((a, b) for a, b in itertools.pairwise(times) if b[1] > (1 - REAL) * a[1]), None)
        if worse is None:
            falls.append(name)
        else:
            verb = "gets slower" if worse[1][1] > (1 + REAL) * worse[0][1] else "gains nothing"
            stops.append(f"{name} {verb} from {worse[0][0]} to {worse[1][0]} nodes")
    said = [f"{listed(falls)} {'get' if len(falls) > 1 else 'gets'} faster with every node"] if falls else []
    return "; ".join([*said, *stops[:2]]) + (f"; so do {len(stops) - 2} more" if len(stops) > 2 else "")


def efficiency(chapter: Chapter, curves: dict[str, Curve]) -> str:
    ends = {
        name: ((chapter.speed_up(curve[-1][1]) or 0.0) / curve[-1][0], curve[-1][0]) for name, curve in curves.items()
    }
    best, worst = max(ends, key=lambda n: ends[n]), min(ends, key=lambda n: ends[n])
    text = f"At {ends[best][1]:g} nodes {best} makes use of {percent(ends[best][0])} of them"
    return text if best == worst else f"{text}, {worst} of {percent(ends[worst][0])}"


def weak(curves: dict[str, Curve]) -> str:
    gains = {n: c[-1][1].images_per_second / c[0][1].images_per_second for n, c in curves.items()}
    best = max(gains, key=lambda name: gains[name])
    first, last = curves[best][0][0], curves[best][-1][0]
    return f"With {best}, {last:g} nodes get through {gains[best]:.1f} times the images of {first:g}"


def bandwidth(curves: dict[str, Curve], met: Sequence[Crossing], single: Cell | None) -> str:
    """From which rate on each method beats one node; without a baseline, who is fastest where."""
    pays = {each.right: each.at for each in met if each.left == "one node"}
    if single:
        level = single.seconds.centre
        always = [n for n, curve in curves.items() if n not in pays and curve[-1][1].seconds.centre < level]
        ordered = sorted(pays.items(), key=lambda pair: pair[1])
        said = [f"{name} {'beats one node ' * (k == 0)}from {rate(at)} on" for k, (name, at) in enumerate(ordered)]
        said = [*said[:MOST], f"{len(said) - MOST} more from higher rates on"] if len(said) > MOST + 1 else said
        never = [name for name in curves if name not in pays and name not in always]
        said += [f"{listed(always)} {'beats one node ' * (not said)}at every rate"] if always else []
        said += [f"{listed(never)} {'beats one node ' * (not said)}at none of these rates"] if never else []
        return ", ".join(said)
    ends = [min(curves, key=lambda n: curves[n][k][1].seconds.centre) for k in (0, -1)]
    low = rate(min(x for c in curves.values() for x, _ in c))
    if ends[0] == ends[1]:
        return f"{ends[0]} is the fastest from {low} up"
    return f"{ends[0]} is the fastest at {low}, {ends[1]} at the highest rate"


def buckets(curves: dict[str, Curve], levels: Sequence[Cell]) -> str:
    name, curve = min(curves.items(), key=lambda pair: min(c.seconds.centre for _, c in pair[1]))
    best = min((cell for _, cell in curve), key=lambda cell: cell.seconds.centre)
    worst = max((cell for _, cell in curve), key=lambda cell: cell.seconds.centre)
    gain = worst.seconds.centre / best.seconds.centre - 1
    own = next((cell for cell in levels if cell.spec.mode.algorithm == best.spec.mode.algorithm), None)
    if gain < REAL:
        return f"The size of a bucket makes no difference to {name}: {percent(gain)} between best and worst"
    tail = f", {own.seconds.centre / best.seconds.centre:.2f} times as fast as {own.label}'s own" if own else ""
    times = f"{best.seconds.centre:.2f} s against {worst.seconds.centre:.2f} s for {worst.label}"
    return f"{best.label} is best: {times}{tail}"


def skipping_speed(curves: dict[str, Curve]) -> str:
    name, curve = max(curves.items(), key=lambda pair: pair[1][0][1].seconds.centre / pair[1][-1][1].seconds.centre)
    gain = curve[0][1].seconds.centre / curve[-1][1].seconds.centre
    return f"Synchronising every {curve[-1][0]:g} steps makes {name} {gain:.2f} times as fast"


def skipping_accuracy(curves: dict[str, Curve]) -> str:
    for name, curve in curves.items():
        known = [(x, 100 * a) for x, cell in curve if (a := cell.first.summary.test_accuracy) is not None]
        if len(known) > 1:
            change = known[-1][1] - known[0][1]
            verb = "costs" if change < 0 else "gains"
            return f"every:{known[-1][0]:g} {verb} {name} {abs(change):.1f} points of accuracy"
    return "Accuracy against skipped synchronisation"


def places(both: Sequence[dict[str, Cell]]) -> str:
    """How far apart two places are at most."""
    gaps = []
    for cells in both:
        times = [cell.seconds.centre for cell in cells.values()]
        gaps.append((max(times) / min(times) - 1, next(iter(cells.values())).label))
    gap, label = max(gaps)
    names = listed(list(dict.fromkeys(place for cells in both for place in cells)))
    return f"{names} agree within {percent(gap)} (furthest apart: {label})"


SUM_TOLERANCE = 0.05  # of the sums of a split, and of what it leaves as rest
BYTE_TOLERANCE = 0.095  # of counted bytes over payload: headers up to 4.6 %, acknowledgements as much again
CONTROL_TOLERANCE = 0.10  # of compute against the control run


@dataclass(frozen=True)
class Tile:
    """One figure, large, and what it is."""

    figure: str
    what: str


@dataclass(frozen=True)
class Check:
    """One way in which the numbers were held against something else."""

    ok: bool | None  # None: could not be checked
    text: str


@dataclass(frozen=True)
class Verdict:
    """A headline, why it is so, the figures behind it, and the checks."""

    headline: str
    why: list[str]
    tiles: list[Tile]
    checks: list[Check]


def verdict(chapter: Chapter, focused: Focus, swept: str = "") -> Verdict:
    """`swept` is what was found along the axis that the experiment sweeps; it comes first where there is one."""
    cells = [cell for cell in focused.cells if not cell.spec.overrides] or focused.cells  # equal nodes, where any are
    best, worst = fastest(cells), slowest(cells)
    usual = _headline(chapter, cells, best, worst)
    first = swept or _cost_of_one(chapter) or _learning(chapter)
    return Verdict(
        headline=first or usual,
        why=[*([f"{usual}."] if first else []), *_why(best, worst), *_limits(best), *_slow_ranks(chapter)],
        tiles=_tiles(chapter, best, worst, namer(cells)),
        checks=checks(chapter),
    )


def _cost_of_one(chapter: Chapter) -> str:
    """What one slow node costs, against the same mode on equal nodes."""
    costs = []
    for cell in (cell for cell in chapter.cells if cell.spec.overrides):
        equal = next((c for c in chapter.cells if c.label == cell.label and not c.spec.overrides), None)
        if equal:
            costs.append((cell.seconds.centre / equal.seconds.centre, cell, equal))
    if not costs:
        return ""
    factor, cell, equal = max(costs, key=lambda each: each[0])
    times = f"{seconds(cell.seconds.centre)} a step instead of {seconds(equal.seconds.centre)}"
    where = f"{cell.label} with {overrides_in_words(cell)}"
    return f"One slow node slows everybody: {where} takes {times}, {factor:.1f} times as long"


def _learning(chapter: Chapter) -> str:
    """Where the question is what is learnt, the answer is too."""
    placed = {cell.spec.placement for cell in chapter.cells}
    return loss_by_step([c for c in chapter.cells if not c.spec.mode.is_control]) if len(placed) > 1 else ""


def _headline(chapter: Chapter, cells: Sequence[Cell], best: Cell, worst: Cell) -> str:
    speed, copies = chapter.speed_up(best), best.world
    if not best.spec.mode.distributed:
        return f"One node takes {seconds(best.seconds.centre)} a step"
    rate = best.spec.link.rate
    where = f"At {rate_in_words(rate)} each way" if rate else "On this network"
    if best is worst or best.label == worst.label:
        gain = "" if speed is None else f", {speed:.2f} times the speed of one node"
        return f"{where} {best.label} keeps {copies} copies in step in {seconds(best.seconds.centre)} a step{gain}"
    factor = worst.seconds.centre / best.seconds.centre
    text = f"{where} {best.label} is {factor:.1f} times as fast as {worst.label}"
    if speed is None:
        return text
    pays = (
        f"and {speed:.2f} times as fast as one node" if speed >= 1 else f"but slower than one node ({speed:.2f} times)"
    )
    return f"{text}, {pays}"


def _why(best: Cell, worst: Cell) -> list[str]:
    """The bytes on the busiest link, and what is hidden."""
    costs = [theory.cost(cell.spec.mode, cell.world) for cell in (best, worst)]
    if best is worst or not all(costs) or not best.bound or not worst.bound:
        return []
    said = []
    if worst.bound > 1.5 * best.bound:
        loads = [
            cost.load * cell.buffers[1] * cell.syncs for cost, cell in zip(costs, (best, worst), strict=True) if cost
        ]
        where = "through rank 0's link" if worst.spec.mode.rooted else "over the busiest link"
        said.append(
            f"{worst.label} must move {megabytes(loads[1])} a step {where}: at least {seconds(worst.bound)} here. "
            f"{best.label} moves {megabytes(loads[0])} over each link: {seconds(best.bound)}."
        )
    hidden = best.split.hidden_share
    if hidden and hidden > 0.05:
        said.append(f"{best.label} also sends while it computes: {percent(hidden)} of its communication costs no time.")
    return said


def _limits(best: Cell) -> list[str]:
    if not best.bound or not best.spec.spans:
        return []
    s, wire, step = best.split, best.bound, best.seconds.centre
    if s.exposed > s.compute and wire < s.busy / 2:
        return [
            f"Neither computing ({seconds(s.compute)} a step) nor the bytes ({seconds(wire)} at this rate) limit "
            f"{best.label}, but the {seconds(s.busy)} that it takes to exchange them: delay, switching and waiting."
        ]
    limit = "The network" if wire > s.compute else "The CPU"
    return [
        f"{limit} limits {best.label}: a step needs {seconds(s.compute)} of computing and at least {seconds(wire)} of "
        f"wire, so with perfect overlap {seconds(max(s.compute, wire))}; it takes {seconds(step)}."
    ]


def _slow_ranks(chapter: Chapter) -> list[str]:
    """Each straggler once, with the runs it was found in."""
    found: dict[tuple[int, str], list[tuple[Cell, str]]] = {}
    for cell in chapter.cells:
        for each in cell.stragglers:
            found.setdefault((each.rank, each.cause), []).append((cell, each.sentence))
    lines = []
    for (_, cause), cases in found.items():
        cell, sentence = cases[0]
        more = f", and in {len(cases) - 1} more" if len(cases) > 1 else ""
        lines.append(f"Straggler ({cause}): {sentence} (in {cell.spec.name}{more}).")
    return lines


def _tiles(chapter: Chapter, best: Cell, worst: Cell, name: Callable[[Cell], str]) -> list[Tile]:
    s = best.seconds
    tiles = [
        Tile(seconds(s.centre), f"a step of {name(best)}, the fastest (95 %: {seconds(s.low)} to {seconds(s.high)})")
    ]
    speed = chapter.speed_up(best)
    if speed is not None and best.spec.mode.distributed:
        tiles.append(Tile(f"{speed:.2f}×", f"one node's speed, with {best.world} nodes"))
    if worst is not best:
        tiles.append(Tile(f"{seconds(worst.seconds.centre)}", f"a step of {name(worst)}, the slowest"))
    if best.split.busy > 0:
        tiles.append(
            Tile(percent(best.split.exposed / best.split.step), f"of {best.label}'s step is waiting for the network")
        )
    return tiles


def checks(chapter: Chapter) -> list[Check]:
    """Asked against got, counted against computed, part against whole."""
    found = [
        _network(chapter),
        _replicas(chapter),
        _bytes(chapter),
        _sums(chapter),
        _control(chapter),
        _clocks(chapter),
    ]
    return [check for check in found if check is not None]


def _network(chapter: Chapter) -> Check | None:
    runs = [run for cell in chapter.cells for run in cell.runs if run.spec.world > 1]
    worst = [run.network.worst_error for run in runs if run.network.worst_error is not None]
    links = sum(len(run.network.measured) for run in runs if run.network.worst_error is not None)
    if worst:
        return Check(True, f"Rates: {links} links were within {percent(max(map(abs, worst)))} of what was asked")
    return Check(None, "Rates: nothing was asked of this network, so nothing was checked") if runs else None


def _replicas(chapter: Chapter) -> Check | None:
    must = [r for c in chapter.cells for r in c.runs if r.spec.world > 1 and r.spec.replicas_must_agree]
    equal = [run for run in must if run.summary.replicas_agree]
    if not must:
        return None
    return Check(
        len(equal) == len(must), f"Replicas: parameters were bit for bit equal in {len(equal)} of {len(must)} runs"
    )


def _bytes(chapter: Chapter) -> Check | None:
    ratios = [ratio for cell in chapter.cells if cell.world > 1 and (ratio := sent_over_theory(cell))]
    if not ratios:
        return None
    off = max(ratios, key=lambda ratio: abs(ratio - 1)) - 1
    over = f"{percent(abs(off))} {'more' if off > 0 else 'less'} at most"
    text = f"Bytes: the kernel counted what theory asks for ({over}; headers and acknowledgements are 0.2 to 9 %)"
    return Check(-0.01 <= off <= BYTE_TOLERANCE, text)


def _sums(chapter: Chapter) -> Check | None:
    """The rest is nearly what is left over, so the sum alone proves little: the rest must be small, too."""
    detailed = [cell for cell in chapter.cells if cell.spec.spans]
    if not detailed:
        return None
    splits = [cell.split for cell in detailed]
    step, busy = max(split.step_gap for split in splits), max(split.busy_gap for split in splits)
    most = max(detailed, key=lambda cell: abs(cell.split.rest_share))
    rest = abs(most.split.rest_share)
    text = (
        f"Times: compute + exposed + rest is the step within {percent(step)}, the rest at most {percent(rest)} of it "
        f"({most.label}); exposed + hidden is communication within {percent(busy)}"
    )
    return Check(max(step, busy, rest) <= SUM_TOLERANCE, text)


def _clocks(chapter: Chapter) -> Check | None:
    """Only where nodes have clocks of their own: what waiting and traces may be wrong by."""
    error = max(run.network.offset_error for cell in chapter.cells for run in cell.runs)
    waiting = [w for cell in chapter.cells for w in cell.waiting.waiting if cell.waiting.exchanges]
    if not error:
        return None
    fine = error <= max(0.001, 0.1 * statistics.fmean(waiting)) if waiting else None
    return Check(fine, f"Clocks: the nodes' own were set to rank 0's, right to {seconds(error)} or better")


def _computes_alike(a: Cell, b: Cell) -> bool:
    """Everything is the same but the method and the network: computing should cost the same."""
    varies = [key for key in a.flat if a.flat[key] != b.flat[key] and key not in NO_CONDITION]
    free = [key in ("mode", "placement") or key.startswith("link.") for key in varies]
    return a.world == b.world and a.substrate == b.substrate and all(free)


def _control(chapter: Chapter) -> Check | None:
    """Compute of every mode against the same ranks without synchronisation, by the clock and in processor time.

    Both may be more although it is the same work, most of all with few images a step: the processor moves the bytes in
    between, and a kernel that does not account for interrupts counts them as time of whoever is interrupted.
    """
    controls = [cell for cell in chapter.cells if cell.spec.mode.is_control and cell.spec.spans]
    clock: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for control in controls:
        for cell in chapter.cells:
            if cell is not control and cell.spec.spans and _computes_alike(cell, control):
                clock[cell.label] = cell.split.compute / control.split.compute - 1
                cpu[cell.label] = cell.split.cpu / control.split.cpu - 1
    if not clock:
        return None
    said = f"by the clock it takes up to {_most(clock)}"
    if not all(gap - gap == 0 for gap in cpu.values()):
        within = max(map(abs, clock.values()))
        return Check(within <= CONTROL_TOLERANCE, f"Control: against the same ranks without synchronisation, {said}")
    text = (
        f"Control: against the same ranks without synchronisation, computing takes up to {_most(cpu)} in processor "
        f"time; {said} (moving bytes takes the same processor)"
    )
    return Check(max(map(abs, cpu.values())) <= CONTROL_TOLERANCE, text)


def _most(gaps: dict[str, float]) -> str:
    """'4.0 % more (ddp)'."""
    worst = max(gaps, key=lambda name: abs(gaps[name]))
    return f"{percent(abs(gaps[worst]))} {'more' if gaps[worst] >= 0 else 'less'} ({worst})"
