"""Presence: ranks 1..N-1 hold a plain connection to rank 0, and its end tells them that rank 0 has left.

They leave after it: a caller that stops everything with the first container that ends (Compose's
--abort-on-container-exit) would otherwise kill rank 0 while it sums up.
"""

from __future__ import annotations

import contextlib
import fcntl
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Collection

from testbed.net.tcp import tcp_sockets
from testbed.spec.errors import RankFailed, Unavailable

PATIENCE = 900.0  # seconds; rank 0 may fetch a data set before it listens
NAMELESS = 20.0  # seconds without a name after which rank 0 is gone: a container's name ends with it
RETRY = 0.2  # seconds
BACKLOG = 1024  # in front of the door: whoever fills it keeps the ranks out
ROOM = 256  # guests beside the ranks: each is a descriptor of this process
LOOK = 1.0  # seconds until the closing of the door is noticed
IDLE = 60  # seconds without a word after which the kernel asks whether rank 0's machine is still there
SIOCGIFADDR = 0x8915  # Linux's request for an interface's address


def listen(address: str, port: int, size: int) -> socket.socket:
    """Rank 0's end. A thread lets everybody in, strangers too; connections end with the process, or with this one."""
    try:
        listener = socket.create_server((address, port), backlog=BACKLOG)
    except OSError as error:
        raise Unavailable(f"port {port} on {address}: cannot listen ({error.strerror}). Set MASTER_PORT.") from None
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    threading.Thread(target=_host, args=(listener, selector, size + ROOM), daemon=True, name="presence").start()
    return listener


def _host(listener: socket.socket, selector: selectors.BaseSelector, room: int) -> None:
    """Keep who says nothing, as ranks do. One too many, and whoever holds most connections loses its oldest."""
    guests: dict[socket.socket, str] = {}
    with selector:

        def show_out(guest: socket.socket) -> None:
            del guests[guest]
            selector.unregister(guest)
            guest.close()

        while listener.fileno() >= 0:
            for guest in [key.data for key, _ in selector.select(LOOK)]:
                if guest is not None:  # it talks, or has left
                    show_out(guest)
                    continue
                try:
                    newest, where = listener.accept()
                except OSError:  # gone meanwhile, or no descriptor is left
                    time.sleep(RETRY)
                    continue
                selector.register(newest, selectors.EVENT_READ, newest)
                guests[newest] = where[0]
            while len(guests) > room:
                most = Counter(guests.values()).most_common(1)[0][0]
                show_out(next(guest for guest, address in guests.items() if address == most))
    for guest in guests:
        guest.close()


def attend(name: str, port: int) -> socket.socket:
    """The others' end, connected; waits for rank 0 to come up."""
    named = begun = time.monotonic()
    while (now := time.monotonic()) < begun + PATIENCE:
        try:
            connection = socket.create_connection((name, port), timeout=5.0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
            return connection
        except socket.gaierror:
            if now > named + NAMELESS:
                raise RankFailed(f"rank 0 has left, or never came: nobody is called {name!r}. See its log") from None
        except OSError:
            named = now  # it exists, and does not listen yet
        time.sleep(RETRY)
    raise RankFailed(f"rank 0 did not listen at {name}:{port} within {PATIENCE:g} s. See its log")


def outlast(connection: socket.socket, seconds: float | None) -> None:
    """Return when rank 0 has left, or after so many seconds."""
    connection.settimeout(seconds)
    with contextlib.suppress(OSError):
        connection.recv(1)


def own_address(master: str) -> str:
    """The address of this node on the way to rank 0; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect((master, 9))
        address: str = trial.getsockname()[0]
        return address


def interface_of(address: str) -> str:
    """The interface that has this IPv4 address; nothing is named where none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("16s16x", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def hang_up(keep: Collection[int]) -> None:
    """End all of this process's TCP connections but those to or from the ports `keep`: peers that wait see it at once.

    Destroying the process group would not do: Gloo closes nothing while anybody still holds a piece of it.
    """
    for sock in tcp_sockets():
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            if not {sock.getpeername()[1], sock.getsockname()[1]} & set(keep):
                sock.shutdown(socket.SHUT_RDWR)
