"""Where the nodes of a probe meet: node 0 is the hub, the others are members, one JSON object per line.

member -> hub   {"rank": 2, "peer": {...}}      hub -> member   {"welcome": {...}}
hub -> member   {"tick": 0}                     member -> hub   {"tock": the member's clock}
member -> hub   {"ready": 3}                    hub -> member   {"go": 3}
member -> hub   {"outcome": {...}}              hub -> member   {"outcomes": [...]}
either way      {"fail": "a sentence"}          ends the probe on every node
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

from testbed.net.clock import TICKS, Clock, min_round_trip, read_clock

PATIENCE = 30.0  # seconds that nodes may be apart, start-up included
LINE_LIMIT = 1 << 20  # bytes; a longer line is not ours


class ProbeError(Exception):
    """The probe cannot go on; the message is a sentence for a person."""


@dataclass(frozen=True)
class Peer:
    """A node's address, and the rate of its link in bit/s."""

    address: str
    rate: int | None


class Channel:
    """One control connection."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        self.sock = sock
        self.who = who
        self._buffer = b""
        sock.settimeout(PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        """Send one object; the connection's own timeout holds."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._gone(error) from None

    def _gone(self, error: OSError) -> ProbeError:
        """Why the other end is closed: its own last words if it left any."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            self.sock.settimeout(0)
            for line in (self._buffer + self.sock.recv(65536)).splitlines():
                message = json.loads(line)
                if "fail" in message:
                    return ProbeError(str(message["fail"]))
        return ProbeError(f"{self.who} left the probe ({error})")

    def fill(self) -> None:
        """Read what has arrived."""
        try:
            data = self.sock.recv(65536)
        except OSError as error:
            raise ProbeError(f"{self.who} left the probe ({error})") from None
        self._buffer += data
        if not data or len(self._buffer) > LINE_LIMIT:
            raise ProbeError(f"{self.who} left the probe")

    def take(self) -> dict[str, Any] | None:
        """The next object that is complete; None while there is none."""
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):  # depth without end
            message = None
        if not isinstance(message, dict):
            raise ProbeError(f"{self.who} does not speak the probe's language")
        return message


def hear(channels: Sequence[Channel], key: str, allow: float) -> list[Any]:
    """The value under `key` from each channel, in order; the failure of any ends the wait at once."""
    heard: dict[Channel, Any] = {}
    deadline = time.monotonic() + allow
    while True:
        for channel in channels:  # first what came along with an earlier line: no socket announces it again
            message = channel.take() if channel not in heard else None
            if message is not None:
                if key not in message:
                    raise ProbeError(str(message.get("fail", f"{channel.who} is out of step")))
                heard[channel] = message[key]
        silent = {channel.sock: channel for channel in channels if channel not in heard}
        if not silent:
            return [heard[channel] for channel in channels]
        for sock in _readable(list(silent), deadline, ", ".join(channel.who for channel in silent.values())):
            silent[sock].fill()


def _readable(socks: list[socket.socket], deadline: float, whom: str) -> list[socket.socket]:
    """Those with something to read; ProbeError when the deadline passes first."""
    ready = select.select(socks, [], [], max(0.0, deadline - time.monotonic()))[0]
    if not ready:
        raise ProbeError(f"waited too long for {whom}")
    return ready


class Rendezvous(ABC):
    """What a node needs of the meeting, hub or member."""

    def __init__(self, token: bytes, peers: Sequence[Peer], channels: Sequence[Channel]) -> None:
        self.token = token  # data connections show it, so that strangers are told apart
        self.peers = peers
        self._channels = channels

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for channel in self._channels:
            channel.sock.close()

    @abstractmethod
    def meet(self, number: int, allow: float) -> None:
        """Return when all nodes are ready for step `number`, within `allow` seconds."""

    @abstractmethod
    def clocks(self) -> list[Clock]:
        """Compare clocks with node 0; only there is the result, in rank order, and nothing elsewhere."""

    @abstractmethod
    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Give this node's outcome; the outcomes of all, in rank order."""

    def round_trip(self) -> float:
        """Seconds to the hub and back, or to the farthest member, as the kernel has seen it at best."""
        return max((min_round_trip(channel.sock) for channel in self._channels), default=0.0)

    def tell(self, message: dict[str, Any]) -> None:
        """Send to everyone this node has a connection to."""
        for channel in self._channels:
            channel.send(message)

    def fail(self, error: Exception) -> ProbeError:
        """Tell the others why; what this node should raise."""
        for channel in self._channels:
            with contextlib.suppress(ProbeError):
                channel.send({"fail": str(error)})
        return ProbeError(str(error))


class Hub(Rendezvous):
    """Node 0 leads."""

    def meet(self, number: int, allow: float) -> None:
        """Wait for all members, then let all go."""
        hear(self._channels, "ready", allow)
        self.tell({"go": number})

    def clocks(self) -> list[Clock]:
        """One member after the other, so that nobody waits behind another's answer."""
        return [Clock(), *(read_clock(partial(_tick, channel)) for channel in self._channels)]

    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Collect in rank order and hand the whole to everyone."""
        outcomes = [outcome, *hear(self._channels, "outcome", PATIENCE)]
        self.tell({"outcomes": outcomes})
        return outcomes


def _tick(channel: Channel, number: int) -> float:
    """A member's time, asked for now."""
    channel.send({"tick": number})
    return float(hear([channel], "tock", PATIENCE)[0])


class Member(Rendezvous):
    """The other nodes follow."""

    def meet(self, number: int, allow: float) -> None:
        """Say ready, wait for go."""
        self.tell({"ready": number})
        hear(self._channels, "go", allow)

    def clocks(self) -> list[Clock]:
        """Answer with ours."""
        for _ in range(TICKS):
            hear(self._channels, "tick", PATIENCE)
            self.tell({"tock": time.time()})
        return []

    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Hand in ours, get all."""
        self.tell({"outcome": outcome})
        return list(hear(self._channels, "outcomes", PATIENCE)[0])


def arrive(rank: int, addresses: Sequence[str], port: int, me: Peer) -> Rendezvous:
    """Node 0 listens at `port`, the others go there; returns when everyone has come."""
    return _host(addresses, port, me) if rank == 0 else _join(rank, addresses, port, me)


def _join(rank: int, addresses: Sequence[str], port: int, me: Peer) -> Member:
    channel = Channel(_reach(addresses[rank], addresses[0], port), "node0")
    channel.send({"rank": rank, "peer": asdict(me)})
    welcome = hear([channel], "welcome", PATIENCE + 5)[0]  # longer than the hub waits: its sentence is the better one
    return Member(bytes.fromhex(welcome["token"]), [Peer(**peer) for peer in welcome["peers"]], [channel])


def _reach(source: str, address: str, port: int) -> socket.socket:
    """Connect to node 0, which may start later than we do."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((address, port), timeout=2, source_address=(source, 0))
        except OSError as error:
            if time.monotonic() > deadline:
                raise ProbeError(f"node0 does not answer at {address}:{port} ({error})") from None
            time.sleep(0.02)


def _host(addresses: Sequence[str], port: int, me: Peer) -> Hub:
    members: dict[int, tuple[Channel, Peer]] = {}
    try:
        with socket.create_server((addresses[0], port), backlog=len(addresses)) as server:
            _welcome(server, len(addresses), members)
        hub = Hub(secrets.token_bytes(16), [me, *_in_order(members, 1)], _in_order(members, 0))
        hub.tell({"welcome": {"token": hub.token.hex(), "peers": [asdict(peer) for peer in hub.peers]}})
        return hub
    except (OSError, ProbeError) as error:
        with Hub(b"", [], _in_order(members, 0)) as reached:
            raise reached.fail(ProbeError(f"node0 at {addresses[0]}:{port}: {error}")) from None


def _in_order(members: dict[int, tuple[Channel, Peer]], part: int) -> list[Any]:
    return [members[rank][part] for rank in sorted(members)]


def _welcome(server: socket.socket, n: int, members: dict[int, tuple[Channel, Peer]]) -> None:
    """Accept until every rank has said hello; connections that say anything else are dropped."""
    strangers: dict[socket.socket, Channel] = {}
    deadline = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as leave:
        while len(members) < n - 1:
            missing = ", ".join(f"node{rank}" for rank in range(1, n) if rank not in members)
            for sock in _readable([server, *strangers], deadline, missing):
                if sock is server:
                    guest = server.accept()[0]
                    leave.callback(_close_unless_member, guest, members)
                    strangers[guest] = Channel(guest, "a stranger")
                else:
                    _greet(strangers, sock, n, members)


def _greet(
    strangers: dict[socket.socket, Channel], sock: socket.socket, n: int, members: dict[int, tuple[Channel, Peer]]
) -> None:
    """Read a hello; a rank that is ours and new becomes a member."""
    channel = strangers[sock]
    try:
        channel.fill()
        hello = channel.take()
        if hello is None:
            return  # half a line so far
        rank, peer = int(hello["rank"]), Peer(**hello["peer"])
    except (ProbeError, KeyError, TypeError, ValueError, OverflowError):
        del strangers[sock]
        return
    del strangers[sock]
    if 0 < rank < n and rank not in members:
        channel.who = f"node{rank}"
        members[rank] = (channel, peer)


def _close_unless_member(sock: socket.socket, members: dict[int, tuple[Channel, Peer]]) -> None:
    if all(sock is not channel.sock for channel, _ in members.values()):
        sock.close()
