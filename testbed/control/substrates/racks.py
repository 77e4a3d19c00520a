"""Racks in the switch's namespace: a bridge per rack, and a shaped trunk from each of them to the core bridge.

    node0 -- [port0] rack0 [up0] --veth-- [down0] br0 [down1] --veth-- [up1] rack1 [port2] -- node2

What leaves a rack passes the token bucket on its `up` end, what enters it the bucket on its `down` end. So each uplink
is shared by all nodes of its rack, each way. The commands are data here; netns.py executes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from testbed.control.substrates.base import NodePlan
from testbed.net.shaping import Shaping, read_buckets, shape
from testbed.spec.errors import NetworkInvalid
from testbed.spec.link import Link

CORE = "br0"
# forward_delay 0: a port carries traffic at once. mcast_snooping 0: no queries among the measured bytes.
BRIDGE = ["type", "bridge", "forward_delay", "0", "mcast_snooping", "0"]
LIST_COUNTERS = ["ip", "-s", "-json", "link", "show"]


def bridge_of(plan: NodePlan) -> str:
    """The bridge that a node is connected to."""
    return CORE if plan.uplink is None else f"rack{plan.rack}"


def devices(rack: int) -> tuple[str, str]:
    """The two ends of a rack's trunk: the first sends out of the rack, the second into it."""
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


def without_delay(link: Link) -> Link:
    """The link without its delay: a path from rack to rack leaves one rack, so the delay applies once."""
    return link.model_copy(update={"delay": None})


def read_uplinks(plans: Sequence[NodePlan], qdiscs: str, counters: str) -> dict[int, Shaping]:
    """The uplink of each rack, from the output of LIST_QDISCS and LIST_COUNTERS. Raises NetworkInvalid."""
    buckets = read_buckets(qdiscs)
    try:
        sent = {each["ifname"]: int(each["stats64"]["tx"]["bytes"]) for each in json.loads(counters)}
    except (ValueError, KeyError, TypeError):
        rule = "ip does not list its counters as JSON"
        raise NetworkInvalid(f"the uplinks cannot be read: {rule}. Install iproute2 5.5 or newer.") from None
    found = {}
    for rack, link in trunks(plans).items():
        ends = devices(rack)
        own = {name: bucket for name, bucket in buckets.items() if name in ends}
        found[rack] = Shaping(link.rate, own, {name: sent.get(name, 0) for name in ends})
    return found
