"""A substrate that starts nothing and records every call: for tests of the code that uses substrates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from testbed.control.substrates.base import NodeCounts, NodeHandle, Process
from testbed.net.shaping import Shaping


@dataclass
class FakeProcess:
    """Runs until `code` is set; signals are recorded and change nothing."""

    pid: int
    code: int | None = None
    signals: list[int] = field(default_factory=list)

    def poll(self) -> int | None:
        """Return the scripted exit code."""
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """Return the scripted exit code; raise TimeoutError at once if there is none."""
        if self.code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self.code

    def signal(self, signum: int) -> None:
        """Record the signal."""
        self.signals.append(signum)

    def forbid_writing(self) -> None:
        """Record it as signal 0."""
        self.signals.append(0)


Script = Callable[[int, Sequence[str], Path], int | None]  # (node, argv, log) -> exit code; None: it keeps running


class FakeSubstrate:
    """`calls` holds all calls in order; `script` decides what a started process does and how it ends."""

    name = "fake"
    shaped = True
    not_shaped = ""
    one_clock = True
    late_quotas = False
    python = "python3"
    notes: Sequence[str] = ()

    def __init__(
        self,
        n: int,
        script: Script = lambda node, argv, log: 0,
        shaping: Callable[[int], Shaping] = lambda node: Shaping(),
    ) -> None:
        self._script = script
        self.shaping = shaping  # not recorded
        self.calls: list[tuple[object, ...]] = []
        self.limits: list[bool] = []  # CPU quotas, as they were applied and lifted
        self.processes: list[FakeProcess] = []
        self.nodes: Sequence[NodeHandle] = tuple(
            NodeHandle(name=f"node{k}", address=f"10.77.0.{10 + k}", interface="eth0") for k in range(n)
        )

    def __enter__(self) -> Self:
        self.calls.append(("enter",))
        return self

    def __exit__(self, *exception: object) -> None:
        self.calls.append(("exit",))

    def uplinks(self) -> Mapping[int, Shaping]:
        """None: one network connects all nodes."""
        return {}

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Run the script at once; its result is the process's exit code."""
        self.calls.append(("start", node, tuple(argv), dict(env), quota))
        process = FakeProcess(pid=1000 + len(self.processes), code=self._script(node, argv, log))
        self.processes.append(process)
        return process

    def port(self, wanted: int = 0) -> int:
        """Return `wanted`; this call is not recorded."""
        return wanted or 1

    def counts(self, node: int) -> NodeCounts:
        return NodeCounts()

    def limit_cpus(self, limited: bool) -> None:
        self.limits.append(limited)

    def prepare_folder(self, folder: Path) -> None:
        self.calls.append(("prepare_folder", folder))

    def stop(self) -> None:
        self.calls.append(("stop",))

    def kill(self, node: int) -> None:
        self.calls.append(("kill", node))

    def pause(self, node: int) -> None:
        self.calls.append(("pause", node))

    def resume(self, node: int) -> None:
        self.calls.append(("resume", node))

    def cut(self, node: int) -> None:
        self.calls.append(("cut", node))

    def reconnect(self, node: int) -> None:
        self.calls.append(("reconnect", node))

    def set_rate(self, node: int, rate: int | None) -> None:
        self.calls.append(("set_rate", node, rate))

    def set_cpus(self, node: int, cpus: float | None) -> None:
        self.calls.append(("set_cpus", node, cpus))

    def limit_memory(self, node: int) -> None:
        self.calls.append(("limit_memory", node))

    def unlimit_memory(self, node: int) -> None:
        self.calls.append(("unlimit_memory", node))
