"""The fault `oom`: a rank that gets SIGUSR1 allocates memory until its limit ends it."""

from __future__ import annotations

import signal
from types import FrameType

from testbed.spec.run import RunSpec

BLOCK_BYTES = 8 << 20
MAX_BLOCKS = 128  # stop here if there is no memory limit, before the machine has no memory left
_blocks: list[bytes] = []


def install_oom_handler(spec: RunSpec) -> None:
    """Handle SIGUSR1, but only in runs whose spec contains the fault."""
    if any(fault.kind == "oom" for fault in spec.faults):
        signal.signal(signal.SIGUSR1, _allocate)


def _allocate(signum: int, frame: FrameType | None) -> None:
    for _ in range(MAX_BLOCKS):
        _blocks.append(b"\1" * BLOCK_BYTES)  # written to, so that the kernel allocates the pages
    raise MemoryError(f"allocated {MAX_BLOCKS * BLOCK_BYTES >> 20} MiB without reaching a memory limit")
