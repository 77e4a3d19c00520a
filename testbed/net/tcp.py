"""TCP on Linux: bytes on the wire, congestion control, and what the kernel reports about a connection.

The probe, the shaping and the ranks use this module. It imports the standard library and small modules of spec
only, so that a probe starts quickly: no torch and no pydantic.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from testbed.spec.errors import Unavailable
from testbed.spec.words import refuse_setting

MTU_BYTES = 1500  # of an IP packet
IP_TCP_HEADER_BYTES = 52  # IPv4 20, TCP 20, timestamps 12
ETHERNET_HEADER_BYTES = 14  # tbf counts these bytes, too

# Offsets in bytes in Linux's struct tcp_info (include/uapi/linux/tcp.h)
_PATH_MTU = 60  # u32, bytes
_BYTES_RECEIVED = 128  # u64
_MIN_RTT = 148  # u32, microseconds
_BYTES_SENT = 200  # u64, since Linux 4.19; retransmitted bytes count
_BYTES_RETRANSMITTED = 208  # u64, since Linux 4.19


def efficiency(mtu: int = MTU_BYTES) -> float:
    """Return the TCP goodput per bit on the wire: 1448 / 1514 = 0.956 at MTU 1500."""
    return (mtu - IP_TCP_HEADER_BYTES) / (mtu + ETHERNET_HEADER_BYTES)


def wire_rate(goodput: float, mtu: int = MTU_BYTES) -> float:
    """Return the rate on the wire for a goodput, in the same unit."""
    return goodput / efficiency(mtu)


def path_mtu(sock: socket.socket) -> int:
    """Return the bytes of the largest packet on the path of this connection."""
    return _tcp_info(sock, "=I", _PATH_MTU)


def min_round_trip(sock: socket.socket) -> float:
    """Return the shortest round-trip time in seconds that the kernel has measured on this connection."""
    return _tcp_info(sock, "=I", _MIN_RTT) / 1e6


def byte_counts(sock: socket.socket) -> tuple[int, int]:
    """Return the payload bytes (sent, received) of this connection. Raise OSError if the kernel does not count them.

    A payload that TCP sent again counts once. On a busy machine it does so even on loopback, where nothing is lost.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RETRANSMITTED + 8)
    if len(info) < _BYTES_RETRANSMITTED + 8:
        raise OSError("this kernel's tcp_info has no count of bytes sent")
    sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
    return sent - again, struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]


def _tcp_info(sock: socket.socket, form: str, offset: int) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, offset + struct.calcsize(form))
    return int(struct.unpack_from(form, info, offset)[0])


def congestion_control(sock: socket.socket) -> str:
    """Return the congestion control of this connection. A route may set another one than the sysctl."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).partition(b"\0")[0].decode()


def congestion_in_use() -> str:
    """Return the congestion control of this process's connections to other nodes; several are joined by "+"."""
    names = set()
    for sock in tcp_sockets():
        with contextlib.suppress(OSError):  # a listening socket has no peer
            if sock.getpeername()[0] != sock.getsockname()[0]:
                names.add(congestion_control(sock))
    return "+".join(sorted(names)) or "no connection"


def tcp_sockets() -> Iterator[socket.socket]:
    """Yield every TCP socket of this process, those of Gloo included.

    The descriptor stays open. The yielded object is valid only until the next one is yielded. A socket that is closed
    during the iteration is left out.
    """
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only: this runs in every step
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):  # noqa: PTH115
                continue
            borrowed = socket.socket(fileno=int(descriptor))
        except OSError:
            continue
        try:
            if borrowed.type == socket.SOCK_STREAM and borrowed.family in (socket.AF_INET, socket.AF_INET6):
                yield borrowed
        finally:
            borrowed.detach()


LOADED = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
MODULES = Path("/lib/modules")
NOT_CONGESTION = {"diag"}  # the module tcp_diag is no congestion control


def check_congestion_control(name: str | None) -> None:
    """Raise Unavailable with the existing names if the kernel has no congestion control of this name.

    Containers and namespaces use the kernel of the machine, so the check here is valid for all of them.
    """
    if name is None or _accepted(name):
        return
    known = congestion_controls()
    if known and name not in known:
        rule = "this kernel has no such TCP congestion control"
        raise refuse_setting("node.congestion", name, rule, f"Use one of {', '.join(known)}.", Unavailable)


def congestion_controls() -> list[str]:
    """Return the congestion controls that are loaded or are modules; empty if the kernel lists none."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        found.update(LOADED.read_text(encoding="ascii").split())
        with contextlib.suppress(OSError):
            listed = (MODULES / platform.release() / "modules.dep").read_text(encoding="utf-8", errors="replace")
            found.update(re.findall(r"^\S*/net/ipv4/tcp_(\w+)\.ko", listed, re.MULTILINE))
    return sorted(found - NOT_CONGESTION)


def _accepted(name: str) -> bool:
    """Return True if a socket accepts the name, or refuses it only for lack of privileges. As root, load its module."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        return error.errno == errno.EPERM
    return True
