"""Processes of this machine, for tests: their state, and waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s"
        time.sleep(0.01)


def state(pid: int) -> str:
    """R, S, T ... of a process; '' when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
