"""Build the tc commands that shape a Link, and read back what tc lists. This module runs no command.

So tests read the commands without root. The substrates netns and compose and the entrypoint of a container run them;
process and hosts do not shape. After training the buckets are read again (`difference`): a link that has lost its
shaping makes the run invalid.

Both directions of an interface are shaped. Outgoing packets pass a token bucket (tbf) on the interface. Incoming
packets are redirected to an ifb device and pass an equal bucket there. If only egress were shaped, three senders could
send to one receiver at three times its rate, and `gather` would be three times too fast. The size of a bucket is what
the link sends in BURST_S (spec/units.py). `Link.queue` is tbf's `latency`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from testbed.net.tcp import ETHERNET_HEADER_BYTES, MTU_BYTES
from testbed.spec.errors import NetworkInvalid
from testbed.spec.link import Link
from testbed.spec.units import burst_bytes, format_rate

NETEM_MIN_PACKETS = 1000  # netem's own default limit
NETEM_TOP_BITS_PER_S = 10**10  # assumed for a link with a delay and no rate
MAX_PACKET_BYTES = 64 * 1024  # largest packet that a bucket drops, because of segmentation offload
MIN_PASSED = 0.97  # bytes that passed the bucket, divided by those that the interface counts


def shape(link: Link, iface: str = "eth0", ifb: str = "ifb0", ingress: bool = True) -> list[list[str]]:
    """Return the commands that shape `iface` as `link`; egress only if `ingress` is False."""
    commands = [["ip", "link", "set", "dev", iface, "gso_max_size", str(link.segment)]] if link.segment else []
    if link.loss > 0:  # else netem drops packets of 64 KiB, which are 45 frames each, because segmentation comes later
        commands.append(["ip", "link", "set", "dev", iface, "gso_max_segs", "1"])
    commands += [_netem(link, iface)] if link.needs_netem else []
    if link.rate is not None:
        commands.append(_tbf(link, link.rate, iface, _parent(link)))
        if ingress:
            commands += [*_redirect(iface, ifb), _tbf(link, link.rate, ifb, ["root"])]
    return commands


def unshape(link: Link, iface: str = "eth0", ifb: str = "ifb0", ingress: bool = True) -> list[list[str]]:
    """Return the commands that remove what `shape` has made, except the largest segment, which changes no rate."""
    commands = [["tc", "qdisc", "del", "dev", iface, "root"]] if link.rate is not None or link.needs_netem else []
    if link.rate is not None and ingress:
        commands += [["tc", "qdisc", "del", "dev", iface, "ingress"], ["ip", "link", "del", ifb]]
    return commands


def reshape(
    link: Link, before: int | None, rate: int | None, iface: str = "eth0", ifb: str = "ifb0", ingress: bool = True
) -> list[list[str]]:
    """Return the commands that change the rate from `before` to `rate` while packets flow; None is no limit.

    `ingress=False` changes egress only, as in `shape`. All other settings are those of `link`. The size of a token
    bucket never decreases: a queued packet larger than the bucket would never be sent, and would block all others.
    """
    if before is not None and rate is not None:
        size = burst_bytes(max(before, rate, link.rate or 0))
        egress = _tbf(link, rate, iface, _parent(link), "change", size)
        return [egress, *([_tbf(link, rate, ifb, ["root"], "change", size)] if ingress else [])]
    if rate is not None:
        redirected = [*_redirect(iface, ifb), _tbf(link, rate, ifb, ["root"])] if ingress else []
        return [_tbf(link, rate, iface, _parent(link)), *redirected]
    if before is None:
        return []
    removed = [["tc", "qdisc", "del", "dev", iface, "ingress"], ["ip", "link", "del", ifb]] if ingress else []
    return [["tc", "qdisc", "del", "dev", iface, *_parent(link)], *removed]


LIST_QDISCS = ["tc", "-s", "-json", "qdisc", "show"]  # for all devices of a node; needs no privilege


@dataclass(frozen=True)
class Bucket:
    """A token bucket as the kernel lists it."""

    rate: int  # bit/s
    bytes: int = 0  # that have passed the bucket
    drops: int = 0  # dropped packets


@dataclass(frozen=True)
class Shaping:
    """The link of a node: the rate that is requested now (None: no limit), and the buckets by device."""

    rate: int | None = None
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)  # bytes by device, if the kernel's counters were read


def read_buckets(text: str) -> dict[str, Bucket]:
    """Return the token bucket of every device that has one. `text`: output of LIST_QDISCS. Raise NetworkInvalid."""
    try:
        found = [qdisc for qdisc in json.loads(text) if qdisc["kind"] == "tbf"]
        return {
            qdisc["dev"]: Bucket(8 * int(qdisc["options"]["rate"]), int(qdisc["bytes"]), int(qdisc["drops"]))
            for qdisc in found
        }
    except (ValueError, KeyError, TypeError):
        rule = "tc does not list its buckets as JSON"
        raise NetworkInvalid(f"the shaping cannot be read: {rule}. Install iproute2 5.5 or newer.") from None


def difference(
    name: str, before: Shaping, now: Shaping, counted: tuple[int, int] = (0, 0), iface: str = "eth0", ifb: str = "ifb0"
) -> str:
    """Return why the shaping of node `name` is not the requested one now; empty if it is.

    `counted`: the bytes (sent, received) that the node's interface counted since `before`. These bytes must have passed
    the buckets that existed at that time; a fault may add a bucket later to a link without a rate. An interface counts
    a received packet before the ingress bucket, which may drop the packet.
    """
    if now.rate is None:
        return ""
    for way, device, size in (("egress", iface, counted[0]), ("ingress", ifb, counted[1])):
        bucket, first = now.buckets.get(device), before.buckets.get(device)
        requested = f"{name}: {way} is not shaped as requested: requested {format_rate(now.rate)}"
        if bucket is None:
            return f"{requested}, found no token bucket on {device}"
        if abs(bucket.rate - now.rate) >= 8:  # 8 bit/s: tc lists whole bytes per second
            return f"{requested}, found {format_rate(bucket.rate)} on {device}"
        if first is None:
            continue
        passed = bucket.bytes - first.bytes
        if passed + MAX_PACKET_BYTES * (bucket.drops - first.drops) < MIN_PASSED * size:
            moved = f"{passed / 1e6:.4g} MB of the {size / 1e6:.4g} MB of the steps"
            return f"{requested}, and only {moved} passed the token bucket on {device}"
    return ""


def _parent(link: Link) -> list[str]:
    """Return tc's words for the parent of the token bucket: netem if there is one, else the root."""
    return ["parent", "1:1"] if link.needs_netem else ["root"]


def _tbf(link: Link, rate: int, dev: str, parent: list[str], verb: str = "add", size: int | None = None) -> list[str]:
    bucket = ["rate", format_rate(rate), "burst", f"{size or burst_bytes(rate)}b", "latency", _us(queue_s(link))]
    return ["tc", "qdisc", verb, "dev", dev, *parent, "tbf", *bucket]


def queue_s(link: Link) -> float:
    """Return the longest time in s that a packet waits in a link's queue: at least the round trip to an equal node.

    TCP halves its window when a packet is dropped. With a queue of rate x round trip the link stays busy even then.
    `Link.queue` already has the delay of another link on the way (`with_queue_of`).
    """
    return max(link.queue, 2 * (link.delay or 0.0))


def _redirect(iface: str, ifb: str) -> list[list[str]]:
    """Return the commands that redirect all incoming packets to the ifb. Not every kernel has the filter matchall."""
    everything = ["protocol", "all", "u32", "match", "u32", "0", "0"]
    redirect = ["action", "mirred", "egress", "redirect", "dev", ifb]
    return [
        ["ip", "link", "add", ifb, "type", "ifb"],
        ["ip", "link", "set", ifb, "up"],
        ["tc", "qdisc", "add", "dev", iface, "ingress"],
        ["tc", "filter", "add", "dev", iface, "parent", "ffff:", *everything, *redirect],
    ]


def _netem(link: Link, iface: str) -> list[str]:
    """Return the command for delay and loss, on egress only: a directed path leaves one node, so each applies once.

    The limit is twice the number of packets in flight (rate x delay) and in the bucket's queue, which netem counts as
    well, so that netem drops no packet because of its limit.
    """
    seconds = (link.delay or 0.0) + (link.jitter or 0.0) + (queue_s(link) if link.rate is not None else 0.0)
    in_flight = (link.rate or NETEM_TOP_BITS_PER_S) * seconds / 8 / (MTU_BYTES + ETHERNET_HEADER_BYTES)
    options = ["limit", str(max(NETEM_MIN_PACKETS, math.ceil(2 * in_flight)))]
    if link.delay is not None:
        options += ["delay", _us(link.delay), *([_us(link.jitter)] if link.jitter is not None else [])]
    if link.loss > 0:
        options += ["loss", f"{link.loss * 100:g}%"]
    return ["tc", "qdisc", "add", "dev", iface, "root", "handle", "1:", "netem", *options]


def _us(seconds: float) -> str:
    return f"{round(seconds * 1e6)}us"


def congestion(name: str) -> list[str]:
    """Return the command that sets the congestion control of a network namespace. It fails if `name` is not allowed."""
    return ["sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={name}"]


def route_congestion(name: str, subnet: str, iface: str = "eth0", address: str | None = None) -> list[str]:
    """Return the command that sets the congestion control for all connections to `subnet`.

    It works for every `name` that the kernel has. The list of allowed names (net.ipv4.tcp_allowed_congestion_control)
    is one for the whole machine, so a run does not change that list.
    """
    route = ["ip", "route", "replace", subnet, "dev", iface, "scope", "link", "proto", "kernel"]
    return [*route, *(["src", address] if address else []), "congctl", name]


def routes_congestion(name: str, routes: Iterable[dict[str, Any]], iface: str = "eth0") -> list[list[str]]:
    """Return the commands that set the congestion control for `routes` of an interface, from `ip -json route show`."""
    return [route_congestion(name, route["dst"], iface, route.get("prefsrc")) for route in routes]
