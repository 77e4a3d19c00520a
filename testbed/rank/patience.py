"""Patience: threads that move bytes wait until the one that computes has had its turn.

By default Linux wakes them for every packet or two and they interrupt who computes: four ranks on two cores change
threads ten thousand times a step. A batch thread (SCHED_BATCH) interrupts nobody: when its turn comes, it finds more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

GLOO = "gloo_tcp_loop"  # what Gloo calls the thread that reads and writes its sockets


def be_patient(thread: int = 0, patient: bool = True) -> None:
    """This thread, or another of ours by its number. Where the machine refuses, it stays as it was."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH if patient else os.SCHED_OTHER, os.sched_param(0))


def gloo_threads() -> Iterator[int]:
    """Their numbers."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            if (task / "comm").read_text().strip() == GLOO:
                yield int(task.name)


def make_gloo_patient(patient: bool = True) -> None:
    """Gloo started its thread when the ranks met, and other modes use it, too: undo it at the end."""
    for thread in gloo_threads():
        be_patient(thread, patient)
