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
import json
import math
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from testbed.net.rendezvous import PATIENCE, Peer, ProbeError, Rendezvous, arrive
from testbed.net.wire import MTU, bottleneck, burst

Report = Callable[[dict[str, Any]], None]
Pairs = Sequence[tuple[int, int]]  # (src, dst)
CHUNK = 256 * 1024  # bytes per send and receive call
UNSENT = 128 * 1024  # bytes a sender may hold unsent: more would only delay the end
STALL = 10.0  # seconds without a byte after which a flow has failed
CUT = 0.25  # seconds of slow start that are not counted
WINDOW = 0.3  # seconds that are; both grow where a burst takes long
CUT_BURSTS, WINDOW_BURSTS = 20, 50
UNSHAPED_CUT, UNSHAPED_WINDOW = 0.1, 0.2
IN_FLIGHT = 0.025  # seconds of the rate: fills the bucket, stays below the queue, so nothing is lost and sent again
MIN_IN_FLIGHT = 6 * 1024  # bytes, four frames
SMALL_BUFFER = 128 * 1024  # bytes; a first window is half of this, and floods the queue of a link slower than that
HEADER = struct.Struct("!16sII")  # token, step, rank
INFO_MTU, INFO_ROUND_TRIP = 60, 68  # offsets of 32-bit fields in Linux's struct tcp_info; bytes, microseconds
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger for 0 s: closing throws away what is still under way


@dataclass(frozen=True)
class Flow:
    """What one receiver counted in one step; `src` is None for the fan-in, where all the others send."""

    src: int | None
    dst: int
    bytes: int
    seconds: float

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


@dataclass(frozen=True)
class Pace:
    """How long a step cuts off, counts, and may last; in seconds."""

    cut: float
    window: float

    @property
    def longest(self) -> float:
        """Far beyond what a healthy step takes."""
        return 2 * (self.cut + self.window) + STALL


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
        return Pace(UNSHAPED_CUT, UNSHAPED_WINDOW)
    return Pace(max(CUT, CUT_BURSTS * max(spans)), max(WINDOW, WINDOW_BURSTS * max(spans)))


def in_flight(rates: Sequence[int | None], pairs: Pairs, src_dst: tuple[int, int], round_trip: float) -> int | None:
    """Bytes one flow may have under way, so that no queue overflows or runs dry; None where nothing is shaped."""
    sources = [src for src, dst in pairs if dst == src_dst[1]]
    total = bottleneck(rates[src_dst[1]], [rates[src] for src in sources])
    if total is None:
        return None
    share = bottleneck(total // len(sources), [rates[src_dst[0]]]) or total
    return max(MIN_IN_FLIGHT, round(share * (IN_FLIGHT + round_trip) / 8))


def probe_node(rank: int, addresses: Sequence[str], port: int, rate: int | None, report: Report) -> Measurement:
    """Take part in a probe as node `rank`, whose link has `rate` bit/s; all nodes call this at the same time."""
    began = time.monotonic()
    with socket.create_server((addresses[rank], 0), backlog=2 * len(addresses)) as listener:
        me = Peer(address=addresses[rank], port=listener.getsockname()[1], rate=rate)
        with arrive(rank, addresses, port, me) as meeting:
            node = _Node(rank, listener, meeting, report)
            try:
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
    )


class _Node:
    """One node's part: connect, meet, send and count, in every step."""

    def __init__(self, rank: int, listener: socket.socket, meeting: Rendezvous, report: Report) -> None:
        self._rank = rank
        self._listener = listener
        self._meeting = meeting
        self._report = report
        self._rates = [peer.rate for peer in meeting.peers]
        self._steps = schedule(len(self._rates))
        self._flows: list[Flow] = []
        self._mtu = MTU
        self._congestion = ""

    def run(self) -> None:
        """All steps in turn."""
        for number, pairs in enumerate(self._steps, start=1):
            self._step(number, pairs)

    def outcome(self) -> dict[str, Any]:
        """What this node tells the others at the end."""
        return {"flows": [asdict(flow) for flow in self._flows], "mtu": self._mtu, "congestion": self._congestion}

    def _step(self, number: int, pairs: Pairs) -> None:
        """Open this step's connections, meet the others, then send and count."""
        plan = pace(self._rates, pairs)
        sources = [src for src, dst in pairs if dst == self._rank]
        with ExitStack() as closing:
            outgoing = [
                closing.enter_context(self._connect(number, pair, pairs)) for pair in pairs if pair[0] == self._rank
            ]
            incoming = [closing.enter_context(sock) for sock in self._accept(number, pairs)]
            self._meeting.meet(number, allow=PATIENCE + plan.longest)
            senders = [threading.Thread(target=_send, args=(sock, plan.longest), daemon=True) for sock in outgoing]
            for sender in senders:
                sender.start()
            if incoming:
                self._count(number, sources, *_receive(incoming, plan))
            for sock in incoming:
                sock.close()  # resets: the sender stops at once
            for sender in senders:
                sender.join(plan.longest)

    def _count(self, number: int, sources: Sequence[int], size: int, seconds: float) -> None:
        last = len(self._steps)
        flow = Flow(None if number == last else sources[0], self._rank, size, seconds)
        self._flows.append(flow)
        event = {"event": "flow", "step": number, "of": last, "src": flow.src, "dst": flow.dst}
        self._report({**event, "goodput": round(flow.goodput)})

    def _connect(self, number: int, src_dst: tuple[int, int], pairs: Pairs) -> socket.socket:
        peer, mine = self._meeting.peers[src_dst[1]], self._meeting.peers[self._rank]
        try:
            sock = socket.create_connection((peer.address, peer.port), timeout=STALL, source_address=(mine.address, 0))
            sock.sendall(HEADER.pack(self._meeting.token, number, self._rank))
        except OSError as error:
            raise ProbeError(f"node{self._rank} cannot reach {peer.address}:{peer.port} ({error})") from None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        bound = in_flight(self._rates, pairs, src_dst, _info(sock, INFO_ROUND_TRIP) / 1e6)
        if bound is not None and bound <= SMALL_BUFFER:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, round(bound * 0.6))  # the kernel doubles it
        self._mtu = _info(sock, INFO_MTU)
        self._congestion = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).partition(b"\0")[0].decode()
        return sock

    def _accept(self, number: int, pairs: Pairs) -> list[socket.socket]:
        """This step's connections, one from each source; anything else is closed."""
        sources = [src for src, dst in pairs if dst == self._rank]
        found: dict[int, socket.socket] = {}
        deadline = time.monotonic() + PATIENCE
        while missing := [f"node{src}" for src in sources if src not in found]:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                raise ProbeError(f"node{self._rank}: no connection from {', '.join(missing)}") from None
            src = self._identify(sock, number)
            if src in sources and src not in found:
                found[src] = self._prepare(sock, (src, self._rank), pairs)
            else:
                sock.close()
        return list(found.values())

    def _identify(self, sock: socket.socket, number: int) -> int | None:
        """The rank behind a new connection; None for a stranger."""
        sock.settimeout(STALL)
        with suppress(OSError):
            data = sock.recv(HEADER.size, socket.MSG_WAITALL)
            if len(data) == HEADER.size:
                token, of_step, src = HEADER.unpack(data)
                return int(src) if (token, of_step) == (self._meeting.token, number) else None
        return None

    def _prepare(self, sock: socket.socket, src_dst: tuple[int, int], pairs: Pairs) -> socket.socket:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        bound = in_flight(self._rates, pairs, src_dst, _info(sock, INFO_ROUND_TRIP) / 1e6)
        if bound is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, bound)
        return sock


def _info(sock: socket.socket, offset: int) -> int:
    """One field of the kernel's struct tcp_info."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_ROUND_TRIP + 4)
    return int(struct.unpack_from("=I", info, offset)[0])


def _send(sock: socket.socket, longest: float) -> None:
    """Fill the link until the receiver has had enough and resets; what went wrong is the receiver's to say."""
    data = memoryview(bytes(CHUNK))
    deadline = time.monotonic() + longest
    sock.settimeout(STALL)
    with suppress(OSError):
        while time.monotonic() < deadline:
            sock.send(data)


def _receive(socks: Sequence[socket.socket], plan: Pace) -> tuple[int, float]:
    """Bytes and seconds of the counted window, over all connections together."""
    buffer = bytearray(CHUNK)
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ)
        _, first = _drain(selector, buffer, until=0.0)
        _, start = _drain(selector, buffer, until=first + plan.cut)
        size, end = _drain(selector, buffer, until=start + plan.window)
    return size, end - start


def _drain(selector: selectors.BaseSelector, buffer: bytearray, until: float) -> tuple[int, float]:
    """Read whatever comes; how much, and when the first read at or after `until` was done."""
    size = 0
    while True:
        ready = selector.select(STALL)
        if not ready:
            raise ProbeError(f"no data for {STALL:g} s")
        for key, _ in ready:
            count = key.fileobj.recv_into(buffer)  # type: ignore[union-attr]
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
    parser.add_argument("--addresses", type=lambda text: text.split(","), required=True, help="all nodes, in rank order")
    parser.add_argument("--port", type=int, required=True, help="where node 0 listens")
    parser.add_argument("--rate", type=lambda text: None if text == "none" else int(text), default=None, help="bit/s")
    options = parser.parse_args(arguments)
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
