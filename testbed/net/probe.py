"""Measure every directed link: `python -m testbed.net.probe --rank R --addresses a,b,c --port P`, one per node.

Rounds 1..N-1: node i sends to node (i + r) % N, so each link is used once; then a last round, the fan-in: nodes
1..N-1 all send into node 0. The receiver counts. A round runs in halves in which no node both sends and receives:
acknowledgements that queue behind a node's own data (two-way TCP on a short path) cost up to 15 % and would be
blamed on the link. Before each half all meet at node 0 over control connections (rendezvous.py); every wait has a
deadline, and a failed node ends the probe for all with a sentence.
Standard library only: it runs in every container, before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import select
import selectors
import socket
import statistics
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self, cast

from testbed.net.tcp import MTU, bottleneck, burst

# The plan of a probe, pure: who sends to whom when, for how long, and how much may be under way.

STALL = 10.0  # seconds without a byte after which a flow has failed
Pairs = Sequence[tuple[int, int]]  # (src, dst)
CUT = 0.25  # seconds of slow start that are not counted
SLICE = 0.1  # seconds; at least three are counted. Both grow where a burst takes long
CUT_BURSTS, SLICE_BURSTS = 20, 17  # so that three slices are more than 50 bursts
UNSHAPED_CUT, UNSHAPED_SLICE = 0.1, 0.067
FEWEST, MOST = 3, 9  # slices
STEADY = 0.01  # standard error of the slices' mean, as a part of it, at which counting ends
IN_FLIGHT = 0.02  # seconds of the rate: keeps the link busy and the queue, 0.05 s by default, from overflowing
MIN_IN_FLIGHT = 4 * 1024  # bytes, about three frames
MAX_IN_FLIGHT = 200_000  # bytes; fast links do well without a bound
NEAR = 0.002  # seconds of round trip; with more, what is under way is on the path and not in the queue


@dataclass(frozen=True)
class Pace:
    """How long a step cuts off, counts, and may last; in seconds."""

    cut: float
    slice: float
    most: int = MOST  # slices

    @property
    def longest(self) -> float:
        """Far beyond what a healthy step takes."""
        return 2 * (self.cut + self.most * self.slice) + STALL


def schedule(n: int) -> list[Pairs]:
    """What is sent at the same time, step by step: the halves of N-1 rounds, then the fan-in."""
    halves = [half for number in range(1, n) for half in _halves(n, number)]
    return [*halves, [(src, 0) for src in range(1, n)]] if n > 1 else []


def _halves(n: int, number: int) -> list[Pairs]:
    """Round `number` in parts where nobody both sends and receives; a ring of odd length needs a third."""
    parts: list[list[tuple[int, int]]] = [[], [], []]
    for ring in range(math.gcd(n, number)):  # the round is made of this many separate rings
        length = n // math.gcd(n, number)
        for place in range(length):
            src = (ring + place * number) % n
            last_of_odd = length % 2 == 1 and place == length - 1
            parts[2 if last_of_odd else place % 2].append((src, (src + number) % n))
    return [part for part in parts if part]


def pace(rates: Sequence[int | None], pairs: Pairs) -> Pace:
    """The slowest link of a step sets its length: at least 50 bursts are counted."""
    limits = [bottleneck(rates[dst], [rates[src] for src, to in pairs if to == dst]) for _, dst in pairs]
    spans = [burst(rate) * 8 / rate for rate in limits if rate is not None]
    if not spans:
        return Pace(UNSHAPED_CUT, UNSHAPED_SLICE, most=FEWEST)
    return Pace(max(CUT, CUT_BURSTS * max(spans)), max(SLICE, SLICE_BURSTS * max(spans)))


def window(rates: Sequence[int | None], pairs: Pairs, dst: int, round_trip: float) -> int | None:
    """Bytes a connection may have under way into `dst`; None leaves that to the kernel.

    On a slow link TCP's first window alone overflows the queue: frames are lost, and the bytes behind the gap are
    counted late. Bounded from the start, nothing is lost, and the link is still busy all the time.
    """
    sources = [src for src, to in pairs if to == dst]
    rate = bottleneck(rates[dst], [rates[src] for src in sources])
    if rate is None or round_trip > NEAR:
        return None
    size = max(MIN_IN_FLIGHT, round(rate / len(sources) * IN_FLIGHT / 8))
    return size if size <= MAX_IN_FLIGHT else None


def steady(rates: Sequence[float], most: int) -> bool:
    """Enough slices counted: their mean is known well, or there is no time for more.

    On a busy machine a slice may be short of bytes; it stays in the mean, and more are counted beside it. The rate
    that was asked plays no part: an instrument must not stop when it likes what it reads.
    """
    if len(rates) < FEWEST:
        return False
    error = statistics.stdev(rates) / math.sqrt(len(rates)) / statistics.fmean(rates)
    return error <= STEADY or len(rates) >= most


# Clocks and round trips: how far apart two nodes are in time. Standard library only, for the probe's sake.

TICKS = 8  # exchanges per clock; the quickest one counts
INFO_MIN_RTT = 148  # offset of the smallest round trip, microseconds, in Linux's struct tcp_info


@dataclass(frozen=True)
class Clock:
    """How far a node's clock is ahead of node 0's, and how wrong that may be; seconds."""

    offset: float = 0.0
    error: float = 0.0


def read_clock(ask: Callable[[int], float]) -> Clock:
    """`ask` gives the other's time: taken for the middle of the exchange, it is wrong by half of it at most."""
    best: Clock | None = None
    for number in range(TICKS):
        before, begun = time.time(), time.monotonic()
        there = ask(number)
        half = (time.monotonic() - begun) / 2
        if best is None or half < best.error:
            best = Clock(there - (before + half), half)
    assert best is not None
    return best


def min_round_trip(sock: socket.socket) -> float:
    """Seconds, the shortest that the kernel has seen on this connection."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_MIN_RTT + 4)
    return float(struct.unpack_from("=I", info, INFO_MIN_RTT)[0]) / 1e6


# Where the nodes of a probe meet: node 0 is the hub, the others are members, one JSON object per line.
#
# member -> hub   {"rank": 2, "peer": {...}}      hub -> member   {"welcome": {...}}
# hub -> member   {"tick": 0}                     member -> hub   {"tock": the member's clock}
# member -> hub   {"ready": 3}                    hub -> member   {"go": 3}
# member -> hub   {"outcome": {...}}              hub -> member   {"outcomes": [...]}
# either way      {"fail": "a sentence"}          ends the probe on every node

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


Report = Callable[[dict[str, Any]], None]
CHUNK = 256 * 1024  # bytes per send and receive call
DEEP = 1024 * 1024  # bytes of buffer at each end: a process that has to wait for a processor does not stop the link
HEADER = struct.Struct("!16sI")  # token, rank
INFO_MTU = 60  # offset of the path's MTU in Linux's struct tcp_info
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger for 0 s: closing throws away what is still under way


@dataclass(frozen=True)
class Flow:
    """What one receiver counted in one step; `src` is None for the fan-in, where all the others send."""

    src: int | None
    dst: int
    bytes: int
    seconds: float
    round_trip: float | None = None  # seconds, of the quiet path; None for the fan-in

    @property
    def goodput(self) -> float:
        """bit/s of payload."""
        return self.bytes * 8 / self.seconds


@dataclass(frozen=True)
class Measurement:
    """All that was measured, the same on every node."""

    flows: Sequence[Flow]
    mtu: int  # bytes; the smallest met
    congestion: Sequence[str]  # one per node, as its sockets say
    seconds: float  # the whole probe
    clocks: Sequence[Clock] = ()  # one per node, against node 0's


def probe_node(rank: int, addresses: Sequence[str], port: int, rate: int | None, report: Report) -> Measurement:
    """Take part in a probe as node `rank`, whose link has `rate` bit/s; all nodes call this at the same time."""
    began = time.monotonic()
    with arrive(rank, addresses, port, Peer(address=addresses[rank], rate=rate)) as meeting:
        try:
            with _Node(rank, meeting, report) as node:
                node.run()
                outcomes = meeting.gather(node.outcome())
        except (OSError, ProbeError) as error:
            raise meeting.fail(error) from None
    return _merge(outcomes, time.monotonic() - began)


def _merge(outcomes: Sequence[dict[str, Any]], seconds: float) -> Measurement:
    flows = [Flow(**flow) for outcome in outcomes for flow in outcome["flows"]]
    return Measurement(
        flows=sorted(flows, key=lambda flow: (flow.src is None, flow.src or 0, flow.dst)),
        mtu=min(outcome["mtu"] for outcome in outcomes),
        congestion=[outcome["congestion"] for outcome in outcomes],
        seconds=seconds,
        clocks=[Clock(**clock) for clock in outcomes[0]["clocks"]],
    )


class _Node:
    """One node's part: connect, meet, send and count, in every step."""

    def __init__(self, rank: int, meeting: Rendezvous, report: Report) -> None:
        self._rank = rank
        self._meeting = meeting
        self._report = report
        self._address = meeting.peers[rank].address
        self._rates = [peer.rate for peer in meeting.peers]
        self._steps = schedule(len(self._rates))
        self._listeners: dict[int, socket.socket] = {}  # one per step in which this node receives
        self._flows: list[Flow] = []
        self._mtu = MTU
        self._congestion = ""
        self._clocks: list[Clock] = []

    def __enter__(self) -> _Node:
        return self

    def __exit__(self, *exception: object) -> None:
        for listener in self._listeners.values():
            listener.close()

    def run(self) -> None:
        """All steps in turn; first everyone says where it listens, and clocks are compared while nothing is sent."""
        for number, pairs in enumerate(self._steps):
            if any(dst == self._rank for _, dst in pairs):
                self._listeners[number] = self._listen(pairs)
        ports = self._meeting.gather({str(n): sock.getsockname()[1] for n, sock in self._listeners.items()})
        self._clocks = self._meeting.clocks()
        for number, pairs in enumerate(self._steps):
            self._step(number, pairs, [node.get(str(number), 0) for node in ports])

    def _window(self, pairs: Pairs, dst: int) -> int | None:
        return window(self._rates, pairs, dst, self._meeting.round_trip())

    def _listen(self, pairs: Pairs) -> socket.socket:
        listener = socket.create_server((self._address, 0), backlog=2 * len(self._rates))
        size = self._window(pairs, self._rank)
        if size is not None:  # accepted connections inherit both
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, DEEP)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, size)
        return listener

    def outcome(self) -> dict[str, Any]:
        """What this node tells the others at the end."""
        found: dict[str, Sequence[Any]] = {"flows": self._flows, "clocks": self._clocks}
        told = {key: [asdict(each) for each in items] for key, items in found.items()}
        return {**told, "mtu": self._mtu, "congestion": self._congestion}

    def _step(self, number: int, pairs: Pairs, ports: Sequence[int]) -> None:
        """Open this step's connections, meet the others, then send and count."""
        plan = pace(self._rates, pairs)
        sources = [src for src, dst in pairs if dst == self._rank]
        with ExitStack() as closing:
            outgoing = [
                closing.enter_context(
                    self._connect((self._meeting.peers[dst].address, ports[dst]), self._window(pairs, dst))
                )
                for src, dst in pairs
                if src == self._rank
            ]
            incoming = [closing.enter_context(sock) for sock in self._accept(number, sources)]
            self._meeting.meet(number, allow=PATIENCE + plan.longest)
            senders = [threading.Thread(target=_send, args=(sock, plan.longest), daemon=True) for sock in outgoing]
            for sender in senders:
                sender.start()
            if incoming:
                self._count(number, sources, plan, incoming)
            for sock in incoming:
                sock.close()  # resets: the sender stops at once
            for sender in senders:
                sender.join(plan.longest)

    def _count(self, number: int, sources: Sequence[int], plan: Pace, incoming: Sequence[socket.socket]) -> None:
        last = number == len(self._steps) - 1
        quiet = None if last else min_round_trip(incoming[0])  # of the handshake: nothing has been sent yet
        bound = self._window(self._steps[number], self._rank)
        try:
            flow = Flow(None if last else sources[0], self._rank, *_receive(incoming, plan, bound), quiet)
        except (OSError, ProbeError) as error:
            names = ", ".join(f"node{src}" for src in sources)
            raise ProbeError(f"node{self._rank} receives nothing from {names} ({error})") from None
        self._flows.append(flow)
        event = {"event": "flow", "step": number + 1, "of": len(self._steps), "src": flow.src, "dst": flow.dst}
        self._report({**event, "goodput": round(flow.goodput)})

    def _connect(self, target: tuple[str, int], bound: int | None) -> socket.socket:
        try:
            sock = socket.create_connection(target, timeout=STALL, source_address=(self._address, 0))
            sock.sendall(HEADER.pack(self._meeting.token, self._rank))
        except OSError as error:
            raise ProbeError(f"node{self._rank} cannot reach {target[0]}:{target[1]} ({error})") from None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        if bound is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, DEEP)
        self._mtu = _path_mtu(sock)
        self._congestion = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).partition(b"\0")[0].decode()
        return sock

    def _accept(self, number: int, sources: Sequence[int]) -> list[socket.socket]:
        """This step's connections, one from each source; anything else is closed."""
        found: dict[int, socket.socket] = {}
        deadline = time.monotonic() + PATIENCE
        while missing := [f"node{src}" for src in sources if src not in found]:
            self._listeners[number].settimeout(max(0.001, deadline - time.monotonic()))
            try:
                sock, _ = self._listeners[number].accept()
            except TimeoutError:
                raise ProbeError(f"node{self._rank}: no connection from {', '.join(missing)}") from None
            src = self._identify(sock)
            if src is not None and src in sources and src not in found:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                found[src] = sock
            else:
                sock.close()
        return list(found.values())

    def _identify(self, sock: socket.socket) -> int | None:
        """The rank behind a new connection; None for a stranger."""
        sock.settimeout(STALL)
        with suppress(OSError):
            data = sock.recv(HEADER.size, socket.MSG_WAITALL)
            if len(data) == HEADER.size and data.startswith(self._meeting.token):
                return int(HEADER.unpack(data)[1])
        return None


def _path_mtu(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_MTU + 4)
    return int(struct.unpack_from("=I", info, INFO_MTU)[0])


def _send(sock: socket.socket, longest: float) -> None:
    """Fill the link until the receiver has had enough and resets; what went wrong is the receiver's to say."""
    data = memoryview(bytes(CHUNK))
    deadline = time.monotonic() + longest
    sock.settimeout(STALL)
    with suppress(OSError):
        while time.monotonic() < deadline:
            sock.send(data)


def _receive(socks: Sequence[socket.socket], plan: Pace, bound: int | None) -> tuple[int, float]:
    """Bytes and seconds counted, over all connections together; `bound` is the window of each."""
    buffer = bytearray(CHUNK)
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, data=bound)
        _, first = _drain(selector, buffer, until=0.0)
        _, start = _drain(selector, buffer, until=first + plan.cut)
        total, end, rates = 0, start, list[float]()
        while not steady(rates, plan.most):
            began = end
            size, end = _drain(selector, buffer, until=began + plan.slice)
            total += size
            rates.append(size / (end - began))
    return total, end - start


def _drain(selector: selectors.BaseSelector, buffer: bytearray, until: float) -> tuple[int, float]:
    """Read whatever comes; how much, and when the first read at or after `until` was done."""
    size = 0
    while True:
        ready = selector.select(STALL)
        if not ready:
            raise ProbeError(f"no data for {STALL:g} s")
        for key, _ in ready:
            sock = cast(socket.socket, key.fileobj)
            if key.data is not None:  # each time: the kernel lifts it whenever it thinks anew about its buffers
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, key.data)
            count = sock.recv_into(buffer)
            if count == 0:
                raise ProbeError("a sender stopped early")
            size += count
        now = time.monotonic()
        if now >= until:
            return size, now


def main(arguments: Sequence[str] | None = None) -> int:
    """One node of a probe; JSON lines on stdout: flow, then result or error."""
    parser = argparse.ArgumentParser(prog="python -m testbed.net.probe", description="Measure the links between nodes.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument(
        "--addresses", type=lambda text: text.split(","), required=True, help="all nodes, in rank order"
    )
    parser.add_argument("--port", type=int, required=True, help="where node 0 listens")
    parser.add_argument("--rate", type=lambda text: None if text == "none" else int(text), default=None, help="bit/s")
    options = parser.parse_args(arguments)
    with suppress(OSError):  # where allowed: the link is measured, not how busy the processors are
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    try:
        result = probe_node(options.rank, options.addresses, options.port, options.rate, _print)
    except (OSError, ProbeError) as error:
        _print({"event": "error", "rank": options.rank, "sentence": str(error)})
        return 1
    _print({"event": "result", "rank": options.rank, **asdict(result)})
    return 0


def _print(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
