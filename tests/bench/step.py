"""The whole step: `pipeline` against torch's DDP, on shaped namespaces.

A part is a rate, or a relation of wire to compute (C/(F+B) = 1.0): then the control is timed first, and the rate set to
fit; once more where what came out is too far from it. A short round finds the best bucket sizes; then DDP, DDP at its
best, the pipeline at its best and the control take turns, three times. Four ranks, one thread each, no CPU quota. C is
the wire's time for one all-reduce at the rate's TCP goodput, F+B the step of the control: the same ranks without
synchronisation.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from testbed.net.tcp import efficiency
from testbed.spec.units import parse_rate
from tests.bench import cases
from tests.bench.cases import CONTROL, DDP, NODES, PATIENT, PIPELINE, case, train
from tests.bench.figures import Figure, spread
from tests.bench.shaped import network

GRADIENT = 9_231_114 * 4  # bytes of VGG-11's
LEAST = 2 * (NODES - 1) / NODES * GRADIENT  # bytes that an exact mode sends per rank and step
DDP_SIZES = ("1MiB", "2MiB", "5MiB", "10MiB")
OUR_SIZES = ("1MiB", "2MiB")
FEWEST_BYTES, MOST_BYTES = 0.97, 1.07  # over LEAST; fewer than that, and the counter does not count
OFF = 0.05  # a relation of wire to compute this far from the one asked is another point


class Case(NamedTuple):
    """What one mode did at one rate."""

    seconds: list[float]  # per step, mean over ranks
    sent: float  # bytes per rank and step

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Timed(NamedTuple):
    """What all modes did at one rate, and which were the best of their kind."""

    rate: str
    ours: str
    ddp: str
    search: dict[str, Case]  # by mode, in the short round
    found: dict[str, Case]

    @property
    def compute(self) -> float:
        return self.found[CONTROL].median

    @property
    def wire(self) -> float:
        return _bits() / parse_rate(self.rate)

    @property
    def relation(self) -> float:
        return self.wire / self.compute


class Plan(NamedTuple):
    """How thoroughly a point is measured (steps of the search and of a repeat, repeats), and what is promised."""

    search: int
    steps: int
    repeats: int
    default: float = 0.97  # DDP's default / ours, at least
    best: float = 0.97  # DDP at its best / ours, at least
    bound: float | None = None  # ours / max(C, F+B), at most
    patient: bool = False  # also DDP with the pipeline's class of Gloo's thread: what part of the lead is that?


PLANS = {  # a rate, or C/(F+B)
    "50mbit": Plan(0, 6, 1),
    "100mbit": Plan(0, 6, 1),
    "2.0": Plan(8, 12, 3, default=1.10, bound=1.15),
    "1.0": Plan(8, 12, 3, default=1.35, best=1.10, bound=1.25, patient=True),
    "0.67": Plan(8, 12, 3, default=1.25),
    "0.5": Plan(8, 12, 3, bound=1.15),
    "1gbit": Plan(8, 12, 3),
}


def measure_at(point: str) -> Iterator[Figure]:
    """All figures of one point; those of a rate that missed it are not its figures."""
    plan = PLANS[point]
    if point.endswith("bit"):
        yield from _figures(_time(point, plan), plan)
        return
    asked = float(point)
    timed = _time(_fitting(asked, _compute()), plan)
    if abs(timed.relation / asked - 1) > OFF:
        where, when = f"{timed.rate}, where {point} was asked", spread(timed.found[CONTROL].seconds)
        yield Figure(name=f"C/(F+B) at {where}", value=timed.relation, detail=f"fitted once more; F+B {when}")
        timed = _time(_fitting(asked, timed.compute), plan)
    yield from _figures(timed, plan)


def _time(rate: str, plan: Plan) -> Timed:
    """The short round, and the long one with its best."""
    with network(rate, NODES) as (substrate, receipt, folder):
        print(f"  {receipt.sentence()}", flush=True)

        def times(modes: list[str], steps: int, repeats: int) -> dict[str, Case]:
            ranks = train(substrate, folder, [case(mode, steps, spans=False) for mode in modes * repeats])
            found: dict[str, Case] = {}
            for mode, each in zip(modes * repeats, ranks, strict=True):
                before = found[mode].seconds if mode in found else []
                found[mode] = Case(before + cases.seconds(each), each.sent)
            return found

        search: dict[str, Case] = {}
        ours, ddp = PIPELINE, "ddp/bucket:2MiB"  # where the wire decides, sizes hardly matter
        if plan.search:
            ring = [f"ring/bucket:{size}/pipeline" for size in OUR_SIZES]
            search = times([*ring, *(f"ddp/bucket:{size}" for size in DDP_SIZES)], plan.search, 1)
            ours, ddp = _best(search, "ring"), _best(search, "ddp")
        patient = [DDP + PATIENT, ddp + PATIENT] if plan.patient else []
        return Timed(rate, ours, ddp, search, times([CONTROL, DDP, ddp, ours, *patient], plan.steps, plan.repeats))


def _fitting(relation: float, compute: float) -> str:
    """The rate at which the wire takes `relation` times as long as computing."""
    return f"{round(_bits() / (relation * compute) / 1e6)}mbit"


@functools.cache
def _compute() -> float:
    """F+B, to choose rates by; each point times it again beside its modes."""
    with network("1gbit", NODES) as (substrate, _, folder):
        (ranks,) = train(substrate, folder, [case(CONTROL, 10)])
    return statistics.median(cases.seconds(ranks))


def _bits() -> float:
    """On the wire, headers included, of one all-reduce."""
    return LEAST * 8 / efficiency()


def _best(found: dict[str, Case], word: str) -> str:
    return min((m for m in found if m.startswith(word)), key=lambda mode: found[mode].median)


def byte_figure(name: str, sent: float, detail: str) -> Figure:
    """Bytes per rank and step of an exact mode against what it must send."""
    return Figure(name=name, value=sent / LEAST, low=FEWEST_BYTES, high=MOST_BYTES, detail=detail)


def _figures(timed: Timed, plan: Plan) -> Iterator[Figure]:
    rate, mode, found = timed.rate, timed.ours, timed.found
    for name, of in timed.search.items():
        yield Figure(name=f"step of {name} in the short round, {rate}", value=of.median, detail=spread(of.seconds))
    where = f"{rate}, C/(F+B) = {timed.relation:.2f}"
    yield Figure(
        name=f"DDP's default / {mode}, {where}",
        value=found[DDP].median / found[mode].median,
        low=plan.default,
        detail=f"{mode} {spread(found[mode].seconds)}, ddp {spread(found[DDP].seconds)}",
    )
    best = min((DDP, timed.ddp), key=lambda name: found[name].median)
    yield Figure(
        name=f"DDP's best / {mode}, {where}",
        value=found[best].median / found[mode].median,
        low=plan.best,
        detail=f"{best} {spread(found[best].seconds)}",
    )
    for name in (name for name in found if name.endswith(PATIENT)):
        ratio = found[name].median / found[mode].median
        yield Figure(name=f"{name} / {mode}, {where}", value=ratio, detail=spread(found[name].seconds))
    yield Figure(
        name=f"{mode} / max(C, F+B), {where}",
        value=found[mode].median / max(timed.wire, timed.compute),
        high=plan.bound,
        detail=f"C {timed.wire:.3f} s, F+B {spread(found[CONTROL].seconds)}",
    )
    yield byte_figure(f"bytes of {mode} / least, {rate}", found[mode].sent, "interface counters")
