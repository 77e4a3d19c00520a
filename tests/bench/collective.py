"""The collective alone: 36.9 MB, four shaped nodes, cubic, against the receipt of the same network."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from testbed.control.substrates.base import Substrate
from testbed.results.receipt import Receipt
from tests.bench import openmpi
from tests.bench.figures import Figure, spread
from tests.bench.shaped import Make, network, work

NODES = 4
ELEMENTS = 9_231_114  # float32, VGG-11's gradient
GRADIENT_BITS = ELEMENTS * 32
LEAST_BITS = 2 * (NODES - 1) / NODES * GRADIENT_BITS  # that a rank must send, whatever the algorithm
NAMES = "ring,allreduce,gather"
REPEATS = {"200mbit": 4, "1gbit": 8}
Times = dict[str, list[float]]


def measure() -> Iterator[Figure]:
    """In namespaces, at two rates; Open MPI on the same ones, where it is installed."""
    lacking = openmpi.missing()
    if lacking:
        print(f"  {lacking}", flush=True)
    for rate, repeats in REPEATS.items():
        rivals: list[Figure] = []
        with network(rate, NODES) as (substrate, receipt, folder):
            times = collectives(substrate, folder, repeats, ELEMENTS, NAMES)
            if not lacking:
                rivals = _open_mpi(substrate, folder, rate, times["ring"])
        yield from _figures(rate, receipt, times)
        yield from rivals
        if rate == "200mbit":
            yield two_way(rate, times, "netns")


def _open_mpi(substrate: Substrate, folder: Path, rate: str, before: list[float]) -> list[Figure]:
    """Its ranks spin, so it cannot take turns with ours: the ring goes before and after it."""
    timings = openmpi.allreduce(substrate, folder, REPEATS[rate], ELEMENTS)
    after = collectives(substrate, folder, REPEATS[rate], ELEMENTS, "ring")["ring"]
    return list(openmpi.figures(rate, before + after, LEAST_BITS / 8, timings))


def run_at(rate: str, make: Make) -> Times:
    """Time the collectives on a network of another kind."""
    with network(rate, NODES, make) as (substrate, _, folder):
        return collectives(substrate, folder, REPEATS[rate], ELEMENTS, NAMES)


def collectives(substrate: Substrate, folder: Path, repeats: int, elements: int, names: str) -> Times:
    """Seconds of each algorithm, `repeats` times, interleaved; a collective is over when its last rank is."""
    script = Path(__file__).with_name("collective_worker.py")
    work(substrate, folder, script, str(repeats), str(elements), names, seconds=600)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(substrate.nodes))]
    return {name: [max(row) for row in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}


def _figures(rate: str, receipt: Receipt, times: Times) -> Iterator[Figure]:
    ring, gloo = (statistics.median(times[name]) for name in ("ring", "allreduce"))
    goodput = statistics.median(link.goodput for link in receipt.links)
    yield Figure(
        name=f"ring/flat, rate over the links' TCP goodput, {rate}",
        value=LEAST_BITS / ring / goodput,
        low=0.95,
        detail=f"ring {spread(times['ring'])}, goodput {goodput / 1e6:.1f} Mbit/s",
    )
    detail = f"Gloo {spread(times['allreduce'])}"
    yield Figure(name=f"ring/flat / Gloo's all_reduce, {rate}", value=ring / gloo, high=1.03, detail=detail)


def two_way(rate: str, times: Times, where: str) -> Figure:
    """Four times the ring's bytes pass rank 0's link each way; shaped one way only, it would be cheaper."""
    ring, gather = (statistics.median(times[name]) for name in ("ring", "gather"))
    detail = f"gather {spread(times['gather'])}"
    return Figure(
        name=f"gather/flat / ring/flat, {rate}, {where}", value=gather / ring, low=3.6, high=4.4, detail=detail
    )
