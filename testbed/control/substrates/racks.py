"""Racks and their uplinks as commands; netns.py and compose.py execute them.

Namespaces: the switch has a bridge per rack, and a trunk from each of them to the core bridge.

    node0 -- [port0] rack0 [up0] --veth-- [down0] br0 [down1] --veth-- [up1] rack1 [port2] -- node2

Containers: Docker has a network per rack, and a router has an interface `down` and an ifb device `up` for each.

    node0 -- network rack0 -- [up0, down0] router [up1, down1] -- network rack1 -- node2

On both, what leaves a rack passes the token bucket of `up`, what enters it the bucket of `down`. So each uplink is
shared by all nodes of its rack, each way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.control.substrates.base import NodePlan
from testbed.net.shaping import Shaping, queue_s, read_buckets, shape
from testbed.spec.errors import NetworkInvalid
from testbed.spec.link import Link

CORE = "br0"
# forward_delay 0: a port carries traffic at once. mcast_snooping 0: no queries among the measured bytes.
BRIDGE = ["type", "bridge", "forward_delay", "0", "mcast_snooping", "0"]
LIST_COUNTERS = ["ip", "-s", "-json", "link", "show"]
LIST_ADDRESSES = ["ip", "-json", "-4", "address", "show"]


@dataclass(frozen=True)
class RackNetwork:
    """The Docker network of a rack."""

    subnet: str
    router: str  # the router's address in it


def bridge_of(plan: NodePlan) -> str:
    """The bridge that a node is connected to."""
    return CORE if plan.uplink is None else f"rack{plan.rack}"


def devices(rack: int) -> tuple[str, str]:
    """The two devices of a rack's uplink: what leaves the rack passes the first, what enters it the second."""
    return f"up{rack}", f"down{rack}"


def trunks(plans: Sequence[NodePlan]) -> dict[int, Link]:
    """The uplink of each rack."""
    return {plan.rack: plan.uplink for plan in plans if plan.uplink is not None}


def make_bridges(plans: Sequence[NodePlan]) -> list[list[str]]:
    """The commands that make the core bridge, and the bridge and the trunk of each rack."""
    commands = [["ip", "link", "add", CORE, *BRIDGE], ["ip", "link", "set", CORE, "up"]]
    for rack, link in trunks(plans).items():
        bridge, (up, down) = f"rack{rack}", devices(rack)
        commands += [
            ["ip", "link", "add", bridge, *BRIDGE],
            ["ip", "link", "set", bridge, "up"],
            ["ip", "link", "add", up, "type", "veth", "peer", "name", down],
            ["ip", "link", "set", up, "master", bridge, "up"],
            ["ip", "link", "set", down, "master", CORE, "up"],
            *shape(link, up, ingress=False),
            *shape(without_delay(link), down, ingress=False),
        ]
    return commands


def shape_router(plans: Sequence[NodePlan], networks: Mapping[int, RackNetwork], addresses: str) -> list[list[str]]:
    """The commands that make the uplinks of a router; `addresses` is its output of LIST_ADDRESSES."""
    names = {own["local"]: each["ifname"] for each in json.loads(addresses) for own in each["addr_info"]}
    if absent := [network.router for network in networks.values() if network.router not in names]:
        raise NetworkInvalid(f"the router has no interface with address {absent[0]}. Run it again.")
    commands = []
    for rack, link in trunks(plans).items():
        up, down = devices(rack)
        commands += [
            ["ip", "link", "set", "dev", names[networks[rack].router], "down"],  # only then it can get another name
            ["ip", "link", "set", "dev", names[networks[rack].router], "name", down],
            ["ip", "link", "set", "dev", down, "up"],
            *shape(link, down, up),
        ]
    return commands


def routes_from(
    rack: int, networks: Mapping[int, RackNetwork], iface: str, congestion: str | None = None
) -> list[list[str]]:
    """The commands that give a node of this rack its routes to the other racks, with this congestion control."""
    last = ["congctl", congestion] if congestion else []
    others = [network.subnet for number, network in networks.items() if number != rack]
    return [["ip", "route", "replace", subnet, "via", networks[rack].router, "dev", iface, *last] for subnet in others]


def without_delay(link: Link) -> Link:
    """The link without its delay, but with its queue: a path from rack to rack leaves one rack, so it applies once."""
    return link.model_copy(update={"delay": None, "queue": queue_s(link)})


def read_uplinks(plans: Sequence[NodePlan], qdiscs: str, counters: str) -> dict[int, Shaping]:
    """The uplink of each rack, from the output of LIST_QDISCS and LIST_COUNTERS. Raises NetworkInvalid."""
    buckets = read_buckets(qdiscs)
    try:
        listed = {each["ifname"]: each["stats64"] for each in json.loads(counters)}
        counted = {name: (int(each["rx"]["bytes"]), int(each["tx"]["bytes"])) for name, each in listed.items()}
    except (ValueError, KeyError, TypeError):
        rule = "ip does not list its counters as JSON"
        raise NetworkInvalid(f"the uplinks cannot be read: {rule}. Install iproute2 5.5 or newer.") from None
    found = {}
    for rack, link in trunks(plans).items():
        up, down = devices(rack)
        own = {name: bucket for name, bucket in buckets.items() if name in (up, down)}
        left, entered = counted.get(down, (0, 0))  # not of `up`: an ifb counts only what is still redirected to it
        found[rack] = Shaping(link.rate, own, {up: left, down: entered})
    return found
