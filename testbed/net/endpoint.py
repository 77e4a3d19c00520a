"""Interfaces and addresses of this node, and the address at which other nodes reach it.

`python -m testbed.net.endpoint` prints interface and address, found from the node's routes, as one JSON line, with the
files of a run that are missing on the node. The controller runs it on every node of an allocation
(control/substrates/slurm.py). Imports the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import ipaddress
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

SIOCGIFADDR = 0x8915  # Linux: the ioctl that returns an interface's IPv4 address
IPV6_ADDRESSES = Path("/proc/self/net/if_inet6")  # one per line: address, index, prefix length, scope, flags, interface
DISCARD_PORT = 9  # any port would do, because nothing is sent
SEEN_TIMEOUT_S = 5.0  # for a new file to appear on a disk that several machines share
POLL_S = 0.2


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


def free_port(address: str, wanted: int) -> tuple[int, str]:
    """Return `wanted`, or a free port if it is 0, and why this port of the address cannot be used; "" if it can."""
    try:
        with socket.create_server((address, wanted)) as server:
            return int(server.getsockname()[1]), ""
    except OSError as error:
        return wanted, os.strerror(error.errno) if error.errno else str(error)


def describe(
    name: str, names: Sequence[str], addresses: Sequence[str], port: int, sees: Sequence[str]
) -> dict[str, object]:
    """Return what node `name` finds about itself, from its route to the first node (the first: to the second)."""
    found: dict[str, object] = {"node": name, "interface": "lo", "address": "127.0.0.1", "problem": ""}
    if len(names) > 1:
        target = addresses[1] if name == names[0] else addresses[0]
        try:
            own = route_to(target, DISCARD_PORT)
        except OSError as error:  # e.g. this node cannot resolve the name
            own, found["problem"] = "", f"no route to {target} ({error.strerror or error})"
        if own:
            found["address"], found["interface"] = own, interface_of(own)
            if not found["interface"]:
                found["problem"] = f"no interface has {own}, its address on the route to {target}, as its first address"
        elif not found["problem"]:
            found["problem"] = f"no route to {target}"
    found["port"], found["busy"] = free_port(str(found["address"]), port) if name == names[0] else (port, "")
    found["missing"] = _missing(sees)
    return found


def _missing(paths: Sequence[str]) -> list[str]:
    deadline = time.monotonic() + SEEN_TIMEOUT_S
    while True:
        missing = [path for path in paths if not Path(path).exists()]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--names", "--addresses"):
        parser.add_argument(option, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--sees", action="append", default=[])
    given = parser.parse_args()
    name = os.environ.get("SLURMD_NODENAME", "")
    print(json.dumps(describe(name, given.names.split(","), given.addresses.split(","), given.port, given.sees)))


if __name__ == "__main__":
    main()
