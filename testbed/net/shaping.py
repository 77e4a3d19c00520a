"""Link -> tc argument lists: data first, so that tests read them without root and every substrate applies the same.

Both directions of an interface are shaped. What leaves goes through a token bucket (tbf) on the interface; what
arrives is redirected to an ifb device and leaves that through an equal bucket. Shaping only what leaves would let
three senders fill one receiver at three times its rate, and make `gather` look three times too cheap.
"""

from __future__ import annotations

import math

from testbed.net.tcp import ETHERNET_HEADER_BYTES, MTU_BYTES, burst
from testbed.spec.link import Link
from testbed.spec.units import format_rate

NETEM_MIN_LIMIT = 1000  # packets; netem's own default
NETEM_TOP_RATE = 10**10  # bit/s assumed where a delay is asked but no rate


def shape(link: Link, iface: str = "eth0", ifb: str = "ifb0", ingress: bool = True) -> list[list[str]]:
    """The commands that make `iface` the link asked for; `ingress=False` shapes only what leaves."""
    commands = [["ip", "link", "set", "dev", iface, "gso_max_size", str(link.segment)]] if link.segment else []
    commands += [_netem(link, iface)] if link.needs_netem else []
    if link.rate is not None:
        commands.append(_tbf(link, link.rate, iface, ["parent", "1:1"] if link.needs_netem else ["root"]))
        if ingress:
            commands += [*_redirect(iface, ifb), _tbf(link, link.rate, ifb, ["root"])]
    return commands


def reshape(
    link: Link, before: int | None, rate: int | None, iface: str = "eth0", ifb: str = "ifb0"
) -> list[list[str]]:
    """From one rate to another while packets flow; `link` has the rest of what is asked, None is no limit.

    The bucket never gets smaller than it was: a packet in the queue that is larger would never fit, and stop them all.
    """
    place = ["parent", "1:1"] if link.needs_netem else ["root"]
    if before is not None and rate is not None:
        size = burst(max(before, rate, link.rate or 0))
        return [_tbf(link, rate, iface, place, "change", size), _tbf(link, rate, ifb, ["root"], "change", size)]
    if rate is not None:
        return [_tbf(link, rate, iface, place), *_redirect(iface, ifb), _tbf(link, rate, ifb, ["root"])]
    if before is None:
        return []
    drop = [["tc", "qdisc", "del", "dev", iface, *place], ["tc", "qdisc", "del", "dev", iface, "ingress"]]
    return [*drop, ["ip", "link", "del", ifb]]


def congestion(name: str) -> list[str]:
    """Set TCP's congestion control for one network namespace; refused where the machine does not *allow* `name`."""
    return ["sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={name}"]


def route_congestion(name: str, subnet: str, iface: str = "eth0", address: str | None = None) -> list[str]:
    """The same for all connections to `subnet`: works for every `name` the kernel has, allowed list or not.

    That list (net.ipv4.tcp_allowed_congestion_control) is one for the whole machine: changing it would touch others.
    """
    source = ["src", address] if address else []
    return [
        "ip",
        "route",
        "replace",
        subnet,
        "dev",
        iface,
        "scope",
        "link",
        "proto",
        "kernel",
        *source,
        "congctl",
        name,
    ]


def _tbf(link: Link, rate: int, dev: str, place: list[str], verb: str = "add", size: int | None = None) -> list[str]:
    bucket = ["rate", format_rate(rate), "burst", f"{size or burst(rate)}b", "latency", _us(link.queue)]
    return ["tc", "qdisc", verb, "dev", dev, *place, "tbf", *bucket]


def _redirect(iface: str, ifb: str) -> list[list[str]]:
    """Send everything that arrives through the ifb; u32 because not every kernel has matchall."""
    everything = ["protocol", "all", "u32", "match", "u32", "0", "0"]
    redirect = ["action", "mirred", "egress", "redirect", "dev", ifb]
    return [
        ["ip", "link", "add", ifb, "type", "ifb"],
        ["ip", "link", "set", ifb, "up"],
        ["tc", "qdisc", "add", "dev", iface, "ingress"],
        ["tc", "filter", "add", "dev", iface, "parent", "ffff:", *everything, *redirect],
    ]


def _netem(link: Link, iface: str) -> list[str]:
    """Delay and loss on the way out only: every directed path leaves one node, so it meets them once."""
    options = ["limit", str(_netem_limit(link))]
    if link.delay is not None:
        options += ["delay", _us(link.delay), *([_us(link.jitter)] if link.jitter is not None else [])]
    if link.loss > 0:
        options += ["loss", f"{link.loss * 100:g}%"]
    return ["tc", "qdisc", "add", "dev", iface, "root", "handle", "1:", "netem", *options]


def _netem_limit(link: Link) -> int:
    """Packets that may be under way at once: twice rate x delay, so that netem never drops for lack of room."""
    seconds = (link.delay or 0.0) + (link.jitter or 0.0)
    packets = (link.rate or NETEM_TOP_RATE) * seconds / 8 / (MTU_BYTES + ETHERNET_HEADER_BYTES)
    return max(NETEM_MIN_LIMIT, math.ceil(2 * packets))


def _us(seconds: float) -> str:
    return f"{round(seconds * 1e6)}us"
