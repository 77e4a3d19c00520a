"""Turns: of tests that run beside each other in two workers, one that measures has the machine to itself."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def take_turn(alone: bool) -> Iterator[None]:
    """Run beside others, or alone. Who waits to be alone stands in the gate, so that nobody new slips in before."""
    files = Path(tempfile.gettempdir()) / f"pytest-turns-{os.geteuid()}"
    with files.with_suffix(".room").open("w") as room:
        with files.with_suffix(".gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
