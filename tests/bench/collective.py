"""The collective alone: 36.9 MB, four shaped nodes, cubic, against the receipt of the same network."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from testbed.control.substrates.base import Substrate
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.net.receipt import Receipt
from tests.bench.figures import Figure, spread
from tests.bench.shaped import Make, network, work

NODES = 4
ELEMENTS = 9_231_114  # float32, VGG-11's gradient
GRADIENT_BITS = ELEMENTS * 32
REPEATS = {"200mbit": 4, "1gbit": 8}
Times = dict[str, list[float]]


def measure() -> Iterator[Figure]:
    """In namespaces, at two rates."""
    for rate in REPEATS:
        receipt, times = run_at(rate, NetnsSubstrate)
        yield from _figures(rate, receipt, times)
        if rate == "200mbit":
            yield two_way(rate, times, "netns")


def run_at(rate: str, make: Make = NetnsSubstrate) -> tuple[Receipt, Times]:
    """Probe a network, then time the collectives on it; a collective is over when its last rank is."""
    with network(rate, NODES, make) as (substrate, receipt, folder):
        return receipt, collectives(substrate, folder, REPEATS[rate], ELEMENTS, "ring,allreduce,gather")


def collectives(substrate: Substrate, folder: Path, repeats: int, elements: int, names: str) -> Times:
    """Seconds of each algorithm, `repeats` times, interleaved."""
    script = Path(__file__).with_name("collective_worker.py")
    work(substrate, folder, script, str(repeats), str(elements), names, seconds=600)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(substrate.nodes))]
    return {name: [max(row) for row in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}


def _figures(rate: str, receipt: Receipt, times: Times) -> Iterator[Figure]:
    ring, gloo = (statistics.median(times[name]) for name in ("ring", "allreduce"))
    goodput = statistics.median(link.goodput for link in receipt.links)
    yield Figure(
        name=f"ring/flat, rate over the links' TCP goodput, {rate}",
        value=2 * (NODES - 1) / NODES * GRADIENT_BITS / ring / goodput,
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
