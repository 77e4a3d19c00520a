"""Where the nodes of a probe meet: node 0 is the hub, the others are members, one JSON object per line.

    member -> hub   {"rank": 2, "peer": {...}}      hub -> member   {"token": "...", "peers": [...]}
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

PATIENCE = 30.0  # seconds that nodes may be apart, start-up included
LINE_LIMIT = 1 << 20  # bytes; a longer line is not ours


class ProbeError(Exception):
    """The probe cannot go on; the message is a sentence for a person."""


@dataclass(frozen=True)
class Peer:
    """Where a node takes data connections, and the rate of its link in bit/s."""

    address: str
    port: int
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
            raise ProbeError(f"{self.who} left the probe ({error})") from None

    def take(self) -> dict[str, Any] | None:
        """Read what has arrived; an object once its line is complete."""
        try:
            data = self.sock.recv(65536)
        except OSError as error:
            raise ProbeError(f"{self.who} left the probe ({error})") from None
        self._buffer += data
        if not data or len(self._buffer) > LINE_LIMIT:
            raise ProbeError(f"{self.who} left the probe")
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ProbeError(f"{self.who} does not speak the probe's language")
        return message


def hear(channels: Sequence[Channel], key: str, allow: float) -> dict[str, Any]:
    """One object from each channel, the value under `key` by who sent it; a failure of any ends the wait at once."""
    heard: dict[str, Any] = {}
    waiting = {channel.sock: channel for channel in channels}
    deadline = time.monotonic() + allow
    while waiting:
        for sock in _readable(list(waiting), deadline, waiting):
            message = waiting[sock].take()
            if message is not None:
                channel = waiting.pop(sock)
                if "fail" in message or key not in message:
                    raise ProbeError(str(message.get("fail", f"{channel.who} is out of step: {message}")))
                heard[channel.who] = message[key]
    return heard


def _readable(
    socks: list[socket.socket], deadline: float, waiting: dict[socket.socket, Channel] | None = None
) -> list[socket.socket]:
    """Those with something to read; ProbeError naming who is silent when the deadline passes."""
    ready = select.select(socks, [], [], max(0.0, deadline - time.monotonic()))[0]
    if not ready:
        names = ", ".join(channel.who for channel in (waiting or {}).values()) or "the other nodes"
        raise ProbeError(f"waited too long for {names}")
    return ready


class Rendezvous(ABC):
    """What a node needs of the meeting, hub or member."""

    peers: Sequence[Peer]
    token: bytes
    _channels: list[Channel]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for channel in self._channels:
            channel.sock.close()

    @abstractmethod
    def meet(self, number: int, allow: float) -> None:
        """Return when all nodes are ready for round `number`, within `allow` seconds."""

    @abstractmethod
    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Give this node's outcome; the outcomes of all, in rank order."""

    def fail(self, error: Exception) -> ProbeError:
        """Tell the others why; what this node should raise."""
        for channel in self._channels:
            with contextlib.suppress(ProbeError):
                channel.send({"fail": str(error)})
        return ProbeError(str(error))


class Hub(Rendezvous):
    """Node 0: waits for all the others, then leads."""

    def __init__(self, addresses: Sequence[str], port: int, me: Peer) -> None:
        self.token = secrets.token_bytes(16)
        self._channels = []
        with _listen(addresses[0], port) as server:
            members = self._welcome(server, len(addresses))
        self._channels = [channel for _, (channel, _) in sorted(members.items())]
        self.peers = [me, *(peer for _, (_, peer) in sorted(members.items()))]
        self._tell({"token": self.token.hex(), "peers": [asdict(peer) for peer in self.peers]})

    def _welcome(self, server: socket.socket, n: int) -> dict[int, tuple[Channel, Peer]]:
        """Accept until every rank has said hello; connections that say anything else are dropped."""
        members: dict[int, tuple[Channel, Peer]] = {}
        strangers: dict[socket.socket, Channel] = {}
        deadline = time.monotonic() + PATIENCE
        try:
            while len(members) < n - 1:
                for sock in _knocking(server, strangers, deadline, missing=set(range(1, n)) - set(members)):
                    hello = _hello(strangers.pop(sock), n)
                    if hello is not None and hello[0] not in members:
                        members[hello[0]] = hello[1:]
        finally:
            for stranger in strangers:
                stranger.close()
        return members

    def _tell(self, message: dict[str, Any]) -> None:
        for channel in self._channels:
            channel.send(message)

    def meet(self, number: int, allow: float) -> None:
        """Wait for all members, then let all go."""
        hear(self._channels, "ready", allow)
        self._tell({"go": number})

    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Collect in rank order and hand the whole to everyone."""
        heard = hear(self._channels, "outcome", PATIENCE)
        outcomes = [outcome, *(heard[channel.who] for channel in self._channels)]
        self._tell({"outcomes": outcomes})
        return outcomes


class Member(Rendezvous):
    """Any other node: follows node 0."""

    def __init__(self, rank: int, addresses: Sequence[str], port: int, me: Peer) -> None:
        sock = _reach(addresses[rank], addresses[0], port)
        self._channels = [Channel(sock, "node0")]
        self._hub = self._channels[0]
        self._hub.send({"rank": rank, "peer": asdict(me)})
        welcome = self._ask("peers", PATIENCE, whole=True)
        self.peers = [Peer(**peer) for peer in welcome["peers"]]
        self.token = bytes.fromhex(welcome["token"])

    def _ask(self, key: str, allow: float, whole: bool = False) -> Any:
        deadline = time.monotonic() + allow
        while True:
            _readable([self._hub.sock], deadline, {self._hub.sock: self._hub})
            message = self._hub.take()
            if message is not None:
                if key not in message:
                    raise ProbeError(str(message.get("fail", f"node0 is out of step: {message}")))
                return message if whole else message[key]

    def meet(self, number: int, allow: float) -> None:
        """Say ready, wait for go."""
        self._hub.send({"ready": number})
        self._ask("go", allow)

    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Hand in ours, get all."""
        self._hub.send({"outcome": outcome})
        return list(self._ask("outcomes", PATIENCE))
