"""Measure every directed link between nodes: `python -m testbed.net.probe --rank R --addresses a,b,c --port P`.

Every node runs one. In rounds 1..N-1 node i sends to node (i + r) % N, so that each directed link is used once; above
ALL_LINKS_NODES only some of the rounds are taken, in each of which every node still sends and receives. Then come the
fan-ins: several nodes send into one, because one sender alone never fills more than its own link, and so never shows
whether the ingress of the receiver is shaped. The receiver counts. Each round is cut into steps in which no node both
sends and receives: acknowledgements that queue behind a node's own data (two-way TCP on a short path) cost up to 15 %,
and the link would look that much slower than it is. Before each step all nodes report to node 0 and wait for its
answer. With racks, at most one link of a step passes each uplink, and at last all nodes of a rack send to all others at
once, because one sender alone does not show what the uplink passes. Where a delay or a loss is requested, the
round-trip time and the lost packets of a link are measured before its flow; where packets are lost datagrams are
counted instead of a flow (net/distance.py). Every wait has a deadline. If a node fails, the probe ends on all nodes
with the same message.

The controller starts the probe on every node; ranks without a controller call `probe_node`. Both check the result
by net/check.py.
Standard library only, so that it starts quickly on a slow node; `receipt_of` imports what it needs when called.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from testbed.net import distance
from testbed.net.channel import Channel, listen, new_token
from testbed.net.tcp import MTU_BYTES, congestion_control, efficiency, min_round_trip, path_mtu, wire_rate
from testbed.spec.errors import ChannelClosed, ProbeError
from testbed.spec.fabric import Distance, Fabric, Pairs
from testbed.spec.units import burst_bytes

if TYPE_CHECKING:
    from testbed.results.receipt import Receipt, WayReceipt

MEETING_TIMEOUT_S = 30.0  # for all nodes to connect, start-up included
STALL_TIMEOUT_S = 10.0  # a flow that receives no byte for so long has failed

ALL_LINKS_NODES = 16  # with more nodes a sample of the links is measured: 64 nodes have 4032
SAMPLE_ROUNDS = 8  # of that sample: each node sends on so many links and receives on so many
ACROSS_LINKS = 24  # most links between racks that are measured, because that is done one after the other
SAMPLE_ACROSS = 2  # of these links after training
ALL_PAIRS = 36  # through an uplink at once; of more, each node sends to one
FILLS = 1.25  # senders fill a link if their rates together are so many times its own

SLOW_START_S = 0.25  # discarded at the start of a flow
SLICE_S = 0.1  # a flow is counted in slices
SLOW_START_BURSTS, SLICE_BURSTS = 20, 17  # both take longer on a slow link; three slices hold more than 50 bursts
UNSHAPED_SLOW_START_S, UNSHAPED_SLICE_S = 0.1, 0.067
MIN_SLICES, MAX_SLICES = 3, 9
TOGETHER_SLICES = 5  # of a step whose receivers' rates are added
MAX_STANDARD_ERROR = 0.01  # a flow ends when the standard error of the slices' mean is at most this share of it

IN_FLIGHT_S = 0.02  # seconds of the rate in flight: keeps the link busy, and its queue (0.05 s) from overflowing
MIN_IN_FLIGHT_BYTES = 4 * 1024  # about three frames
MAX_IN_FLIGHT_BYTES = 200_000  # a link that needs more in flight is not limited
SLOW_START_ROUND_TRIPS, SLICE_ROUND_TRIPS = 10, 2  # on a path with delay: TCP's window needs so long to fill it
SHORT_PATH_S = 0.002  # on a path with a longer round trip the data in flight is on the path, not in the queue

CLOCK_EXCHANGES = 8  # per clock; the quickest one counts
CHUNK_BYTES = 256 * 1024  # per send and receive call
BUFFER_BYTES = 1024 * 1024  # at each end, so that the link stays busy while a process waits for a processor
HEADER = struct.Struct("!32sI")  # of a data connection: token, rank
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing discards what is still in flight

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Pace:
    """How long one step discards, counts, and may take."""

    slow_start_s: float
    slice_s: float
    max_slices: int = MAX_SLICES
    min_slices: int = MIN_SLICES

    @property
    def timeout_s(self) -> float:
        """Much more than a step takes when nothing is wrong."""
        return 2 * (self.slow_start_s + self.max_slices * self.slice_s) + STALL_TIMEOUT_S


def link_steps(n: int) -> list[Pairs]:
    """The pairs of every step that measures links: all rounds, or SAMPLE_ROUNDS of them, spread evenly."""
    rounds = range(1, n) if n <= ALL_LINKS_NODES else [1 + k * (n - 1) // SAMPLE_ROUNDS for k in range(SAMPLE_ROUNDS)]
    return [step for number in rounds for step in _steps_of_round(n, number)]


def link_steps_of(fabric: Fabric) -> list[Pairs]:
    """The same with racks: the links inside racks as without, then those across, of which some are left out."""
    steps = link_steps(fabric.size)
    if not fabric.shared_uplinks:
        return steps
    inside = [[pair for pair in step if not fabric.crosses(*pair)] for step in steps]
    across = [pair for step in steps for pair in step if fabric.crosses(*pair)]
    kept = min(len(across), ACROSS_LINKS)
    spread = [across[k * len(across) // kept] for k in range(kept)]
    return [*filter(None, inside), *_one_per_uplink(fabric, spread)]


def _one_per_uplink(fabric: Fabric, pairs: Pairs) -> list[Pairs]:
    """Steps in which each uplink carries one pair, in one direction: acknowledgements must not queue behind data."""
    steps: list[list[tuple[int, int]]] = []
    for src, dst in pairs:
        racks = {fabric.racks[src], fabric.racks[dst]}
        for step in steps:
            if not racks & {fabric.racks[node] for pair in step for node in pair}:
                step.append((src, dst))
                break
        else:
            steps.append([(src, dst)])
    return list(steps)


def uplink_steps(fabric: Fabric) -> list[tuple[int, bool, Pairs]]:
    """For each rack, and each direction (True: out of the rack), the pairs that send through its uplink at once.

    What leaves one of two racks enters the other, so two racks have one step for each direction.
    """
    found: list[tuple[int, bool, Pairs]] = []
    racks = fabric.shared_uplinks
    for rack in racks:
        own = [node for node in range(fabric.size) if fabric.racks[node] == rack]
        others = [node for node in range(fabric.size) if fabric.racks[node] != rack]
        for outgoing in (True, False) if len(racks) > 2 else (True,):
            senders, receivers = (own, others) if outgoing else (others, own)
            pairs = [(src, dst) for src in senders for dst in receivers]
            if len(pairs) > ALL_PAIRS:
                count = max(len(senders), len(receivers))
                pairs = [(senders[k % len(senders)], receivers[k % len(receivers)]) for k in range(count)]
            found.append((rack, outgoing, pairs))
    return found


def fan_in_steps(fabric: Fabric) -> list[Pairs]:
    """The pairs of every fan-in: all nodes into node 0, then as few as fill the link into every other shaped node.

    Several nodes receive in one step if there are enough senders for each. Two nodes have one fan-in only: a single
    sender fills no link but its own.
    """
    n, rates = fabric.size, fabric.rates
    if n < 2:
        return []
    steps: list[Pairs] = [[(src, 0) for src in range(1, n)]]
    waiting = [dst for dst in range(1, n) if n > 2 and rates[dst] is not None]
    while waiting:
        step: list[tuple[int, int]] = []
        free = set(range(n))
        for dst in [dst for dst in waiting if dst in free][: 1 if fabric.shared_uplinks else None]:
            # First those that have had their own fan-in, so that the others can receive in the same step.
            others = sorted(free - {dst}, key=lambda src: (src in waiting, -(rates[src] or math.inf), src))
            senders = _senders(fabric, dst, others) or (others if not step else [])
            if dst in free and senders:
                step += [(src, dst) for src in senders]
                free -= {dst, *senders}
        waiting = [dst for dst in waiting if dst not in {to for _, to in step}]
        steps.append(step)
    return steps


def _senders(fabric: Fabric, dst: int, others: Sequence[int]) -> Sequence[int]:
    """The first of `others`, at least two, that together fill the link of `dst`; none if all of them do not."""
    unlimited = replace(fabric, rates=tuple(None if node == dst else rate for node, rate in enumerate(fabric.rates)))
    for count in range(2, len(others) + 1):
        sent = unlimited.limit([(src, dst) for src in others[:count]])
        if sent is None or sent >= FILLS * (fabric.rates[dst] or 0):
            return others[:count]
    return []


def schedule(fabric: Fabric, sample: int | None = None) -> list[Pairs]:
    """The pairs of every step: the links, then the fan-ins, then the uplinks."""
    links, fan_ins, uplinks = plan_steps(fabric, sample)
    return [*links, *fan_ins, *(pairs for _, _, pairs in uplinks)]


def plan_steps(
    fabric: Fabric, sample: int | None = None
) -> tuple[list[Pairs], list[Pairs], list[tuple[int, bool, Pairs]]]:
    """The steps that measure links, the fan-ins, and the uplinks.

    With `sample`, a number that chooses them: one round of links, in which every node sends and receives once (with
    racks at least one of them across), the fan-in of one node, and one uplink.
    """
    n, uplinks = fabric.size, uplink_steps(fabric)
    if sample is None or n < 2:
        return link_steps_of(fabric), fan_in_steps(fabric), uplinks
    into = [pair for step in fan_in_steps(fabric) for pair in step]
    receivers = sorted({dst for _, dst in into})
    chosen = receivers[sample % len(receivers)]
    fan_ins: list[Pairs] = [[pair for pair in into if pair[1] == chosen]] if n > 2 else []  # two nodes: as the links
    links = _steps_of_round(n, 1 + sample % (n - 1))
    if not uplinks:
        return links, fan_ins, []
    inside = [[pair for pair in step if not fabric.crosses(*pair)] for step in links]
    across = [pair for step in links for pair in step if fabric.crosses(*pair)]
    kept = [*filter(None, inside), *_one_per_uplink(fabric, across[:SAMPLE_ACROSS])]
    return kept, fan_ins, [uplinks[sample % len(uplinks)]]


def _steps_of_round(n: int, number: int) -> list[Pairs]:
    """Two steps in which no node both sends and receives; three if the round has a ring of odd length."""
    steps: list[list[tuple[int, int]]] = [[], [], []]
    rings = math.gcd(n, number)  # the round consists of this many separate rings
    for ring in range(rings):
        length = n // rings
        for index in range(length):
            src = (ring + index * number) % n
            last_of_odd = length % 2 == 1 and index == length - 1
            steps[2 if last_of_odd else index % 2].append((src, (src + number) % n))
    return [step for step in steps if step]


def pace(fabric: Fabric, pairs: Pairs, together: bool = False) -> Pace:
    """Return how long a step takes. Its slowest link decides: at least 50 bursts are counted.

    `together`: all receivers count for the same time, because their rates are added.
    """
    limits = [fabric.limit([pair for pair in pairs if pair[1] == dst]) for _, dst in pairs]
    burst_s = [burst_bytes(rate) * 8 / rate for rate in limits if rate is not None]
    round_trip = longest_round_trip(fabric, pairs)
    far = (SLOW_START_ROUND_TRIPS * round_trip, SLICE_ROUND_TRIPS * round_trip)
    if not burst_s:
        slow_start_s, slice_s = max(UNSHAPED_SLOW_START_S, far[0]), max(UNSHAPED_SLICE_S, far[1])
        return Pace(slow_start_s, slice_s, max_slices=MIN_SLICES)
    slow_start_s, slice_s = (
        max(SLOW_START_S, SLOW_START_BURSTS * max(burst_s), far[0]),
        max(SLICE_S, SLICE_BURSTS * max(burst_s), far[1]),
    )
    return Pace(slow_start_s, slice_s, *((TOGETHER_SLICES, TOGETHER_SLICES) if together else ()))


def longest_round_trip(fabric: Fabric, pairs: Pairs) -> float:
    """Seconds that are requested for the way there and back of the farthest pair."""
    found = (fabric.round_trip(*pair) for pair in pairs)
    return max((each.delay + each.jitter for each in found), default=0.0)


def distance_timeout(fabric: Fabric, pairs: Pairs, single: bool) -> float:
    """Seconds after which measuring the distances of a step counts as hung; 0 where none is requested."""
    if not fabric.is_far(pairs):
        return 0.0
    far = max(
        distance.Plan.of(fabric, pairs, pair, single).seconds(trip.delay, trip.jitter)
        for pair in pairs
        for trip in [fabric.round_trip(*pair)]
    )
    return 4 * far + pace(fabric, pairs).timeout_s + STALL_TIMEOUT_S


def longest_probe(fabric: Fabric, sample: int | None = None) -> float:
    """Seconds after which a probe of these links counts as hung."""
    steps = schedule(fabric, sample)
    waits = (pace(fabric, pairs).timeout_s + distance_timeout(fabric, pairs, single=True) for pairs in steps)
    return 2 * MEETING_TIMEOUT_S + sum(waits)


def window(fabric: Fabric, pairs: Pairs, dst: int, round_trip: float) -> int | None:
    """Bytes that one connection into `dst` may have in flight; None leaves that to the kernel.

    On a slow link TCP's first window alone overflows the queue: frames are lost, and the bytes behind the gap are
    counted late. With a bound from the start nothing is lost, and the link is still busy all the time.
    """
    into = [pair for pair in pairs if pair[1] == dst]
    rate, flows = fabric.limit(into), len(into)
    if len({to for _, to in pairs if to != dst}) and any(fabric.crosses(*pair) for pair in into):
        rate, flows = fabric.limit(pairs), len(pairs)  # all of them share an uplink
    if rate is None:
        return None
    farthest = longest_round_trip(fabric, into)
    if farthest > SHORT_PATH_S:  # all of them may be in flight: the receiver's buffer grows to that size
        return max(MIN_IN_FLIGHT_BYTES, round(rate / flows * (farthest + IN_FLIGHT_S) / 8))
    if round_trip > SHORT_PATH_S:
        return None
    size = max(MIN_IN_FLIGHT_BYTES, round(rate / flows * IN_FLIGHT_S / 8))
    return size if size <= MAX_IN_FLIGHT_BYTES else None


def steady(rates: Sequence[float], max_slices: int, min_slices: int = MIN_SLICES) -> bool:
    """Return True if enough slices are counted: their mean is known well, or there are `max_slices`.

    On a busy machine a slice may be short of bytes; it stays in the mean, and more slices are counted. The requested
    rate is not used: a measurement must not end because its result is the expected one.
    """
    if len(rates) < min_slices:
        return False
    error = statistics.stdev(rates) / math.sqrt(len(rates)) / statistics.fmean(rates)
    return error <= MAX_STANDARD_ERROR or len(rates) >= max_slices


@dataclass(frozen=True)
class Clock:
    """How far a node's clock is ahead of node 0's, and the largest error of that; seconds."""

    offset: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class Flow:
    """What one receiver counted in one step; `src` is None for a fan-in, and for its part of what an uplink passed."""

    src: int | None
    dst: int
    bytes: int
    seconds: float
    round_trip: float | None = None  # seconds, before any data was sent; None for a fan-in
    uplink: tuple[int, bool] | None = None  # the rack whose uplink all senders of the step share, and if it sends
    packets: int = 0  # numbered datagrams that were sent to count those that are lost
    lost: int = 0

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Build it from JSON, which has no tuples."""
        uplink = values.get("uplink")
        return cls(**(values | {"uplink": tuple(uplink) if uplink else None}))

    @property
    def goodput(self) -> float:
        """Payload rate in bit/s."""
        return self.bytes * 8 / self.seconds


@dataclass(frozen=True)
class Measurement:
    """Everything that a probe measured; the same on every node."""

    flows: Sequence[Flow]
    mtu: int  # bytes; the smallest of all paths
    congestion: Sequence[str]  # of each node's connections
    seconds: float  # of the whole probe
    clocks: Sequence[Clock] = ()  # of each node, against node 0's

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Build it from the event `result` that a probe process prints."""
        return cls(
            flows=[Flow.of(flow) for flow in values["flows"]],
            mtu=values["mtu"],
            congestion=values["congestion"],
            seconds=values["seconds"],
            clocks=[Clock(**clock) for clock in values["clocks"]],
        )


def receipt_of(measurement: Measurement, fabric: Fabric) -> Receipt:
    """Return the receipt: the measured rates against the requested rates of the links and uplinks."""
    # pydantic: not for a probe process
    from testbed.results.receipt import (
        ClockReceipt,
        FanIn,
        LinkReceipt,
        Receipt,
        UplinkReceipt,
    )

    def rate(goodput: float, pairs: Pairs) -> dict[str, Any]:
        requested, measured = fabric.limit(pairs), wire_rate(goodput, measurement.mtu)
        error = None if requested is None else measured / requested - 1
        far = fabric.is_far(pairs)
        return {"requested": requested, "goodput": goodput, "measured": measured, "error": error, "far": far}

    links, fan_ins = [], list[FanIn]()
    into = [pair for step in fan_in_steps(fabric) for pair in step]
    for flow in measurement.flows:
        if flow.uplink is not None:
            continue
        if flow.src is None:
            pairs = [pair for pair in into if pair[1] == flow.dst]
            fan_ins.append(FanIn(dst=flow.dst, senders=tuple(src for src, _ in pairs), **rate(flow.goodput, pairs)))
        else:
            pair = (flow.src, flow.dst)
            across, measured = fabric.crosses(*pair), rate(flow.goodput, [pair])
            added = _added_to(flow, fabric)
            ends: dict[str, Any] = {"src": flow.src, "dst": flow.dst, "rtt": flow.round_trip}
            links.append(LinkReceipt(across=across, way=added, **ends, **measured))
    uplinks = []
    for rack, outgoing, through in uplink_steps(fabric):
        parts = [flow.goodput for flow in measurement.flows if flow.uplink == (rack, outgoing)]
        if parts:
            found = rate(sum(parts), through)
            uplinks.append(UplinkReceipt(rack=rack, outgoing=outgoing, pairs=tuple(through), **found))
    between = fabric.size * (fabric.size - 1)
    return Receipt(
        links=tuple(links),
        sampled_from=between if len(links) < between else None,
        fan_in=next((each for each in fan_ins if each.dst == 0), None),
        fan_in_others=tuple(each for each in fan_ins if each.dst != 0),
        uplinks=tuple(uplinks),
        mtu=measurement.mtu,
        congestion=tuple(measurement.congestion),
        duration=measurement.seconds,
        clock=tuple(ClockReceipt(offset=clock.offset, error=clock.error) for clock in measurement.clocks),
    )


def _added_to(flow: Flow, fabric: Fabric) -> WayReceipt | None:
    """What was added on the way of a link, requested and measured; None if nothing is requested."""
    from testbed.results.receipt import WayReceipt

    pair = (flow.src or 0, flow.dst)
    trip, loss = fabric.round_trip(*pair), fabric.distance(*pair).loss
    if trip == Distance() and not loss:
        return None
    return WayReceipt(
        rtt_requested=trip.delay,
        jitter=trip.jitter,
        rtt=flow.round_trip or 0.0,
        loss_requested=loss,
        packets=flow.packets,
        lost=flow.lost,
    )


@dataclass(frozen=True)
class Peer:
    """A node's address, the rate of its link in bit/s, its rack and that rack's uplink, what is added on the way."""

    address: str
    rate: int | None
    rack: int = 0
    uplink: int | None = None
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    uplink_delay: float = 0.0

    @property
    def distance(self) -> Distance:
        """What is added to all that it sends."""
        return Distance(self.delay, self.jitter, self.loss)


class Meeting(ABC):
    """The control connections of a probe: node 0 is the hub, the others are members. One JSON object per line.

    member -> hub   {"rank": 2, "peer": {...}}      hub -> member   {"welcome": {...}}
    hub -> member   {"tick": 0}                     member -> hub   {"tock": the member's clock}
    member -> hub   {"ready": 3}                    hub -> member   {"go": 3}
    member -> hub   {"outcome": {...}}              hub -> member   {"outcomes": [...]}
    either way      {"fail": "a sentence"}          ends the probe on every node
    """

    def __init__(self, token: str, peers: Sequence[Peer], channels: Sequence[Channel], timeout_s: float) -> None:
        self.token = token  # the first bytes of every data connection, so that other processes are refused
        self.peers = peers
        self.timeout_s = timeout_s
        self._channels = channels

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for channel in self._channels:
            channel.sock.close()

    @abstractmethod
    def wait_for_all(self, number: int, timeout_s: float) -> None:
        """Return when all nodes are ready for step `number`."""

    @abstractmethod
    def clocks(self) -> list[Clock]:
        """Compare clocks with node 0, which gets all of them in rank order; the members get none."""

    @abstractmethod
    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Send this node's outcome; return the outcomes of all, in rank order."""

    def round_trip(self) -> float:
        """The longest of the shortest round-trip times to the nodes we are connected to, in seconds."""
        return max((min_round_trip(channel.sock) for channel in self._channels), default=0.0)

    def send_to_all(self, message: dict[str, Any]) -> None:
        """Send to every connected node; ProbeError if one of them is gone."""
        for channel in self._channels:
            _send_message(channel, message)

    def fail(self, error: Exception) -> ProbeError:
        """Send the reason of this node's failure to all connected nodes; return the exception to raise."""
        for channel in self._channels:
            with suppress(ChannelClosed):
                channel.send({"fail": str(error)})
        return ProbeError(str(error))


class Hub(Meeting):
    """Node 0."""

    def wait_for_all(self, number: int, timeout_s: float) -> None:
        """Wait until all members are ready, then send them "go"."""
        _await(self._channels, "ready", timeout_s)
        self.send_to_all({"go": number})

    def clocks(self) -> list[Clock]:
        """Compare one member after the other, so that no reply is delayed by another."""
        return [Clock(), *(read_clock(partial(self._read_member_clock, channel)) for channel in self._channels)]

    def _read_member_clock(self, channel: Channel, number: int) -> float:
        _send_message(channel, {"tick": number})
        return float(_await([channel], "tock", self.timeout_s)[0])

    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Collect the outcomes and send all of them to every member."""
        outcomes = [outcome, *_await(self._channels, "outcome", self.timeout_s)]
        self.send_to_all({"outcomes": outcomes})
        return outcomes


class Member(Meeting):
    """All other nodes."""

    def wait_for_all(self, number: int, timeout_s: float) -> None:
        """Send "ready" and wait for the hub's "go"."""
        self.send_to_all({"ready": number})
        _await(self._channels, "go", timeout_s)

    def clocks(self) -> list[Clock]:
        """Answer with this node's clock."""
        for _ in range(CLOCK_EXCHANGES):
            _await(self._channels, "tick", self.timeout_s)
            self.send_to_all({"tock": time.time()})
        return []

    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Send this node's outcome and receive those of all nodes."""
        self.send_to_all({"outcome": outcome})
        return list(_await(self._channels, "outcomes", self.timeout_s)[0])


def read_clock(remote_time: Callable[[int], float]) -> Clock:
    """Return the offset of another node's clock; `remote_time(number)` asks that node for its time.

    The reply is taken as the time in the middle of the exchange, so the error is at most half of the exchange.
    """
    best: Clock | None = None
    for number in range(CLOCK_EXCHANGES):
        before, begun = time.time(), time.monotonic()
        there = remote_time(number)
        half = (time.monotonic() - begun) / 2
        if best is None or half < best.error:
            best = Clock(there - (before + half), half)
    assert best is not None
    return best


def _await(channels: Sequence[Channel], key: str, timeout_s: float) -> list[Any]:
    """The value under `key` from each channel, in order; the failure of any node ends the wait at once."""
    values: dict[Channel, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            for (
                channel
            ) in channels:  # before select: a line that arrived together with an earlier one makes no socket readable
                message = channel.next_message() if channel not in values else None
                if message is not None:
                    if key not in message:
                        raise ProbeError(str(message.get("fail", f"{channel.name} sent no {key!r}")))
                    values[channel] = message[key]
            missing = {channel.sock: channel for channel in channels if channel not in values}
            if not missing:
                return [values[channel] for channel in channels]
            for sock in _readable(list(missing), deadline, ", ".join(channel.name for channel in missing.values())):
                missing[sock].read_once()
    except ChannelClosed as error:
        raise ProbeError(str(error)) from None


def _readable(socks: list[socket.socket], deadline: float, names: str) -> list[socket.socket]:
    """The sockets with something to read; ProbeError if the deadline passes first."""
    ready = select.select(socks, [], [], max(0.0, deadline - time.monotonic()))[0]
    if not ready:
        raise ProbeError(f"timeout while waiting for {names}")
    return ready


def _send_message(channel: Channel, message: dict[str, Any]) -> None:
    """Send; if the other end is closed, raise ProbeError with the reason that it sent before it closed."""
    try:
        channel.send(message)
    except ChannelClosed as error:
        reason = str(error)
        with suppress(ChannelClosed, OSError):
            channel.sock.settimeout(0)
            while (last := channel.next_message()) is not None or channel.read_once():
                if last is not None and "fail" in last:
                    reason = str(last["fail"])
                    break
        raise ProbeError(reason) from None


def meet(
    rank: int, addresses: Sequence[str], port: int, me: Peer, timeout_s: float = MEETING_TIMEOUT_S
) -> Hub | Member:
    """Node 0 listens at `port`, the others connect to it. Return when all have; ProbeError after the timeout."""
    if rank == 0:
        return _host(addresses, port, me, timeout_s)
    channel = Channel(_connect_to_hub(addresses[rank], addresses[0], port, timeout_s), "node0")
    channel.sock.settimeout(timeout_s)
    _send_message(channel, {"rank": rank, "peer": asdict(me)})
    # Longer than the hub waits, because the hub's message names the missing nodes.
    welcome = _await([channel], "welcome", timeout_s + 5)[0]
    return Member(welcome["token"], [Peer(**peer) for peer in welcome["peers"]], [channel], timeout_s)


def _connect_to_hub(source: str, address: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to node 0, which may start later than this node."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((address, port), timeout=2, source_address=(source, 0))
        except OSError as error:
            if time.monotonic() > deadline:
                raise ProbeError(f"node0 does not answer at {address}:{port} ({error})") from None
            time.sleep(0.02)


def _host(addresses: Sequence[str], port: int, me: Peer, timeout_s: float) -> Hub:
    members: dict[int, tuple[Channel, Peer]] = {}
    try:
        with listen(addresses[0], port, backlog=len(addresses)) as server:
            _accept_members(server, len(addresses), members, timeout_s)
        channels, peers = zip(*(members[rank] for rank in sorted(members)), strict=True) if members else ((), ())
        hub = Hub(new_token(), [me, *peers], channels, timeout_s)
        hub.send_to_all({"welcome": {"token": hub.token, "peers": [asdict(peer) for peer in hub.peers]}})
        return hub
    except (OSError, ProbeError) as error:
        with Hub("", [], [channel for channel, _ in members.values()], timeout_s) as partial_hub:
            raise partial_hub.fail(ProbeError(f"node0 at {addresses[0]}:{port}: {error}")) from None


def _accept_members(server: socket.socket, n: int, members: dict[int, tuple[Channel, Peer]], timeout_s: float) -> None:
    """Accept connections until every rank has sent its hello; connections that send anything else are closed."""
    unknown: dict[socket.socket, Channel] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(members) < n - 1:
            missing = ", ".join(f"node{rank}" for rank in range(1, n) if rank not in members)
            for sock in _readable([server, *unknown], deadline, missing):
                if sock is server:
                    accepted = server.accept()[0]
                    accepted.settimeout(timeout_s)
                    unknown[accepted] = Channel(accepted, "an unknown process")
                elif (hello := _read_hello(unknown[sock], n)) is not None:
                    channel = unknown.pop(sock)
                    rank, peer = hello
                    if peer is None or rank in members:
                        sock.close()
                    else:
                        channel.name = f"node{rank}"
                        members[rank] = (channel, peer)
    finally:
        for sock in unknown:
            sock.close()


def _read_hello(channel: Channel, n: int) -> tuple[int, Peer | None] | None:
    """Return the rank and the peer from the hello of a new connection; None while the line is not complete.

    The peer is None if the hello is not valid.
    """
    try:
        channel.read_once()
        hello = channel.next_message()
        if hello is None:
            return None
        rank, peer = int(hello["rank"]), Peer(**hello["peer"])
    except (ChannelClosed, KeyError, TypeError, ValueError, OverflowError):
        return 0, None
    return (rank, peer) if 0 < rank < n else (0, None)


def probe_node(
    rank: int,
    addresses: Sequence[str],
    port: int,
    rate: int | None,
    on_event: OnEvent,
    timeout_s: float = MEETING_TIMEOUT_S,
    sample: int | None = None,
    rack: int = 0,
    uplink: int | None = None,
    added: Distance = Distance(),  # noqa: B008  (frozen)
    uplink_delay: float = 0.0,
) -> Measurement:
    """Take part in a probe as node `rank`, whose link has `rate` bit/s; all nodes call this at the same time.

    `uplink` is the rate of its rack's uplink; None where nothing is limited between racks. `added`: to what it sends.

    `sample`: see `schedule`; the same on all nodes.
    """
    began = time.monotonic()
    me = Peer(addresses[rank], rate, rack, uplink, **asdict(added), uplink_delay=uplink_delay)
    with meet(rank, addresses, port, me, timeout_s) as meeting:
        try:
            with _Node(rank, meeting, on_event, sample) as node:
                node.run()
                outcomes = meeting.gather(node.outcome())
        except (OSError, ProbeError) as error:
            raise meeting.fail(error) from None
    flows = [Flow.of(flow) for outcome in outcomes for flow in outcome["flows"]]
    return Measurement(
        flows=sorted(flows, key=lambda flow: (flow.src is None, flow.src or 0, flow.dst)),
        mtu=min(outcome["mtu"] for outcome in outcomes),
        congestion=[outcome["congestion"] for outcome in outcomes],
        seconds=time.monotonic() - began,
        clocks=[Clock(**clock) for clock in outcomes[0]["clocks"]],
    )


class _Node:
    """One node of a probe. In every step it connects, waits for the others, sends and counts."""

    def __init__(self, rank: int, meeting: Meeting, on_event: OnEvent, sample: int | None) -> None:
        self._rank = rank
        self._meeting = meeting
        self._on_event = on_event
        self._address = meeting.peers[rank].address
        peers = meeting.peers
        self._fabric = Fabric.of(
            (peer.rate for peer in peers),
            (peer.rack for peer in peers),
            peers[0].uplink,
            (peer.distance for peer in peers),
            peers[0].uplink_delay,
        )
        links, fan_ins, uplinks = plan_steps(self._fabric, sample)
        self._steps = [*links, *fan_ins, *(pairs for _, _, pairs in uplinks)]
        self._links = len(links)
        first = len(links) + len(fan_ins)
        self._uplinks = {first + k: (rack, outgoing) for k, (rack, outgoing, _) in enumerate(uplinks)}  # by step
        self._listeners: dict[int, socket.socket] = {}  # one per step in which this node receives
        self._flows: list[Flow] = []
        self._mtu = MTU_BYTES
        self._congestion = ""
        self._clocks: list[Clock] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for listener in self._listeners.values():
            listener.close()

    def run(self) -> None:
        """Exchange ports, compare clocks while nothing is sent, then take all steps."""
        for number, pairs in enumerate(self._steps):
            if any(dst == self._rank for _, dst in pairs):
                self._listeners[number] = self._listen(pairs)
        ports = self._meeting.gather({str(n): sock.getsockname()[1] for n, sock in self._listeners.items()})
        self._clocks = self._meeting.clocks()
        for number, pairs in enumerate(self._steps):
            self._step(number, pairs, [node.get(str(number), 0) for node in ports])

    def outcome(self) -> dict[str, Any]:
        """What this node sends to the others at the end."""
        return {
            "flows": [asdict(flow) for flow in self._flows],
            "clocks": [asdict(clock) for clock in self._clocks],
            "mtu": self._mtu,
            "congestion": self._congestion,
        }

    def _listen(self, pairs: Pairs) -> socket.socket:
        listener = listen(self._address, 0, backlog=2 * self._fabric.size)
        size = self._window(pairs, self._rank)
        if size is not None:  # accepted connections inherit both
            if not self._fabric.is_far(pairs):
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, size)
        return listener

    def _window(self, pairs: Pairs, dst: int) -> int | None:
        return window(self._fabric, pairs, dst, self._meeting.round_trip())

    def _step(self, number: int, pairs: Pairs, ports: Sequence[int]) -> None:
        """Open this step's connections, wait for the others, then send and count."""
        plan = pace(self._fabric, pairs, together=number in self._uplinks)
        sources = [src for src, dst in pairs if dst == self._rank]
        with ExitStack() as closing:
            outgoing = []
            for dst in [dst for src, dst in pairs if src == self._rank]:
                target = (self._meeting.peers[dst].address, ports[dst])
                outgoing.append(
                    closing.enter_context(self._connect(target, self._window(pairs, dst), self._fabric.is_far(pairs)))
                )
            incoming = [closing.enter_context(sock) for sock in self._accept(number, sources)]
            self._meeting.wait_for_all(number, self._meeting.timeout_s + plan.timeout_s)
            extra_s = distance_timeout(self._fabric, pairs, number < self._links)
            senders = []
            for sock, pair in zip(outgoing, [pair for pair in pairs if pair[0] == self._rank], strict=True):
                first = self._distance_plan(number, pair) if extra_s else None
                arguments = (sock, plan.timeout_s, extra_s, self._token, first)
                senders.append(threading.Thread(target=_send, args=arguments, daemon=True))
            for sender in senders:
                sender.start()
            found = self._measure_distance(number, sources, plan, incoming, extra_s) if extra_s else {}
            if incoming:
                self._count(number, sources, plan, incoming, found)
            for sock in incoming:
                sock.close()  # resets the connection: the sender stops at once
            for sender in senders:
                sender.join(plan.timeout_s)

    @property
    def _token(self) -> bytes:
        return self._meeting.token.encode()

    def _distance_plan(self, number: int, pair: tuple[int, int]) -> distance.Plan:
        return distance.Plan.of(self._fabric, self._steps[number], pair, number < self._links)

    def _measure_distance(
        self, number: int, sources: Sequence[int], plan: Pace, incoming: Sequence[socket.socket], extra_s: float
    ) -> dict[str, Any]:
        """Measure round trip, loss and rate before the flows begin; return them as values of a Flow.

        All nodes of the step end each phase together: the round trips are those of an idle machine, and no flow begins
        while datagrams are counted.
        """
        timeout_s = self._meeting.timeout_s + extra_s
        if not incoming:
            for _ in ("round trips", "losses and rates"):
                self._meeting.wait_for_all(number, timeout_s)
            return {}
        pair = (sources[0], self._rank)
        wanted, jitter = self._distance_plan(number, pair), self._fabric.round_trip(*pair).jitter
        try:
            with distance.Receiver(incoming, self._token, extra_s) as receiver:
                found = _round_trip(receiver, wanted, jitter)
                self._meeting.wait_for_all(number, timeout_s)
                found |= _loss(receiver, wanted, jitter)
                if wanted.fill is not None:
                    found |= _rate_of_datagrams(receiver, plan, self._fabric, self._steps[number])
                self._meeting.wait_for_all(number, timeout_s)
                receiver.go()
        except OSError as error:
            names = ", ".join(f"node{src}" for src in sources)
            raise ProbeError(f"node{self._rank} cannot measure its distance from {names} ({error})") from None
        return found

    def _connect(self, target: tuple[str, int], bound: int | None, far: bool) -> socket.socket:
        try:
            sock = socket.create_connection(target, timeout=STALL_TIMEOUT_S, source_address=(self._address, 0))
            sock.sendall(HEADER.pack(self._meeting.token.encode(), self._rank))
        except OSError as error:
            raise ProbeError(f"node{self._rank} cannot reach {target[0]}:{target[1]} ({error})") from None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        if bound is not None and not far:  # else the kernel lets the buffer grow to what is in flight
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._mtu = path_mtu(sock)
        self._congestion = congestion_control(sock)
        return sock

    def _accept(self, number: int, sources: Sequence[int]) -> list[socket.socket]:
        """This step's connections, one from each source; all others are closed."""
        found: dict[int, socket.socket] = {}
        deadline = time.monotonic() + self._meeting.timeout_s
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
        """Return the rank that opened a connection; None without the right token."""
        sock.settimeout(STALL_TIMEOUT_S)
        with suppress(OSError):
            data = sock.recv(HEADER.size, socket.MSG_WAITALL)
            if len(data) == HEADER.size and data.startswith(self._meeting.token.encode()):
                return int(HEADER.unpack(data)[1])
        return None

    def _count(
        self,
        number: int,
        sources: Sequence[int],
        plan: Pace,
        incoming: Sequence[socket.socket],
        distances: dict[str, Any],
    ) -> None:
        several, uplink = number >= self._links, self._uplinks.get(number)
        round_trip = None if several else min_round_trip(incoming[0])  # of the handshake: no data has been sent yet
        bound = self._window(self._steps[number], self._rank)
        try:
            counted = (0, 0.0) if "bytes" in distances else _receive(incoming, plan, bound)
            flow = replace(Flow(None if several else sources[0], self._rank, *counted, round_trip, uplink), **distances)
        except (OSError, ProbeError) as error:
            names = ", ".join(f"node{src}" for src in sources)
            raise ProbeError(f"node{self._rank} receives nothing from {names} ({error})") from None
        self._flows.append(flow)
        event = {"event": "flow", "step": number + 1, "of": len(self._steps), "src": flow.src, "dst": flow.dst}
        self._on_event({**event, "goodput": round(flow.goodput)})


def _round_trip(receiver: distance.Receiver, wanted: distance.Plan, jitter: float) -> dict[str, Any]:
    if not wanted.exchanges:
        return {}
    trips = receiver.round_trips(wanted.exchanges)
    return {"round_trip": statistics.median(trips) if jitter else min(trips)}


def _loss(receiver: distance.Receiver, wanted: distance.Plan, jitter: float) -> dict[str, Any]:
    return {"packets": wanted.packets, "lost": receiver.lost(wanted, jitter)} if wanted.packets else {}


def _rate_of_datagrams(receiver: distance.Receiver, plan: Pace, fabric: Fabric, pairs: Pairs) -> dict[str, Any]:
    """The datagrams start at full rate, so a delay needs no time for a slow start."""
    near = pace(replace(fabric, distances=()), pairs)
    enough = partial(steady, max_slices=plan.max_slices, min_slices=plan.min_slices)
    discard_s = near.slow_start_s + longest_round_trip(fabric, pairs)
    packets, seconds = receiver.count(discard_s, near.slice_s, enough)
    # the payload that TCP would have in as many bytes on the wire
    return {"bytes": round(packets * distance.WIRE_BYTES * efficiency()), "seconds": seconds}


def _send(sock: socket.socket, timeout_s: float, extra_s: float, token: bytes, first: distance.Plan | None) -> None:
    """Send until the receiver resets the connection, `first` what it measures before. The receiver reports errors."""
    data = memoryview(bytes(CHUNK_BYTES))
    with suppress(OSError, ProbeError):
        if first is not None:
            distance.answer(sock, token, first, extra_s)
        deadline = time.monotonic() + timeout_s
        sock.settimeout(STALL_TIMEOUT_S)
        while time.monotonic() < deadline:
            sock.send(data)


def _receive(socks: Sequence[socket.socket], plan: Pace, bound: int | None) -> tuple[int, float]:
    """Bytes and seconds counted over all connections together; `bound` is the window of each."""
    buffer = bytearray(CHUNK_BYTES)
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, data=bound)
        _, first = _drain(selector, buffer, until=0.0)
        _, start = _drain(selector, buffer, until=first + plan.slow_start_s)
        total, end, rates = 0, start, list[float]()
        while not steady(rates, plan.max_slices, plan.min_slices):
            began = end
            size, end = _drain(selector, buffer, until=began + plan.slice_s)
            total += size
            rates.append(size / (end - began))
    return total, end - start


def _drain(selector: selectors.BaseSelector, buffer: bytearray, until: float) -> tuple[int, float]:
    """Read until the time `until`; return the bytes, and the time of the first read at or after it."""
    size = 0
    while True:
        ready = selector.select(STALL_TIMEOUT_S)
        if not ready:
            raise ProbeError(f"no data for {STALL_TIMEOUT_S:g} s")
        for key, _ in ready:
            sock = cast(socket.socket, key.fileobj)
            if key.data is not None:  # set the bound before each read: the kernel raises it when it resizes its buffers
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, key.data)
            count = sock.recv_into(buffer)
            if count == 0:
                raise ProbeError("a sender stopped early")
            size += count
        now = time.monotonic()
        if now >= until:
            return size, now


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one node of a probe; print events as JSON lines: flow, then result or error."""
    parser = argparse.ArgumentParser(prog="python -m testbed.net.probe", description="Measure the links between nodes.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument(
        "--addresses", type=lambda text: text.split(","), required=True, help="all nodes, in rank order"
    )
    parser.add_argument("--port", type=int, required=True, help="where node 0 listens")
    parser.add_argument("--rate", type=lambda text: None if text == "none" else int(text), default=None, help="bit/s")
    parser.add_argument("--rack", type=int, default=0)
    parser.add_argument("--uplink", type=lambda text: None if text == "none" else int(text), default=None, help="bit/s")
    for name in ("--delay", "--jitter", "--uplink-delay"):
        parser.add_argument(name, type=float, default=0.0, help="seconds one way")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets that this node sends")
    parser.add_argument("--sample", type=int, default=None, help="measure a few links only, chosen by this number")
    options = parser.parse_args(arguments)
    with suppress(OSError):  # if allowed: the probe measures the link, not how busy the processors are
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    try:
        where = (options.rank, options.addresses, options.port, options.rate)
        racks = {"rack": options.rack, "uplink": options.uplink, "uplink_delay": options.uplink_delay}
        added = Distance(options.delay, options.jitter, options.loss)
        result = probe_node(*where, _print, sample=options.sample, added=added, **racks)
    except (OSError, ProbeError) as error:
        _print({"event": "error", "rank": options.rank, "sentence": str(error)})
        return ProbeError.exit_code
    _print({"event": "result", "rank": options.rank, **asdict(result)})
    return 0


def _print(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
