"""Collectives alone, without training: their rate against the network's, and how they scale with the number of ranks.

collective    36.9 MB (VGG-11's gradient) on four shaped nodes: `ring/flat` against the links' TCP goodput, against
              Gloo's all_reduce and against Open MPI's Allreduce on the same network
growth        8 MB at 100 Mbit on 2 to 16 nodes, against theory, and a plot of it
uplinks       8 MB on four and six nodes in racks of two, whose uplinks are at 4:1: `ring` and `hierarchical` against
              theory, in both orders of the ranks
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from testbed.control.substrates.base import Substrate
from testbed.net.tcp import efficiency
from testbed.results import theory as least
from testbed.results.receipt import Receipt
from testbed.spec.fabric import Racks
from testbed.spec.mode import SyncMode
from tests.bench import openmpi
from tests.bench.figures import Figure, spread
from tests.bench.shaped_network import NODES, SubstrateFactory, run_worker, shaped_network
from tests.support.provenance import ROOT

ELEMENTS = 9_231_114  # float32, VGG-11's gradient
GRADIENT_BITS = ELEMENTS * 32
LEAST_BITS = 2 * (NODES - 1) / NODES * GRADIENT_BITS  # that a rank must send in any all-reduce
ALGORITHMS = "ring,allreduce,gather"
REPEATS = {"200mbit": 4, "1gbit": 8}

GROWTH_NODES = (2, 4, 8, 16)
GROWTH_ELEMENTS = 2_000_000  # float32: 8 MB
GROWTH_RATE, GROWTH_BITS_PER_S, GROWTH_REPEATS = "100mbit", 100e6, 3
# TCP passes 16 KiB to the interface at once, and a token bucket of 100 Mbit lets them through whole. Split into frames,
# the traffic of 16 nodes needs more than two cores: `ring/flat` then takes 1.8 times as long as the network needs, and
# Gloo's all_reduce is no faster.
GROWTH_SEGMENT = "16KiB"
GROWTH_PLOT = ROOT / "results" / "growth.svg"

UPLINK, SLOWER = "50mbit", 2.0  # than a link; the two nodes of a rack could send four times as much
ORDERS: tuple[Racks, ...] = (  # a ring leaves a rack once a round, or at every hop
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0, 1), (2, 3), (4, 5)),
    ((0, 3), (1, 4), (2, 5)),
)

Times = dict[str, list[float]]  # algorithm: seconds of each repeat


def time_collectives(
    substrate: Substrate, folder: Path, repeats: int, elements: int, names: str, racks: Racks = ()
) -> Times:
    """Time the algorithms in turn. The time of a collective is that of its slowest rank."""
    run_worker(substrate, folder, "collectives", str(repeats), str(elements), names, json.dumps(racks), timeout_s=600)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(substrate.nodes))]
    return {name: [max(row) for row in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}


# --- collective: four nodes at two rates -----------------------------------------------------------------------------


def collective() -> Iterator[Figure]:
    """In namespaces, at two rates, with Open MPI on the same networks if it is installed."""
    missing = openmpi.missing()
    if missing:
        print(f"  {missing}", flush=True)
    for rate, repeats in REPEATS.items():
        open_mpi: list[Figure] = []
        with shaped_network(rate) as (substrate, receipt, folder):
            times = time_collectives(substrate, folder, repeats, ELEMENTS, ALGORITHMS)
            if not missing:
                open_mpi = _open_mpi(substrate, folder, rate, times["ring"])
        yield from _collective_figures(rate, receipt, times)
        yield from open_mpi
        if rate == "200mbit":
            yield two_way(rate, times, "netns")


def _open_mpi(substrate: Substrate, folder: Path, rate: str, before: list[float]) -> list[Figure]:
    """Open MPI's ranks poll while they wait, so the ring is timed before and after them, not in turn with them."""
    timings = openmpi.allreduce(substrate, folder, REPEATS[rate], ELEMENTS)
    after = time_collectives(substrate, folder, REPEATS[rate], ELEMENTS, "ring")["ring"]
    return list(openmpi.figures(rate, before + after, LEAST_BITS / 8, timings))


def collectives_at(rate: str, make: SubstrateFactory) -> Times:
    """Time the collectives on another substrate."""
    with shaped_network(rate, make=make) as (substrate, _, folder):
        return time_collectives(substrate, folder, REPEATS[rate], ELEMENTS, ALGORITHMS)


def _collective_figures(rate: str, receipt: Receipt, times: Times) -> Iterator[Figure]:
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


def two_way(rate: str, times: Times, substrate: str) -> Figure:
    """In `gather`, four times the ring's bytes pass rank 0's link in each direction. With one direction unshaped, the
    ratio is lower."""
    ring, gather = (statistics.median(times[name]) for name in ("ring", "gather"))
    return Figure(
        name=f"gather/flat / ring/flat, {rate}, {substrate}",
        value=gather / ring,
        low=3.6,
        high=4.4,
        detail=f"gather {spread(times['gather'])}",
    )


# --- growth: 2 to 16 nodes -------------------------------------------------------------------------------------------


def growth() -> Iterator[Figure]:
    once = GROWTH_ELEMENTS * 32 / (GROWTH_BITS_PER_S * efficiency())  # seconds to send the buffer over one link
    theory = {n: {"ring": 2 * (n - 1) / n * once, "gather": 2 * (n - 1) * once} for n in GROWTH_NODES}
    measured: dict[int, Times] = {}
    for n in GROWTH_NODES:
        with shaped_network(GROWTH_RATE, n, segment=GROWTH_SEGMENT) as (substrate, _, folder):
            measured[n] = time_collectives(substrate, folder, GROWTH_REPEATS, GROWTH_ELEMENTS, "ring,gather")
    for n in GROWTH_NODES:
        for name in ("ring", "gather"):
            yield Figure(
                name=f"{name}/flat, 8 MB, {GROWTH_RATE}, N = {n}: time / theory",
                value=statistics.median(measured[n][name]) / theory[n][name],
                low=0.85,
                high=1.15,
                detail=f"{spread(measured[n][name])}, theory {theory[n][name]:.3f} s",
            )
    _plot_growth(measured, theory)


def _plot_growth(measured: dict[int, Times], theory: dict[int, dict[str, float]]) -> None:
    import matplotlib.pyplot as plt

    sizes = GROWTH_NODES
    figure, axes = plt.subplots(figsize=(6, 4))
    for name, colour in (("gather", "#d55e00"), ("ring", "#0072b2")):
        axes.plot(sizes, [theory[n][name] for n in sizes], "--", color=colour, label=f"{name}, theory")
        axes.plot(sizes, [statistics.median(measured[n][name]) for n in sizes], "o", color=colour, label=name)
    title = f"8 MB at {GROWTH_RATE}: the ring levels off, gather grows"
    axes.set(xlabel="ranks", ylabel="seconds", xticks=sizes, title=title)
    axes.legend()
    figure.savefig(GROWTH_PLOT, bbox_inches="tight")
    print(f"  plot: {GROWTH_PLOT}", flush=True)


# --- uplinks: racks of two -------------------------------------------------------------------------------------------


def uplinks() -> Iterator[Figure]:
    once = GROWTH_ELEMENTS * 32 / (GROWTH_BITS_PER_S * efficiency())  # seconds to send the buffer over one link
    for racks in ORDERS:
        nodes, keys = sum(map(len, racks)), {"uplink": UPLINK, "segment": GROWTH_SEGMENT}
        with shaped_network(GROWTH_RATE, nodes, racks=racks, **keys) as (substrate, _, folder):
            names = "ring,hierarchical"
            times = time_collectives(substrate, folder, GROWTH_REPEATS, GROWTH_ELEMENTS, names, racks)
        for name, measured in times.items():
            known = least.cost(SyncMode.parse(name), nodes, least.Uplinks(racks, SLOWER))
            assert known is not None
            yield Figure(
                name=f"{name}, 8 MB, {GROWTH_RATE}, uplinks of {UPLINK}, racks {json.dumps(racks)}: time / theory",
                value=statistics.median(measured) / (known.load * once),
                low=0.9,
                high=1.1,
                detail=f"{spread(measured)}, theory {known.load * once:.3f} s",
            )
