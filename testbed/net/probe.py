"""Measure every directed link: `python -m testbed.net.probe --rank R --addresses a,b,c --port P`, one per node.

Rounds 1..N-1: node i sends to node (i + r) % N, all at once, so each link is used once and each node is busy both
ways. A last round, the fan-in: nodes 1..N-1 all send into node 0. The receiver counts. Between rounds all meet at
node 0 over control connections (`rendezvous.py`); every wait has a deadline, and a failed node ends the probe for
all with a sentence. Standard library only: it runs in every container, before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import json
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from testbed.net.pace import Pace, pace
from testbed.net.rendezvous import PATIENCE, Hub, Member, Peer, ProbeError, Rendezvous

Report = Callable[[dict[str, Any]], None]
CHUNK = 256 * 1024  # bytes per send and receive call
UNSENT = 128 * 1024  # bytes a sender may hold unsent: what it held at the end would delay the next round
HEADER = struct.Struct("!16sII")  # token, round, rank: stray connections are told apart
IP_MTU = 14  # Linux's number; Python's socket module does not name it
RST_ON_CLOSE = struct.pack("ii", 1, 0)  # linger for 0 s: closing throws away what is still under way


@dataclass(frozen=True)
class Flow:
    """What one receiver counted in one round; `src` is None for the fan-in, where all the others send."""

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


def probe_node(rank: int, addresses: Sequence[str], port: int, rate: int | None, report: Report) -> Measurement:
    """Take part in a probe as node `rank`, whose link has `rate` bit/s; all nodes call this at the same time."""
    began = time.monotonic()
    with socket.create_server((addresses[rank], 0), backlog=len(addresses)) as listener:
        me = Peer(address=addresses[rank], port=listener.getsockname()[1], rate=rate)
        with Hub(addresses, port, me) if rank == 0 else Member(rank, addresses, port, me) as meeting:
            node = _Node(rank, listener, meeting, report)
            try:
                node.run()
                everything = meeting.gather(node.outcome())
            except (OSError, ProbeError) as error:
                raise meeting.fail(error) from None
    return _merge(everything, time.monotonic() - began)


def _merge(outcomes: Sequence[dict[str, Any]], seconds: float) -> Measurement:
    flows = [Flow(**flow) for outcome in outcomes for flow in outcome["flows"]]
    return Measurement(
        flows=sorted(flows, key=lambda flow: (flow.src is None, flow.src, flow.dst)),
        mtu=min(outcome["mtu"] for outcome in outcomes),
        congestion=[outcome["congestion"] for outcome in outcomes],
        seconds=seconds,
    )


class _Node:
    """One node's part: connect, meet, send and count, in every round."""

    def __init__(self, rank: int, listener: socket.socket, meeting: Rendezvous, report: Report) -> None:
        self._rank = rank
        self._listener = listener
        self._meeting = meeting
        self._report = report
        self._flows: list[Flow] = []
        self._mtu = 0
        self._congestion = ""

    def run(self) -> None:
        """All rounds in turn."""
        n = len(self._meeting.peers)
        for number in range(1, n + 1):
            pairs = fan_in(n) if number == n else ring_round(n, number)
            flow = self._round(number, pairs)
            if flow is not None:
                src = None if number == n else flow.src
                self._flows.append(Flow(src, flow.dst, flow.bytes, flow.seconds))
                self._report({"event": "flow", "round": number, "of": n, "src": src, "dst": flow.dst}
                             | {"goodput": round(flow.goodput)})

    def outcome(self) -> dict[str, Any]:
        """What this node tells the others at the end."""
        return {"flows": [asdict(flow) for flow in self._flows], "mtu": self._mtu, "congestion": self._congestion}

    def _round(self, number: int, pairs: Sequence[tuple[int, int]]) -> Flow | None:
        """Open this round's connections, meet the others, then send and count; None for one that only sends."""
        plan = pace([peer.rate for peer in self._meeting.peers], pairs)
        targets = [dst for src, dst in pairs if src == self._rank]
        sources = [src for src, dst in pairs if dst == self._rank]
        outgoing = [self._connect(number, dst) for dst in targets]
        incoming = self._accept(number, sources)
        try:
            self._meeting.meet(number, allow=PATIENCE + plan.longest)
            senders = [threading.Thread(target=_send, args=(sock, plan), daemon=True) for sock in outgoing]
            for sender in senders:
                sender.start()
            counted = _receive(incoming, plan, self._window(plan, sources)) if sources else None
            for sender in senders:
                sender.join(plan.longest)
        finally:
            for sock in [*outgoing, *incoming]:
                sock.close()
        return Flow(sources[0], self._rank, *counted) if counted else None
