"""Shaping by a substrate: which commands run on which node, what a failure becomes, and how counters are read."""

from __future__ import annotations

import subprocess

import pytest

from testbed.control.substrates.base import NodeCounts, NodePlan
from testbed.control.substrates.links import READ_COUNTERS, ShapedLinks, parse_counts, trials, try_commands
from testbed.net.shaping import Bucket, Shaping
from testbed.spec.errors import CommandFailed, NetworkInvalid, Unavailable
from testbed.spec.link import Link

FAST, SLOW = Link(rate=200_000_000), Link(rate=10_000_000)


class Nodes:
    """Records the commands of each node."""

    def __init__(self, *links: Link, ingress: bool = True) -> None:
        self.commands: list[tuple[int, str]] = []
        plans = [NodePlan(name=f"node{k}", link=link) for k, link in enumerate(links)]
        self.links = ShapedLinks(plans, self.run, self.cc, ingress)

    def run(self, node: int, argv: list[str]) -> str:
        self.commands.append((node, " ".join(argv)))
        return ""

    def cc(self, node: int) -> None:
        self.commands.append((node, "congestion"))

    def rates(self) -> list[tuple[int, str]]:
        return [(node, text.split("rate ")[1].split()[0]) for node, text in self.commands if "tbf" in text]


def test_each_node_gets_its_rate_both_ways_and_its_congestion_control() -> None:
    nodes = Nodes(FAST, SLOW, Link())
    for node in range(3):
        nodes.links.shape(node)
    assert nodes.rates() == [(0, "200mbit"), (0, "200mbit"), (1, "10mbit"), (1, "10mbit")]
    assert [node for node, text in nodes.commands if text == "congestion"] == [0, 1, 2]


def test_a_rate_is_changed_from_what_it_is_now_and_restored() -> None:
    nodes = Nodes(FAST, Link())
    nodes.links.set_rate(0, 50_000_000)
    nodes.links.set_rate(0, None)
    assert nodes.rates() == [(0, "50mbit"), (0, "50mbit"), (0, "200mbit"), (0, "200mbit")]
    assert all(" change " in text for _, text in nodes.commands)
    nodes.commands.clear()
    nodes.links.set_rate(1, 10_000_000)
    nodes.links.set_rate(1, None)
    assert nodes.rates() == [(1, "10mbit"), (1, "10mbit")] and nodes.commands[-1] == (1, "ip link del ifb0")


def test_the_requested_rate_is_the_one_of_now_and_the_buckets_are_those_that_tc_lists() -> None:
    nodes = Nodes(FAST, Link())
    listed = '[{"kind": "tbf", "dev": "eth0", "options": {"rate": 6250000}, "bytes": 7, "drops": 1}]'
    nodes.links = ShapedLinks(nodes.links._plans, lambda node, argv: listed, nodes.cc)
    assert nodes.links.read(0) == Shaping(200_000_000, {"eth0": Bucket(50_000_000, 7, 1)})
    nodes.links.set_rate(0, 50_000_000)
    assert nodes.links.read(0).rate == 50_000_000 and nodes.links.read(1).rate is None


def test_a_command_that_fails_makes_the_network_invalid_and_names_the_node() -> None:
    def fail(node: int, argv: list[str]) -> str:
        raise CommandFailed(f"{' '.join(argv[:2])}: exit code 2", 2, "unknown qdisc")

    links = ShapedLinks([NodePlan(name="node7", link=FAST)], fail, lambda node: None)
    with pytest.raises(NetworkInvalid, match=r"node7: tc qdisc: exit code 2"):
        links.shape(0)


def test_each_distinct_link_is_tried_once_and_rate_and_delay_apart() -> None:
    both = Link(rate=10_000_000, delay=0.01)
    features = [feature for _, feature in trials([NodePlan(name=name, link=both) for name in "ab"])]
    assert features == ["shaping (tbf, ifb, ingress, u32, mirred)", "delay and loss (netem)"]
    assert list(trials([NodePlan(name="a")])) == []


def test_a_trial_that_fails_names_the_feature_and_the_kernels_reason() -> None:
    def fail(script: str) -> str:
        assert script == "tc a && tc 'b c'"
        raise CommandFailed("sh: exit code 2", 2, "Error: Specified qdisc kind is unknown.")

    with pytest.raises(Unavailable, match=r"^here lacks netem: Specified qdisc kind is unknown\. Leave it out"):
        try_commands("here", [["tc", "a"], ["tc", "b c"]], "netem", fail)


def test_without_ingress_one_bucket_is_made_changed_and_tried() -> None:
    nodes = Nodes(FAST, ingress=False)
    nodes.links.shape(0)
    nodes.links.set_rate(0, 10_000_000)
    assert nodes.rates() == [(0, "200mbit"), (0, "10mbit")]
    assert not any("ifb" in text for _, text in nodes.commands)
    ((commands, feature),) = trials([NodePlan(name="node0", link=FAST)], ingress=False)
    assert len(commands) == 2 and feature == "shaping (tbf)"


@pytest.mark.parametrize(
    "listed", ['[{"kind":"tbf","dev":"lo","options":{rate 10Mbit burst 5000b}}]', "qdisc tbf 8001:"]
)
def test_a_tc_that_does_not_list_its_buckets_as_json_is_refused_before_anything_starts(listed: str) -> None:
    """Older ones print the options of a token bucket as text."""
    ((commands, feature),) = trials([NodePlan(name="node0", link=FAST)])
    with pytest.raises(Unavailable, match=r"^substrate netns: the shaping cannot be read: .* iproute2 5\.5 or newer"):
        try_commands("substrate netns: this machine's kernel", commands, feature, lambda script: listed)
    try_commands("substrate netns: this machine's kernel", commands, feature, lambda script: "[]")


COUNTERS = """Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:    7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
  eth0: 5000 9 0 0 0 0 0 0 6000 8 0 0 0 0 0 0
Ip: Forwarding InReceives OutDiscards OutNoRoutes ReasmTimeout
Ip: 1 1200 0 3 0
Tcp: RtoAlgorithm
Tcp: 1
max 17
"""


def test_bytes_of_the_interface_and_what_the_kernel_refused() -> None:
    expected = NodeCounts(sent=6000, received=5000, unreachable=3, refused=17)
    assert parse_counts(COUNTERS, "eth0") == expected


def test_what_is_not_there_is_none() -> None:
    assert parse_counts("", "eth0") == NodeCounts()
    assert parse_counts(COUNTERS, "eth9").sent is None


def test_the_command_works_where_some_files_are_missing() -> None:
    done = subprocess.run(READ_COUNTERS, capture_output=True, text=True, timeout=60, check=True)
    assert parse_counts(done.stdout, "lo").sent is not None
