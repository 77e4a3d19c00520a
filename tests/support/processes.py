"""The state of a process, and waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the condition is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s"
        time.sleep(0.01)


def state(pid: int) -> str:
    """Return the state of a process (R, S, T ...), or '' if it no longer exists."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
