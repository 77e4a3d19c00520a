"""Names and addresses of this machine's network interfaces. Imports the standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

SIOCGIFADDR = 0x8915  # Linux: the ioctl that returns an interface's IPv4 address
IPV6_ADDRESSES = Path("/proc/self/net/if_inet6")  # one per line: address, index, prefix length, scope, flags, interface


def interface_of(address: str) -> str:
    """Return the name of the interface that has this IPv4 or IPv6 address; empty if there is none."""
    wanted = address.partition("%")[0]
    return next((name for name, found in _addresses() if found == wanted), "")


def address_of(interface: str) -> str:
    """Return an interface's address: IPv4 if it has one, else IPv6 (not link-local), else an empty string."""
    found = [address for name, address in _addresses() if name == interface]
    return next((address for address in found if not ipaddress.ip_address(address).is_link_local), "")


def route_to(host: str, port: int) -> str:
    """Return this machine's address on the route to a host; empty without a route. Send nothing."""
    for family, kind, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    return ""


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield every interface with its address, first all IPv4 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("16s16x", name.encode()))
                yield name, socket.inet_ntoa(found[20:24])
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
