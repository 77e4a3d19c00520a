"""Verdict: the first thing a reader sees. Who wins and by how much, what limits it, and whether the numbers add up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from testbed.report import theory
from testbed.report.cells import NO_CONDITION, Cell, Chapter
from testbed.report.findings import fastest, loss_by_step, megabytes, namer, percent, rate_in_words, slowest
from testbed.report.focus import Focus, overrides_in_words
from testbed.report.stats import seconds
from testbed.report.tables import sent_over_theory

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
    worst = [run.network.worst for run in runs if run.network.worst is not None]
    links = sum(len(run.network.got) for run in runs if run.network.worst is not None)
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
