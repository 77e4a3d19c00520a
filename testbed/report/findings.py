"""Every sentence that the report derives from the numbers, and the notes on how to read them.

Each rule is one function that returns its sentence. `@states` registers it with the fewest steps and cells that it
needs. The order is: how numbers are spelled, the verdict at the top of a chapter, the checks of the numbers against
each other, the titles of the figures, and the notes. A rule checks the sign of a difference before it names a
direction.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from testbed.report.load import Column, FaultedRun
from testbed.report.model import (
    REPEAT_KEYS,
    Cell,
    Chapter,
    Crossing,
    Curve,
    comparable,
    name_of,
    names,
    overrides_in_words,
    value_of,
    words_for,
)
from testbed.report.sentences import (
    COMPARE_STEPS,
    STEADY_STEPS,
    Check,
    Sentence,
    Tile,
    check_sentence,
    states,
)
from testbed.report.stats import seconds
from testbed.results import theory
from testbed.results.table import label
from testbed.results.validity import MAX_USE
from testbed.spec.units import in_megabytes

SUM_TOLERANCE = 0.05  # largest difference between a step and the sum of its parts, and largest rest, as shares
BYTE_TOLERANCE = 0.095  # of counted bytes over payload: up to 4.6 % headers, and as much for acknowledgements
CONTROL_TOLERANCE = 0.10  # largest difference of the processor time of computing from the control run
MAX_NOISE = 0.10  # at most added to that tolerance, if the ranks of the control, which do equal work, differ as much
CONTENTION = 0.15  # a difference above that limit by up to this much is open, a larger one is wrong; docs/report.md
MIN_CHANGE = 0.02  # a smaller relative change counts as none
AGREE = 0.05  # substrates agree if their steps differ by no more
MAX_LISTED = 4  # modes that a sentence names one by one
EXACT_STEPS = 3  # first steps in which exact modes must agree, so that a later difference counts as rounding


def rate_in_words(value: float, digits: int = 4) -> str:
    """Return a rate in bit/s as text: 180_000_000 -> '180 Mbit/s'."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded / 1e9:g} Gbit/s" if rounded >= 1e9 else f"{rounded / 1e6:g} Mbit/s"


def rough_rate(value: float) -> str:
    """Return a rate as text with two digits, for a rate that is interpolated between two measured ones."""
    return rate_in_words(value, 2)


def megabytes(value: float) -> str:
    """Return bytes as text: 111_050_000 -> '111 MB', 390_000 -> '0.39 MB', 34_100 -> '34.1 kB'."""
    if 0 < value < 1e5:
        return in_megabytes(value)
    return f"{value / 1e6:.0f} MB" if value >= 1e7 else f"{value / 1e6:.2g} MB"


def times(value: float) -> str:
    """Return a ratio as text: 1.054 -> '1.05', 139.2 -> '139'."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def percent(share: float) -> str:
    """Return a share that is a limit ("within", "at most") as text: 0.256 -> '26 %', 0.034 -> '3.4 %', 0 -> '0.1 %'."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * max(share, 0.001):.1f} %"


def exactly(share: float) -> str:
    """Return a share that is no limit as text: the same as `percent`, but 0 -> '0 %'."""
    return "0 %" if share < 0.0005 else percent(share)


def factor(value: float) -> str:
    """Return a factor as text: 3.14 -> '3.1', 1.034 -> '1.03', so that a difference is never printed as 1.0."""
    return f"{value:.1f}" if value >= 1.1 else f"{value:.2f}"


def listed(names: Sequence[str]) -> str:
    """Return names as text: `a, b and c`; of a long list the first three and how many more there are."""
    names = list(dict.fromkeys(names))
    names = [*names[:3], f"{len(names) - 3} more"] if len(names) > MAX_LISTED else names
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def namer(cells: Sequence[Cell]) -> Callable[[Cell], str]:
    """Return a function that names each of these cells, by the mode alone if that is unique."""
    known = {id(cell): name for cell, name in zip(cells, names(cells), strict=True)}
    return lambda cell: known.get(id(cell), cell.label)


def all_of(cells: Sequence[Cell]) -> str:
    """Return `every mode`, or `each of them` if a cell is a user's script."""
    return "each of them" if any(cell.spec.script for cell in cells) else "every mode"


def fastest(cells: Sequence[Cell]) -> Cell:
    """Return the cell with the shortest step. Modes that do not synchronise count only if there is no other."""
    real = [cell for cell in cells if not cell.spec.mode.silent] or list(cells)
    return min(real, key=lambda cell: cell.seconds.centre)


def slowest(cells: Sequence[Cell]) -> Cell:
    """Return the cell with the longest step. Modes that do not synchronise count only if there is no other."""
    real = [cell for cell in cells if not cell.spec.mode.silent] or list(cells)
    return max(real, key=lambda cell: cell.seconds.centre)


@dataclass(frozen=True)
class Verdict:
    """The top of a chapter: a headline, its reasons, the most important numbers, and the checks."""

    headline: str
    why: list[str]
    tiles: list[Tile]
    checks: list[Check]

    def __post_init__(self) -> None:
        tiles, checks = [tile.text for tile in self.tiles], [check.text for check in self.checks]
        for text in (self.headline, *self.why, *tiles, *checks):
            check_sentence(text)


def verdict(chapter: Chapter, swept: str = "") -> Verdict:
    """Return the top of a chapter. `swept`: the finding along a swept axis, which is the headline if it has a claim.

    A sentence that compares modes uses only cells that differ in their mode alone.
    """
    cells = comparable(chapter)
    cells = [cell for cell in cells if cell.n >= COMPARE_STEPS] or cells
    best, worst = fastest(cells), slowest(cells)
    usual = check_sentence(fastest_and_slowest(chapter, best, worst) or too_few_steps(best))
    found = [*([swept] if swept else []), *(rule(chapter) for rule in HEADLINES)]
    first = next((sentence for sentence in map(check_sentence, found) if sentence.claims), None)
    reasons = [sentence for rule in REASONS for sentence in rule(chapter, best, worst)]
    return Verdict(
        headline=first or usual,
        why=[*([usual.ended()] if first else []), *reasons],
        tiles=tiles(chapter, best, worst),
        checks=checks(chapter),
    )


def place(chapter: Chapter, cell: Cell) -> str:
    """Return the beginning of a sentence: the network of a cell, and its values of the other keys that vary."""
    rate = cell.spec.link.rate
    where = f"At {rate_in_words(rate)} each way" if rate else "On this network"
    on = f" on {cell.substrate}" if "on" in chapter.keys else ""
    others = [key for key in chapter.keys if key not in ("link.rate", "on")]
    values = [words_for(key, value_of(cell, key), others) for key in others]
    return ", ".join([f"{where}{on}", *values]) + ("," if values else "")


@states(steps=COMPARE_STEPS)
def fastest_and_slowest(chapter: Chapter, best: Cell, worst: Cell) -> str:
    """Return which mode is fastest, and how much faster it is than the slowest mode and than one node."""
    step, where = seconds(best.seconds.centre), place(chapter, best)
    if not best.spec.mode.distributed:
        return f"One node takes {step} a step"
    if best.spec.mode.silent:
        return f"{where} {best.label} takes {step} a step without synchronising"
    one_node = _against_one_node(chapter.speed_up(best))
    if best.label == worst.label and best.spec.mode.is_script:
        return f"{where} {best.label} takes {step} a step on {best.world} rank{'s' * (best.world > 1)}"
    if best.label == worst.label:
        return f"{where} {best.label} takes {step} a step to synchronise {best.world} ranks{one_node}"
    ratio = worst.seconds.centre / best.seconds.centre
    if ratio < 1 + MIN_CHANGE:
        who = "all modes" if all_of([best, worst]) == "every mode" else "all of them"
        return f"{where} {who} take the same time within {percent(ratio - 1)}, {step} a step{one_node}"
    return f"{where} {best.label} is {factor(ratio)} times as fast as {worst.label}{one_node}"


def _against_one_node(speed: float | None) -> str:
    """Return the end of a sentence about the fastest mode: its speed-up."""
    if speed is None:
        return ""
    if abs(speed - 1) < MIN_CHANGE:
        return ", and as fast as one node"
    if speed > 1:
        return f", and {speed:.2f} times as fast as one node"
    return f", but slower than one node ({speed:.2f} times its speed)"


@states(steps=1)
def too_few_steps(cell: Cell) -> str:
    """Return the sentence that takes the place of a comparison."""
    who = cell.label if cell.spec.mode.distributed else "One node"
    few = "1 step after warm-up is" if cell.n == 1 else f"{cell.n} steps after warm-up are"
    return f"{who} takes {seconds(cell.seconds.centre)} a step; {few} too few to compare, {COMPARE_STEPS} are needed"


@states(steps=COMPARE_STEPS, cells=2)
def cost_of_one_slow_node(chapter: Chapter) -> str:
    """Return how much longer a step takes with one slow node than with equal nodes."""
    costs = []
    for cell in (cell for cell in chapter.cells if cell.spec.overrides):
        equal = next((c for c in chapter.cells if not c.spec.overrides and _differ_in(c, cell) <= {"overrides"}), None)
        if equal:
            costs.append((cell.seconds.centre / equal.seconds.centre, cell, equal))
    if not costs:
        return ""
    ratio, cell, equal = max(costs, key=lambda each: each[0])
    steps = f"{seconds(cell.seconds.centre)} a step instead of {seconds(equal.seconds.centre)}"
    where = name_of(cell, [key for key in chapter.keys if key != "overrides"])
    slow = f"{where} with {overrides_in_words(cell)} takes {steps}"
    if ratio < 1 + MIN_CHANGE:
        return f"One slow node makes no difference: {slow}"
    return f"One slow node slows all ranks: {slow}, {factor(ratio)} times as long"


def _differ_in(a: Cell, b: Cell) -> set[str]:
    """Return the keys in which two cells differ, with "on" and "machine"."""
    every = {**a.flat, **b.flat}
    keys = {key for key in every if a.flat.get(key) != b.flat.get(key) and key not in REPEAT_KEYS}
    return keys | {key for key in ("on", "machine") if value_of(a, key) != value_of(b, key)}


@states(steps=COMPARE_STEPS, cells=2)
def effect_of_placement(chapter: Chapter) -> str:
    """Return the effect of synchronising before or after the optimizer's step on the loss; empty for one placement."""
    placed = {cell.spec.placement for cell in chapter.cells}
    return loss_by_step([c for c in chapter.cells if not c.spec.mode.is_control]) if len(placed) > 1 else ""


@states(steps=1, otherwise=[])
def busiest_link(chapter: Chapter, best: Cell, worst: Cell) -> list[str]:
    """Return the bytes on the busiest link of the slowest and of the fastest mode."""
    costs = [theory.cost(cell.spec.mode, cell.world, cell.first.network.rack_uplinks) for cell in (best, worst)]
    if best.label == worst.label or not best.bound or not worst.bound or worst.bound <= 1.5 * best.bound:
        return []
    loads = [cost.load * cell.buffers[1] * cell.syncs for cost, cell in zip(costs, (best, worst), strict=True) if cost]
    if len(loads) < 2:
        return []
    where = "through rank 0's link" if worst.spec.mode.rooted else "over the busiest link"
    return [
        f"{worst.label} must move {megabytes(loads[1])} a step {where}: at least {seconds(worst.bound)} here. "
        f"{best.label} moves {megabytes(loads[0])} over each link: {seconds(best.bound)}."
    ]


@states(steps=COMPARE_STEPS, otherwise=[])
def hidden_time(chapter: Chapter, best: Cell, worst: Cell) -> list[str]:
    """Return how much of its communication the fastest mode hides."""
    hidden = best.split.hidden_share
    if best.label == worst.label or not hidden or hidden <= 0.05:
        return []
    return [f"{best.label} also sends while it computes: {percent(hidden)} of its communication costs no time."]


@states(steps=COMPARE_STEPS, otherwise=[])
def limit(chapter: Chapter, best: Cell, worst: Cell) -> list[str]:
    """Return whether the network, the CPU or neither limits the fastest mode."""
    if not best.bound or not best.spec.spans:
        return []
    s, wire, step = best.split, best.bound, best.seconds.centre
    own = s.compute + s.copies
    if MAX_USE * step < max(own, wire):
        return []  # a lower bound that is longer than the measured step is wrong, so nothing follows from it
    if s.exposed > own and wire < s.busy / 2:
        return [
            f"Neither computing ({seconds(own)} a step) nor the bytes ({seconds(wire)} at this rate) explain a step of "
            f"{best.label}: the exchange takes {seconds(s.busy)}, with delay, task switches and waiting."
        ]
    limits = "Network and CPU limit" if abs(wire - own) < MIN_CHANGE * own else "The network limits"
    limits = limits if wire > (1 - MIN_CHANGE) * own else "The CPU limits"
    return [
        f"{limits} {best.label}: a step needs {seconds(own)} of computing and copying and at least "
        f"{seconds(wire)} of transfer, so with perfect overlap {seconds(max(own, wire))}; it takes {seconds(step)}."
    ]


@states(steps=COMPARE_STEPS, otherwise=[])
def slow_ranks(chapter: Chapter, best: Cell, worst: Cell) -> list[str]:
    """Return one sentence per straggler, with the runs in which it was found."""
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


@states(steps=COMPARE_STEPS, otherwise="Computing, waiting and transfer of every rank")
def straggler(cell: Cell) -> str:
    """Return the sentence on the slowest straggler of a cell, as the title of its figure."""
    first = cell.stragglers[0].sentence
    return f"{first[0].upper()}{first[1:]}"


# If the finding of the swept axis states nothing, the first of these that does.
HEADLINES = (cost_of_one_slow_node, effect_of_placement)
REASONS = (busiest_link, hidden_time, limit, slow_ranks)  # in the order of the page


@states(steps=1, otherwise=[])
def tiles(chapter: Chapter, best: Cell, worst: Cell) -> list[Tile]:
    """Return the most important numbers of a chapter."""
    name, s = namer(chapter.cells), best.seconds
    enough = min(best.n, worst.n) >= COMPARE_STEPS
    ranked = enough and worst.seconds.centre >= (1 + MIN_CHANGE) * s.centre and name(best) != name(worst)
    spread = f" (95 %: {seconds(s.low)} to {seconds(s.high)})" if enough else f" (of {s.n} measured)"
    made = [Tile(seconds(s.centre), f"a step of {name(best)}{', the fastest' if ranked else ''}{spread}")]
    speed = chapter.speed_up(best)
    if speed is not None and best.spec.mode.distributed and enough:
        made.append(Tile(f"{speed:.2f}×", f"the speed of one node, with {best.world} nodes"))
    if ranked:
        made.append(Tile(seconds(worst.seconds.centre), f"a step of {name(worst)}, the slowest"))
    if best.split.busy > 0:
        exposed = exactly(best.split.exposed / best.split.step)
        made.append(Tile(exposed, f"of a step of {name(best)} is waiting for the network"))
    return made


def checks(chapter: Chapter) -> list[Check]:
    """Return all checks that have numbers to compare."""
    return [check for rule in CHECKS if (check := rule(chapter)) is not None]


@states(steps=1, otherwise=None)
def check_rates(chapter: Chapter) -> Check | None:
    """Compare requested and measured rates of all links."""
    runs = [run for cell in chapter.cells for run in cell.runs if run.spec.world > 1]
    worst = [run.network.worst_error for run in runs if run.network.worst_error is not None]
    links = sum(len(run.network.measured) for run in runs if run.network.worst_error is not None)
    if worst:
        off = max(map(abs, worst))
        allowed = max(run.network.tolerance for run in runs)
        return Check(
            off <= allowed, f"Rates: the largest error of {links} links is {percent(off)} of the requested rate"
        )
    return Check(None, "Rates: no rate was requested, so there is nothing to compare") if runs else None


@states(steps=1, otherwise=None)
def check_ways(chapter: Chapter) -> Check | None:
    """Compare requested and measured delay and loss of all links."""
    ways = [way for cell in chapter.cells for run in cell.runs for way in run.network.ways]
    wrong = [problem for way in ways if (problem := way.problem())]
    if wrong:
        return Check(False, f"Delay and loss: {len(wrong)} of {len(ways)} links are off, e.g. {wrong[0]}")
    return Check(True, f"Delay and loss: {len(ways)} links have what was requested") if ways else None


@states(steps=1, otherwise=None)
def check_replicas(chapter: Chapter) -> Check | None:
    """Compare the parameters of all ranks at the end of each run."""
    must = [r for c in chapter.cells for r in c.runs if r.spec.world > 1 and r.spec.replicas_must_agree]
    if not must:
        return None
    scripts = [run for run in must if run.spec.script]
    odd = [run for run in scripts if not run.summary.replicas_agree]  # the findings on the script explain it
    must = [run for run in must if run not in odd]
    if not must:
        differ = any(run.summary.replicas_agree is False for run in odd)
        text = "parameters differ between ranks of a script; see its findings" if differ else "no sample was taken"
        return Check(None, f"Replicas: {text}")
    equal = sum(bool(run.summary.replicas_agree) for run in must)
    return Check(equal == len(must), f"Replicas: parameters were bit for bit equal in {equal} of {len(must)} runs")


@states(steps=1, otherwise=None)
def check_bytes(chapter: Chapter) -> Check | None:
    """Compare the bytes that the kernel counted with the payload in theory."""
    name = namer(chapter.cells)
    ratios = [(ratio, name(cell)) for cell in chapter.cells if cell.world > 1 and (ratio := cell.sent_over_theory())]
    if not ratios:
        return None
    ratio, most = max(ratios, key=lambda each: abs(each[0] - 1))
    off = ratio - 1
    usual = "headers and acknowledgements are 0.2 to 9 %"
    if -0.01 <= off <= BYTE_TOLERANCE:
        over = f"{percent(abs(off))} {'more' if off > 0 else 'fewer'} at most"
        return Check(True, f"Bytes: the kernel counted what theory predicts ({over}; {usual})")
    differ = f"{percent(abs(off))} {'more' if off > 0 else 'fewer'} bytes than theory predicts for {most}"
    return Check(False, f"Bytes: the kernel counted {differ}; {usual}")


@states(steps=1, otherwise=None)
def check_times(chapter: Chapter) -> Check | None:
    """Compare the sum of the parts of a step with the step.

    The rest is calculated as a difference, so the sum alone is a weak check. Therefore the rest must be small, too.
    """
    detailed = [cell for cell in chapter.cells if cell.spec.spans]
    if not detailed:
        return None
    splits = [cell.split for cell in detailed]
    step, busy = max(split.step_gap for split in splits), max(split.busy_gap for split in splits)
    most = max(detailed, key=lambda cell: abs(cell.split.rest_share))
    rest = abs(most.split.rest_share)
    own = [abs(cell.split.rest_share) for cell in detailed if not cell.spec.script]
    if most.spec.script:  # the rest includes work of the script between its phases, e.g. a test or a log line
        text = (
            f"Times: compute + copies + exposed + rest is the step within {percent(step)}, exposed + hidden is "
            f"communication within {percent(busy)}; {exactly(rest)} of a step of {most.label} is other work"
        )
        return Check(max(step, busy, *own) <= SUM_TOLERANCE, text)
    text = (
        f"Times: compute + copies + exposed + rest is the step within {percent(step)}, the rest is at most "
        f"{percent(rest)} of it ({most.label}); exposed + hidden is communication within {percent(busy)}"
    )
    return Check(max(step, busy, rest) <= SUM_TOLERANCE, text)


@dataclass(frozen=True)
class _AgainstControl:
    """Computing of one cell compared with the control. Gaps are shares of the control's computing."""

    name: str
    clock: float  # gap in wall-clock time
    work: float  # gap in processor time; nan where it was not recorded
    noise: float  # difference between the ranks of the control
    contended: float  # share of computing during which bytes move (if the gap is positive), else of waiting
    copies: float  # share of the cell's step

    @property
    def gap(self) -> float:
        return self.clock if math.isnan(self.work) else self.work

    @property
    def limit(self) -> float:
        """The largest gap that counts as no difference."""
        return CONTROL_TOLERANCE + self.noise

    @property
    def ok(self) -> bool | None:
        """True up to the limit, None up to what contention could add, else False. Contention is not recorded."""
        if abs(self.gap) <= self.limit:
            return True
        return None if abs(self.gap) <= self.limit + CONTENTION * self.contended else False


def _against_control(cell: Cell, control: Cell, name: str) -> _AgainstControl:
    own, base = cell.split, control.split
    clock, work = own.compute / base.compute - 1, own.work / base.work - 1
    recorded = not math.isnan(work)
    noise = min(MAX_NOISE, control.rank_spread("work" if recorded else "compute"))
    more = (work if recorded else clock) > 0
    contended = own.overlap if more else 1 - (own.compute + own.copies) / own.step
    return _AgainstControl(name, clock, work, noise, contended, own.copies / own.step)


@states(steps=COMPARE_STEPS, cells=2, otherwise=None)
def check_control(chapter: Chapter) -> Check | None:
    """Compare computing of every mode with the same ranks without synchronisation (the control).

    The check compares the processor time of the loop's own thread in user mode, without copies. In wall-clock time the
    same work takes longer, because moving bytes uses the same processor. Time in kernel mode is left out: the kernel
    adds page faults and network interrupts to the thread that they interrupt. If processor time was not recorded,
    wall-clock time is compared. The ranks of the control do equal work, so a difference between them is noise of the
    machine and is added to the limit. Above the limit the check is open if contention could explain the difference
    (docs/report.md).
    """
    name = namer(chapter.cells)
    found = [
        _against_control(cell, control, name(cell))
        for control in chapter.cells
        if control.spec.mode.is_control and control.spec.spans
        for cell in chapter.cells
        if cell is not control and cell.spec.spans and _computes_alike(cell, control)
    ]
    if not found:
        return None
    recorded = not any(math.isnan(each.work) for each in found)
    off = [each for each in found if not each.ok]
    nearest = max(found, key=lambda each: abs(each.gap) - each.limit)
    gaps = [
        f"{each.name} {percent(abs(each.gap))} {'more' if each.gap >= 0 else 'less'} (limit {percent(each.limit)})"
        for each in off or [nearest]
    ]
    most = max(found, key=lambda each: each.copies)
    text = (
        f"Control: {'processor time' if recorded else 'wall-clock time'} of computing, compared with the same ranks "
        f"without synchronisation: {', '.join(gaps)}{'' if off else ', the nearest to its limit'}. "
    )
    if any(each.ok is None for each in off):
        text += "Shared caches, execution units or the clock rate could cause this; none of them is recorded. "
    text += (
        f"In wall-clock time the difference is at most {percent(max(abs(each.clock) for each in found))}. "
        f"Copies are counted separately: at most {percent(most.copies)} of a step ({most.name})"
    )
    return Check(False if any(each.ok is False for each in found) else None if off else True, text)


def _computes_alike(a: Cell, b: Cell) -> bool:
    """Return True if the specs differ in mode and network only, so that computing is the same work."""
    free = {key for key in a.flat if key in ("mode", "placement") or key.startswith("link.")}
    return a.world == b.world and _differ_in(a, b) <= free


@states(steps=1, otherwise=None)
def check_clocks(chapter: Chapter) -> Check | None:
    """Check the error of clock synchronisation if nodes have own clocks, because waiting and traces depend on it."""
    error = max(run.network.offset_error for cell in chapter.cells for run in cell.runs)
    if not error:
        return None
    waiting = [w for cell in chapter.cells for w in cell.waiting.waiting if cell.waiting.exchanges]
    fine = error <= max(0.001, 0.1 * statistics.fmean(waiting)) if waiting else None
    return Check(fine, f"Clocks: times of all nodes were converted to rank 0's clock with an error of {seconds(error)}")


CHECKS = (
    check_rates,
    check_ways,
    check_replicas,
    check_bytes,
    check_times,
    check_control,
    check_clocks,
)  # in this order


@states(steps=COMPARE_STEPS, otherwise="The parts of an average step")
def where_time_goes(cells: Sequence[Cell]) -> str:
    """Return the share of a step in which the slowest and the fastest mode wait."""
    name = namer(cells)
    best, worst = fastest(cells), slowest(cells)
    share = exactly(worst.split.exposed / worst.split.step)
    if worst.spec.mode.silent:
        return f"{name(worst)} has no communication to wait for"
    if name(best) == name(worst):
        return f"{name(best)} is blocked by communication for {share} of a step"
    hidden = best.split.hidden_share
    tail = f", and hides {percent(hidden)} of its communication" if hidden and hidden > 0.05 else ""
    own = exactly(best.split.exposed / best.split.step)
    return f"{name(worst)} is blocked by communication for {share} of its step, {name(best)} for {own}{tail}"


@states(steps=1, otherwise="Bytes that each rank sends in a step")
def bytes_per_rank(cells: Sequence[Cell]) -> str:
    """Return which mode sends most through one link, and which sends least."""
    name = namer(cells)

    def busiest(cell: Cell) -> tuple[float, int]:
        return max((float(sent or 0.0), -rank) for rank, sent in enumerate(cell.sent()))

    most, least = max(cells, key=busiest), min(cells, key=busiest)
    (high, rank), (low, _) = busiest(most), busiest(least)
    if name(most) == name(least):
        return f"{name(most)} sends {megabytes(high)} a step through rank {-rank}'s link"
    if high < 1.15 * low:
        who = all_of(cells).capitalize()
        return f"{who} sends about {megabytes(high)} a step through its busiest link"
    return (
        f"{name(most)} sends {megabytes(high)} a step through rank {-rank}'s link, {name(least)} {megabytes(low)} "
        f"at most through any: {high / low:.1f} times as much"
    )


@states(steps=COMPARE_STEPS, otherwise="Seconds of communication and their lower bound")
def roofline(cells: Sequence[Cell]) -> str:
    """Return by which factor communication exceeds its lower bound."""
    name = namer(cells)
    ratios = {name(cell): cell.split.busy / cell.bound for cell in cells if cell.bound}
    if not ratios:
        return Sentence("Seconds of communication", claims=False)
    worst, best = max(ratios, key=lambda each: ratios[each]), min(ratios, key=lambda each: ratios[each])
    if MAX_USE * ratios[best] < 1:
        less = f"{times(ratios[best])} times its lower bound"
        return f"Communication of {best} takes {less}, in which rounds follow each other at the rate of the probe"
    if ratios[worst] <= 1.1:
        most = percent(ratios[worst] - 1)
        return f"Communication is within {most} of its lower bound: only fewer bytes or more overlap can be faster"
    if times(ratios[worst]) == times(ratios[best]):
        who = f"Communication of {worst}" if len(ratios) == 1 else f"Communication of {all_of(cells)}"
        return f"{who} takes {times(ratios[worst])} times its lower bound"
    return (
        f"Communication of {worst} takes {times(ratios[worst])} times its lower bound, of {best} {times(ratios[best])}"
    )


@states(steps=1, otherwise="One step, phase by phase")
def timeline(cells: Sequence[Cell]) -> str:
    """Return which modes send while they compute."""
    name = namer(cells)
    overlapping = [cell for cell in cells if (cell.split.hidden_share or 0.0) > 0.1]
    after = [cell for cell in cells if cell.split.busy > 0 and (cell.split.hidden_share or 0.0) <= 0.1]
    first_then = "computes first and then waits for the network"
    if overlapping and after:
        best = max(overlapping, key=lambda cell: cell.split.hidden_share or 0.0)
        others = listed([name(cell) for cell in after])
        plural = "compute first and then wait for the network" if len(after) > 1 else first_then
        return f"{name(best)} sends while it computes; {others} {plural}"
    if overlapping:
        who = listed([name(cell) for cell in overlapping])
        return f"{who} {'send while they compute' if len(overlapping) > 1 else 'sends while it computes'}"
    if not after:
        return Sentence("One step, phase by phase", claims=False)
    return f"{all_of(after).capitalize() if len(after) > 1 else name(after[0])} {first_then}"


@states(steps=COMPARE_STEPS, otherwise="Training loss of each step")
def loss_by_step(cells: Sequence[Cell]) -> str:
    """Return whether all modes have the same loss. Leave out single nodes, whose BatchNorm uses the whole batch."""
    name = namer(cells)
    cells = [cell for cell in cells if cell.spec.mode.distributed] or cells
    length = min(len(cell.losses()) for cell in cells)
    if length < COMPARE_STEPS:
        return Sentence("Training loss of each step", claims=False)
    if _train_apart(cells):
        return Sentence("Training loss of each step", claims=False)
    table = np.array([cell.losses()[:length] for cell in cells])
    if not np.isfinite(table).all():
        lost = [name(cell) for cell, row in zip(cells, table, strict=True) if not np.isfinite(row).all()]
        return f"The loss of {listed(lost)} is not a number any more: training diverged"
    if len(cells) < 2:
        return f"The loss of {name(cells[0])} {_trend(table[0])}"
    final = table[:, -max(1, length // 10) :].mean(axis=1)
    if _equal_but_for_rounding(final):
        gap = float(final.max() - final.min())
        return f"After {length} steps the losses of all {len(cells)} are within {gap:.3f} of each other"
    return (
        _differ_by_placement(cells, final, name)
        or _differ_later(cells, table, final)
        or _differ(cells, final, length, name)
    )


def _train_apart(cells: Sequence[Cell]) -> bool:
    """Return True if not all train the same: scripts of several commands or folders, or a script and our own loop."""
    return len({(cell.spec.script.argv, cell.spec.script.folder) if cell.spec.script else () for cell in cells}) > 1


def _trend(losses: Column) -> str:
    """Return e.g. `falls from 2.30 to 1.75`, from the means of the first and of the last tenth."""
    width = max(1, len(losses) // 10)
    first, last = float(losses[:width].mean()), float(losses[-width:].mean())
    if abs(last - first) <= MIN_CHANGE * abs(first):
        return f"stays at {last:.2f}"
    return f"{'falls' if last < first else 'rises'} from {first:.2f} to {last:.2f}"


def _differ_by_placement(cells: Sequence[Cell], final: Column, name: Callable[[Cell], str]) -> str:
    """Return the sentence on a difference between synchronising before and after the optimizer's step, else empty."""
    late = np.array([cell.spec.placement == "after-step" for cell in cells])
    if not late.any() or (~late).sum() < 2 or not _equal_but_for_rounding(final[~late]):
        return ""
    right, wrong = final[~late].mean(), final[late].mean()
    together = listed([name(cell) for cell in cells if cell.spec.placement == "before-step"])
    return f"{together} have the same loss ({right:.2f}); synchronising after the step has another ({wrong:.2f})"


def _differ_later(cells: Sequence[Cell], table: Column, final: Column) -> str:
    """Return the sentence on exact modes that agree at first and differ later by rounding errors, else empty."""
    apart = [not _equal_but_for_rounding(table[:, step]) for step in range(table.shape[1])]
    common = apart.index(True) if True in apart else len(apart)
    exact = all(c.spec.mode.codec is None and c.spec.mode.every == 1 and not c.spec.script for c in cells)
    if not exact or any(c.spec.placement == "after-step" for c in cells) or common < EXACT_STEPS:
        return ""
    ends = f"{final.min():.2f} to {final.max():.2f}"
    return f"All {len(cells)} have the same loss for {common} steps; then they differ ({ends} at the end)"


def _differ(cells: Sequence[Cell], final: Column, length: int, name: Callable[[Cell], str]) -> str:
    high, low = name(cells[int(final.argmax())]), name(cells[int(final.argmin())])
    return f"The losses differ: after {length} steps {high} is at {final.max():.2f}, {low} at {final.min():.2f}"


def _equal_but_for_rounding(losses: Column) -> bool:
    return float(losses.max() - losses.min()) <= 0.02 * float(np.abs(losses).mean()) + 0.005


@states(steps=COMPARE_STEPS, otherwise="Loss against time")
def loss_by_time(cells: Sequence[Cell]) -> str:
    """Return the loss that all modes reach, and which mode reaches it first."""
    name = namer(cells)
    curves = [(cell.seconds_so_far(), _smooth(cell.losses())) for cell in cells]
    if _train_apart(cells) or not all(len(y) >= COMPARE_STEPS and np.isfinite(y).all() for _, y in curves):
        return Sentence("Loss against time", claims=False)
    trends = {name(cell): _trend(y) for cell, (_, y) in zip(cells, curves, strict=True)}
    not_falling = [who for who, trend in trends.items() if not trend.startswith("falls")]
    if not_falling:
        return f"The loss of {not_falling[0]} {trends[not_falling[0]]}"
    level = max(float(y.min()) for _, y in curves)
    reached = {name(cell): float(x[int(np.argmax(y <= level))]) for cell, (x, y) in zip(cells, curves, strict=True)}
    first, last = min(reached, key=lambda n: reached[n]), max(reached, key=lambda n: reached[n])
    if len(reached) < 2:
        return f"The loss of {first} falls to {level:.2f} in {seconds(reached[first])}"
    if reached[last] <= (1 + MIN_CHANGE) * reached[first]:
        return f"All {len(reached)} reach a loss of {level:.2f} after {seconds(reached[first])}"
    ends = f"after {seconds(reached[first])}, {last} after {seconds(reached[last])}"
    return f"{first} reaches a loss of {level:.2f} {ends}"


def _smooth(values: Column) -> Column:
    width = max(1, len(values) // 20)
    return np.convolve(values, np.ones(width) / width, mode="valid") if len(values) else values


@states(steps=STEADY_STEPS, otherwise="Seconds of each step")
def seconds_by_step(cells: Sequence[Cell]) -> str:
    """Return how much steps vary after warm-up."""
    name = namer(cells)
    spreads = {}
    for cell in cells:
        pooled = np.concatenate(list(cell.samples))
        middle = float(np.median(pooled))
        within = float(np.quantile(np.abs(pooled - middle), 0.9, method="inverted_cdf"))
        spreads[name(cell)] = within / middle if middle else 0.0
    worst = max(spreads, key=lambda each: spreads[each])
    within_text = f"nine of ten are within ±{percent(spreads[worst])}"
    if spreads[worst] <= 0.05:
        who = f"in {all_of(cells)}" if len(spreads) > 1 else f"of {worst}"
        return f"Steps are steady: {within_text} of the median {who}"
    if len(spreads) == 1 or percent(max(spreads.values())) == percent(min(spreads.values())):
        return f"Steps of {listed(list(spreads))} vary: {within_text} of their median"
    return f"Steps of {worst} vary most: {within_text} of their median"


@states(steps=1)
def faults(runs: Sequence[FaultedRun]) -> str:
    """Return how many runs had faults, how fast these were detected, whether the right rank was named, and the ends."""
    stopped = [run for run in runs if run.history.last_notice_s is not None]
    named = [run.history.named_right for run in stopped if run.history.named_right is not None]
    on = sum(run.row[-1] == "went on" for run in runs)
    again = sum(run.row[-1] == "restarted" for run in runs)
    not_injected = sum(not run.episodes for run in runs)
    sentences = [f"{len(runs)} run{'s' if len(runs) != 1 else ''} with injected faults"]
    if stopped:
        last = max(run.history.last_notice_s or 0.0 for run in stopped)
        sentences.append(f"{len(stopped)} ended because of a fault that all other ranks detected within {last:.1f} s")
        sentences.append(f"the right rank was named in {sum(named)} of {len(named)}")
    if on:
        sentences.append(f"{on} went on")
    if again:
        sentences.append(f"{again} restarted and finished")
    if not_injected:
        sentences.append(f"in {not_injected} nothing was injected")
    return "; ".join(sentences)


@states(steps=1)
def faults_noticed(runs: Sequence[FaultedRun]) -> str:
    """Return how long it took until all other ranks had detected the fault, and how often they named the right rank."""
    right = sum(run.history.named_right is True for run in runs)
    slowest = max(run.history.last_notice_s or 0.0 for run in runs)
    detected = f"All other ranks detected the fault within {slowest:.1f} s"
    return f"{detected} and named the right rank in {right} of {len(runs)} runs"


@states(steps=1)
def one_fault(run: FaultedRun) -> str:
    """Return the effect of a fault on its run."""
    mode, fault = label(run.spec), run.row[1]
    if run.row[-1] == "went on":
        return f"{fault} with {mode}: the run goes on"
    if run.row[-1] == "restarted":
        return f"{fault} with {mode}: all ranks restart from the last checkpoint and finish"
    if run.history.last_notice_s is None:
        return f"{fault} with {mode}: the run ends"
    named = {True: "the right rank", False: "another rank", None: "no rank"}[run.history.named_right]
    return f"{fault} with {mode}: all other ranks detect it after {run.history.last_notice_s:.2f} s and name {named}"


@states(steps=COMPARE_STEPS, otherwise="Seconds per step against the number of nodes")
def nodes(curves: dict[str, Curve]) -> str:
    """Return which modes get faster with every node, and from which number of nodes on others do not."""
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
    more = f"; {len(stops) - 2} more gain nothing or get slower" if len(stops) > 2 else ""
    return "; ".join([*sentences, *stops[:2]]) + more


@states(steps=COMPARE_STEPS, otherwise="Speed-up over the number of nodes")
def efficiency(chapter: Chapter, curves: dict[str, Curve]) -> str:
    """Return the best and the worst efficiency at the largest number of nodes."""
    speed = {name: (chapter.speed_up(curve[-1][1]), curve[-1][0]) for name, curve in curves.items()}
    known = {name: (gain / count, count) for name, (gain, count) in speed.items() if gain is not None}
    most = max((count for _, count in known.values()), default=0.0)
    ends = {name: share for name, (share, count) in known.items() if count == most}
    if not ends:
        return Sentence("Speed-up over the number of nodes", claims=False)
    best, worst = max(ends, key=lambda n: ends[n]), min(ends, key=lambda n: ends[n])
    text = f"At {most:g} nodes {best} has an efficiency of {percent(ends[best])}"
    return text if percent(ends[best]) == percent(ends[worst]) else f"{text}, {worst} of {percent(ends[worst])}"


@states(steps=COMPARE_STEPS, otherwise="Images per second against the number of nodes")
def weak(curves: dict[str, Curve]) -> str:
    """Return the gain in images per second of the mode that gains most."""
    speeds = {n: [cell.images_per_second or math.nan for _, cell in curve] for n, curve in curves.items()}
    gains = {name: speed[-1] / speed[0] for name, speed in speeds.items()}
    best = max(gains, key=lambda name: gains[name])
    first, last = curves[best][0][0], curves[best][-1][0]
    return f"With {best}, {last:g} nodes process {factor(gains[best])} times the images per second of {first:g}"


@states(steps=COMPARE_STEPS, otherwise="Seconds per step against the rate of the links")
def bandwidth(curves: dict[str, Curve], *, met: Sequence[Crossing], single: Cell | None) -> str:
    """Return from which rate on each mode is faster than one node; without a baseline, which mode is the fastest."""
    if not single or single.n < COMPARE_STEPS:
        return _fastest_at_rates(curves)
    pays = {each.right: each.at for each in met if each.left == "one node" and each.right in curves}
    level = single.seconds.centre
    rest = {name: [cell.seconds.centre for _, cell in curve] for name, curve in curves.items() if name not in pays}
    always = [name for name, steps in rest.items() if max(steps) < level]
    never = [name for name, steps in rest.items() if min(steps) >= level]
    sentences = [(name, f"from {rough_rate(at)} on") for name, at in sorted(pays.items(), key=lambda pair: pair[1])]
    if len(sentences) > MAX_LISTED + 1:
        sentences = [*sentences[:MAX_LISTED], (f"{len(sentences) - MAX_LISTED} more", "from higher rates on")]
    sentences += [(listed(always), "at every rate")] if always else []
    sentences += [(listed(never), "at none of these rates")] if never else []
    if not sentences:
        return Sentence("Seconds per step against the rate of the links", claims=False)
    (first, when), *others = sentences
    return ", ".join([f"{first} beats one node {when}", *(f"{name} {rates}" for name, rates in others)])


def _fastest_at_rates(curves: dict[str, Curve]) -> str:
    """Return which mode is the fastest at the lowest and at the highest rate at which all modes were measured."""
    points = {name: {x: cell.seconds.centre for x, cell in curve} for name, curve in curves.items()}
    common = set.intersection(*(set(each) for each in points.values()))
    if len(curves) < 2 or len(common) < 2:
        return Sentence("Seconds per step against the rate of the links", claims=False)
    low, high = min(common), max(common)
    first, last = (min(points, key=lambda name, x=x: points[name][x]) for x in (low, high))  # type: ignore[misc]
    ties = [x for x in (low, high) if len({f"{each[x]:.3g}" for each in points.values()}) == 1]
    if ties:
        return f"All {len(curves)} take the same time at {rough_rate(ties[0])}"
    if first == last:
        return f"{first} is the fastest at {rough_rate(low)} and at {rough_rate(high)}"
    return f"{first} is the fastest at {rough_rate(low)}, {last} at {rough_rate(high)}"


@states(steps=COMPARE_STEPS, otherwise="Seconds per step against the bucket size")
def buckets(curves: dict[str, Curve], *, levels: Sequence[Cell]) -> str:
    """Return the best bucket size, and its gain over the worst size and over the mode without buckets."""
    name, curve = min(curves.items(), key=lambda pair: min(c.seconds.centre for _, c in pair[1]))
    best = min((cell for _, cell in curve), key=lambda cell: cell.seconds.centre)
    worst = max((cell for _, cell in curve), key=lambda cell: cell.seconds.centre)
    gain = worst.seconds.centre / best.seconds.centre - 1
    if gain < MIN_CHANGE:
        return f"The bucket size makes no difference to {name}: {percent(gain)} between best and worst"
    against = f"{seconds(best.seconds.centre)} against {seconds(worst.seconds.centre)} for {worst.label}"
    alike = (c for c in levels if c.spec.mode.algorithm == best.spec.mode.algorithm and c.n >= COMPARE_STEPS)
    own = next((cell for cell in alike if _differ_in(cell, best) <= {"mode"}), None)
    return f"{best.label} is best: {against}{_versus(best, own) if own else ''}"


def _versus(cell: Cell, other: Cell) -> str:
    """Return the end of a sentence: how much faster or slower a cell is than another."""
    ratio = other.seconds.centre / cell.seconds.centre
    if abs(ratio - 1) < MIN_CHANGE:
        return f", as fast as {other.label}"
    if ratio > 1:
        return f", {ratio:.2f} times as fast as {other.label}"
    return f", but slower than {other.label} ({seconds(other.seconds.centre)})"


@states(steps=COMPARE_STEPS, otherwise="Seconds per step against the steps between synchronisations")
def skipping_speed(curves: dict[str, Curve]) -> str:
    """Return the gain from synchronising less often, for the mode that gains most."""
    name, curve = max(curves.items(), key=lambda pair: pair[1][0][1].seconds.centre / pair[1][-1][1].seconds.centre)
    (often, before), (seldom, after) = curve[0], curve[-1]
    gain = before.seconds.centre / after.seconds.centre
    than = f"synchronising {'in every step' if often == 1 else f'every {often:g} steps'}"
    if abs(gain - 1) < MIN_CHANGE:
        return f"Synchronising every {seldom:g} steps makes no mode faster than {than}"
    if gain < 1:
        return f"Synchronising every {seldom:g} steps makes {name} slower than {than}"
    return f"Synchronising every {seldom:g} steps makes {name} {gain:.2f} times as fast as {than}"


@states(steps=1, otherwise="Accuracy against the number of steps between synchronisations")
def skipping_accuracy(curves: dict[str, Curve]) -> str:
    """Return the effect of synchronising less often on the accuracy."""
    for name, curve in curves.items():
        known = [(x, 100 * a) for x, cell in curve if (a := cell.first.summary.test_accuracy) is not None]
        if len(known) > 1:
            change = known[-1][1] - known[0][1]
            if abs(change) < 0.05:
                return f"every:{known[-1][0]:g} does not change the accuracy of {name}"
            verb = "costs" if change < 0 else "gains"
            return f"every:{known[-1][0]:g} {verb} {name} {abs(change):.1f} points of accuracy"
    return Sentence("Accuracy against the number of steps between synchronisations", claims=False)


@states(steps=COMPARE_STEPS, otherwise="The same spec on several substrates")
def substrates(both: Sequence[dict[str, Cell]]) -> str:
    """Return how much the times of equal specs differ between substrates."""
    found = []
    for cells in both:
        quick = min(cells, key=lambda each: cells[each].seconds.centre)
        slow = max(cells, key=lambda each: cells[each].seconds.centre)
        found.append((cells[slow].seconds.centre / cells[quick].seconds.centre - 1, cells[slow].label, quick, slow))
    gap, label, quick, slow = max(found)
    if gap <= AGREE:
        named = listed(list(dict.fromkeys(substrate for cells in both for substrate in cells)))
        return f"{named} agree within {percent(gap)} (largest difference: {label})"
    return f"{label} takes {factor(1 + gap)} times as long on {slow} as on {quick}"


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
OBSERVED = (
    " Of a user's script theory is that of its observed collectives, as Gloo sends them, and S is their bytes. It says"
    " nothing about what the script could do instead."
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
    "Seconds per epoch are extrapolated: the images of the training set divided by the images per second of the steps"
    " after warm-up and without a fault."
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
