"""Clocks and round trips: how far apart two nodes are in time. Standard library only, for the probe's sake."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

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
