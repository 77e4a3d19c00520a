"""Exclusive turns for tests that measure, while two pytest workers run tests in parallel."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def take_turn(alone: bool) -> Iterator[None]:
    """Run in parallel with other tests, or alone. A test that waits to run alone holds the queue lock, so that no later
    test can start before it."""
    files = Path(tempfile.gettempdir()) / f"pytest-turns-{os.geteuid()}"
    with files.with_suffix(".running").open("w") as running:
        with files.with_suffix(".queue").open("w") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
