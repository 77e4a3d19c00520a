"""Can every node reach every other at one port? `python3 meet.py RANK PORT a,b,c` on all of them at the same time.

Each listens at its own address and connects to all the others until it got through or time is up; one JSON object
says how it went. Standard library only and one file: it also runs on a host that has Python and not our image.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

PATIENCE = 15.0  # seconds that nodes may be apart
HELLO = b"testbed"


def meet(rank: int, port: int, addresses: list[str], patience: float = PATIENCE) -> dict[str, object]:
    """{"busy": why the port is not to be had, "missing": ranks that were not reached, or not heard}.

    To be let in somewhere proves little; that the other also came from its address, and said who it is, does.
    """
    deadline = time.monotonic() + patience
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
            heard |= _hear(server)
            reached |= {each for each in others - reached if _knock(addresses[rank], addresses[each], port, rank)}
        return {"busy": "", "missing": sorted(others - (reached & heard))}


def _knock(source: str, address: str, port: int, rank: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1.0, source_address=(source, 0)) as sock:
            sock.sendall(HELLO + f"{rank}\n".encode())
            return True
    except OSError:
        return False


def _hear(server: socket.socket) -> set[int]:
    """Ranks that have just said hello; anybody else is hung up on."""
    heard = set()
    while select.select([server], [], [], 0.1)[0]:
        guest = server.accept()[0]
        with guest:
            guest.settimeout(1.0)
            try:
                text = guest.recv(64)
            except OSError:
                continue
            number = text.removeprefix(HELLO).strip()
            if text.startswith(HELLO) and number.isdigit():
                heard.add(int(number))
    return heard


if __name__ == "__main__":
    print(json.dumps(meet(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","))))
