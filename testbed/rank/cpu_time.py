"""Processor time that this machine and this rank use while steps are measured.

The difference is what other processes use; results/machines.py calculates it from the values of all ranks. In a
container /proc/stat is that of the host, so ranks in containers see the whole machine too.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAT = Path("/proc/stat")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class CpuTime:
    """Seconds of processor time; only differences between two readings have a meaning."""

    at: float  # monotonic time of the reading
    machine: float  # all processes on all cores
    own: float  # all threads of this process, and its children that have ended


def read_cpu_time(stat: Path = STAT) -> CpuTime | None:
    """Return the processor time used so far; None where the kernel does not count it.

    The machine's is all time of its cores without idle, iowait, irq, softirq and steal. The kernel measures idle time.
    User and system time it samples at ticks, and a rank with a CPU quota starts at a tick: with a quota of 0.4 cores
    their sum was 0.2 cores too large. Interrupts are left out, because most of them are the network traffic of the
    ranks, which is no work of others.
    """
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
        name, *ticks = lines[0].split()
        idle, iowait, irq, softirq, steal = (int(tick) for tick in ticks[3:8])
    except (OSError, ValueError, IndexError):
        return None
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + children.ru_utime + children.ru_stime
    now, cores = time.monotonic(), sum(line.startswith("cpu") for line in lines[1:])
    unused = (idle + iowait + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return CpuTime(now, cores * now - unused, own) if name == "cpu" and cores else None


def machine_id(boot_id: Path = BOOT_ID) -> str:
    """Return a name that is equal for all ranks on one machine, in containers too; empty where there is none."""
    try:
        return boot_id.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


class CpuMeter:
    """Measures from the first call of `begin` to the last call of `end`."""

    def __init__(self) -> None:
        self._first: CpuTime | None = None
        self._last: CpuTime | None = None

    def begin(self) -> None:
        """Start to measure. Later calls do nothing."""
        if self._first is None:
            self._first = read_cpu_time()

    def end(self) -> None:
        """Measure up to now, if `begin` was called."""
        if self._first is not None:
            self._last = read_cpu_time()

    def fields(self) -> dict[str, Any]:
        """Return fields of an End record; none if nothing was measured."""
        if self._first is None or self._last is None:
            return {}
        return {
            "machine": machine_id(),
            "measured": self._last.at - self._first.at,
            "machine_cpu": self._last.machine - self._first.machine,
            "own_cpu": self._last.own - self._first.own,
        }
