"""The whole step: `pipeline` against torch's DDP, on shaped namespaces, at rates from 50 Mbit to 1 Gbit.

At each rate a short round finds the best bucket sizes; then DDP, DDP at its best, the pipeline at its best and the
control (same ranks, no synchronisation) take turns, three times. Four ranks, one thread each, no CPU quota.
C is the wire's time for one all-reduce at the rate's TCP goodput, F+B the step of the control.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed.net.wire import efficiency
from testbed.spec.records import read
from testbed.spec.units import parse_rate
from tests.bench.figures import Figure, spread
from tests.bench.shaped import network, work

NODES = 4
GRADIENT = 9_231_114 * 4  # bytes of VGG-11's
BATCH = 64  # images a rank
CONTROL, DDP = "none", "ddp"
DDP_SIZES = ("1MiB", "2MiB", "5MiB")
OUR_SIZES = ("1MiB", "2MiB", "4MiB")
OURS = ("ring", "direct")  # with /bucket:SIZE/pipeline
MOST_BYTES = 1.07  # over 2(N-1)/N S


class Case(NamedTuple):
    """What one mode did at one rate."""

    seconds: list[float]  # per step, mean over ranks
    sent: float  # bytes per rank and step


class Plan(NamedTuple):
    """How thoroughly a rate is measured: steps of the search and of a repeat, and how many repeats."""

    search: int
    steps: int
    repeats: int


PLANS = {
    "50mbit": Plan(0, 6, 1),
    "100mbit": Plan(0, 6, 1),
    "200mbit": Plan(5, 12, 3),
    "400mbit": Plan(5, 12, 3),
    "600mbit": Plan(5, 12, 3),
    "800mbit": Plan(5, 12, 3),
    "1gbit": Plan(5, 12, 3),
}


def measure_at(rate: str) -> Iterator[Figure]:
    """All figures of one rate."""
    plan = PLANS[rate]
    with network(rate, NODES) as (substrate, receipt, folder):
        print(f"  {receipt.sentence()}", flush=True)

        def times(modes: Sequence[str], steps: int, repeats: int) -> dict[str, Case]:
            (folder / "cases.json").write_text(
                json.dumps([_run(mode, steps) for _ in range(repeats) for mode in modes])
            )
            work(substrate, folder, Path(__file__).with_name("step_worker.py"), seconds=1800)
            return _collect(folder, list(modes), repeats)

        ours = [f"{algorithm}/bucket:{size}/pipeline" for algorithm in OURS for size in OUR_SIZES]
        ddp = [f"ddp/bucket:{size}" for size in DDP_SIZES]
        if plan.search:
            found = times([*ours, *ddp], plan.search, 1)
            ring, direct, best_ddp = (_best(found, word) for word in ("ring", "direct", "ddp"))
        else:  # where the wire decides, sizes hardly matter
            ring, direct, best_ddp = "ring/bucket:2MiB/pipeline", "direct/bucket:2MiB/pipeline", "ddp/bucket:2MiB"
        found = times([CONTROL, DDP, best_ddp, ring, direct], plan.steps, plan.repeats)
    yield from _figures(rate, found, ring, best_ddp, ring)
    yield from _figures(rate, found, direct, best_ddp, ring)


def _run(mode: str, steps: int) -> dict[str, Any]:
    few = {"model": "vgg11", "nodes": NODES, "batch_per_rank": BATCH, "steps": steps, "data": {"name": "synthetic"}}
    return few | {"mode": mode, "evaluate": "never"}


def _collect(folder: Path, modes: list[str], repeats: int) -> dict[str, Case]:
    cases: dict[str, Case] = {mode: Case([], 0.0) for mode in modes}
    for number in range(repeats * len(modes)):
        files = [folder / f"{number}.rank{rank}.jsonl" for rank in range(NODES)]
        ranks = [[r for r in read(path) if r["kind"] == "step"][2:] for path in files]
        for path in files:
            path.unlink()
        mode = modes[number % len(modes)]
        rows = zip(*ranks, strict=True)
        seconds = cases[mode].seconds + [statistics.fmean(r["total"] for r in row) for row in rows]
        sent = statistics.fmean((steps[-1]["sent"] - steps[0]["sent"]) / (len(steps) - 1) for steps in ranks)
        cases[mode] = Case(seconds, sent)
    return cases


def _best(found: dict[str, Case], word: str) -> str:
    return min((m for m in found if m.startswith(word)), key=lambda mode: statistics.median(found[mode].seconds))


def _figures(rate: str, found: dict[str, Case], mode: str, best_ddp: str, judged: str) -> Iterator[Figure]:
    """Limits hold for the mode that is judged; the others are shown beside it."""
    median = {name: statistics.median(case.seconds) for name, case in found.items()}
    wire = 2 * (NODES - 1) / NODES * GRADIENT * 8 / (parse_rate(rate) * efficiency())
    compute = median[CONTROL]
    ratio = wire / compute
    limits = _limits(ratio) if mode == judged else {}
    where = f"{rate}, C/(F+B) = {ratio:.2f}"
    detail = f"{mode} {spread(found[mode].seconds)}"
    yield Figure(
        name=f"DDP's default / {mode}, {where}",
        value=median[DDP] / median[mode],
        low=limits.get("default"),
        detail=f"{detail}, ddp {spread(found[DDP].seconds)}",
    )
    yield Figure(
        name=f"DDP's best / {mode}, {where}",
        value=median[best_ddp] / median[mode],
        low=limits.get("best"),
        detail=f"{best_ddp} {spread(found[best_ddp].seconds)}",
    )
    yield Figure(
        name=f"{mode} / max(C, F+B), {where}",
        value=median[mode] / max(wire, compute),
        high=limits.get("bound"),
        detail=f"C {wire:.3f} s, F+B {spread(found[CONTROL].seconds)}",
    )
    if found[mode].sent:
        least = 2 * (NODES - 1) / NODES * GRADIENT
        value = found[mode].sent / least
        yield Figure(name=f"bytes of {mode} / least, {rate}", value=value, high=MOST_BYTES, detail="interface counters")


def _limits(ratio: float) -> dict[str, float]:
    """What is promised where wire and compute relate like this; elsewhere never to be slower than DDP."""
    limits = {"default": 0.97, "best": 0.97}
    if 0.85 <= ratio <= 1.15:
        limits |= {"default": 1.35, "best": 1.10, "bound": 1.25}
    elif 0.6 <= ratio <= 0.75:
        limits |= {"default": 1.25}
    elif 0.45 <= ratio <= 0.55:
        limits |= {"bound": 1.15}
    elif 1.8 <= ratio <= 2.2:
        limits |= {"default": 1.10, "bound": 1.15}
    return limits
