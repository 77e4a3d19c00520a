"""Measure links with delay or loss: the round-trip time, the share of lost packets, and the rate of a link with loss.

`net/probe.py` does this before it sends a flow, over the flow's connection:

    receiver: port of its datagram socket  ->
              "ask" -> <- the same byte          EXCHANGES times: the round-trip time while nothing else is sent
    sender:   numbered datagrams, "sent" ->      in batches so small that no queue drops a datagram: the rest was lost
              <- "counted"
    sender:   datagrams, faster than the link -> until the receiver has counted enough and sends "enough"
              <- "go": the flow of the probe begins, unless datagrams were counted

A TCP flow slows down when packets are lost, so it does not show the rate of such a link; the datagrams do. At both
ends the kernel has the work of each packet: it cuts them from larger ones (UDP_SEGMENT), and a filter of the receiving
socket drops them, which the socket counts. So a processor that needs long for a system call can fill a link.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from testbed.net.tcp import ETHERNET_HEADER_BYTES
from testbed.spec.errors import ProbeError
from testbed.spec.fabric import Fabric, Pairs

EXCHANGES = 8
EXPECTED_LOST = 20  # expected number of lost packets of a link, unless that needs more than MAX_PACKETS
MIN_PACKETS, MAX_PACKETS = 1000, 10_000
MAX_BATCH = 250  # datagrams; they fit in a socket's usual buffer
BATCH_S = 0.02  # time in which the link sends a batch: less than its queue holds
SETTLE_S = 0.03  # wait after the last datagram of a batch for those that the kernel still delivers
NUMBER = struct.Struct("!16sI")  # content of a numbered datagram: begin of the token, number
PORT = struct.Struct("!H")
UDP_HEADER_BYTES = 8
HEADERS_BYTES = 20 + UDP_HEADER_BYTES + ETHERNET_HEADER_BYTES  # of a datagram, as a token bucket counts them
PAYLOAD_BYTES = 1472  # of the datagrams that fill a link
WIRE_BYTES = PAYLOAD_BYTES + HEADERS_BYTES
OVERLOAD, OVERLOAD_TOGETHER = 1.15, 1.5  # one sender, or several, send so many times what the link passes
BUFFER_BYTES = 4 << 20  # of the receiver, which may wait for a processor
SO_RCVBUFFORCE = 33  # socket(7); the module socket does not have it
SO_ATTACH_FILTER, SO_MEMINFO = 26, 55  # socket(7), and asm-generic/socket.h of the kernel
UDP_SEGMENT, MAX_SEGMENTS = 103, 16  # udp(7), and packets of one system call
SOCKET_PACKETS = 80  # that a socket's usual buffer holds on their way
QUEUE_S = 0.05  # that packets may wait in the queue of their link
START_TIMEOUT_S = 10.0  # for the first datagram of every sender
TICK_S = 0.002  # between two writes of a sender
MAX_BEHIND_S = 0.1  # a sender that is late sends at most this much at once; the queue of a link holds as much
ASK, SENT, COUNTED, ENOUGH, GO = b"a", b"s", b"c", b"e", b"g"


@dataclass(frozen=True)
class Plan:
    """What is measured on one connection. Both ends have the same plan."""

    exchanges: int = 0
    packets: int = 0  # numbered datagrams, to count those that are lost
    batch: int = MAX_BATCH
    fill: float | None = None  # bit/s of datagrams that fill the link; None: none are sent
    sockets: int = 1  # that send these datagrams: each has a limited send buffer
    segments: int = 1  # of these datagrams in one system call: no more than a token bucket holds

    @classmethod
    def of(cls, fabric: Fabric, pairs: Pairs, pair: tuple[int, int], single: bool) -> Plan:
        """Return the plan of one pair of a step. `single`: the receiver has no other sender, so a link is measured."""
        into = [each for each in pairs if each[1] == pair[1]]
        loss = fabric.distance(*pair).loss if single else 0.0
        rate = fabric.limit(into)
        fill = None
        if rate is not None and fabric.is_lossy(into):
            own = [fabric.limit([each]) or rate for each in into]
            share = OVERLOAD_TOGETHER * rate / len(into)
            fill = OVERLOAD * rate
            if not single:  # if a sender's link is too slow for its share, all send at the rates of their links
                fill = share if min(own) >= share else OVERLOAD * (fabric.limit([pair]) or rate)
        packets = packets_for(loss) if loss else 0
        way_s = fabric.distance(*pair).delay + fabric.distance(*pair).jitter + QUEUE_S
        sockets = math.ceil((fill or 0.0) * way_s / 8 / WIRE_BYTES / SOCKET_PACKETS)
        at_once = int((fill or 0.0) * TICK_S / 8 / WIRE_BYTES)
        segments = max(1, min(MAX_SEGMENTS, at_once))
        return cls(EXCHANGES if single else 0, packets, batch_for(rate), fill, max(1, sockets), segments)

    def seconds(self, round_trip: float, jitter: float) -> float:
        """Return about how many seconds the plan takes, without the datagrams of `fill`."""
        batches = math.ceil(self.packets / self.batch)
        return self.exchanges * (round_trip + jitter) + batches * (round_trip + 2 * SETTLE_S + 3 * jitter)


def packets_for(loss: float) -> int:
    """Return how many packets are needed to measure a loss of this share."""
    return min(MAX_PACKETS, max(MIN_PACKETS, math.ceil(EXPECTED_LOST / loss)))


def batch_for(rate: int | None) -> int:
    """Return how many numbered datagrams can be sent at once over a link of this rate without a drop in a queue."""
    size = NUMBER.size + HEADERS_BYTES
    return MAX_BATCH if rate is None else min(MAX_BATCH, max(10, int(rate * BATCH_S / 8 / size)))


# The sender


def answer(sock: socket.socket, token: bytes, plan: Plan, timeout_s: float) -> None:
    """Send what the receiver at the other end of `sock` measures. Return when the flow may begin. Raise ProbeError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(timeout_s)
    port = PORT.unpack(_exactly(sock, PORT.size))[0]
    for _ in range(plan.exchanges):
        sock.sendall(_exactly(sock, 1))
    with ExitStack() as closing:
        opened = []
        for _ in range(plan.sockets):
            udp = closing.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            udp.bind((sock.getsockname()[0], 0))
            udp.connect((sock.getpeername()[0], port))
            opened.append(udp)
        if plan.packets:
            _send_numbered(sock, opened[0], token, plan)
        if plan.fill is not None:
            _fill(sock, opened, token, plan.fill, plan.segments, timeout_s)
    _expect(sock, GO)


def _send_numbered(sock: socket.socket, udp: socket.socket, token: bytes, plan: Plan) -> None:
    for first in range(0, plan.packets, plan.batch):
        for number in range(first, min(plan.packets, first + plan.batch)):
            _send(udp, NUMBER.pack(token[:16], number))
        sock.sendall(SENT)
        _expect(sock, COUNTED)


def _fill(
    sock: socket.socket, opened: Sequence[socket.socket], token: bytes, rate: float, segments: int, timeout_s: float
) -> None:
    for udp in opened:
        udp.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, PAYLOAD_BYTES)
    data, in_turn = token[:16].ljust(PAYLOAD_BYTES, b"\0") * segments, itertools.cycle(opened)
    interval = segments * WIRE_BYTES * 8 / rate
    end = time.monotonic() + timeout_s
    due = time.monotonic()
    while (now := time.monotonic()) < end:
        due = max(due, now - MAX_BEHIND_S)
        while due <= now:
            _send(next(in_turn), data)
            due += interval
        if select.select([sock], [], [], TICK_S)[0]:
            _expect(sock, ENOUGH)
            return
    raise ProbeError("the receiver of datagrams has not ended")


def _send(udp: socket.socket, data: bytes) -> None:
    with suppress(ConnectionRefusedError):  # the receiver has counted enough and closed its socket
        udp.send(data)


# The receiver


class Receiver:
    """Measures the senders at the other ends of the connections `socks`. A context manager."""

    def __init__(self, socks: Sequence[socket.socket], token: bytes, timeout_s: float) -> None:
        self._socks = socks
        self._token = token[:16]
        self._timeout_s = timeout_s
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        with suppress(OSError):  # above the system's limit; needs CAP_NET_ADMIN
            self._udp.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self._udp.bind((socks[0].getsockname()[0], 0))
        for sock in socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(timeout_s)
            sock.sendall(PORT.pack(self._udp.getsockname()[1]))

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *exception: object) -> None:
        self._udp.close()

    def round_trips(self, exchanges: int) -> list[float]:
        """Exchange one byte with the one sender `exchanges` times. Return the seconds of each exchange."""
        (sock,) = self._socks
        found = []
        for _ in range(exchanges):
            begun = time.monotonic()
            sock.sendall(ASK)
            _expect(sock, ASK)
            found.append(time.monotonic() - begun)
        return found

    def lost(self, plan: Plan, jitter: float) -> int:
        """Return how many of the numbered datagrams of the one sender did not arrive.

        Raise ProbeError if the sender has not sent all of them within the timeout.
        """
        (sock,) = self._socks
        end = time.monotonic() + self._timeout_s
        arrived = set[int]()
        for _ in range(0, plan.packets, plan.batch):
            quiet_since = None  # time of the last datagram after the sender has sent the batch
            while quiet_since is None or time.monotonic() - quiet_since < SETTLE_S + 2 * jitter:
                if time.monotonic() > end:
                    name = sock.getpeername()[0]
                    raise ProbeError(f"{name} has not sent {plan.packets} datagrams in {self._timeout_s:g} s")
                ready = select.select([self._udp, *([sock] if quiet_since is None else [])], [], [], SETTLE_S / 2)[0]
                if self._udp in ready:
                    data = self._udp.recv(64)
                    if len(data) == NUMBER.size and data.startswith(self._token):
                        arrived.add(NUMBER.unpack(data)[1])
                        quiet_since = quiet_since and time.monotonic()
                elif sock in ready:
                    _expect(sock, SENT)
                    quiet_since = time.monotonic()
            sock.sendall(COUNTED)
        return plan.packets - len(arrived)

    def count(self, discard_s: float, slice_s: float, enough: Callable[[Sequence[float]], bool]) -> tuple[int, float]:
        """Count the datagrams of all senders after the first `discard_s`, in slices, until `enough(rates)` is True.

        Return their number and the seconds of the slices. Raise ProbeError if a sender sends none.
        """
        self._wait_for_all()
        _drop_and_count(self._udp, self._token)
        time.sleep(discard_s)
        rates: list[float] = []
        first = last = self._dropped(), time.monotonic()
        while not enough(rates):
            time.sleep(slice_s)
            now = self._dropped(), time.monotonic()
            rates.append(max(1, now[0] - last[0]) / (now[1] - last[1]))
            last = now
        for sock in self._socks:
            sock.sendall(ENOUGH)
        return last[0] - first[0], last[1] - first[1]

    def _dropped(self) -> int:
        """How many datagrams the kernel has dropped of the socket's so far: the last value of SO_MEMINFO."""
        values = struct.Struct("=9I")
        return int(values.unpack(self._udp.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, values.size))[-1])

    def _wait_for_all(self) -> None:
        """Wait for a datagram of each sender. Senders begin at different times. Raise ProbeError if one sends none."""
        missing = {sock.getpeername()[0] for sock in self._socks}
        end = time.monotonic() + START_TIMEOUT_S
        while missing:
            if not select.select([self._udp], [], [], max(0.0, end - time.monotonic()))[0]:
                raise ProbeError(f"no datagrams from {', '.join(sorted(missing))}")
            data, address = self._udp.recvfrom(PAYLOAD_BYTES)
            if data.startswith(self._token):
                missing.discard(address[0])

    def go(self) -> None:
        """Tell the senders that their flows may begin."""
        for sock in self._socks:
            sock.sendall(GO)


def _drop_and_count(udp: socket.socket, token: bytes) -> None:
    """Let the kernel drop each datagram that fills a link: its size and its beginning are right. Others wait unread."""
    load_length, load, is_equal, end = 0x80, 0x20, 0x15, 0x06  # of classic BPF, linux/bpf_common.h
    wanted = [(load_length, 0, UDP_HEADER_BYTES + PAYLOAD_BYTES)]
    words = struct.unpack(f">{len(token) // 4}I", token)
    wanted += [(load, UDP_HEADER_BYTES + 4 * number, word) for number, word in enumerate(words)]
    program = []
    for number, (code, place, value) in enumerate(wanted):
        to_the_last = 2 * (len(wanted) - number) - 1
        program += [(code, 0, 0, place), (is_equal, 0, to_the_last, value)]
    program += [(end, 0, 0, 0), (end, 0, 0, 0xFFFFFFFF)]  # bytes that are kept
    content = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    filter_ = struct.pack("HP", len(program), ctypes.addressof(content))
    udp.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_)


def _expect(sock: socket.socket, wanted: bytes) -> None:
    found = _exactly(sock, 1)
    if found != wanted:
        raise ProbeError(f"the other end sent {found!r} instead of {wanted!r}")


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ProbeError("the other end closed the connection")
        data += more
    return data
