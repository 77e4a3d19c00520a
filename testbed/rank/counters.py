"""What the kernel counts for this rank: bytes that it has sent and received, and processor time.

Bytes on a node with its own interface are the counters of that interface. With segmentation offload (GSO) the kernel
counts the headers of a large segment once. So the counters show the payload plus less than 1 %, while the headers on
the wire add 4.6 %. All ranks share loopback, so there the counters of this process's own TCP sockets are read. They
count payload only.

Processor time is measured for this machine and for this rank, while the steps run. The difference is what other
processes use; results/validity.py calculates it from the values of all ranks. A container's /proc/stat is that of the
host, so ranks in containers measure the whole machine too.

Standard library only: the observer of a user's script counts bytes too (attach/).
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from testbed.net.tcp import byte_counts, tcp_sockets

READ_BYTES = 1 << 16


class Counter(Protocol):
    """`read` returns cumulative (sent, received) in bytes; (None, None) if nothing counts bytes."""

    name: str

    def read(self) -> tuple[int | None, int | None]: ...


class InterfaceCounter:
    """All traffic of an interface. In a namespace or container it belongs to one rank."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.name = f"interface {interface}"
        self._name = interface.encode()

    def read(self) -> tuple[int | None, int | None]:
        for line in read_file("/proc/self/net/dev").splitlines():
            name, _, numbers = line.partition(b":")
            if name.strip() == self._name:
                fields = numbers.split()
                return int(fields[8]), int(fields[0])
        return None, None


_CLOSED = [0, 0]  # bytes sent and received on sockets that this process has closed


def keep_counts(connection: socket.socket) -> None:
    """Add the bytes of this socket to those of closed sockets. Call it directly before the socket is closed."""
    with contextlib.suppress(OSError):  # this kernel does not count bytes of sockets
        for number, size in enumerate(byte_counts(connection)):
            _CLOSED[number] += size


class SocketCounter:
    """All open TCP sockets of this process, and the closed sockets that were given to `keep_counts`.

    Gloo does not close its sockets during a run, so it needs no call of `keep_counts`.
    """

    name = "tcp sockets"

    def __init__(self) -> None:
        self._open: list[tuple[str, int]] = []  # descriptors and inodes when the sockets were looked up
        self._sockets: list[tuple[int, int]] = []  # descriptors and families

    def read(self) -> tuple[int | None, int | None]:
        found = _descriptors()
        if found != self._open:
            self._open = found
            self._sockets = [(connection.fileno(), connection.family) for connection in tcp_sockets()]
        sent, received = _CLOSED
        for descriptor, family in self._sockets:
            with contextlib.suppress(OSError):  # the socket was closed meanwhile, or this kernel does not count bytes
                counts = _counts(descriptor, family)
                sent, received = sent + counts[0], received + counts[1]
        return sent, received


def _descriptors() -> list[tuple[str, int]]:
    """Return the number and the inode of every open descriptor.

    If the list has not changed, the TCP sockets need not be looked up again, which takes ten times as long.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only: this runs in every step
        try:
            found.append((name, os.fstat(int(name)).st_ino))
        except OSError:  # the descriptor of listdir itself, or a descriptor that was closed meanwhile
            continue
    return found


def _counts(descriptor: int, family: int) -> tuple[int, int]:
    borrowed = socket.socket(family, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        return byte_counts(borrowed)
    finally:
        borrowed.detach()


def read_file(path: str) -> bytes:
    """Return the content of a small file of /proc. Path.read_bytes takes twice as long, and this runs in every step."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, READ_BYTES)
    finally:
        os.close(descriptor)


class NoCounter:
    """For systems without /proc."""

    name = "nothing"

    def read(self) -> tuple[int | None, int | None]:
        return None, None


def open_counter(interface: str) -> Counter:
    """Return the best available counter for a rank that uses this interface."""
    if not Path("/proc/self/net/dev").exists():
        return NoCounter()
    return SocketCounter() if interface == "lo" else InterfaceCounter(interface)


STAT = Path("/proc/stat")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class CpuTime:
    """One reading of processor time in seconds; only the difference of two readings has a meaning."""

    at: float  # monotonic time of the reading
    machine: float  # all processes on all cores
    own: float  # all threads of this process, and its children that have ended
    idle: float = 0.0  # all cores: time without work, or waiting for a disk


def read_cpu_time(stat: Path = STAT) -> CpuTime | None:
    """Return the processor time used so far; None where the kernel does not count it.

    The machine's processor time is all time of its cores without idle, iowait, irq, softirq and steal. The sum of user
    and system time would be wrong: the kernel samples these two at ticks, and a rank with a CPU quota starts at a tick.
    With a quota of 0.4 cores the sum was 0.2 cores too large. Idle time is measured. Interrupts are left out, because
    most of them come from the network traffic of the ranks and not from other processes.
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
    nothing = (idle + iowait) / os.sysconf("SC_CLK_TCK")
    return CpuTime(now, cores * now - unused, own, nothing) if name == "cpu" and cores else None


def machine_id(boot_id: Path = BOOT_ID) -> str:
    """Return the boot id: it is equal for all ranks on one machine, in containers too. Empty if it cannot be read."""
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
            "machine_idle": self._last.idle - self._first.idle,
        }
