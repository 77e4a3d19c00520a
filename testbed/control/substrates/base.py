"""The interface between a run and the substrate it runs on.

`Substrate` is what run.py needs: nodes, processes on them, a folder, a port. `FaultTarget` is what fault injection
needs. Every substrate implements both; code takes the one it uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from testbed.net.shaping import Shaping
from testbed.spec.errors import Unavailable
from testbed.spec.link import Link

MEMORY_HEADROOM_BYTES = 64 << 20  # `limit_memory` sets the limit to the memory in use plus this


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """What is requested of one node; None means that nothing is requested."""

    name: str
    cpus: float | None = None  # quota, in cores
    threads: int | None = None  # compute threads, if they get cores of their own (machine/affinity.py)
    link: Link = field(default_factory=Link)
    congestion: str | None = None
    address: str = ""  # empty: the substrate's choice
    interface: str = ""  # name of its network interface; empty: the substrate's choice
    rack: int = 0
    uplink: Link | None = None  # of its rack, each way; None: one switch connects all nodes


@dataclass(frozen=True, kw_only=True)
class NodeHandle:
    """A node that exists: the address and the interface of its rank."""

    name: str
    address: str
    interface: str


@dataclass(frozen=True, kw_only=True)
class NodeCounts:
    """What the kernel has counted for a node so far; None where nothing of the node's own counts it."""

    sent: int | None = None  # bytes of its interface
    received: int | None = None
    unreachable: int | None = None  # packets to addresses without a route
    refused: int | None = None  # processes beyond its limit


class Process(Protocol):
    """A process on a node."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raise TimeoutError after `timeout` seconds."""
        ...

    def signal(self, signum: int) -> None:
        """Send a signal; a process that has ended is ignored."""
        ...

    def forbid_writing(self) -> None:
        """Make every further write of the process fail, as on a full disk."""
        ...


class FaultTarget(Protocol):
    """Nodes that can be made to fail. Each fault affects all processes of the node, or its link."""

    one_clock: bool  # True if the nodes have the controller's monotonic clock

    def kill(self, node: int) -> None:
        """Send SIGKILL to every process of the node."""
        ...

    def pause(self, node: int) -> None:
        """Stop every process of the node until `resume`."""
        ...

    def resume(self, node: int) -> None:
        """Continue what `pause` stopped."""
        ...

    def cut(self, node: int) -> None:
        """Set the node's link down until `reconnect`."""
        ...

    def reconnect(self, node: int) -> None:
        """Set the node's link up again."""
        ...

    def set_rate(self, node: int, rate: int | None) -> None:
        """Change the rate of the node's link, both ways; None restores the planned rate."""
        ...

    def set_cpus(self, node: int, cpus: float | None) -> None:
        """Change the node's CPU quota; None restores the planned quota."""
        ...

    def limit_memory(self, node: int) -> None:
        """Limit the node's memory to what it uses now plus MEMORY_HEADROOM_BYTES."""
        ...

    def unlimit_memory(self, node: int) -> None:
        """Restore the memory limit that the node had before `limit_memory`."""
        ...


class Substrate(FaultTarget, Protocol):
    """A context manager. Entering creates the nodes; leaving ends all processes and removes what was created."""

    name: str
    shaped: bool  # True if links can be shaped
    not_shaped: str  # why runs are left out of tables although nothing failed (SHAPING); empty: they are not
    python: str  # the Python command of a node, with our package on its path

    @property
    def late_quotas(self) -> bool:
        """True if nodes have CPU quotas that can be applied and lifted while processes run."""
        ...

    @property
    def nodes(self) -> Sequence[NodeHandle]:
        """The nodes in rank order."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was requested and could not be applied, one sentence each."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a process with `env` in its environment and its output appended to `log`; `quota`: limit its CPU."""
        ...

    def port(self, wanted: int = 0) -> int:
        """Return a port of node 0 to listen on: `wanted` if it is free, any free one for 0."""
        ...

    def shaping(self, node: int) -> Shaping:
        """The node's link as it is requested now, and as the kernel has it; Shaping() where nothing is shaped."""
        ...

    def uplinks(self) -> Mapping[int, Shaping]:
        """The uplink of each rack as it is requested, and as the kernel has it: devices up0 and down0 of rack 0.

        Empty where nothing is requested between racks.
        """
        ...

    def counts(self, node: int) -> NodeCounts:
        """What the kernel counts for the node, read from outside of its processes; NodeCounts() where it does not."""
        ...

    def limit_cpus(self, limited: bool) -> None:
        """Apply the planned CPU quotas of all nodes, or lift them. No-op where they last as long as the nodes."""
        ...

    def prepare_folder(self, folder: Path) -> None:
        """Make a run folder that the controller has just created usable for the ranks."""
        ...

    def stop(self) -> None:
        """End every process that was started: SIGTERM first, then SIGKILL. The nodes stay."""
        ...


class UnchangedNodes:
    """What all nodes have in common whose network, CPU, memory and disk are never changed. A base of substrates."""

    name: str
    unchanged: str  # why a fault that would change them is refused, and where it is not
    shaped = False
    not_shaped = ""
    late_quotas = False

    def cut(self, node: int) -> None:
        """Raise Unavailable, as each of these faults does."""
        raise Unavailable(self.unchanged)

    def reconnect(self, node: int) -> None:
        self.cut(node)

    def set_rate(self, node: int, rate: int | None) -> None:
        self.cut(node)

    def set_cpus(self, node: int, cpus: float | None) -> None:
        self.cut(node)

    def limit_memory(self, node: int) -> None:
        self.cut(node)

    def unlimit_memory(self, node: int) -> None:
        self.cut(node)

    def shaping(self, node: int) -> Shaping:
        """Nothing is shaped."""
        return Shaping()

    def uplinks(self) -> Mapping[int, Shaping]:
        """None: one network connects all nodes."""
        return {}

    def counts(self, node: int) -> NodeCounts:
        """The interface of a node has other traffic too."""
        return NodeCounts()

    def limit_cpus(self, limited: bool) -> None:
        """No-op: no quota is changed while processes run."""


def rank_argv(python: str, script: bool, folder: str) -> list[str]:
    """The command that starts a rank, or the launcher of a user's script, for the run in this folder.

    -P: no module is imported from the present folder, which may be a script's, by a launcher that may be root.
    """
    return [python, "-P", "-m", "testbed.attach.launch" if script else "testbed.rank", "--folder", folder]
