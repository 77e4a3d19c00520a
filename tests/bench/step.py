"""The whole step: `pipeline` against torch's DDP, on shaped namespaces.

A part is a rate, or a relation of wire to compute (C/(F+B) = 1.0): then the control is timed first, and the rate set to
fit. A short round finds the best bucket sizes; then DDP, DDP at its best, the pipeline at its best and the control take
turns, three times. Four ranks, one thread each, no CPU quota. C is the wire's time for one all-reduce at the rate's TCP
goodput, F+B the step of the control: the same ranks without synchronisation.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from testbed.net.wire import efficiency
from testbed.spec.units import parse_rate
from tests.bench import cases
from tests.bench.cases import CONTROL, DDP, NODES, PIPELINE, case, train
from tests.bench.figures import Figure, spread
from tests.bench.shaped import network

GRADIENT = 9_231_114 * 4  # bytes of VGG-11's
LEAST = 2 * (NODES - 1) / NODES * GRADIENT  # bytes that an exact mode sends per rank and step
DDP_SIZES = ("1MiB", "2MiB", "5MiB", "10MiB")
OUR_SIZES = ("1MiB", "2MiB")
MOST_BYTES = 1.07  # over LEAST


class Case(NamedTuple):
    """What one mode did at one rate."""

    seconds: list[float]  # per step, mean over ranks
    sent: float  # bytes per rank and step


class Plan(NamedTuple):
    """How thoroughly a point is measured (steps of the search and of a repeat, repeats), and what is promised."""

    search: int
    steps: int
    repeats: int
    default: float = 0.97  # DDP's default / ours, at least
    best: float = 0.97  # DDP at its best / ours, at least
    bound: float | None = None  # ours / max(C, F+B), at most


PLANS = {  # a rate, or C/(F+B)
    "50mbit": Plan(0, 6, 1),
    "100mbit": Plan(0, 6, 1),
    "2.0": Plan(8, 12, 3, default=1.10, bound=1.15),
    "1.0": Plan(8, 12, 3, default=1.35, best=1.10, bound=1.25),
    "0.67": Plan(8, 12, 3, default=1.25),
    "0.5": Plan(8, 12, 3, bound=1.15),
    "1gbit": Plan(8, 12, 3),
}


def measure_at(point: str) -> Iterator[Figure]:
    """All figures of one point."""
    plan, rate = PLANS[point], point if point.endswith("bit") else _fitting(float(point))
    with network(rate, NODES) as (substrate, receipt, folder):
        print(f"  {receipt.sentence()}", flush=True)

        def times(modes: list[str], steps: int, repeats: int) -> dict[str, Case]:
            ranks = train(substrate, folder, [case(mode, steps, spans=False) for mode in modes * repeats])
            found: dict[str, Case] = {}
            for mode, each in zip(modes * repeats, ranks, strict=True):
                before = found[mode].seconds if mode in found else []
                found[mode] = Case(before + cases.seconds(each), cases.sent(each))
            return found

        ours, ddp = PIPELINE, "ddp/bucket:2MiB"  # where the wire decides, sizes hardly matter
        if plan.search:
            ring = [f"ring/bucket:{size}/pipeline" for size in OUR_SIZES]
            found = times([*ring, *(f"ddp/bucket:{size}" for size in DDP_SIZES)], plan.search, 1)
            ours, ddp = _best(found, "ring"), _best(found, "ddp")
        found = times([CONTROL, DDP, ddp, ours], plan.steps, plan.repeats)
    yield from _figures(rate, found, ours, ddp, plan)


def _fitting(relation: float) -> str:
    """The rate at which the wire takes `relation` times as long as computing."""
    return f"{round(_bits() / (relation * _compute()) / 1e6)}mbit"


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
    return min((m for m in found if m.startswith(word)), key=lambda mode: statistics.median(found[mode].seconds))


def _figures(rate: str, found: dict[str, Case], mode: str, best_ddp: str, plan: Plan) -> Iterator[Figure]:
    median = {name: statistics.median(case.seconds) for name, case in found.items()}
    wire, compute = _bits() / parse_rate(rate), median[CONTROL]
    where = f"{rate}, C/(F+B) = {wire / compute:.2f}"
    yield Figure(
        name=f"DDP's default / {mode}, {where}",
        value=median[DDP] / median[mode],
        low=plan.default,
        detail=f"{mode} {spread(found[mode].seconds)}, ddp {spread(found[DDP].seconds)}",
    )
    best = min((DDP, best_ddp), key=lambda name: median[name])
    yield Figure(
        name=f"DDP's best / {mode}, {where}",
        value=median[best] / median[mode],
        low=plan.best,
        detail=f"{best} {spread(found[best].seconds)}",
    )
    yield Figure(
        name=f"{mode} / max(C, F+B), {where}",
        value=median[mode] / max(wire, compute),
        high=plan.bound,
        detail=f"C {wire:.3f} s, F+B {spread(found[CONTROL].seconds)}",
    )
    yield Figure(
        name=f"bytes of {mode} / least, {rate}",
        value=found[mode].sent / LEAST,
        high=MOST_BYTES,
        detail="interface counters",
    )
