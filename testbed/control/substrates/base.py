"""The narrow seam between a run and the place it happens in: what every substrate can do, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from testbed.spec.link import Link

MEMORY_LEFT = 64 << 20  # bytes until a rank that grows meets its limit
NODE_PORT = 29_500  # where ranks meet on a node that has its ports to itself


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """What is asked of one node; None leaves a value to the machine."""

    name: str
    cpus: float | None = None  # a quota, in cores
    threads: int | None = None  # that compute, on cores of the node's own (cores.py)
    link: Link = field(default_factory=Link)
    congestion: str | None = None


@dataclass(frozen=True, kw_only=True)
class NodeHandle:
    """A node that exists: where a rank listens and through which interface it talks."""

    name: str
    address: str
    interface: str


class Process(Protocol):
    """A process on a node; `wait` raises TimeoutError when `timeout` seconds have passed."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutError."""
        ...

    def signal(self, signum: int) -> None:
        """Send a signal; a process that has ended is left alone."""
        ...

    def forbid_writing(self) -> None:
        """From now on no file of it can grow, as on a full disk."""
        ...


class Substrate(Protocol):
    """Enter it and the nodes exist; leave it and exactly what was created is gone, with all that ran there."""

    name: str
    shaped: bool  # can it apply a Link?
    one_clock: bool  # is the monotonic clock of its nodes ours?
    python: str  # what a node calls Python; our package is on its path

    @property
    def nodes(self) -> Sequence[NodeHandle]:
        """The nodes in rank order."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was asked and could not be applied, one sentence each."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

    def exec(self, node: int, argv: Sequence[str], timeout: float) -> str:
        """Run to the end, outside the CPU quota; stdout, or TestbedError with argv, code and stderr."""
        ...

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a long-running process with `env` added to ours; its stdout and stderr are appended to `log`."""
        ...

    def port(self, wanted: int = 0) -> int:
        """A port of node 0 to listen on: `wanted` if it is free, any free one for 0."""
        ...

    def share(self, folder: Path) -> None:
        """Let ranks write into a folder that the controller has just made."""
        ...

    def stop(self) -> None:
        """End every process that was started, first politely; the nodes stay."""
        ...

    def put(self, node: int, local: Path, remote: Path) -> None:
        """Copy a file to a node."""
        ...

    def get(self, node: int, remote: Path, local: Path) -> None:
        """Copy a file from a node."""
        ...

    # Faults: each touches all processes of the node, or its link.
    def kill(self, node: int) -> None: ...
    def pause(self, node: int) -> None: ...
    def resume(self, node: int) -> None: ...
    def cut(self, node: int) -> None: ...
    def join(self, node: int) -> None: ...

    def set_rate(self, node: int, rate: int | None) -> None:
        """Another rate of the link, each way; None: the one that was planned."""
        ...

    def set_cpus(self, node: int, cpus: float | None) -> None:
        """Another share of the processor; None: the one that was planned."""
        ...

    def limit_memory(self, node: int) -> None:
        """Let the rank have MEMORY_LEFT bytes more than now."""
        ...

    def unlimit_memory(self, node: int) -> None:
        """As much memory as the node had before."""
        ...
