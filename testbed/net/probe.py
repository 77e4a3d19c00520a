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
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

from testbed.net.clock import Clock, min_round_trip
from testbed.net.pace import STALL, Pace, Pairs, pace, schedule, steady, window
from testbed.net.rendezvous import PATIENCE, Peer, ProbeError, Rendezvous, arrive
from testbed.net.wire import MTU

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
