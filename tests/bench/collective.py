"""The collective alone: 36.9 MB, four shaped namespaces, cubic, against the receipt of the same run."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.figures import Figure, spread

ELEMENTS = 9_231_114  # float32, VGG-11's gradient
NODES = 4
REPEATS = {"200mbit": 4, "1gbit": 8}


def measure() -> Iterator[Figure]:
    for rate in REPEATS:
        yield from _at(rate)


def _at(rate: str) -> Iterator[Figure]:
    from testbed.control.measure import probe
    from testbed.control.substrates.base import NodePlan
    from testbed.control.substrates.netns import NetnsSubstrate
    from testbed.spec.link import Link

    link = Link.load({"rate": rate}, "bench")
    plans = [NodePlan(name=f"node{k}", link=link, congestion="cubic") for k in range(NODES)]
    with tempfile.TemporaryDirectory() as folder, NetnsSubstrate(plans) as substrate:
        receipt = probe(substrate, plans, lambda text: None)
        environment = {"WORLD_SIZE": str(NODES), "MASTER_ADDR": substrate.nodes[0].address, "OMP_NUM_THREADS": "1"}
        processes = []
        for rank in range(NODES):
            out = Path(folder) / f"{rank}.json"
            argv = [sys.executable, "-m", "tests.bench.collective", str(out), str(REPEATS[rate])]
            own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"}
            processes.append(substrate.start(rank, argv, environment | own, Path(folder) / f"{rank}.log"))
        for rank, process in enumerate(processes):
            if process.wait(300) != 0:
                raise SystemExit((Path(folder) / f"{rank}.log").read_text())
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NODES)]
    # A collective is over when its last rank is.
    times = {name: [max(row) for row in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}
    yield from _figures(rate, times, statistics.median(link.goodput for link in receipt.links))


def _figures(rate: str, times: dict[str, list[float]], goodput: float) -> Iterator[Figure]:
    ring, gloo, gather = (statistics.median(times[name]) for name in ("ring", "allreduce", "gather"))
    moved = 2 * (NODES - 1) / NODES * ELEMENTS * 4 * 8  # bits each rank must send
    yield Figure(
        name=f"ring/flat, rate over the links' TCP goodput, {rate}",
        value=moved / ring / goodput,
        low=0.95,
        detail=f"ring {spread(times['ring'])}, goodput {goodput / 1e6:.1f} Mbit/s",
    )
    yield Figure(
        name=f"ring/flat / Gloo's all_reduce, {rate}",
        value=ring / gloo,
        high=1.03,
        detail=f"Gloo {spread(times['allreduce'])}",
    )
    if rate == "200mbit":
        yield Figure(
            name=f"gather/flat / ring/flat, {rate}",
            value=gather / ring,
            low=3.6,
            high=4.4,
            detail=f"gather {spread(times['gather'])}",
        )


def _work(out: Path, repeats: int) -> None:
    """One rank: time each algorithm in turn, so that a slow moment hits all of them."""
    import os

    import torch
    import torch.distributed as dist

    from testbed.rank.group import join, leave
    from testbed.rank.sync.algorithms import MEANS

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    group = join(rank, int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"], 29500, 120)
    names = [name for name in ("ring", "allreduce", "gather") if name in MEANS]
    times: dict[str, list[float]] = {name: [] for name in names}
    buffer = torch.randn(ELEMENTS)
    for repeat in range(repeats + 1):
        for name in names:
            dist.barrier()
            begun = time.monotonic()
            MEANS[name](buffer, group)
            if repeat:
                times[name].append(time.monotonic() - begun)
    out.write_text(json.dumps(times))
    leave(group)


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
