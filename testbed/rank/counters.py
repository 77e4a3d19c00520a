"""Bytes that this rank has sent and received, counted by the kernel.

On a node with its own interface: the counters of that interface. With segmentation offload (GSO) the kernel counts the
headers of a large segment once, so this is the payload plus less than 1 %; on the wire it is 4.6 % more.
On loopback, which all ranks share: the counters of this process's own TCP sockets, payload only.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Protocol

from testbed.net.tcp import byte_counts, tcp_sockets


class Counter(Protocol):
    """Cumulative (sent, received) in bytes; (None, None) if nothing counts them."""

    name: str

    def read(self) -> tuple[int | None, int | None]: ...


class InterfaceCounter:
    """All traffic of an interface. In a namespace or container it belongs to one rank."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.name = f"interface {interface}"

    def read(self) -> tuple[int | None, int | None]:
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                fields = numbers.split()
                return int(fields[8]), int(fields[0])
        return None, None


class SocketCounter:
    """All open TCP sockets of this process. Closed sockets are not counted; Gloo keeps its own open."""

    name = "tcp sockets"

    def read(self) -> tuple[int | None, int | None]:
        sent = received = 0
        for connection in tcp_sockets():
            with contextlib.suppress(OSError):  # the socket was closed meanwhile, or this kernel does not count
                counts = byte_counts(connection)
                sent, received = sent + counts[0], received + counts[1]
        return sent, received


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
