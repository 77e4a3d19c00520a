"""Appetite: where a run asks for the fault `oom`, a rank that gets SIGUSR1 grows until its memory limit ends it."""

from __future__ import annotations

import signal
from types import FrameType

from testbed.spec.run import RunSpec

BITE = 8 << 20  # bytes
MOST = 128  # bites: a limit that is missing must not cost the whole machine
_eaten: list[bytes] = []


def wake(spec: RunSpec) -> None:
    """Listen for the signal, in runs that asked for it only."""
    if any(fault.kind == "oom" for fault in spec.faults):
        signal.signal(signal.SIGUSR1, _eat)


def _eat(signum: int, frame: FrameType | None) -> None:
    for _ in range(MOST):
        _eaten.append(b"\1" * BITE)  # written to, so that the pages are really there
    raise MemoryError(f"took {MOST * BITE >> 20} MiB and met no memory limit")
