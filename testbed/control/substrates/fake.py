"""A substrate that does nothing and remembers everything: for tests of what stands above the seam."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from testbed.control.substrates.base import NodeHandle, Process


@dataclass
class FakeProcess:
    """Runs until `code` is set, or a test's script sets it; signals are remembered and change nothing."""

    pid: int
    code: int | None = None
    signals: list[int] = field(default_factory=list)

    def poll(self) -> int | None:
        """The scripted exit code."""
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """The scripted exit code; a process without one would never end."""
        if self.code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self.code

    def signal(self, signum: int) -> None:
        """Remember it."""
        self.signals.append(signum)

    def forbid_writing(self) -> None:
        """Remember it as a signal that no process gets."""
        self.signals.append(0)


Script = Callable[[int, Sequence[str], Path], int | None]  # (node, argv, log) -> exit code; None: keeps running


class FakeSubstrate:
    """`calls` is all that was asked of it, in order; `script` plays the started processes."""

    name = "fake"
    shaped = True
    one_clock = True
    python = "python3"
    notes: Sequence[str] = ()

    def __init__(self, n: int, script: Script = lambda node, argv, log: 0, output: str = "") -> None:
        self._script = script
        self._output = output
        self.calls: list[tuple[object, ...]] = []
        self.processes: list[FakeProcess] = []
        self.nodes: Sequence[NodeHandle] = tuple(
            NodeHandle(name=f"node{k}", address=f"10.77.0.{10 + k}", interface="eth0") for k in range(n)
        )

    def __enter__(self) -> Self:
        self.calls.append(("enter",))
        return self

    def __exit__(self, *exception: object) -> None:
        self.calls.append(("exit",))

    def exec(self, node: int, argv: Sequence[str], timeout: float) -> str:
        """Give back the scripted output."""
        self.calls.append(("exec", node, tuple(argv)))
        return self._output

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Let the script play the process to its end at once."""
        self.calls.append(("start", node, tuple(argv), dict(env), quota))
        process = FakeProcess(pid=1000 + len(self.processes), code=self._script(node, argv, log))
        self.processes.append(process)
        return process

    def port(self, wanted: int = 0) -> int:
        """Whatever is wanted."""
        return wanted or 1

    def share(self, folder: Path) -> None:
        """Remember it."""
        self.calls.append(("share", folder))

    def stop(self) -> None:
        """Remember it."""
        self.calls.append(("stop",))

    def put(self, node: int, local: Path, remote: Path) -> None:
        """Remember it."""
        self.calls.append(("put", node, local, remote))

    def get(self, node: int, remote: Path, local: Path) -> None:
        """Remember it."""
        self.calls.append(("get", node, remote, local))

    def kill(self, node: int) -> None:
        """Remember it."""
        self.calls.append(("kill", node))

    def pause(self, node: int) -> None:
        """Remember it."""
        self.calls.append(("pause", node))

    def resume(self, node: int) -> None:
        """Remember it."""
        self.calls.append(("resume", node))

    def cut(self, node: int) -> None:
        """Remember it."""
        self.calls.append(("cut", node))

    def join(self, node: int) -> None:
        """Remember it."""
        self.calls.append(("join", node))

    def set_rate(self, node: int, rate: int | None) -> None:
        """Remember it."""
        self.calls.append(("set_rate", node, rate))

    def set_cpus(self, node: int, cpus: float | None) -> None:
        """Remember it."""
        self.calls.append(("set_cpus", node, cpus))

    def limit_memory(self, node: int) -> None:
        """Remember it."""
        self.calls.append(("limit_memory", node))

    def unlimit_memory(self, node: int) -> None:
        """Remember it."""
        self.calls.append(("unlimit_memory", node))
