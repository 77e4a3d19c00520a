"""Measure every directed link between nodes: `python -m testbed.net.probe --rank R --addresses a,b,c --port P`.

Every node runs one probe process. The receiver of a flow counts its bytes.

    links     In round r = 1..N-1 node i sends to node (i + r) % N, so that each directed link is measured once. With
              more than ALL_LINKS_NODES nodes only some of the rounds are measured. In each of them every node sends and
              receives.
    fan-ins   Several nodes send to one node, because a single sender fills only its own link and does not show whether
              the ingress of the receiver is shaped.
    uplinks   With racks, all nodes of a rack send to all others at once, because a single sender does not fill the
              uplink. When links are measured, at most one link of a step passes each uplink.

Each round is divided into steps in which no node both sends and receives. Acknowledgements that queue behind a node's
own data (two-way TCP on a short path) cost up to 15 %, so a link would be measured as that much slower. Before each
step all nodes report to node 0 and wait for its answer. Where a delay or a loss is requested, the round-trip time and
the lost packets of a link are measured before its flow. Where packets are lost, datagrams are counted instead of a flow
(net/distance.py). Every wait has a deadline. If a node fails, the probe ends on all nodes with the same message.

The controller starts the probe on every node; ranks without a controller call `probe_node`. Both check the result by
net/check.py. This module imports the standard library only, so that it starts quickly on a slow node; `receipt_of`
imports pydantic when it is called.
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
STALL_TIMEOUT_S = 10.0  # a flow without a received byte for this time has failed

ALL_LINKS_NODES = 16  # with more nodes only a sample of the links is measured: 64 nodes have 4032
SAMPLE_ROUNDS = 8  # of that sample, and so the number of links out of each node and into it
ACROSS_LINKS = 24  # largest number of measured links between racks, which are measured one after the other
SAMPLE_ACROSS = 2  # links between racks that are measured after training
ALL_PAIRS = 36  # most pairs through an uplink at once; if there are more, each node sends to one other only
FILLS = 1.25  # senders fill a link if the sum of their rates is this multiple of the link's rate

SLOW_START_S = 0.25  # discarded at the start of a flow
SLICE_S = 0.1  # a flow is counted in slices
SLOW_START_BURSTS, SLICE_BURSTS = 20, 17  # on a slow link: times in bursts; three slices have more than 50
UNSHAPED_SLOW_START_S, UNSHAPED_SLICE_S = 0.1, 0.067
MIN_SLICES, MAX_SLICES = 3, 9
TOGETHER_SLICES = 5  # in a step whose receivers' rates are added
MAX_STANDARD_ERROR = 0.01  # a flow ends when the standard error of the slices' mean is at most this share of the mean

IN_FLIGHT_S = 0.02  # data in flight in seconds of the rate: enough to fill the link, less than its queue (0.05 s)
MIN_IN_FLIGHT_BYTES = 4 * 1024  # about three frames
MAX_IN_FLIGHT_BYTES = 200_000  # a link that needs more data in flight gets no limit
SLOW_START_ROUND_TRIPS, SLICE_ROUND_TRIPS = 10, 2  # on a path with delay: until TCP's window fills the path
SHORT_PATH_S = 0.002  # with a longer round trip the data in flight is on the path, not in the queue

CLOCK_EXCHANGES = 8  # per clock; the fastest exchange counts
CHUNK_BYTES = 256 * 1024  # per send and receive call
BUFFER_BYTES = 1024 * 1024  # at each end, so that the link stays busy while a process waits for a processor
HEADER = struct.Struct("!32sI")  # first bytes of a data connection: token, rank
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() discards the data in flight

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Pace:
    """The times of one step: how long bytes are discarded and counted, and the timeout."""

    slow_start_s: float
    slice_s: float
    max_slices: int = MAX_SLICES
    min_slices: int = MIN_SLICES

    @property
    def timeout_s(self) -> float:
        """Much more than the usual time of a step."""
        return 2 * (self.slow_start_s + self.max_slices * self.slice_s) + STALL_TIMEOUT_S


def link_steps(n: int) -> list[Pairs]:
    """Return the pairs of every step that measures links: of all rounds, or of SAMPLE_ROUNDS evenly spread ones."""
    rounds = range(1, n) if n <= ALL_LINKS_NODES else [1 + k * (n - 1) // SAMPLE_ROUNDS for k in range(SAMPLE_ROUNDS)]
    return [step for number in rounds for step in _steps_of_round(n, number)]


def link_steps_of(fabric: Fabric) -> list[Pairs]:
    """Return the pairs of every step that measures links of a network that may have racks.

    With racks: first the links inside racks, then at most ACROSS_LINKS of those between racks.
    """
    steps = link_steps(fabric.size)
    if not fabric.shared_uplinks:
        return steps
    inside = [[pair for pair in step if not fabric.crosses(*pair)] for step in steps]
    across = [pair for step in steps for pair in step if fabric.crosses(*pair)]
    kept = min(len(across), ACROSS_LINKS)
    spread = [across[k * len(across) // kept] for k in range(kept)]
    return [*filter(None, inside), *_one_per_uplink(fabric, spread)]


def _one_per_uplink(fabric: Fabric, pairs: Pairs) -> list[Pairs]:
    """Return steps in which each uplink carries one pair only, so that acknowledgements do not queue behind data."""
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
    """Return for each rack and direction (True: out of the rack) the pairs that send through its uplink at once.

    With two racks, all data out of one rack goes into the other, so each direction has one step.
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
    """Return the pairs of every fan-in: all nodes to node 0, then to every other shaped node as few as fill its link.

    Several nodes receive in one step if there are enough senders for each. Two nodes have one fan-in only, because a
    single sender fills only its own link.
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
            # First the nodes whose own fan-in is done, so that the others can receive in the same step.
            others = sorted(free - {dst}, key=lambda src: (src in waiting, -(rates[src] or math.inf), src))
            senders = _senders(fabric, dst, others) or (others if not step else [])
            if dst in free and senders:
                step += [(src, dst) for src in senders]
                free -= {dst, *senders}
        waiting = [dst for dst in waiting if dst not in {to for _, to in step}]
        steps.append(step)
    return steps


def _senders(fabric: Fabric, dst: int, others: Sequence[int]) -> Sequence[int]:
    """Return the first of `others`, at least two, that together fill the link of `dst`; none if all do not fill it."""
    unlimited = replace(fabric, rates=tuple(None if node == dst else rate for node, rate in enumerate(fabric.rates)))
    for count in range(2, len(others) + 1):
        sent = unlimited.limit([(src, dst) for src in others[:count]])
        if sent is None or sent >= FILLS * (fabric.rates[dst] or 0):
            return others[:count]
    return []


def schedule(fabric: Fabric, sample: int | None = None) -> list[Pairs]:
    """Return the pairs of every step: the links, then the fan-ins, then the uplinks."""
    links, fan_ins, uplinks = plan_steps(fabric, sample)
    return [*links, *fan_ins, *(pairs for _, _, pairs in uplinks)]


def plan_steps(
    fabric: Fabric, sample: int | None = None
) -> tuple[list[Pairs], list[Pairs], list[tuple[int, bool, Pairs]]]:
    """Return the steps that measure links, the fan-ins, and the uplinks.

    The number `sample` chooses a sample instead: one round of links, in which every node sends and receives once (with
    racks at most SAMPLE_ACROSS of them between racks), the fan-in of one node, and one uplink.
    """
    n, uplinks = fabric.size, uplink_steps(fabric)
    if sample is None or n < 2:
        return link_steps_of(fabric), fan_in_steps(fabric), uplinks
    into = [pair for step in fan_in_steps(fabric) for pair in step]
    receivers = sorted({dst for _, dst in into})
    chosen = receivers[sample % len(receivers)]
    fan_ins: list[Pairs] = [[pair for pair in into if pair[1] == chosen]] if n > 2 else []  # 2 nodes: it is a link
    links = _steps_of_round(n, 1 + sample % (n - 1))
    if not uplinks:
        return links, fan_ins, []
    inside = [[pair for pair in step if not fabric.crosses(*pair)] for step in links]
    across = [pair for step in links for pair in step if fabric.crosses(*pair)]
    kept = [*filter(None, inside), *_one_per_uplink(fabric, across[:SAMPLE_ACROSS])]
    return kept, fan_ins, [uplinks[sample % len(uplinks)]]


def _steps_of_round(n: int, number: int) -> list[Pairs]:
    """Return two steps in which no node both sends and receives; three if the round has rings of odd length."""
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
    """Return the times of a step, which depend on its slowest link: at least 50 bursts are counted.

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
    """Return the longest requested round-trip time of the pairs, in seconds, jitter included."""
    found = (fabric.round_trip(*pair) for pair in pairs)
    return max((each.delay + each.jitter for each in found), default=0.0)


def distance_timeout(fabric: Fabric, pairs: Pairs, single: bool) -> float:
    """Return the timeout in s for delay and loss of a step (net/distance.py); 0 if neither is requested."""
    if not fabric.is_far(pairs):
        return 0.0
    far = max(
        distance.Plan.of(fabric, pairs, pair, single).seconds(trip.delay, trip.jitter)
        for pair in pairs
        for trip in [fabric.round_trip(*pair)]
    )
    return 4 * far + pace(fabric, pairs).timeout_s + STALL_TIMEOUT_S


def longest_probe(fabric: Fabric, sample: int | None = None) -> float:
    """Return the timeout in s of a whole probe."""
    steps = schedule(fabric, sample)
    waits = (pace(fabric, pairs).timeout_s + distance_timeout(fabric, pairs, single=True) for pairs in steps)
    return 2 * MEETING_TIMEOUT_S + sum(waits)


def window(fabric: Fabric, pairs: Pairs, dst: int, round_trip: float) -> int | None:
    """Return the bytes that one connection into `dst` may have in flight; None leaves the number to the kernel.

    On a slow link TCP's initial window alone overflows the queue: frames are lost, and the bytes after them are counted
    late. With a limit from the start no frame is lost, and the link stays busy.
    """
    into = [pair for pair in pairs if pair[1] == dst]
    rate, flows = fabric.limit(into), len(into)
    if len({to for _, to in pairs if to != dst}) and any(fabric.crosses(*pair) for pair in into):
        rate, flows = fabric.limit(pairs), len(pairs)  # all pairs share an uplink
    if rate is None:
        return None
    farthest = longest_round_trip(fabric, into)
    if farthest > SHORT_PATH_S:  # the receiver's buffer can grow to the bytes in flight
        return max(MIN_IN_FLIGHT_BYTES, round(rate / flows * (farthest + IN_FLIGHT_S) / 8))
    if round_trip > SHORT_PATH_S:
        return None
    size = max(MIN_IN_FLIGHT_BYTES, round(rate / flows * IN_FLIGHT_S / 8))
    return size if size <= MAX_IN_FLIGHT_BYTES else None


def steady(rates: Sequence[float], max_slices: int, min_slices: int = MIN_SLICES) -> bool:
    """Return True if enough slices are counted: the standard error of their mean is small, or there are `max_slices`.

    On a busy machine a slice may have too few bytes. It stays in the mean, and more slices are counted. The requested
    rate is not used: a measurement must not end because its result is the expected one.
    """
    if len(rates) < min_slices:
        return False
    error = statistics.stdev(rates) / math.sqrt(len(rates)) / statistics.fmean(rates)
    return error <= MAX_STANDARD_ERROR or len(rates) >= max_slices


@dataclass(frozen=True)
class Clock:
    """By how many seconds a node's clock is ahead of node 0's, and the largest error of this offset."""

    offset: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class Flow:
    """What one receiver counted in one step. `src` is None in steps with several senders: fan-ins and uplinks."""

    src: int | None
    dst: int
    bytes: int
    seconds: float
    round_trip: float | None = None  # seconds, before any data was sent; None for a fan-in
    uplink: tuple[int, bool] | None = None  # rack whose uplink the step measures; True: out of the rack
    packets: int = 0  # numbered datagrams that were sent, to count the lost ones
    lost: int = 0

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Return a Flow made from JSON, which has no tuples."""
        uplink = values.get("uplink")
        return cls(**(values | {"uplink": tuple(uplink) if uplink else None}))

    @property
    def goodput(self) -> float:
        """Payload rate in bit/s."""
        return self.bytes * 8 / self.seconds


@dataclass(frozen=True)
class Measurement:
    """All results of a probe. Every node gets an identical copy."""

    flows: Sequence[Flow]
    mtu: int  # bytes; the smallest of all paths
    congestion: Sequence[str]  # of each node's connections
    seconds: float  # of the whole probe
    clocks: Sequence[Clock] = ()  # of each node, against node 0's

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Return a Measurement made from the event `result` that a probe process prints."""
        return cls(
            flows=[Flow.of(flow) for flow in values["flows"]],
            mtu=values["mtu"],
            congestion=values["congestion"],
            seconds=values["seconds"],
            clocks=[Clock(**clock) for clock in values["clocks"]],
        )


def receipt_of(measurement: Measurement, fabric: Fabric) -> Receipt:
    """Return the receipt: measured and requested rates of links, fan-ins and uplinks."""
    # here, because it imports pydantic, which a probe process does without
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
    """Return delay and loss of a link's way, requested and measured; None if neither is requested."""
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
    """A node's address, the rate of its link in bit/s, rack and uplink, and the requested delay and loss."""

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
        """The delay and loss of every packet that this node sends."""
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
        self.token = token  # the first bytes of every data connection; connections without it are closed
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
        """Wait until all nodes are ready for step `number`. Raise ProbeError after the timeout."""

    @abstractmethod
    def clocks(self) -> list[Clock]:
        """Compare the clocks with node 0's. Return them in rank order on node 0, and an empty list on members."""

    @abstractmethod
    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Send this node's outcome. Return the outcomes of all nodes, in rank order."""

    def round_trip(self) -> float:
        """Return the shortest round-trip time in s to the farthest connected node."""
        return max((min_round_trip(channel.sock) for channel in self._channels), default=0.0)

    def send_to_all(self, message: dict[str, Any]) -> None:
        """Send a message to every connected node. Raise ProbeError if a connection is closed."""
        for channel in self._channels:
            _send_message(channel, message)

    def fail(self, error: Exception) -> ProbeError:
        """Send the reason of this node's failure to all connected nodes. Return the exception to raise."""
        for channel in self._channels:
            with suppress(ChannelClosed):
                channel.send({"fail": str(error)})
        return ProbeError(str(error))


class Hub(Meeting):
    """The side of node 0."""

    def wait_for_all(self, number: int, timeout_s: float) -> None:
        """Wait until all members are ready, then send them "go"."""
        _await(self._channels, "ready", timeout_s)
        self.send_to_all({"go": number})

    def clocks(self) -> list[Clock]:
        """Compare the clocks of the members one after the other, so that no reply delays another."""
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
    """The side of every node but node 0."""

    def wait_for_all(self, number: int, timeout_s: float) -> None:
        """Send "ready" and wait for the hub's "go"."""
        self.send_to_all({"ready": number})
        _await(self._channels, "go", timeout_s)

    def clocks(self) -> list[Clock]:
        """Answer each question of the hub with the time of this node's clock."""
        for _ in range(CLOCK_EXCHANGES):
            _await(self._channels, "tick", self.timeout_s)
            self.send_to_all({"tock": time.time()})
        return []

    def gather(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        """Send this node's outcome and receive those of all nodes."""
        self.send_to_all({"outcome": outcome})
        return list(_await(self._channels, "outcomes", self.timeout_s)[0])


def read_clock(remote_time: Callable[[int], float]) -> Clock:
    """Return the offset of another node's clock. `remote_time(number)` asks that node for its time.

    The offset assumes that the node replies in the middle of the exchange, so the error is at most half its duration.
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
    """Return the value of `key` from each channel, in order. Raise ProbeError if a node fails or the time is over."""
    values: dict[Channel, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            # Before select: a line that arrived together with an earlier one does not make a socket readable.
            for channel in channels:
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
    """Return the sockets that have data to read. Raise ProbeError if the deadline passes first."""
    ready = select.select(socks, [], [], max(0.0, deadline - time.monotonic()))[0]
    if not ready:
        raise ProbeError(f"timeout while waiting for {names}")
    return ready


def _send_message(channel: Channel, message: dict[str, Any]) -> None:
    """Send a message. If the other end is closed, raise ProbeError with the reason that it sent last, if any."""
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
    """Listen at `port` on node 0, connect to it on the others. Return when all are connected, else raise ProbeError."""
    if rank == 0:
        return _host(addresses, port, me, timeout_s)
    channel = Channel(_connect_to_hub(addresses[rank], addresses[0], port, timeout_s), "node0")
    channel.sock.settimeout(timeout_s)
    _send_message(channel, {"rank": rank, "peer": asdict(me)})
    # 5 s longer than the hub waits, because the hub's error message names the missing nodes.
    welcome = _await([channel], "welcome", timeout_s + 5)[0]
    return Member(welcome["token"], [Peer(**peer) for peer in welcome["peers"]], [channel], timeout_s)


def _connect_to_hub(source: str, address: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to node 0, which may start later than this node. Raise ProbeError after the timeout."""
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
    """Accept connections until every rank has sent its hello. Close connections that send anything else."""
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
    """Return the rank and the peer from the hello of a new connection. Return None while the line is incomplete.

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
    """Take part in a probe as node `rank`, whose link has `rate` bit/s. All nodes call this at the same time.

    `uplink`: the rate of the uplink of the node's rack, None without a limit. `added`: delay and loss of every packet
    that the node sends. `sample`: see `plan_steps`; it must be the same on all nodes. Raise ProbeError on all nodes if
    one fails.
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
    """One node of a probe. In every step the node connects, waits for the others, sends and counts."""

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
        """Exchange ports, compare clocks while no flow runs, then run all steps."""
        for number, pairs in enumerate(self._steps):
            if any(dst == self._rank for _, dst in pairs):
                self._listeners[number] = self._listen(pairs)
        ports = self._meeting.gather({str(n): sock.getsockname()[1] for n, sock in self._listeners.items()})
        self._clocks = self._meeting.clocks()
        for number, pairs in enumerate(self._steps):
            self._step(number, pairs, [node.get(str(number), 0) for node in ports])

    def outcome(self) -> dict[str, Any]:
        """Return the results that this node sends to the others at the end."""
        return {
            "flows": [asdict(flow) for flow in self._flows],
            "clocks": [asdict(clock) for clock in self._clocks],
            "mtu": self._mtu,
            "congestion": self._congestion,
        }

    def _listen(self, pairs: Pairs) -> socket.socket:
        listener = listen(self._address, 0, backlog=2 * self._fabric.size)
        size = self._window(pairs, self._rank)
        if size is not None:  # accepted connections inherit both options
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
                sock.close()  # resets the connection, so that the sender stops at once
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
        """Measure round trip, loss and rate before the flows begin. Return them as values of a Flow.

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
            raise ProbeError(f"node{self._rank} cannot measure delay and loss from {names} ({error})") from None
        return found

    def _connect(self, target: tuple[str, int], bound: int | None, far: bool) -> socket.socket:
        try:
            sock = socket.create_connection(target, timeout=STALL_TIMEOUT_S, source_address=(self._address, 0))
            sock.sendall(HEADER.pack(self._meeting.token.encode(), self._rank))
        except OSError as error:
            raise ProbeError(f"node{self._rank} cannot reach {target[0]}:{target[1]} ({error})") from None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        if bound is not None and not far:  # else the kernel lets the buffer grow to the bytes in flight
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._mtu = path_mtu(sock)
        self._congestion = congestion_control(sock)
        return sock

    def _accept(self, number: int, sources: Sequence[int]) -> list[socket.socket]:
        """Return this step's connections, one from each source. Close others. Raise ProbeError after the timeout."""
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
        """Return the rank that opened a connection; None if the token is wrong."""
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
    """Send what `first` measures, then a flow until the receiver resets the connection. The receiver reports errors."""
    data = memoryview(bytes(CHUNK_BYTES))
    with suppress(OSError, ProbeError):
        if first is not None:
            distance.answer(sock, token, first, extra_s)
        deadline = time.monotonic() + timeout_s
        sock.settimeout(STALL_TIMEOUT_S)
        while time.monotonic() < deadline:
            sock.send(data)


def _receive(socks: Sequence[socket.socket], plan: Pace, bound: int | None) -> tuple[int, float]:
    """Return bytes and seconds, counted over all connections together. `bound`: the window of each connection."""
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
    """Read until the time `until`. Return the bytes, and the time of the first read at or after `until`."""
    size = 0
    while True:
        ready = selector.select(STALL_TIMEOUT_S)
        if not ready:
            raise ProbeError(f"no data for {STALL_TIMEOUT_S:g} s")
        for key, _ in ready:
            sock = cast(socket.socket, key.fileobj)
            if key.data is not None:  # before each read, because the kernel raises it when it resizes its buffers
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, key.data)
            count = sock.recv_into(buffer)
            if count == 0:
                raise ProbeError("a sender stopped early")
            size += count
        now = time.monotonic()
        if now >= until:
            return size, now


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one node of a probe. Print events as JSON lines: flow, then result or error. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m testbed.net.probe", description="Measure the links between nodes.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument(
        "--addresses", type=lambda text: text.split(","), required=True, help="all nodes, in rank order, e.g. a,b,c"
    )
    parser.add_argument("--port", type=int, required=True, help="port at which node 0 listens")
    parser.add_argument("--rate", type=lambda text: None if text == "none" else int(text), default=None, help="bit/s")
    parser.add_argument("--rack", type=int, default=0)
    parser.add_argument("--uplink", type=lambda text: None if text == "none" else int(text), default=None, help="bit/s")
    for name in ("--delay", "--jitter", "--uplink-delay"):
        parser.add_argument(name, type=float, default=0.0, help="seconds one way")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets that this node sends")
    parser.add_argument("--sample", type=int, default=None, help="measure a few links only, chosen by this number")
    options = parser.parse_args(arguments)
    with suppress(OSError):  # if allowed, so that a busy processor affects the measurement less
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
