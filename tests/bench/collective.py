"""The collective alone: 36.9 MB, four shaped nodes, cubic, against the receipt of the same network."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from testbed.control.measure import probe
from testbed.control.substrates.base import NodePlan, Substrate
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.net.receipt import Receipt
from testbed.spec.link import Link
from tests.bench.figures import Figure, spread

NODES = 4
GRADIENT_BITS = 9_231_114 * 32
REPEATS = {"200mbit": 4, "1gbit": 8}
Times = dict[str, list[float]]


def measure() -> Iterator[Figure]:
    """In namespaces, at two rates."""
    for rate in REPEATS:
        receipt, times = run_at(rate, NetnsSubstrate)
        yield from _figures(rate, receipt, times)
        if rate == "200mbit":
            yield two_way(rate, times, "netns")


def run_at(rate: str, make: Callable[[Sequence[NodePlan], Path], Substrate]) -> tuple[Receipt, Times]:
    """Probe a network, then time the collectives on it; a collective is over when its last rank is."""
    link = Link.load({"rate": rate}, "bench")
    plans = [NodePlan(name=f"node{k}", link=link, congestion="cubic") for k in range(NODES)]
    with tempfile.TemporaryDirectory() as name, make(plans, Path(name) / "run") as substrate:
        folder = Path(name) / "run"
        folder.mkdir()
        Path(name).chmod(0o755)
        substrate.share(folder)
        receipt = probe(substrate, plans, lambda event: None)
        _work(substrate, folder, REPEATS[rate])
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NODES)]
    return receipt, {name: [max(row) for row in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}


def _work(substrate: Substrate, folder: Path, repeats: int) -> None:
    worker = Path(shutil.copy(Path(__file__).with_name("collective_worker.py"), folder))
    common = {"WORLD_SIZE": str(NODES), "MASTER_ADDR": substrate.nodes[0].address, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank, node in enumerate(substrate.nodes):
        argv = [substrate.python, str(worker), str(folder / f"{rank}.json"), str(repeats)]
        own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": node.interface}
        processes.append(substrate.start(rank, argv, common | own, folder / f"{rank}.log"))
    for rank, process in enumerate(processes):
        if process.wait(300) != 0:
            raise SystemExit((folder / f"{rank}.log").read_text())


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
