"""Stopping: SIGTERM and SIGINT end a rank soon, even one that waits inside Gloo.

Python's own handlers run when the main thread is back in Python, which may be a slow network's whole all-reduce
later. The kernel's handler writes the signal's number to a pipe at once; a thread reads it there, gives the main
thread a few seconds, and then ends the rank itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from testbed.spec.errors import Interrupted

GRACE = 3.0  # seconds for the main thread to raise, write down and leave
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def raise_interrupted() -> None:
    """SIGTERM and SIGINT raise Interrupted in the main thread; signals held back until now arrive."""
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def insist(end: Callable[[Interrupted], None]) -> None:
    """Call `end` from a thread when a signal came and the main thread did not react within GRACE."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading, end), daemon=True).start()


def ignore() -> None:
    """From here on there is nothing left to interrupt."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _watch(reading: int, end: Callable[[Interrupted], None]) -> None:
    name = signal.Signals(os.read(reading, 1)[0]).name
    threading.Event().wait(GRACE)
    end(Interrupted(f"stopped by {name} while it waited for others"))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    ignore()  # a second one must not interrupt the writing down
    raise Interrupted(f"stopped by {signal.Signals(signum).name}")
