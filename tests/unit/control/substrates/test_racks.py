"""Racks as commands: a bridge per rack, and a bucket at each end of its trunk."""

from __future__ import annotations

import json

import pytest

from testbed.control.runs.select import node_plans
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.racks import (
    RackNetwork,
    bridge_of,
    make_bridges,
    read_uplinks,
    routes_from,
    shape_router,
)
from testbed.spec.errors import NetworkInvalid
from testbed.spec.run import RunSpec

TOPOLOGY = {"racks": [[0, 2], [1, 3]], "uplink": "40mbit"}
SMALL = {"model": "lenet5", "data": {"name": "synthetic"}, "batch": 12, "nodes": 4, "link": {"rate": "80mbit"}}


def plans(**topology: object) -> list[NodePlan]:
    return node_plans(RunSpec.load(SMALL | {"topology": TOPOLOGY | topology}, "here"))


def test_each_node_is_connected_to_the_bridge_of_its_rack() -> None:
    assert [bridge_of(plan) for plan in plans()] == ["rack0", "rack1", "rack0", "rack1"]
    assert {bridge_of(plan) for plan in plans(uplink=None)} == {"br0"}


def test_what_leaves_and_what_enters_a_rack_passes_a_bucket_of_the_uplink_s_rate() -> None:
    commands = [" ".join(command) for command in make_bridges(plans())]
    for rack in (0, 1):
        assert f"ip link add up{rack} type veth peer name down{rack}" in commands
        assert f"ip link set up{rack} master rack{rack} up" in commands
        assert f"ip link set down{rack} master br0 up" in commands
        for device in (f"up{rack}", f"down{rack}"):
            assert f"tc qdisc add dev {device} root tbf rate 40mbit burst 20000b latency 50000us" in commands


def test_the_delay_between_racks_applies_once_where_a_rack_is_left() -> None:
    commands = [" ".join(command) for command in make_bridges(plans(delay="5ms"))]
    delayed = [command for command in commands if "netem" in command]
    assert len(delayed) == 2 and all(" dev up" in command and "delay 5000us" in command for command in delayed)


def test_every_queue_on_the_way_to_another_rack_holds_its_round_trip() -> None:
    """100 ms between racks and 5 ms of node 1's link: what crosses is back after 210 ms, from node 0 after 200 ms."""
    values = {"topology": TOPOLOGY | {"delay": "100ms"}, "overrides": {"node1": {"link": {"delay": "5ms"}}}}
    found = node_plans(RunSpec.load(SMALL | values, "here"))
    assert [plan.link.queue for plan in found] == [0.2, 0.21, 0.2, 0.2]
    commands = [" ".join(command) for command in make_bridges(found)]
    tbf = [command for command in commands if " tbf " in command]
    assert len(tbf) == 4 and all(command.endswith("latency 210000us") for command in tbf), tbf
    assert {plan.link.queue for plan in plans(delay="1ms")} == {0.05}, "never less than requested"
    slowed = node_plans(RunSpec.load(SMALL | values | {"compute": "emulated:p", "dilation": 2.0}, "here"))
    assert slowed[0].link.queue == 0.4


def test_without_racks_there_is_one_bridge() -> None:
    commands = make_bridges(plans(uplink=None))
    assert [command[3] for command in commands] == ["br0", "br0"]


def router(**topology: object) -> list[str]:
    networks = {0: RackNetwork("10.1.0.0/16", "10.1.0.9"), 1: RackNetwork("10.2.0.0/16", "10.2.0.9")}
    listed = [{"ifname": f"eth{1 - k}", "addr_info": [{"local": networks[k].router}]} for k in networks]
    return [" ".join(command) for command in shape_router(plans(**topology), networks, json.dumps(listed))]


def test_a_router_has_an_interface_of_each_rack_shaped_both_ways() -> None:
    commands = router()
    for rack in (0, 1):
        assert f"ip link set dev eth{1 - rack} name down{rack}" in commands
        for device in (f"up{rack}", f"down{rack}"):
            assert f"tc qdisc add dev {device} root tbf rate 40mbit burst 20000b latency 50000us" in commands
        (redirect,) = [command for command in commands if f"filter add dev down{rack}" in command]
        assert redirect.endswith(f"mirred egress redirect dev up{rack}")


def test_the_delay_applies_once_where_the_router_is_left() -> None:
    delayed = [command for command in router(delay="5ms") if "netem" in command]
    assert len(delayed) == 2 and all(" dev down" in command and "delay 5000us" in command for command in delayed)


def test_a_node_has_a_route_to_every_other_rack_with_its_congestion_control() -> None:
    networks = {k: RackNetwork(f"10.{k}.0.0/16", f"10.{k}.0.9") for k in range(3)}
    routes = [" ".join(route) for route in routes_from(1, networks, "eth0", "cubic")]
    assert routes == [f"ip route replace 10.{k}.0.0/16 via 10.1.0.9 dev eth0 congctl cubic" for k in (0, 2)]
    assert all("congctl" not in route for route in routes_from(1, networks, "eth0"))


def test_the_uplinks_are_read_from_what_tc_and_ip_list() -> None:
    def bucket(device: str) -> dict[str, object]:
        return {"kind": "tbf", "dev": device, "options": {"rate": 5_000_000}, "bytes": 7, "drops": 0}

    qdiscs = json.dumps([bucket(device) for device in ("up0", "down0", "up1", "down1", "port0")])
    counters = json.dumps([{"ifname": "down0", "stats64": {"rx": {"bytes": 6}, "tx": {"bytes": 5}}}])
    found = read_uplinks(plans(), qdiscs, counters)
    assert set(found) == {0, 1} and set(found[1].buckets) == {"up1", "down1"}
    assert found[0].sent == {"up0": 6, "down0": 5} and found[1].sent == {"up1": 0, "down1": 0}
    with pytest.raises(NetworkInvalid, match="Install iproute2"):
        read_uplinks(plans(), qdiscs, "[{}]")
