"""Plain processes on this machine's loopback: works on any machine and shapes nothing.

netns.py and compose.py also use the first half, which starts and stops processes on this machine.
"""

from __future__ import annotations

import contextlib
import os
import resource
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
from testbed.control.machine.processes import kill_until_gone, send
from testbed.control.substrates.base import NodeHandle, NodePlan, Process, UnchangedNodes
from testbed.results.folder import open_append
from testbed.spec.errors import Unavailable, require_extra
from testbed.spec.process_tree import descendants
from testbed.spec.units import format_rate

STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL


class LocalProcess:
    """A child of this process, in a session of its own: Ctrl-C at the terminal reaches only the controller."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._popen.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raise TimeoutError."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s") from None

    def signal(self, signum: int) -> None:
        """Send a signal; a process that has ended is ignored."""
        self._popen.send_signal(signum)

    def forbid_writing(self) -> None:
        """Limit the size of its files to one byte: every further write fails, as on a full disk."""
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (1, 1))

    def group(self) -> list[int]:
        """Return the pids of its live processes: itself and its descendants, in whatever group or session.

        Descendants of a launcher that was killed are found by the variable that it has set.
        """
        owned = ownership.current_processes()
        found = {pid for pid, launcher in owned.items() if launcher == str(self.pid) or _group_of(pid) == self.pid}
        return sorted(found | self._descendants())

    def _descendants(self) -> set[int]:
        """Those of a process that has not been waited for, so that its pid is still its own."""
        return set(descendants(self.pid)) if self._popen.returncode is None else set()


def _group_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def dies_with_parent() -> list[str]:
    """Return a command prefix that makes the kernel send SIGTERM to the process when its parent ends.

    The parent is the *thread* that starts the process, so processes must be started from the main thread.
    """
    return ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    inherited: Mapping[str, str] = os.environ,
    outlives_controller: bool = False,
) -> LocalProcess:
    """Start a process with this controller's mark in a session of its own; stdout and stderr are appended to `log`.

    `inherited`: the variables that it has besides `env`. `outlives_controller`: it has no mark, so that
    the next run does not kill it if this controller is killed.
    Raises SpecError if `log` is a link or pipe: a script in a container may own the folder, and this process may be
    root.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    whole = {**inherited, ownership.PACKAGE_PATH: package_path(), **env}
    if not outlives_controller:
        whole[ownership.VARIABLE] = ownership.current()
    with open_append(log) as output:
        popen = subprocess.Popen(
            argv, env=whole, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return LocalProcess(popen)


def package_path() -> str:
    """Return PYTHONPATH with this package's folder first, so that a child imports the same code, installed or not."""
    root = str(Path(testbed.__file__).resolve().parent.parent)
    inherited = os.environ.get(ownership.PACKAGE_PATH)
    return root + (os.pathsep + inherited if inherited else "")


def stop(processes: Iterable[LocalProcess], grace_s: float = STOP_GRACE_S) -> None:
    """Send SIGTERM, wait `grace_s` seconds, then send SIGKILL to each whole process group; all are reaped."""
    running = list(processes)
    for process in running:
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGCONT)  # a paused process does not react to SIGTERM
    deadline = time.monotonic() + grace_s
    for process in running:
        with contextlib.suppress(TimeoutError):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in running:
        kill_until_gone(process.group)
        process.wait(grace_s)


def check(plans: Sequence[NodePlan]) -> None:
    """Raise Unavailable if this Python cannot run a rank."""
    require_extra("substrate process", "rank", "torch", "torchvision")


class ProcessSubstrate(UnchangedNodes):
    """Every node is this machine. Links and CPU shares are not applied, and `notes` says so."""

    name = "process"
    unchanged = "plain processes share this machine's loopback, CPU and memory. Use --on netns"
    one_clock = True
    python = sys.executable

    def __init__(self, plans: Sequence[NodePlan], folder: Path | None = None) -> None:
        self._plans = tuple(plans)
        self._cores = affinity.assign_cores(plans, affinity.usable_cores())
        self._started: list[tuple[int, LocalProcess]] = []
        self.nodes: Sequence[NodeHandle] = tuple(
            NodeHandle(name=plan.name, address="127.0.0.1", interface="lo") for plan in plans
        )

    @property
    def notes(self) -> Sequence[str]:
        """What was requested and is not applied; each sentence once."""
        return tuple(dict.fromkeys(note for plan in self._plans for note in _not_applied(plan)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a process on this machine. With `quota` it is limited to its cores, but gets no CPU quota."""
        with affinity.limited_to(self._cores[node] if quota else None):
            process = spawn([*dies_with_parent(), *argv], env, log)
        self._started.append((node, process))
        return process

    def port(self, wanted: int = 0) -> int:
        """Return a free port. Raises Unavailable if `wanted` is in use, because all nodes share the loopback."""
        address = self.nodes[0].address
        try:
            with socket.create_server((address, wanted)) as server:
                return int(server.getsockname()[1])
        except OSError as error:
            way_out = "Use another, or --set port=0 for any free one"
            raise Unavailable(f"port {wanted} on {address}: {error.strerror}. {way_out}") from None

    def prepare_folder(self, folder: Path) -> None:
        """No-op: ranks run as this user."""

    def stop(self) -> None:
        """End every process that was started."""
        stop(process for _, process in self._started)
        self._started.clear()

    def kill(self, node: int) -> None:
        """Send SIGKILL to every process of the node."""
        self._signal(node, signal.SIGKILL)

    def pause(self, node: int) -> None:
        """Stop every process of the node."""
        self._signal(node, signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Continue every process of the node."""
        self._signal(node, signal.SIGCONT)

    def _signal(self, node: int, signum: int) -> None:
        for index, process in self._started:
            if index == node:
                send(process.group(), signum)


def _not_applied(plan: NodePlan) -> list[str]:
    link, notes = plan.link, []
    if link.rate is not None:
        notes.append(f"rate {format_rate(link.rate)} not applied: plain processes share the loopback")
    if link.needs_netem:
        notes.append("delay and loss not applied: plain processes share the loopback")
    if plan.uplink is not None:
        notes.append("uplinks of racks not applied: plain processes share the loopback")
    if plan.cpus is not None:
        notes.append(f"{plan.cpus:g} CPUs per node not applied: plain processes share all cores")
    if plan.congestion is not None:
        notes.append(f"congestion control {plan.congestion} not applied: plain processes use the machine's own")
    return notes
