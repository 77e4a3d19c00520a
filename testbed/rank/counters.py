"""Bytes this rank has sent and received, counted by the kernel.

On a node with its own interface: that interface's counters. Where the kernel hands it segments to cut up (GSO) it
counts their headers once, so this is payload and less than 1 % more; on the wire there are 4.6 % more.
On loopback, which all ranks share: the counters of this process's own TCP sockets, payload only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

TCP_INFO_BYTES = 216  # struct tcp_info up to tcpi_bytes_retrans
BYTES_RECEIVED, BYTES_SENT = 128, 200  # offsets of u64 fields in it (Linux 4.19 and later)


class Counter(Protocol):
    """Cumulative (sent, received) in bytes; (None, None) where nothing counts."""

    name: str

    def read(self) -> tuple[int | None, int | None]: ...


class InterfaceCounter:
    """The whole interface, which in a namespace or container belongs to one rank."""

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
    """All TCP sockets this process holds open. Sockets closed in between are missed; Gloo keeps its own open."""

    name = "tcp sockets"

    def read(self) -> tuple[int | None, int | None]:
        sent = received = 0
        for connection in _tcp_sockets():
            with contextlib.suppress(OSError, struct.error):  # no TCP socket, or a kernel that counts less
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                received += struct.unpack_from("=Q", info, BYTES_RECEIVED)[0]
                sent += struct.unpack_from("=Q", info, BYTES_SENT)[0]
        return sent, received


class NoCounter:
    """For systems without /proc."""

    name = "nothing"

    def read(self) -> tuple[int | None, int | None]:
        return None, None


def congestion_control() -> str:
    """What this process's connections to others really use: a route may say another name than the sysctl."""
    names = set()
    for connection in _tcp_sockets():
        with contextlib.suppress(OSError):  # a listening socket has no peer
            if connection.getpeername()[0] != connection.getsockname()[0]:
                name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                names.add(name.partition(b"\0")[0].decode())
    return "+".join(sorted(names)) or "no connection"


def _tcp_sockets() -> Iterator[socket.socket]:
    """Every socket of this process, borrowed for a moment; one that closes meanwhile is left out."""
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only, on the hot path
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):  # noqa: PTH115
                continue
            borrowed = socket.socket(fileno=int(descriptor))
        except OSError:
            continue
        try:
            yield borrowed
        finally:
            borrowed.detach()


def open_counter(interface: str) -> Counter:
    """The best counter there is for a rank that talks through `interface`."""
    if not Path("/proc/self/net/dev").exists():
        return NoCounter()
    return SocketCounter() if interface == "lo" else InterfaceCounter(interface)
