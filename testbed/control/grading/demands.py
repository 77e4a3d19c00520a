"""Judge the demands of an assignment on the evidence of one submission. One function for each kind of demand.

met          the evidence shows that the demand is met
not met      the evidence shows that it is not met
not proven   the evidence contradicts itself or shows neither: no points, and a person has to look at it
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from testbed.control.grading.evidence import PartEvidence, contradictions
from testbed.control.tuning.statistics import Race
from testbed.results.gradients import gradient_fit
from testbed.results.observations import Batch, Parameters
from testbed.spec.grading import DEMANDS, OUTSIDE, Assignment, Demand, Part

SHARED_IMAGES = 2  # two ranks that share this number of images fail; one is allowed: a data set may have duplicates
MET, NOT_MET, NOT_PROVEN = "met", "not met", "not proven"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one demand."""

    part: str
    kind: str
    demand: str  # in words
    points: float  # given
    of: float  # the points of the demand
    verdict: str
    reason: str
    evidence: str  # OUTSIDE, RECORDS or BOTH


@dataclass(frozen=True)
class Finding:
    """What the function of a demand returns."""

    verdict: str
    reason: str


@dataclass(frozen=True)
class Case:
    """What the function of a demand gets."""

    assignment: Assignment
    demand: Demand
    own: PartEvidence
    parts: Mapping[str, PartEvidence]  # all parts of the same submission, by name


def judge(assignment: Assignment, parts: Mapping[str, PartEvidence]) -> list[Verdict]:
    """Return the verdicts on all demands, in the order of the file. A part without evidence was not submitted."""
    return [
        _verdict(assignment, assignment.complete(part), demand, parts)
        for part in assignment.parts
        for demand in part.demands
    ]


def _verdict(assignment: Assignment, part: Part, demand: Demand, parts: Mapping[str, PartEvidence]) -> Verdict:
    row, own = DEMANDS[demand.kind], parts.get(part.name)
    rests_on = row.rests_on
    if own is None:
        found, rests_on = Finding(NOT_MET, f"{part.file} is missing"), OUTSIDE
    elif incidents := own.outside.incidents():
        found, rests_on = Finding(NOT_PROVEN, f"{'; '.join(incidents)}. A person has to look at it"), OUTSIDE
    elif own.uncounted:
        found, rests_on = Finding(NOT_PROVEN, f"{own.uncounted}. A person has to look at it"), OUTSIDE
    elif own.failure:
        found, rests_on = Finding(NOT_MET, own.failure), OUTSIDE
    elif own.unreadable and not own.records:
        found = Finding(NOT_PROVEN, own.unreadable)
    else:
        refuted = [] if row.rests_on == OUTSIDE else contradictions(own) or list(filter(None, [own.unreadable]))
        case = Case(assignment, demand, own, parts)
        found = Finding(NOT_PROVEN, "; ".join(refuted)) if refuted else JUDGES[demand.kind](case)
    if demand.kind == "bytes" and own and own.trusted and not own.outside.counted:
        rests_on = "records"  # for a trusted submission without counted bytes, those in its records are used
    return Verdict(
        part=part.name,
        kind=demand.kind,
        demand=in_words(demand),
        points=demand.points if found.verdict == MET else 0.0,
        of=demand.points,
        verdict=found.verdict,
        reason=found.reason,
        evidence=rests_on,
    )


def in_words(demand: Demand) -> str:
    """Return a demand as the table shows it."""
    details = {
        "collectives": "; ".join(
            f"{word} {', '.join(names)}"
            for word, names in (("calls", demand.required), ("never calls", demand.forbidden))
            if names
        ),
        "batch": f"{demand.images} images a step on all ranks",
        "bytes": f"gradients sent a step: {_band(demand.rank0)} at rank 0, {_band(demand.others)} at others",
        "speed": f"a step is not slower than in part {demand.part}",
        "loss": f"the first loss is that of part {demand.part}",
    }
    return details.get(demand.kind) or DEMANDS[demand.kind].does


def _band(band: tuple[float, float] | None) -> str:
    return "any" if band is None else f"{band[0]:g} to {band[1]:g}"


def _runs(case: Case) -> Finding:
    wanted = case.own.part.steps
    done = [len(case.own.steps(rank)) for rank in range(case.own.world)]
    if min(done) < (wanted or 0):
        return Finding(NOT_MET, f"ended after {min(done)} of {wanted} steps")
    codes = [node.code for node in case.own.outside.nodes]
    if any(codes):
        return Finding(NOT_MET, f"exit codes {codes}")
    return Finding(MET, f"code 0 on {case.own.world} nodes after {case.own.outside.seconds:.1f} s, {min(done)} steps")


def _collectives(case: Case) -> Finding:
    own, demand = case.own, case.demand
    for rank in range(own.world):
        rows, wrappers = own.calls(rank), own.wrappers(rank)
        called = {row.operation for row in rows} | wrappers
        for name in demand.forbidden:
            if name in called:
                sites = sorted({row.site for row in rows if row.operation == name and row.site})
                return Finding(NOT_MET, f"rank {rank} uses {name}" + (f" ({', '.join(sites[:3])})" if sites else ""))
        in_steps = [own.operations(step) for step in own.steps(rank)]
        for name in demand.required:
            if name in wrappers:
                continue
            if name not in called:
                return Finding(NOT_MET, f"rank {rank} never calls {name}")
            # what is called after an update belongs to the next step, so the first step may have none
            missing = [number for number, operations in enumerate(in_steps) if number and name not in operations]
            if missing:
                steps = f"{len(missing)} of {len(in_steps)} steps, first in step {missing[0] + 1}"
                return Finding(NOT_MET, f"rank {rank} does not call {name} in {steps}")
    counted = sorted({(row.operation, row.count) for row in own.calls(0)})
    return Finding(MET, ", ".join(f"{count} x {name}" for name, count in counted) or "none is called")


def _gradients(case: Case) -> Finding:
    fit = gradient_fit(dict(enumerate(case.own.records)))
    if fit.kind in ("unseen", "zero"):
        return Finding(NOT_PROVEN, f"the gradients are {fit.words}")
    told = f"the optimizer gets {fit.words}" if fit.kind != "equal" else f"gradients are {fit.words}"
    numbers = f"factor {fit.factor:.6f}, residual {fit.residual:.1e}"
    if fit.kind in ("mean", "equal"):
        return Finding(MET, f"{told} ({numbers}, {fit.samples} samples)")
    return Finding(NOT_MET, f"{told} ({numbers}, at update {fit.step}, {fit.samples} of {fit.decided} samples)")


def _replicas(case: Case) -> Finding:
    by_rank = [
        {(each.moment, each.step): each.hash for each in records if isinstance(each, Parameters)}
        for records in case.own.records
    ]
    common = sorted(set.intersection(*(set(each) for each in by_rank)), key=lambda key: (key[0] != "start", key[1]))
    if len(common) < 2:
        return Finding(NOT_PROVEN, "the records have no hashes of parameters to compare")
    for moment, step in common:
        if len({each[moment, step] for each in by_rank}) > 1:
            when = "at the start" if moment == "start" else f"after step {step + 1}"
            return Finding(NOT_MET, f"parameters differ {when}")
    return Finding(MET, f"equal at {len(common)} moments, the last after step {common[-1][1] + 1}")


def _data(case: Case) -> Finding:
    by_rank = [{each.step: each for each in records if isinstance(each, Batch)} for records in case.own.records]
    common = sorted(set.intersection(*(set(each) for each in by_rank)))
    if not common:
        return Finding(NOT_PROVEN, "the records have no hashes of batches to compare")
    seen: dict[str, tuple[int, int]] = {}  # hash of a batch or an image -> rank, step
    shared: dict[str, str] = {}  # hash -> where
    for rank, batches in enumerate(by_rank):
        for step in common:
            listed = batches[step].detail.get("samples")
            images = listed if isinstance(listed, list) else []
            single = bool(images)
            for text in map(str, images or [batches[step].hash] * SHARED_IMAGES):
                other, before = seen.setdefault(text, (rank, step))
                if other != rank:
                    where = f"rank {rank} at step {step + 1} and rank {other} at step {before + 1}"
                    shared.setdefault(text if single else f"{text} {len(shared)}", where)
    if len(shared) >= SHARED_IMAGES:
        return Finding(NOT_MET, f"{next(iter(shared.values()))} get the same images")
    return Finding(MET, f"no images in common in {len(common)} steps")


def _batch(case: Case) -> Finding:
    totals = [sum(step.images for step in each) for each in zip(*map(case.own.steps, _ranks(case)), strict=False)]
    if not any(totals):
        return Finding(NOT_PROVEN, "the script uses no DataLoader, so its images were not counted")
    wrong = [(number, total) for number, total in enumerate(totals) if total != case.demand.images]
    if wrong:
        number, total = wrong[0]
        return Finding(NOT_MET, f"step {number + 1} has {total} images on all ranks together")
    return Finding(MET, f"{totals[0]} images in each of {len(totals)} steps")


def _ranks(case: Case) -> range:
    return range(case.own.world)


def _bytes(case: Case) -> Finding:
    own, demand = case.own, case.demand
    unit = case.assignment.gradient_bytes * (own.part.steps or 1)
    sent: list[float] = []
    for rank in _ranks(case):
        steps = [step.sent for step in own.steps(rank) if step.sent is not None]
        counted = own.outside.nodes[rank].sent if own.outside.counted else (steps[-1] if steps else None)
        if counted is None:
            return Finding(NOT_PROVEN, f"the bytes of node {rank} were not counted")
        sent.append(counted / unit)
    shown = ", ".join(f"{value:.2f}" for value in sent)
    for rank, value in enumerate(sent):
        low, high = (demand.rank0 if rank == 0 else demand.others) or (0.0, float("inf"))
        if not low <= value <= high:
            return Finding(NOT_MET, f"rank {rank} sends {value:.2f} gradients a step (by rank: {shown})")
    return Finding(MET, f"by rank {shown} gradients a step")


def _speed(case: Case) -> Finding:
    other = case.parts.get(case.demand.part)
    if other is None or other.failure or min(len(other.seconds()), len(case.own.seconds())) < 3:
        return Finding(NOT_PROVEN, f"part {case.demand.part} has no times to compare with")
    doubts = [*other.outside.incidents(), other.uncounted, *contradictions(other), other.unreadable]
    if doubts := list(filter(None, doubts)):
        return Finding(NOT_PROVEN, f"the times of part {case.demand.part} prove nothing: {doubts[0]}")
    race = Race({"own": case.own.seconds(), "other": other.seconds()})
    mine, theirs = race.interval("own"), race.interval("other")
    shown = f"{_span(mine)} here, {_span(theirs)} in part {case.demand.part}"
    if mine[0] > theirs[1]:
        busy = case.own.busy or other.busy
        return Finding(NOT_PROVEN, f"slower: {shown}; {busy}") if busy else Finding(NOT_MET, f"slower: {shown}")
    if mine[1] < theirs[0]:
        return Finding(MET, f"faster: {shown}")
    return Finding(MET, f"the intervals overlap, so no order is shown: {shown}")


def _span(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f} s"


def _loss(case: Case) -> Finding:
    other = case.parts.get(case.demand.part)
    losses = [_first_loss(found) for found in (case.own, other) if found is not None]
    if len(losses) < 2 or None in losses:
        return Finding(NOT_PROVEN, f"part {case.demand.part} has no loss to compare with")
    mine, theirs = (value or 0.0 for value in losses)
    near = abs(mine - theirs) <= case.demand.tolerance * abs(theirs)
    return Finding(MET if near else NOT_MET, f"{mine:.4f} here, {theirs:.4f} in part {case.demand.part}")


def _first_loss(found: PartEvidence) -> float | None:
    """Return the loss of the first step, the mean over ranks; None if a rank has no step."""
    steps = [found.steps(rank)[:1] for rank in range(len(found.records))]
    return statistics.fmean(each[0].loss for each in steps) if steps and all(steps) else None


JUDGES: dict[str, Callable[[Case], Finding]] = {
    "runs": _runs,
    "collectives": _collectives,
    "gradients": _gradients,
    "replicas": _replicas,
    "data": _data,
    "batch": _batch,
    "bytes": _bytes,
    "speed": _speed,
    "loss": _loss,
}
