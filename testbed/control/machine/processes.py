"""Processes of this machine: run a command to its end, find processes in /proc, send signals."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from testbed.control.machine import user_namespace
from testbed.spec.errors import CommandFailed

PROC = Path("/proc")
KILL_TIMEOUT_S = 5.0
TIMEOUT_CODE = 124  # what timeout(1) ends with when the command did not finish in time


def run(argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None, text: str = "") -> str:
    """Run a command to its end and return its stdout; raise CommandFailed with the command, its code and stderr.

    `env`: instead of this process's variables. `text`: its input. At the timeout its whole process group is killed.
    """
    pipe = subprocess.PIPE
    child = subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        out, err = child.communicate(text, timeout=timeout_s)
    except BaseException as error:
        if child.returncode is None:  # Popen may have waited for it after Ctrl-C; else no other process has its pid
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise CommandFailed(f"{shlex.join(argv)}: not finished after {timeout_s:g} s", TIMEOUT_CODE, "") from None
        raise
    if child.returncode != 0:
        output = (err or out).strip()
        raise CommandFailed(f"{shlex.join(argv)}: exit code {child.returncode}: {output}", child.returncode, output)
    return out


def start_time(pid: int, proc: Path = PROC) -> str | None:
    """Return the clock ticks between boot and the process's start; None if it has ended or is a zombie."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command name in front may hold spaces and brackets
    return None if fields[0] in "ZX" else fields[19]


def all_pids() -> Iterator[int]:
    """Yield every pid in /proc."""
    return (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def pids_in_namespace(namespace: str) -> list[int]:
    """Return the pids of live processes inside a named network namespace."""
    found = []
    with contextlib.suppress(OSError):
        wanted = (user_namespace.named() / namespace).stat()
        for pid in all_pids():
            with contextlib.suppress(OSError):
                if os.path.samestat((PROC / str(pid) / "ns/net").stat(), wanted) and start_time(pid) is not None:
                    found.append(pid)
    return found


def pids_of_session(session: int) -> list[int]:
    """Return the pids of live processes of a session; its number is the pid of the process that began it."""
    found = []
    for pid in all_pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == session and start_time(pid) is not None:
                found.append(pid)
    return found


def send(pids: Sequence[int], signum: int) -> None:
    """Send a signal to each pid; a process that has ended meanwhile is ignored."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill_until_gone(find_pids: Callable[[], list[int]], timeout_s: float = KILL_TIMEOUT_S) -> list[int]:
    """Send SIGKILL to what `find_pids()` lists until it lists nothing; return the pids.

    `find_pids` is called again because a process may have forked before it was killed.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while (found := find_pids()) and time.monotonic() < deadline:
        send(found, signal.SIGKILL)
        killed.update(found)
        time.sleep(0.01)
    return sorted(killed)
