"""A Link as tc argument lists, and what tc lists of it. Nothing is run here, so tests read the lists without root.

The substrates netns and compose and the entrypoint of a container apply them. process and hosts do not shape. After
training the buckets are read again (`difference`): a link that lost its shaping meanwhile makes the run invalid.

Both directions of an interface are shaped. Outgoing packets pass a token bucket (tbf) on the interface. Incoming
packets are redirected to an ifb device and pass an equal bucket there. If only egress were shaped, three senders could
send to one receiver at three times its rate, and `gather` would look three times too fast. The
bucket holds what the link sends in BURST_S (spec/units.py). `Link.queue` is tbf's `latency`.
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
MAX_PACKET_BYTES = 64 * 1024  # of a packet that a bucket drops: segmentation offload makes them as large
MIN_PASSED = 0.97  # of what an interface counts, as the bucket counts it


def shape(link: Link, iface: str = "eth0", ifb: str = "ifb0", ingress: bool = True) -> list[list[str]]:
    """The commands that give `iface` the link; `ingress=False` shapes egress only."""
    commands = [["ip", "link", "set", "dev", iface, "gso_max_size", str(link.segment)]] if link.segment else []
    if link.loss > 0:  # else a lost packet is one of 64 KiB, which segmentation would have cut into 45 frames
        commands.append(["ip", "link", "set", "dev", iface, "gso_max_segs", "1"])
    commands += [_netem(link, iface)] if link.needs_netem else []
    if link.rate is not None:
        commands.append(_tbf(link, link.rate, iface, _parent(link)))
        if ingress:
            commands += [*_redirect(iface, ifb), _tbf(link, link.rate, ifb, ["root"])]
    return commands


def unshape(link: Link, iface: str = "eth0", ifb: str = "ifb0", ingress: bool = True) -> list[list[str]]:
    """The commands that remove what `shape` has made. The largest segment stays, which changes no rate."""
    commands = [["tc", "qdisc", "del", "dev", iface, "root"]] if link.rate is not None or link.needs_netem else []
    if link.rate is not None and ingress:
        commands += [["tc", "qdisc", "del", "dev", iface, "ingress"], ["ip", "link", "del", ifb]]
    return commands


def reshape(
    link: Link, before: int | None, rate: int | None, iface: str = "eth0", ifb: str = "ifb0", ingress: bool = True
) -> list[list[str]]:
    """The commands that change the rate from `before` to `rate` while packets flow; None is no limit.

    `ingress=False` changes egress only, as in `shape`.

    Everything else is as in `link`. The token bucket never gets smaller than it was: a queued packet that is larger
    than the bucket would never be sent, and would block all packets behind it.
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


LIST_QDISCS = ["tc", "-s", "-json", "qdisc", "show"]  # of all devices of a node; needs no privilege


@dataclass(frozen=True)
class Bucket:
    """A token bucket as the kernel has it."""

    rate: int  # bit/s
    bytes: int = 0  # that have passed it
    drops: int = 0  # packets


@dataclass(frozen=True)
class Shaping:
    """The link of a node: the rate that is requested now, None for none, and its buckets by device."""

    rate: int | None = None
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)  # bytes by device, where the kernel's count of them was read


def read_buckets(text: str) -> dict[str, Bucket]:
    """The token bucket of every device that has one, from the output of LIST_QDISCS. Raises NetworkInvalid."""
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
    """Why the shaping of node `name` is not the requested one now; empty if it is.

    `counted` are the bytes (sent, received) that its interface counted since `before`: they must have passed the
    buckets that existed then. A fault adds a bucket later to a link without a rate. An interface counts a received
    packet before the ingress bucket, which may drop it.
    """
    if now.rate is None:
        return ""
    for way, device, size in (("egress", iface, counted[0]), ("ingress", ifb, counted[1])):
        bucket, first = now.buckets.get(device), before.buckets.get(device)
        requested = f"{name}: {way} is not shaped as requested: requested {format_rate(now.rate)}"
        if bucket is None:
            return f"{requested}, found no token bucket on {device}"
        if abs(bucket.rate - now.rate) >= 8:  # tc counts bytes
            return f"{requested}, found {format_rate(bucket.rate)} on {device}"
        if first is None:
            continue
        passed = bucket.bytes - first.bytes
        if passed + MAX_PACKET_BYTES * (bucket.drops - first.drops) < MIN_PASSED * size:
            moved = f"{passed / 1e6:.4g} MB of the {size / 1e6:.4g} MB of the steps"
            return f"{requested}, and only {moved} passed the token bucket on {device}"
    return ""


def _parent(link: Link) -> list[str]:
    """Where the token bucket goes: below netem if there is one."""
    return ["parent", "1:1"] if link.needs_netem else ["root"]


def _tbf(link: Link, rate: int, dev: str, parent: list[str], verb: str = "add", size: int | None = None) -> list[str]:
    bucket = ["rate", format_rate(rate), "burst", f"{size or burst_bytes(rate)}b", "latency", _us(queue_s(link))]
    return ["tc", "qdisc", verb, "dev", dev, *parent, "tbf", *bucket]


def queue_s(link: Link) -> float:
    """The longest time that a packet waits in the queue of a link: at least that of a round trip to an equal node.

    TCP halves its window when a packet is dropped. With a queue of rate x round trip the link is busy all the same.
    What another link on the way delays is in `Link.queue` already (`with_queue_of`).
    """
    return max(link.queue, 2 * (link.delay or 0.0))


def _redirect(iface: str, ifb: str) -> list[list[str]]:
    """Redirect all incoming packets to the ifb. The filter is u32, because not every kernel has matchall."""
    everything = ["protocol", "all", "u32", "match", "u32", "0", "0"]
    redirect = ["action", "mirred", "egress", "redirect", "dev", ifb]
    return [
        ["ip", "link", "add", ifb, "type", "ifb"],
        ["ip", "link", "set", ifb, "up"],
        ["tc", "qdisc", "add", "dev", iface, "ingress"],
        ["tc", "filter", "add", "dev", iface, "parent", "ffff:", *everything, *redirect],
    ]


def _netem(link: Link, iface: str) -> list[str]:
    """Delay and loss on egress only: a directed path leaves one node, so they apply once.

    The limit is twice the packets in flight (rate x delay) and in the bucket's queue, which netem counts as well, so
    that netem never drops for lack of room.
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
    """The command that sets TCP's congestion control in a network namespace; fails if `name` is not allowed there."""
    return ["sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={name}"]


def route_congestion(name: str, subnet: str, iface: str = "eth0", address: str | None = None) -> list[str]:
    """The command that sets it for all connections to `subnet`; works for every `name` that the kernel has.

    The list of allowed names (net.ipv4.tcp_allowed_congestion_control) is one for the whole machine, so a run does not
    change it.
    """
    route = ["ip", "route", "replace", subnet, "dev", iface, "scope", "link", "proto", "kernel"]
    return [*route, *(["src", address] if address else []), "congctl", name]


def routes_congestion(name: str, routes: Iterable[dict[str, Any]], iface: str = "eth0") -> list[list[str]]:
    """The commands that set it for all routes of an interface, as `ip -json route show` lists them."""
    return [route_congestion(name, route["dst"], iface, route.get("prefsrc")) for route in routes]
