"""Exclusive turns for tests that measure, while several pytest workers run tests in parallel."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def _lock_file(name: str) -> IO[str]:
    return (Path(tempfile.gettempdir()) / f"pytest-turns-{os.geteuid()}.{name}").open("w")


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Only one worker at a time is in a block of this name."""
    with _lock_file(name) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Turn:
    """A worker's turn: beside the tests of other workers, or alone. Every process has its own."""

    def __init__(self) -> None:
        self._running: IO[str] | None = None
        self._alone = False

    def take(self, alone: bool) -> None:
        """Begin a turn, or go on with that of the last test if it was not ended and is of the same kind.

        A test that waits to run alone holds the queue lock, so that no later test can start before it.
        """
        if self._running and self._alone == alone:
            return
        self.end()
        running = _lock_file("running")
        with _lock_file("queue") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        self._running, self._alone = running, alone

    def end(self) -> None:
        if self._running:
            self._running.close()
            self._running = None
