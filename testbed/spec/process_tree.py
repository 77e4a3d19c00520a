"""Finds and ends all descendants of a process by /proc. The controller and the launcher of a script use it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

PROC = Path("/proc")
PR_SET_CHILD_SUBREAPER = 36
END_TIMEOUT_S = 5.0
POLL_S = 0.01


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants, so that `descendants` finds them. Errors are ignored.

    Then a process that starts a session of its own and whose parent ends, e.g. a daemon, stays in the tree.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int, proc: Path = PROC) -> list[int]:
    """Return the live descendants of a process, without itself and without zombies."""
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
                if fields[0] in "ZX":
                    dead.add(int(entry.name))
    found, queue = [], [root]
    while queue:
        below = children.pop(queue.pop(), [])
        found += [pid for pid in below if pid not in dead]
        queue += below
    return found


def end_descendants(root: int, grace_s: float = 0.0) -> list[int]:
    """End all descendants and return those that were killed.

    Send SIGTERM if there is a grace period, then SIGKILL until no descendant is left, for END_TIMEOUT_S at most.
    """
    deadline = time.monotonic() + grace_s
    if grace_s:
        _send(descendants(root), signal.SIGTERM)
        while descendants(root) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    killed: set[int] = set()
    deadline = time.monotonic() + END_TIMEOUT_S
    while (found := descendants(root)) and time.monotonic() < deadline:
        _send(found, signal.SIGKILL)
        killed.update(found)
        time.sleep(POLL_S)
    return sorted(killed)


def _send(pids: list[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
