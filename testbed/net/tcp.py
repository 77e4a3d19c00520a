"""Arithmetic of a shaped link: headers, bursts and bottlenecks. Standard library only, for the probe's sake."""

from __future__ import annotations

import math
from collections.abc import Iterable

BURST_SECONDS = 0.004  # 4 ms of the rate: long enough for late timers, short against anything we time
BURST_MIN = 16 * 1024  # bytes; below this a bucket holds too few frames to be filled evenly
MTU = 1500  # bytes of an IP packet
IP_TCP_HEADERS = 52  # bytes: IPv4 20, TCP 20, timestamps 12
ETHERNET_HEADER = 14  # bytes; tbf counts them too


def efficiency(mtu: int = MTU) -> float:
    """TCP goodput per bit on the wire: 1448 / 1514 = 0.956 at MTU 1500."""
    return (mtu - IP_TCP_HEADERS) / (mtu + ETHERNET_HEADER)


def wire_rate(goodput: float, mtu: int = MTU) -> float:
    """What was on the wire, in the unit of `goodput`."""
    return goodput / efficiency(mtu)


def burst(rate: int) -> int:
    """Size of the token bucket in bytes at `rate` bit/s."""
    return max(BURST_MIN, math.ceil(rate * BURST_SECONDS / 8))


def bottleneck(receiver: int | None, senders: Iterable[int | None]) -> int | None:
    """The rate that `senders` together can reach into `receiver`, in bit/s; None where nothing limits it."""
    rates = list(senders)
    sent = None if None in rates else sum(rate for rate in rates if rate is not None)
    limits = [rate for rate in (receiver, sent) if rate is not None]
    return min(limits, default=None)
