"""Check that every node can reach every other at one port: run `python3 - RANK PORT a,b,c` on all at the same time.

Each node listens at its own address, connects to all others until all are reached or the time is over, and prints the
result as one JSON object. The controller sends this file to every host (control/substrates/hosts/node.py), so the file
imports the standard library only and nothing of testbed.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

TIMEOUT_S = 15.0  # for all nodes to start and connect
HELLO = b"testbed"


def reach_all(rank: int, port: int, addresses: list[str], timeout_s: float = TIMEOUT_S) -> dict[str, object]:
    """Return {"busy": why the port cannot be used, "missing": ranks that were not reached}.

    An open port may belong to another program. So a rank is reached only if it has also connected to this one and sent
    its number.
    """
    deadline = time.monotonic() + timeout_s
    others = set(range(len(addresses))) - {rank}
    try:
        family = socket.AF_INET6 if ":" in addresses[rank] else socket.AF_INET
        server = socket.create_server((addresses[rank], port), family=family, backlog=len(addresses))
    except OSError as error:
        return {"busy": error.strerror or str(error), "missing": []}
    with server:
        reached: set[int] = set()
        heard: set[int] = set()
        while time.monotonic() < deadline and (reached != others or heard != others):
            heard |= _accept_hellos(server)
            reached |= {
                other for other in others - reached if _send_hello(addresses[rank], addresses[other], port, rank)
            }
        return {"busy": "", "missing": sorted(others - (reached & heard))}


def _send_hello(source: str, address: str, port: int, rank: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1.0, source_address=(source, 0)) as sock:
            sock.sendall(HELLO + f"{rank}\n".encode())
            return True
    except OSError:
        return False


def _accept_hellos(server: socket.socket) -> set[int]:
    """Return the ranks that have connected and sent their number. Close other connections."""
    heard = set()
    while select.select([server], [], [], 0.1)[0]:
        with server.accept()[0] as sock:
            sock.settimeout(1.0)
            try:
                text = sock.recv(64)
            except OSError:
                continue
            number = text.removeprefix(HELLO).strip()
            if text.startswith(HELLO) and number.isdigit():
                heard.add(int(number))
    return heard


if __name__ == "__main__":
    print(json.dumps(reach_all(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","))))
