"""Every sentence that the report derives from the numbers, and the notes on how to read them.

Each rule is one function that returns its sentence. In reading order: how numbers are spelled, the verdict at the top
of a chapter, the checks of the numbers against each other, the titles of the figures, and the notes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from testbed.report.faulted import FaultedRun
from testbed.report.load import Column
from testbed.report.model import (
    REPEAT_KEYS,
    Cell,
    Chapter,
    Crossing,
    Curve,
    Focus,
    names,
    overrides_in_words,
)
from testbed.report.stats import seconds
from testbed.results import theory

SUM_TOLERANCE = 0.05  # how far the parts of a step may be off in sum; also the largest rest
BYTE_TOLERANCE = 0.095  # of counted bytes over payload: headers up to 4.6 %, acknowledgements as much again
CONTROL_TOLERANCE = 0.10  # of the processor time of computing against the control run
MAX_NOISE = 0.10  # the most that a difference between the control's ranks, which do equal work, adds to that tolerance
CONTENTION = 0.15  # added for contention, times the share of overlap or of waiting (docs/report.md)
MIN_CHANGE = 0.02  # a smaller relative change counts as none
MAX_LISTED = 4  # modes that a sentence names one by one
EXACT_STEPS = 3  # steps in which exact modes must agree, so that a later difference counts as rounding


def rate_in_words(value: float, digits: int = 4) -> str:
    """180_000_000 -> '180 Mbit/s'."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded / 1e9:g} Gbit/s" if rounded >= 1e9 else f"{rounded / 1e6:g} Mbit/s"


def rough_rate(value: float) -> str:
    """With two digits, for a rate that is interpolated between two measured ones."""
    return rate_in_words(value, 2)


def megabytes(value: float) -> str:
    """111_050_000 -> '111 MB', 390_000 -> '0.39 MB'."""
    return f"{value / 1e6:.0f} MB" if value >= 1e7 else f"{value / 1e6:.2g} MB"


def times(value: float) -> str:
    """1.054 -> '1.05', 139.2 -> '139'."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def percent(share: float) -> str:
    """0.256 -> '26 %'; small shares keep a digit."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * max(share, 0.001):.1f} %"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`; of a long list the first three and a count."""
    names = list(dict.fromkeys(names))
    names = [*names[:3], f"{len(names) - 3} more"] if len(names) > MAX_LISTED else names
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def namer(cells: Sequence[Cell]) -> Callable[[Cell], str]:
    """A function that names each of these cells: by its mode alone where that is enough."""
    known = {id(cell): name for cell, name in zip(cells, names(cells), strict=True)}
    return lambda cell: known.get(id(cell), cell.label)


def fastest(cells: Sequence[Cell]) -> Cell:
    """The cell with the shortest step; modes that do not synchronise count only where there is no other."""
    real = [cell for cell in cells if not cell.spec.mode.silent] or list(cells)
    return min(real, key=lambda cell: cell.seconds.centre)


def slowest(cells: Sequence[Cell]) -> Cell:
    """The cell with the longest step, by the same choice."""
    real = [cell for cell in cells if not cell.spec.mode.silent] or list(cells)
    return max(real, key=lambda cell: cell.seconds.centre)


@dataclass(frozen=True)
class Tile:
    """One number in large type, and what it is."""

    figure: str
    what: str


@dataclass(frozen=True)
class Check:
    """One comparison of the numbers with each other; `ok` is None where there was nothing to compare."""

    ok: bool | None
    text: str


@dataclass(frozen=True)
class Verdict:
    """The top of a chapter: a headline, its reasons, the most important numbers, and the checks."""

    headline: str
    why: list[str]
    tiles: list[Tile]
    checks: list[Check]


def verdict(chapter: Chapter, focused: Focus, swept: str = "") -> Verdict:
    """Build the top of a chapter. `swept` is the finding along a swept axis; it is the headline where there is one."""
    cells = [cell for cell in focused.cells if not cell.spec.overrides] or focused.cells
    best, worst = fastest(cells), slowest(cells)
    usual = fastest_and_slowest(chapter, best, worst)
    first = swept or next(filter(None, (rule(chapter) for rule in HEADLINES)), "")
    reasons = [sentence for rule in REASONS for sentence in rule(chapter, best, worst)]
    return Verdict(
        headline=first or usual,
        why=[*([f"{usual}."] if first else []), *reasons],
        tiles=tiles(chapter, best, worst, namer(cells)),
        checks=checks(chapter),
    )


def fastest_and_slowest(chapter: Chapter, best: Cell, worst: Cell) -> str:
    """The fastest mode, and how much faster it is than the slowest and than one node."""
    speed = chapter.speed_up(best)
    if not best.spec.mode.distributed:
        return f"One node takes {seconds(best.seconds.centre)} a step"
    rate = best.spec.link.rate
    where = f"At {rate_in_words(rate)} each way" if rate else "On this network"
    if best is worst or best.label == worst.label:
        gain = "" if speed is None else f", {speed:.2f} times the speed of one node"
        step = seconds(best.seconds.centre)
        return f"{where} {best.label} takes {step} a step to synchronise {best.world} ranks{gain}"
    factor = worst.seconds.centre / best.seconds.centre
    text = f"{where} {best.label} is {factor:.1f} times as fast as {worst.label}"
    if speed is None:
        return text
    if speed >= 1:
        return f"{text}, and {speed:.2f} times as fast as one node"
    return f"{text}, but slower than one node ({speed:.2f} times)"


def cost_of_one_slow_node(chapter: Chapter) -> str:
    """How much longer a step takes with one slow node than with equal nodes."""
    costs = []
    for cell in (cell for cell in chapter.cells if cell.spec.overrides):
        equal = next((c for c in chapter.cells if c.label == cell.label and not c.spec.overrides), None)
        if equal:
            costs.append((cell.seconds.centre / equal.seconds.centre, cell, equal))
    if not costs:
        return ""
    factor, cell, equal = max(costs, key=lambda each: each[0])
    steps = f"{seconds(cell.seconds.centre)} a step instead of {seconds(equal.seconds.centre)}"
    where = f"{cell.label} with {overrides_in_words(cell)}"
    return f"One slow node slows all ranks: {where} takes {steps}, {factor:.1f} times as long"


def effect_of_placement(chapter: Chapter) -> str:
    """The effect on the loss, if the experiment compares synchronising before and after the optimizer's step."""
    placed = {cell.spec.placement for cell in chapter.cells}
    return loss_by_step([c for c in chapter.cells if not c.spec.mode.is_control]) if len(placed) > 1 else ""


def busiest_link(chapter: Chapter, best: Cell, worst: Cell) -> list[str]:
    """The bytes on the busiest link of the slowest and of the fastest mode."""
    costs = [theory.cost(cell.spec.mode, cell.world) for cell in (best, worst)]
    if best is worst or not best.bound or not worst.bound or worst.bound <= 1.5 * best.bound:
        return []
    loads = [cost.load * cell.buffers[1] * cell.syncs for cost, cell in zip(costs, (best, worst), strict=True) if cost]
    if len(loads) < 2:
        return []
    where = "through rank 0's link" if worst.spec.mode.rooted else "over the busiest link"
    return [
        f"{worst.label} must move {megabytes(loads[1])} a step {where}: at least {seconds(worst.bound)} here. "
        f"{best.label} moves {megabytes(loads[0])} over each link: {seconds(best.bound)}."
    ]


def hidden_time(chapter: Chapter, best: Cell, worst: Cell) -> list[str]:
    """How much communication the fastest mode hides."""
    hidden = best.split.hidden_share
    if best is worst or not hidden or hidden <= 0.05:
        return []
    return [f"{best.label} also sends while it computes: {percent(hidden)} of its communication costs no time."]


def limit(chapter: Chapter, best: Cell, worst: Cell) -> list[str]:
    """Whether the network, the CPU or neither limits the fastest mode."""
    if not best.bound or not best.spec.spans:
        return []
    s, wire, step = best.split, best.bound, best.seconds.centre
    own = s.compute + s.copies
    if s.exposed > own and wire < s.busy / 2:
        return [
            f"Neither computing ({seconds(own)} a step) nor the bytes ({seconds(wire)} at this rate) limit "
            f"{best.label}, but the {seconds(s.busy)} that the exchange takes: delay, task switches and waiting."
        ]
    limits = "The network" if wire > own else "The CPU"
    return [
        f"{limits} limits {best.label}: a step needs {seconds(own)} of computing and copying and at least "
        f"{seconds(wire)} of transfer, so with perfect overlap {seconds(max(own, wire))}; it takes {seconds(step)}."
    ]


def slow_ranks(chapter: Chapter, best: Cell, worst: Cell) -> list[str]:
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


HEADLINES = (cost_of_one_slow_node, effect_of_placement)  # the first sentence is the headline, if no axis was swept
REASONS = (busiest_link, hidden_time, limit, slow_ranks)  # in the order of the page


def tiles(chapter: Chapter, best: Cell, worst: Cell, name: Callable[[Cell], str]) -> list[Tile]:
    """The numbers that a reader looks for first."""
    s = best.seconds
    made = [
        Tile(seconds(s.centre), f"a step of {name(best)}, the fastest (95 %: {seconds(s.low)} to {seconds(s.high)})")
    ]
    speed = chapter.speed_up(best)
    if speed is not None and best.spec.mode.distributed:
        made.append(Tile(f"{speed:.2f}×", f"the speed of one node, with {best.world} nodes"))
    if worst is not best:
        made.append(Tile(f"{seconds(worst.seconds.centre)}", f"a step of {name(worst)}, the slowest"))
    if best.split.busy > 0:
        exposed = percent(best.split.exposed / best.split.step)
        made.append(Tile(exposed, f"of {best.label}'s step is waiting for the network"))
    return made


def checks(chapter: Chapter) -> list[Check]:
    """All checks that have something to compare."""
    return [check for rule in CHECKS if (check := rule(chapter)) is not None]


def check_rates(chapter: Chapter) -> Check | None:
    """Requested against measured rates of all links."""
    runs = [run for cell in chapter.cells for run in cell.runs if run.spec.world > 1]
    worst = [run.network.worst_error for run in runs if run.network.worst_error is not None]
    links = sum(len(run.network.measured) for run in runs if run.network.worst_error is not None)
    if worst:
        return Check(True, f"Rates: {links} links were within {percent(max(map(abs, worst)))} of the requested rate")
    return Check(None, "Rates: no rate was requested, so there is nothing to compare") if runs else None


def check_replicas(chapter: Chapter) -> Check | None:
    """Parameters of all ranks at the end of a run."""
    must = [r for c in chapter.cells for r in c.runs if r.spec.world > 1 and r.spec.replicas_must_agree]
    if not must:
        return None
    equal = sum(bool(run.summary.replicas_agree) for run in must)
    return Check(equal == len(must), f"Replicas: parameters were bit for bit equal in {equal} of {len(must)} runs")


def check_bytes(chapter: Chapter) -> Check | None:
    """Bytes that the kernel counted against the payload of theory."""
    ratios = [ratio for cell in chapter.cells if cell.world > 1 and (ratio := cell.sent_over_theory())]
    if not ratios:
        return None
    off = max(ratios, key=lambda ratio: abs(ratio - 1)) - 1
    over = f"{percent(abs(off))} {'more' if off > 0 else 'less'} at most"
    text = f"Bytes: the kernel counted what theory predicts ({over}; headers and acknowledgements are 0.2 to 9 %)"
    return Check(-0.01 <= off <= BYTE_TOLERANCE, text)


def check_times(chapter: Chapter) -> Check | None:
    """The parts of a step against the whole.

    The rest is calculated as the difference, so the sum alone is a weak check: the rest must be small as well.
    """
    detailed = [cell for cell in chapter.cells if cell.spec.spans]
    if not detailed:
        return None
    splits = [cell.split for cell in detailed]
    step, busy = max(split.step_gap for split in splits), max(split.busy_gap for split in splits)
    most = max(detailed, key=lambda cell: abs(cell.split.rest_share))
    rest = abs(most.split.rest_share)
    text = (
        f"Times: compute + copies + exposed + rest is the step within {percent(step)}, the rest is at most "
        f"{percent(rest)} of it ({most.label}); exposed + hidden is communication within {percent(busy)}"
    )
    return Check(max(step, busy, rest) <= SUM_TOLERANCE, text)


def check_control(chapter: Chapter) -> Check | None:
    """Computing of every mode against the same ranks without synchronisation.

    The processor time of the loop's own thread in user mode is compared, without copies. By wall-clock time the same
    work takes longer, because moving bytes needs the same processor. Kernel mode is page faults and interrupts of the
    network, which the kernel adds to the thread that they interrupt. Cores share caches, memory and often execution
    units: a mode that sends while it computes may need more, and a mode whose ranks often wait may need less than the
    control, whose ranks compute all the time. The ranks of the control do equal work: the difference between them is
    noise of the machine, and widens the limit. If processor time was not recorded, wall-clock time is compared.
    """
    clock: dict[str, float] = {}
    work: dict[str, float] = {}
    allowed: dict[str, float] = {}
    copies: dict[str, float] = {}
    for control in (cell for cell in chapter.cells if cell.spec.mode.is_control and cell.spec.spans):
        for cell in chapter.cells:
            if cell is not control and cell.spec.spans and _computes_alike(cell, control):
                own, base = cell.split, control.split
                clock[cell.label] = own.compute / base.compute - 1
                work[cell.label] = own.work / base.work - 1
                noise = min(MAX_NOISE, control.rank_spread("work" if base.work == base.work else "compute"))
                more = (work[cell.label] if base.work == base.work else clock[cell.label]) > 0
                contended = own.overlap if more else 1 - (own.compute + own.copies) / own.step
                allowed[cell.label] = CONTROL_TOLERANCE + noise + CONTENTION * contended
                copies[cell.label] = own.copies / own.step
    if not clock:
        return None
    recorded = all(gap - gap == 0 for gap in work.values())
    gaps = work if recorded else clock
    over = [name for name in gaps if abs(gaps[name]) > allowed[name]]
    nearest = max(gaps, key=lambda name: abs(gaps[name]) - allowed[name])
    sentences = [
        f"{name} {percent(abs(gaps[name]))} {'more' if gaps[name] >= 0 else 'less'} (limit {percent(allowed[name])})"
        for name in over or [nearest]
    ]
    most = max(copies, key=lambda name: copies[name])
    text = (
        f"Control: {'processor time' if recorded else 'wall-clock time'} of computing, compared with the same ranks "
        f"without synchronisation: {', '.join(sentences)}{'' if over else ', the nearest to its limit'}. "
        f"In wall-clock time it is at most {percent(max(map(abs, clock.values())))} off. "
        f"Copies are counted separately: at most {percent(copies[most])} of a step ({most})"
    )
    return Check(not over, text)


def _computes_alike(a: Cell, b: Cell) -> bool:
    """True if the specs differ in mode and network only: then computing costs the same."""
    varies = [key for key in a.flat if a.flat[key] != b.flat[key] and key not in REPEAT_KEYS]
    free = [key in ("mode", "placement") or key.startswith("link.") for key in varies]
    return a.world == b.world and a.substrate == b.substrate and all(free)


def check_clocks(chapter: Chapter) -> Check | None:
    """The error of clock synchronisation, where nodes have clocks of their own: waiting and traces depend on it."""
    error = max(run.network.offset_error for cell in chapter.cells for run in cell.runs)
    if not error:
        return None
    waiting = [w for cell in chapter.cells for w in cell.waiting.waiting if cell.waiting.exchanges]
    fine = error <= max(0.001, 0.1 * statistics.fmean(waiting)) if waiting else None
    return Check(fine, f"Clocks: times of all nodes were converted to rank 0's clock with an error of {seconds(error)}")


CHECKS = (check_rates, check_replicas, check_bytes, check_times, check_control, check_clocks)  # in this order


def where_time_goes(cells: Sequence[Cell]) -> str:
    """The share of a step in which the slowest and the fastest mode wait."""
    name = namer(cells)
    best, worst = fastest(cells), slowest(cells)
    share = worst.split.exposed / worst.split.step
    if best is worst:
        return f"{name(best)} is blocked by communication for {percent(share)} of a step"
    hidden = best.split.hidden_share
    tail = f", and hides {percent(hidden)} of its communication" if hidden and hidden > 0.05 else ""
    own = percent(best.split.exposed / best.split.step)
    return f"{name(worst)} is blocked by communication for {percent(share)} of its step, {name(best)} for {own}{tail}"


def bytes_per_rank(cells: Sequence[Cell]) -> str:
    """The mode that sends most through one link, and the one that sends least."""
    name = namer(cells)

    def busiest(cell: Cell) -> tuple[float, int]:
        return max((float(sent or 0.0), -rank) for rank, sent in enumerate(cell.sent()))

    most, least = max(cells, key=busiest), min(cells, key=busiest)
    (high, rank), (low, _) = busiest(most), busiest(least)
    if high < 1.15 * low:
        return f"Every mode sends about {megabytes(high)} per rank and step"
    return (
        f"{name(most)} sends {megabytes(high)} a step through rank {-rank}'s link, {name(least)} {megabytes(low)} "
        f"through each: {high / low:.1f} times as much"
    )


def roofline(cells: Sequence[Cell]) -> str:
    """How far communication is from its lower bound."""
    name = namer(cells)
    ratios = {name(cell): cell.split.busy / cell.bound for cell in cells if cell.bound}
    if all(ratio <= 1.1 for ratio in ratios.values()):
        most = percent(max(ratios.values()) - 1)
        return f"Communication is within {most} of its lower bound: only fewer bytes or more overlap can be faster"
    worst, best = max(ratios, key=lambda each: ratios[each]), min(ratios, key=lambda each: ratios[each])
    return (
        f"Communication of {worst} takes {times(ratios[worst])} times its lower bound, of {best} {times(ratios[best])}"
    )


def timeline(cells: Sequence[Cell]) -> str:
    """Which modes send while they compute."""
    name = namer(cells)
    overlapping = [cell for cell in cells if (cell.split.hidden_share or 0.0) > 0.1]
    after = [cell for cell in cells if cell.split.busy > 0 and (cell.split.hidden_share or 0.0) <= 0.1]
    if overlapping and after:
        best = max(overlapping, key=lambda cell: cell.split.hidden_share or 0.0)
        others = listed([name(cell) for cell in after])
        return f"{name(best)} sends while it computes; {others} compute first and then wait for the network"
    if overlapping:
        return f"{listed([name(c) for c in overlapping])} send while they compute"
    return "Every mode computes first and then waits for the network" if after else "One step, phase by phase"


def loss_by_step(cells: Sequence[Cell]) -> str:
    """Whether all modes train the same model. Single-node runs are left out: their BatchNorm uses the whole batch."""
    name = namer(cells)
    cells = [cell for cell in cells if cell.spec.mode.distributed] or cells
    length = min(len(cell.losses()) for cell in cells)
    if len(cells) < 2 or length < 2:
        return f"The loss goes from {cells[0].losses()[0]:.2f} to {cells[0].losses()[-1]:.2f}"
    table = np.array([cell.losses()[:length] for cell in cells])
    if not np.isfinite(table).all():
        lost = [name(cell) for cell, row in zip(cells, table, strict=True) if not np.isfinite(row).all()]
        return f"The loss of {listed(lost)} is not a number any more: it diverged"
    final = table[:, -max(1, length // 10) :].mean(axis=1)
    if _equal_but_for_rounding(final):
        gap = float(final.max() - final.min())
        return f"All {len(cells)} train the same model: after {length} steps their losses are within {gap:.3f}"
    return (
        _differ_by_placement(cells, final, name)
        or _differ_by_rounding(cells, table, final)
        or _differ(cells, final, length, name)
    )


def _differ_by_placement(cells: Sequence[Cell], final: Column, name: Callable[[Cell], str]) -> str:
    """The sentence for a difference that synchronising after the optimizer's step explains; else empty."""
    late = np.array([cell.spec.placement == "after-step" for cell in cells])
    if not late.any() or (~late).sum() < 2 or not _equal_but_for_rounding(final[~late]):
        return ""
    right, wrong = final[~late].mean(), final[late].mean()
    together = listed([name(cell) for cell in cells if cell.spec.placement == "before-step"])
    return f"{together} train the same model (loss {right:.2f}); synchronising after the step does not ({wrong:.2f})"


def _differ_by_rounding(cells: Sequence[Cell], table: Column, final: Column) -> str:
    """The sentence for exact modes that agree at first and differ later, because of rounding; else empty."""
    apart = [not _equal_but_for_rounding(table[:, step]) for step in range(table.shape[1])]
    common = apart.index(True) if True in apart else len(apart)
    exact = all(c.spec.mode.codec is None and c.spec.mode.every == 1 for c in cells)
    if not exact or any(c.spec.placement == "after-step" for c in cells) or common < EXACT_STEPS:
        return ""
    ends = f"{final.min():.2f} to {final.max():.2f}"
    return f"All {len(cells)} have the same loss for {common} steps; then rounding errors grow ({ends} at the end)"


def _differ(cells: Sequence[Cell], final: Column, length: int, name: Callable[[Cell], str]) -> str:
    high, low = name(cells[int(final.argmax())]), name(cells[int(final.argmin())])
    ends = f"{high} is at {final.max():.2f}, {low} at {final.min():.2f}"
    return f"They do not train the same model: after {length} steps {ends}"


def _equal_but_for_rounding(losses: Column) -> bool:
    return float(losses.max() - losses.min()) <= 0.02 * float(np.abs(losses).mean()) + 0.005


def loss_by_time(cells: Sequence[Cell], curves: Sequence[tuple[Column, Column]]) -> str:
    """The loss that all modes reach, and which one reaches it first."""
    name = namer(cells)
    settled = [(x, _smooth(y)) for x, y in curves]
    if not all(len(y) and np.isfinite(y).all() for _, y in settled):
        return "Loss against time"
    level = max(float(y.min()) for _, y in settled)
    reached = {name(cell): float(x[int(np.argmax(y <= level))]) for cell, (x, y) in zip(cells, settled, strict=True)}
    first, last = min(reached, key=lambda n: reached[n]), max(reached, key=lambda n: reached[n])
    if len(reached) < 2 or reached[first] <= 0 or first == last:
        return f"The loss falls to {level:.2f} in {reached[first]:.0f} s"
    ends = f"after {reached[first]:.0f} s, {last} after {reached[last]:.0f} s"
    return f"{first} reaches a loss of {level:.2f} {ends}"


def _smooth(values: Column) -> Column:
    width = max(1, len(values) // 20)
    return np.convolve(values, np.ones(width) / width, mode="valid") if len(values) else values


def seconds_by_step(cells: Sequence[Cell]) -> str:
    """How much steps vary once warm-up is over."""
    name = namer(cells)
    spreads = {}
    for cell in cells:
        pooled = np.concatenate(list(cell.samples))
        middle = float(np.median(pooled))
        half = float(np.quantile(pooled, 0.95) - np.quantile(pooled, 0.05)) / 2
        spreads[name(cell)] = half / middle if middle else 0.0
    worst = max(spreads, key=lambda each: spreads[each])
    if spreads[worst] <= 0.05:
        return f"Steps are steady: nine of ten are within ±{percent(spreads[worst])} of the median in every mode"
    return f"Steps of {worst} vary most: nine of ten are within ±{percent(spreads[worst])} of their median"


def faults(runs: Sequence[FaultedRun]) -> str:
    """How many runs had faults, how fast they were detected, how often the right rank was named, how runs ended."""
    stopped = [run for run in runs if run.history.last_notice_s is not None]
    named = [run.history.named_right for run in stopped if run.history.named_right is not None]
    on = sum(run.row[-1] == "went on" for run in runs)
    again = sum(run.row[-1] == "restarted" for run in runs)
    not_injected = sum(not run.episodes for run in runs)
    sentences = [f"{len(runs)} run{'s' if len(runs) != 1 else ''} with injected faults"]
    if stopped:
        last = max(run.history.last_notice_s or 0.0 for run in stopped)
        sentences.append(f"{len(stopped)} ended by it, detected by all others within {last:.1f} s")
        sentences.append(f"the right rank was named in {sum(named)} of {len(named)}")
    if on:
        sentences.append(f"{on} went on")
    if again:
        sentences.append(f"{again} restarted and finished")
    if not_injected:
        sentences.append(f"in {not_injected} nothing was injected")
    return "; ".join(sentences)


def nodes(curves: dict[str, Curve]) -> str:
    """Which modes get faster with every node, and where the others stop."""
    falls, stops = [], []
    for name, curve in curves.items():
        steps = [(int(x), cell.seconds.centre) for x, cell in curve]
        worse = next(((a, b) for a, b in itertools.pairwise(steps) if b[1] > (1 - MIN_CHANGE) * a[1]), None)
        if worse is None:
            falls.append(name)
        else:
            verb = "gets slower" if worse[1][1] > (1 + MIN_CHANGE) * worse[0][1] else "gains nothing"
            stops.append(f"{name} {verb} from {worse[0][0]} to {worse[1][0]} nodes")
    sentences = [f"{listed(falls)} {'get' if len(falls) > 1 else 'gets'} faster with every node"] if falls else []
    return "; ".join([*sentences, *stops[:2]]) + (f"; so do {len(stops) - 2} more" if len(stops) > 2 else "")


def efficiency(chapter: Chapter, curves: dict[str, Curve]) -> str:
    """The best and the worst efficiency at the largest number of nodes."""
    ends = {
        name: ((chapter.speed_up(curve[-1][1]) or 0.0) / curve[-1][0], curve[-1][0]) for name, curve in curves.items()
    }
    best, worst = max(ends, key=lambda n: ends[n]), min(ends, key=lambda n: ends[n])
    text = f"At {ends[best][1]:g} nodes {best} has an efficiency of {percent(ends[best][0])}"
    return text if best == worst else f"{text}, {worst} of {percent(ends[worst][0])}"


def weak(curves: dict[str, Curve]) -> str:
    """The gain in images per second of the mode that gains most."""
    gains = {n: c[-1][1].images_per_second / c[0][1].images_per_second for n, c in curves.items()}
    best = max(gains, key=lambda name: gains[name])
    first, last = curves[best][0][0], curves[best][-1][0]
    return f"With {best}, {last:g} nodes process {gains[best]:.1f} times the images per second of {first:g}"


def bandwidth(curves: dict[str, Curve], met: Sequence[Crossing], single: Cell | None) -> str:
    """The rate from which on each mode beats one node; without a baseline, which mode is fastest at which rate."""
    if not single:
        ends = [min(curves, key=lambda n: curves[n][k][1].seconds.centre) for k in (0, -1)]
        low = rough_rate(min(x for c in curves.values() for x, _ in c))
        if ends[0] == ends[1]:
            return f"{ends[0]} is the fastest from {low} up"
        return f"{ends[0]} is the fastest at {low}, {ends[1]} at the highest rate"
    pays = {each.right: each.at for each in met if each.left == "one node"}
    level = single.seconds.centre
    always = [n for n, curve in curves.items() if n not in pays and curve[-1][1].seconds.centre < level]
    never = [name for name in curves if name not in pays and name not in always]
    sentences = [(name, f"from {rough_rate(at)} on") for name, at in sorted(pays.items(), key=lambda pair: pair[1])]
    if len(sentences) > MAX_LISTED + 1:
        sentences = [*sentences[:MAX_LISTED], (f"{len(sentences) - MAX_LISTED} more", "from higher rates on")]
    sentences += [(listed(always), "at every rate")] if always else []
    sentences += [(listed(never), "at none of these rates")] if never else []
    (first, when), *others = sentences
    return ", ".join([f"{first} beats one node {when}", *(f"{name} {rates}" for name, rates in others)])


def buckets(curves: dict[str, Curve], levels: Sequence[Cell]) -> str:
    """The best bucket size, and what it gains over the worst and over the mode without buckets."""
    name, curve = min(curves.items(), key=lambda pair: min(c.seconds.centre for _, c in pair[1]))
    best = min((cell for _, cell in curve), key=lambda cell: cell.seconds.centre)
    worst = max((cell for _, cell in curve), key=lambda cell: cell.seconds.centre)
    gain = worst.seconds.centre / best.seconds.centre - 1
    own = next((cell for cell in levels if cell.spec.mode.algorithm == best.spec.mode.algorithm), None)
    if gain < MIN_CHANGE:
        return f"The bucket size makes no difference to {name}: {percent(gain)} between best and worst"
    tail = f", {own.seconds.centre / best.seconds.centre:.2f} times as fast as {own.label}" if own else ""
    against = f"{best.seconds.centre:.2f} s against {worst.seconds.centre:.2f} s for {worst.label}"
    return f"{best.label} is best: {against}{tail}"


def skipping_speed(curves: dict[str, Curve]) -> str:
    """The gain from synchronising less often, for the mode that gains most."""
    name, curve = max(curves.items(), key=lambda pair: pair[1][0][1].seconds.centre / pair[1][-1][1].seconds.centre)
    gain = curve[0][1].seconds.centre / curve[-1][1].seconds.centre
    return f"Synchronising every {curve[-1][0]:g} steps makes {name} {gain:.2f} times as fast"


def skipping_accuracy(curves: dict[str, Curve]) -> str:
    """What synchronising less often does to the accuracy."""
    for name, curve in curves.items():
        known = [(x, 100 * a) for x, cell in curve if (a := cell.first.summary.test_accuracy) is not None]
        if len(known) > 1:
            change = known[-1][1] - known[0][1]
            verb = "costs" if change < 0 else "gains"
            return f"every:{known[-1][0]:g} {verb} {name} {abs(change):.1f} points of accuracy"
    return "Accuracy against the number of steps between synchronisations"


def substrates(both: Sequence[dict[str, Cell]]) -> str:
    """How far the same spec differs between substrates."""
    gaps = []
    for cells in both:
        steps = [cell.seconds.centre for cell in cells.values()]
        gaps.append((max(steps) / min(steps) - 1, next(iter(cells.values())).label))
    gap, label = max(gaps)
    named = listed(list(dict.fromkeys(substrate for cells in both for substrate in cells)))
    return f"{named} agree within {percent(gap)} (largest difference: {label})"


ONE_RUN = "The interval of a cell with one run covers the steps of that run, not the differences between runs."
MODES = (
    "s/iter is the median over steps (every:K: the mean) of the mean over ranks, without warm-up; repeats are pooled."
    " Its interval is a bootstrap interval; with one run it does not cover differences between runs. Speed-up is over"
    " one node with the same batch and the same share of the machine."
)
SPLIT = (
    "Seconds, mean over steps and ranks. Copies: the loop copied gradients to or from the buffers that are sent, or ran"
    " the mode's hooks. Exposed: the loop waited for communication. Hidden: a buffer was in flight while the loop"
    " computed. Communication consists of waiting, until the last rank joined, and transfer, after that."
    " Last to join: the rank that the others waited for most, and how often it was the last."
    " A run with spans = false records none of this."
)
TRAFFIC = (
    "MB (10^6 bytes) per rank and step. Theory is payload. The kernel counts headers as well: 0.2 % where it counts"
    " packets before they are cut into frames, up to 4.6 % where it counts frames. The shares are of all bytes sent"
    " from the first step on (of a restarted run: the first step of its last attempt); the last column is MB per rank"
    " sent before that (probe, rendezvous, first broadcast). Headers and control (heartbeats, agreement) are the"
    " remainder: no counter separates them."
)
WIRE = (
    "S: bytes of the gradient. B: payload rate of the slowest link in the receipt (gather and server: of rank 0's"
    " links). Algorithm bandwidth is S over the time of communication. Bus bandwidth is that times 2(N-1)/N, which is"
    " what a ring sends over each link. Link utilisation: what the busiest rank sent or received, whichever is more,"
    " over the time of communication and its rate in the receipt. A link that is used one way at a time reaches half."
)
NETWORK = (
    "On the wire, each way, with headers; measured before training on every directed link (above 16 nodes on a sample) "
    "and on the fan-in of every shaped node."
)
WHERE_TIME_GOES = (
    "Mean over steps and ranks. Waiting is timed in the training loop, communication in the layer that sends. Hatched:"
    " communication during which the loop computed, so that it cost no time."
)
BYTES = "Counted by the kernel at the node's interface, with headers; theory is payload."
ROOFLINE = (
    "The lower bound is the bytes on the busiest link over the payload rate that the probe measured before training,"
    " plus the delay of each hop. Waiting for a slower rank counts as communication here."
)
TIMELINE = (
    "The step of rank 0 that is nearest to the median. Upper strip: the training loop. Lower strip: each buffer, from"
    " the moment it was given to the network until its result was back. Communication below backward costs no"
    " time, communication below red does."
)
RANKS = (
    "As in published experiment R0 (experiments/r0.toml): losses are of that step on this rank; times are without"
    " warm-up. Shares are those of torch.profiler, where it was on."
)
EPOCH_TIME = (
    "Seconds per epoch are extrapolated: images of the training set over images per second of the steps that count."
    " Speed-up is by images per second, over one worker with the same batch per worker."
)
STRAGGLER = (
    "A rank is a straggler because of its CPU if it needs at least 1.25 times the median of the others to compute an"
    " image, overall and in three of four steps; because of its link if its rate in the receipt is at most 0.8 of the"
    " others'."
)
FAULTS = (
    "Detected after: seconds from the fault until half of the ranks that ended because of it detected it. Named right:"
    " most of them named the rank at which the fault was injected. Codes are those of the first attempt: -9 is SIGKILL,"
    " 6 a rank that lost another, stopped a rank that the controller ended. Recovered: `went on` by itself, or"
    " `restarted` from a checkpoint. A fault whose step never came was not injected."
)
