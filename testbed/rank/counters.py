"""Bytes that this rank has sent and received, counted by the kernel.

On a node with its own interface: the counters of that interface. With segmentation offload (GSO) the kernel counts the
headers of a large segment once, so this is the payload plus less than 1 %; on the wire it is 4.6 % more.
On loopback, which all ranks share: the counters of this process's own TCP sockets, payload only.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Protocol

from testbed.net.tcp import byte_counts, tcp_sockets

READ_BYTES = 1 << 16


class Counter(Protocol):
    """Cumulative (sent, received) in bytes; (None, None) if nothing counts them."""

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


class SocketCounter:
    """All open TCP sockets of this process. Closed sockets are not counted; Gloo keeps its own open."""

    name = "tcp sockets"

    def __init__(self) -> None:
        self._open: list[tuple[str, int]] = []  # descriptors and inodes when the sockets were looked up
        self._sockets: list[tuple[int, int]] = []  # descriptors and families

    def read(self) -> tuple[int | None, int | None]:
        found = _descriptors()
        if found != self._open:
            self._open = found
            self._sockets = [(connection.fileno(), connection.family) for connection in tcp_sockets()]
        sent = received = 0
        for descriptor, family in self._sockets:
            with contextlib.suppress(OSError):  # the socket was closed meanwhile, or this kernel does not count
                counts = _counts(descriptor, family)
                sent, received = sent + counts[0], received + counts[1]
        return sent, received


def _descriptors() -> list[tuple[str, int]]:
    """Every open descriptor and what it is open on. It costs a tenth of looking for the TCP sockets among them."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only: this runs in every step
        try:
            found.append((name, os.fstat(int(name)).st_ino))
        except OSError:  # the listing's own, or one that was closed meanwhile
            continue
    return found


def _counts(descriptor: int, family: int) -> tuple[int, int]:
    borrowed = socket.socket(family, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        return byte_counts(borrowed)
    finally:
        borrowed.detach()


def read_file(path: str) -> bytes:
    """The content of a small file of /proc. Path.read_bytes takes twice as long, and this runs in every step."""
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
    """The best available counter for a rank that uses this interface."""
    if not Path("/proc/self/net/dev").exists():
        return NoCounter()
    return SocketCounter() if interface == "lo" else InterfaceCounter(interface)
