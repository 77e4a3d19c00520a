"""Open MPI's Allreduce on a network of namespaces, if its packages are installed (requirements-bench.txt).

mpirun starts a daemon on each node by ssh. Here it calls a script instead, which enters the node's namespace and gives
it a host name, because the daemons identify each other by host names. Ranks may use only TCP over the shaped link; the
interface counters must show the bytes.
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from testbed.control.machine import ownership
from testbed.control.substrates.base import NodeHandle, Substrate
from tests.bench.figures import Figure, spread
from tests.bench.shaped_network import wait_for

PACKAGES = ("openmpi", "mpi4py")
TUNED = ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm"]
# The algorithm that it chooses exchanges data in both directions within pairs, and is much faster on two connections.
CHOICES: dict[str, list[str]] = {
    "as it chooses": [],
    "as it chooses, two connections": ["--mca", "btl_tcp_links", "2"],
    "its ring": [*TUNED, "ring"],
}
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each Allreduce, and the bytes that a node sent for one of them (mean over nodes)."""

    seconds: list[float]
    sent: float
    library: str


def missing(packages: Sequence[str] = PACKAGES) -> str | None:
    """Return which packages are not installed and how to install them, or None."""
    lacking = [package for package in packages if not _installed(package)]
    way_out = "pip install -r requirements-bench.txt"
    return f"Open MPI is not measured, {' and '.join(lacking)} not installed: {way_out}" if lacking else None


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def allreduce(substrate: Substrate, folder: Path, repeats: int, elements: int) -> dict[str, Timing]:
    """Time its Allreduce with each algorithm, one mpirun after the other: a process cannot change its algorithm."""
    agent = folder / "agent.sh"
    agent.write_text(agent_script(ownership.owned_name("")))
    agent.chmod(0o755)
    worker = str(shutil.copy(Path(__file__).with_name("openmpi_worker.py"), folder))
    found, log = {}, folder / "openmpi.log"
    for choice, options in CHOICES.items():
        file, interface = folder / "openmpi.json", substrate.nodes[0].interface
        rank = [substrate.python, worker, str(file), str(repeats), str(elements), interface, str(len(substrate.nodes))]
        command = [*mpirun(agent, substrate.nodes), *options, *rank]
        # Files that killed daemons leave behind are removed together with the folder.
        env = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        argv = [str(agent), substrate.nodes[0].name, shlex.join(command)]
        process = substrate.start(0, argv, env, log, quota=False)  # with it, all ranks would share node 0's core
        wait_for(process, log, TIMEOUT_S)
        found[choice] = Timing(**json.loads(file.read_text()))
    return found


def agent_script(prefix: str) -> str:
    """Return the script that mpirun calls instead of ssh, with a node's name and a command line."""
    inside = """'hostname "$0" && exec sh -c "$1"' "$node" "$*" """.strip()
    return f'#!/bin/sh\nnode=$1; shift\nexec ip netns exec {shlex.quote(prefix)}"$node" unshare --uts sh -c {inside}\n'


def mpirun(agent: Path, nodes: Sequence[NodeHandle]) -> list[str]:
    """Return the command for one rank per node. Waiting ranks yield, because the nodes share this machine's cores."""
    program = next(file for file in distribution("openmpi").files or () if file.name == "mpirun")
    start = [str(program.locate()), "--allow-run-as-root", "--bind-to", "none"]
    hosts = ["--np", str(len(nodes)), "--host", ",".join(node.name for node in nodes)]
    daemons = {"prte_ssh_agent": str(agent), "prte_if_include": nodes[0].interface}
    ranks = {"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": nodes[0].interface, "mpi_yield_when_idle": "1"}
    settings = [["--prtemca", *pair] for pair in daemons.items()] + [["--mca", *pair] for pair in ranks.items()]
    return [*start, *hosts, *(word for setting in settings for word in setting)]


def figures(rate: str, ring: list[float], least: float, timings: dict[str, Timing]) -> Iterator[Figure]:
    """Compare each algorithm with the seconds of our ring; `least` is the bytes that a node sends in any all-reduce."""
    for choice, timing in timings.items():
        ratio = timing.sent / least
        if ratio < 0.99:
            raise SystemExit(
                f"Open MPI sent {ratio:.3f} of the least bytes over the shaped links, at least 0.99 are expected:"
                " the rest took another path. Check btl and btl_tcp_if_include."
            )
        detail = f"{timing.library} {spread(timing.seconds)}, bytes / least {ratio:.3f}; ring {spread(ring)}"
        value = statistics.median(timing.seconds) / statistics.median(ring)
        yield Figure(name=f"Open MPI's Allreduce, {choice} / ring/flat, {rate}", value=value, detail=detail)
