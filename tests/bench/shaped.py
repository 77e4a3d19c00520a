"""A worker script on every node of a shaped network in namespaces, once, for benchmarks that time what it does."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from testbed.control.runs.run import probe
from testbed.control.substrates.base import NodePlan, Process, Substrate
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.results.receipt import Receipt
from testbed.spec.link import Link

Make = Callable[[Sequence[NodePlan], Path], Substrate]


@contextmanager
def network(
    rate: str, nodes: int = 4, make: Make = NetnsSubstrate, cpus: float | None = None, **link_keys: str
) -> Iterator[tuple[Substrate, Receipt, Path]]:
    """A network of equal nodes, what a probe found on it, and a folder that they can write to."""
    link = Link.load({"rate": rate, **link_keys}, "bench")
    node = NodePlan(name="", link=link, congestion="cubic", cpus=cpus, threads=1)
    plans = [replace(node, name=f"node{k}") for k in range(nodes)]
    with tempfile.TemporaryDirectory() as name, make(plans, Path(name) / "run") as substrate:
        folder = Path(name) / "run"
        folder.mkdir()
        Path(name).chmod(0o755)
        substrate.prepare_folder(folder)
        receipts = (probe(substrate, plans, lambda event: None) for _ in range(2))  # as a run does
        receipt = next((each for each in receipts if each.valid()), None)
        if receipt is None:
            raise SystemExit(f"{rate}: the probe got another rate twice, so nothing is measured. Is the machine busy?")
        yield substrate, receipt, folder


def work(substrate: Substrate, folder: Path, script: Path, *arguments: str, seconds: float = 300) -> None:
    """Run `script FOLDER ...` on every node, as a rank of one group, to its end."""
    worker = Path(shutil.copy(script, folder))
    size = str(len(substrate.nodes))
    common = {"WORLD_SIZE": size, "MASTER_ADDR": substrate.nodes[0].address, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank, node in enumerate(substrate.nodes):
        argv = [substrate.python, str(worker), str(folder), *arguments]
        own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": node.interface}
        processes.append(substrate.start(rank, argv, common | own, folder / f"{rank}.log"))
    for rank, process in enumerate(processes):
        finish(process, folder / f"{rank}.log", seconds)


def finish(process: Process, log: Path, seconds: float) -> None:
    """Wait for its end; what it logged when that was a failure."""
    if process.wait(seconds) != 0:
        raise SystemExit(log.read_text())
