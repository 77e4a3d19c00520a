"""Plain processes on this machine's loopback: runs anywhere, shapes nothing, and says so.

Also what the namespaces' substrate shares with it: starting, waiting for and stopping processes of this machine.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import testbed
from testbed.control.machine import affinity, ownership
from testbed.control.substrates.base import NodeHandle, NodePlan, Process
from testbed.spec.errors import TestbedError, Unavailable, require_extra
from testbed.spec.units import format_rate

GRACE = 5.0  # seconds between SIGTERM and SIGKILL


class LocalProcess:
    """A child of this process, leader of its own group so that Ctrl-C at the terminal reaches only the controller."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._popen.poll()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutError."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s") from None

    def signal(self, signum: int) -> None:
        """Send a signal; a process that has ended is left alone."""
        self._popen.send_signal(signum)

    def forbid_writing(self) -> None:
        """No file may grow beyond one byte: a write fails as it does on a full disk."""
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (1, 1))

    def group(self) -> list[int]:
        """Our live processes that share its group: itself and what it forked."""
        return [
            pid for pid, who in ownership.marked().items() if who == ownership.current() and _group_of(pid) == self.pid
        ]


def _group_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def run(argv: Sequence[str], timeout: float) -> str:
    """Run to the end and return stdout; TestbedError with the command, its code and stderr."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    child = subprocess.Popen(argv, stdin=null, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)  # not reaped yet, so the number is still ours
        child.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TestbedError(f"{shlex.join(argv)}: not finished after {timeout:g} s") from None
        raise
    if child.returncode != 0:
        raise TestbedError(f"{shlex.join(argv)}: exit code {child.returncode}: {(err or out).strip()}")
    return out


def dies_with_parent() -> list[str]:
    """Prefix: SIGTERM when the *thread* that started it ends, so start ranks from the controller's main thread."""
    return ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []


def spawn(argv: Sequence[str], env: Mapping[str, str], log: Path) -> LocalProcess:
    """Start a marked process in a group of its own; stdout and stderr are appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    whole = {**os.environ, "PYTHONPATH": _package_path(), **env, ownership.VARIABLE: ownership.current()}
    with log.open("ab") as output:
        popen = subprocess.Popen(
            argv, env=whole, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return LocalProcess(popen)


def _package_path() -> str:
    """So that a child finds this very package, installed or not."""
    root = str(Path(testbed.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return root + (os.pathsep + inherited if inherited else "")


def stop(processes: Iterable[LocalProcess], grace: float = GRACE) -> None:
    """SIGTERM, `grace` seconds to write things down, then SIGKILL for each whole group; all are reaped."""
    running = list(processes)
    for process in running:
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGCONT)  # a paused one could not react
    deadline = time.monotonic() + grace
    for process in running:
        with contextlib.suppress(TimeoutError):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in running:
        ownership.kill_until_gone(process.group)
        process.wait(grace)


def copy(source: Path, target: Path) -> None:
    """Copy a file where all nodes share our file system."""
    if source.resolve() != target.resolve():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


class SharedFiles:
    """put and get where every node sees this machine's files."""

    def put(self, node: int, local: Path, remote: Path) -> None:
        """Copy within what is shared."""
        copy(local, remote)

    def get(self, node: int, remote: Path, local: Path) -> None:
        """Copy within what is shared."""
        copy(remote, local)


def check(plans: Sequence[NodePlan]) -> None:
    """Refuse where this Python cannot run a rank."""
    require_extra("substrate process", "rank", "torch", "torchvision")


class ProcessSubstrate(SharedFiles):
    """Every node is this machine; links and CPU shares stay as they are, and `notes` lists what that leaves out."""

    name = "process"
    shaped = False
    one_clock = True
    python = sys.executable

    def __init__(self, plans: Sequence[NodePlan], folder: Path | None = None) -> None:
        self._plans = tuple(plans)
        self._cores = affinity.share_out(plans, affinity.here())
        self._started: list[tuple[int, LocalProcess]] = []
        self.nodes: Sequence[NodeHandle] = tuple(
            NodeHandle(name=plan.name, address="127.0.0.1", interface="lo") for plan in plans
        )

    @property
    def notes(self) -> Sequence[str]:
        """What was asked and is not applied, each sentence once."""
        return tuple(dict.fromkeys(note for plan in self._plans for note in _not_applied(plan)))

    def __enter__(self) -> Self:
        check(self._plans)
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def exec(self, node: int, argv: Sequence[str], timeout: float) -> str:
        """Run to the end on this machine."""
        return run(argv, timeout)

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a process on this machine; there is no quota to put it under."""
        with affinity.limited_to(self._cores[node] if quota else None):
            process = spawn([*dies_with_parent(), *argv], env, log)
        self._started.append((node, process))
        return process

    def port(self, wanted: int = 0) -> int:
        """All nodes share one loopback, so it may be taken."""
        address = self.nodes[0].address
        try:
            with socket.create_server((address, wanted)) as server:
                return int(server.getsockname()[1])
        except OSError as error:
            way_out = "Use another, or --set port=0 for any free one"
            raise Unavailable(f"port {wanted} on {address}: {error.strerror}. {way_out}") from None

    def share(self, folder: Path) -> None:
        """Ranks are who we are."""

    def stop(self) -> None:
        """End every process that was started."""
        stop(process for _, process in self._started)
        self._started.clear()

    def kill(self, node: int) -> None:
        """SIGKILL everything of the node."""
        self._signal(node, signal.SIGKILL)

    def pause(self, node: int) -> None:
        """Freeze everything of the node."""
        self._signal(node, signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Let it go on."""
        self._signal(node, signal.SIGCONT)

    def cut(self, node: int) -> None:
        """Not here: loopback has no link per node."""
        raise Unavailable("cutting a link: plain processes share the loopback. Use --on netns (as root)")

    def join(self, node: int) -> None:
        """Not here: loopback has no link per node."""
        self.cut(node)

    def set_rate(self, node: int, rate: int | None) -> None:
        """Not here: loopback has no link per node."""
        self.cut(node)

    def set_cpus(self, node: int, cpus: float | None) -> None:
        """Not here: nobody limits a plain process."""
        raise Unavailable("a share of the processor: plain processes have none. Use --on netns (as root)")

    def limit_memory(self, node: int) -> None:
        """Not here: nobody limits a plain process."""
        raise Unavailable("a memory limit: plain processes have none. Use --on netns (as root)")

    def unlimit_memory(self, node: int) -> None:
        """Not here: nobody limits a plain process."""
        self.limit_memory(node)

    def _signal(self, node: int, signum: int) -> None:
        for index, process in self._started:
            if index == node:
                ownership.send(process.group(), signum)


def _not_applied(plan: NodePlan) -> list[str]:
    link, notes = plan.link, []
    if link.rate is not None:
        notes.append(f"rate {format_rate(link.rate)} not applied: plain processes share the loopback")
    if link.needs_netem:
        notes.append("delay and loss not applied: plain processes share the loopback")
    if plan.cpus is not None:
        notes.append(f"{plan.cpus:g} CPUs per node not applied: plain processes share all cores")
    if plan.congestion is not None:
        notes.append(f"congestion control {plan.congestion} not applied: plain processes use the machine's own")
    return notes
