"""Shaping is data: read the argument lists without root."""

from __future__ import annotations

import pytest

from testbed.net.shaping import congestion, reshape, route_congestion, routes_congestion, shape
from testbed.net.tcp import burst_bytes
from testbed.spec.link import Link


def lines(commands: list[list[str]]) -> list[str]:
    return [" ".join(command) for command in commands]


def test_an_unshaped_link_needs_no_command() -> None:
    assert shape(Link()) == []


def test_both_ways_get_the_same_bucket() -> None:
    commands = lines(shape(Link(rate=200_000_000)))
    bucket = "tbf rate 200mbit burst 100000b latency 50000us"
    assert commands[0] == f"tc qdisc add dev eth0 root {bucket}"
    assert commands[-1] == f"tc qdisc add dev ifb0 root {bucket}"


def test_everything_that_arrives_is_redirected_to_the_ifb() -> None:
    assert lines(shape(Link(rate=10**9)))[1:-1] == [
        "ip link add ifb0 type ifb",
        "ip link set ifb0 up",
        "tc qdisc add dev eth0 ingress",
        "tc filter add dev eth0 parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev ifb0",
    ]


def test_the_segment_size_is_set_on_the_interface() -> None:
    assert lines(shape(Link(segment=2**14))) == ["ip link set dev eth0 gso_max_size 16384"]
    assert lines(shape(Link.load({"rate": "100mbit", "segment": "16KiB"}, "test")))[1:] == lines(
        shape(Link(rate=10**8))
    )


def test_egress_only_leaves_the_ifb_out() -> None:
    commands = lines(shape(Link(rate=10**9), ingress=False))
    assert len(commands) == 1 and "ifb" not in commands[0] and "ingress" not in commands[0]


def test_other_devices_are_named_throughout() -> None:
    commands = lines(shape(Link(rate=10**9), iface="net1", ifb="ifb9"))
    assert not [command for command in commands if "eth0" in command or "ifb0" in command]


def test_delay_and_loss_come_once_before_the_bucket() -> None:
    link = Link(rate=100_000_000, delay=0.02, jitter=0.001, loss=0.01)
    netem, bucket, *rest = lines(shape(link))
    assert netem == "tc qdisc add dev eth0 root handle 1: netem limit 1000 delay 20000us 1000us loss 1%"
    assert bucket.startswith("tc qdisc add dev eth0 parent 1:1 tbf rate 100mbit")
    assert not [command for command in rest if "netem" in command]


@pytest.mark.parametrize(("rate", "delay"), [(10**9, 0.1), (10**10, 0.05), (None, 0.05)])
def test_netem_has_room_for_all_packets_in_flight(rate: int | None, delay: float) -> None:
    netem = shape(Link(rate=rate, delay=delay))[0]
    limit = int(netem[netem.index("limit") + 1])
    assert limit >= (rate or 10**10) * delay / 8 / 1514


def test_loss_without_rate_shapes_only_with_netem() -> None:
    assert lines(shape(Link(loss=0.005))) == ["tc qdisc add dev eth0 root handle 1: netem limit 1000 loss 0.5%"]


def test_congestion_control_is_set_per_namespace_or_per_route() -> None:
    assert congestion("cubic")[-1] == "net.ipv4.tcp_congestion_control=cubic"
    assert route_congestion("cubic", "10.77.0.0/24", address="10.77.0.10")[-4:] == [
        "src",
        "10.77.0.10",
        "congctl",
        "cubic",
    ]


def test_a_rate_changes_without_shrinking_the_bucket() -> None:
    link = Link(rate=100_000_000)
    slower = reshape(link, 100_000_000, 10_000_000)
    assert [command[:6] for command in slower] == [
        ["tc", "qdisc", "change", "dev", "eth0", "root"],
        ["tc", "qdisc", "change", "dev", "ifb0", "root"],
    ]
    assert all("10mbit" in command and f"{burst_bytes(100_000_000)}b" in command for command in slower)
    assert reshape(Link(), None, 10_000_000) == shape(Link(rate=10_000_000))
    assert reshape(Link(), None, None) == []
    assert reshape(Link(), 10_000_000, None)[-1] == ["ip", "link", "del", "ifb0"]
    delayed = Link(rate=10**8, delay=0.01)
    assert [command[5:7] for command in reshape(delayed, 10**8, 10**7)] == [["parent", "1:1"], ["root", "tbf"]]


def test_congestion_control_is_set_on_all_routes_of_an_interface() -> None:
    routes = [{"dst": "10.0.0.0/24", "prefsrc": "10.0.0.7", "dev": "eth0"}, {"dst": "10.1.0.0/24"}]
    assert routes_congestion("reno", routes) == [
        route_congestion("reno", "10.0.0.0/24", "eth0", "10.0.0.7"),
        route_congestion("reno", "10.1.0.0/24", "eth0"),
    ]


def test_where_only_egress_is_shaped_a_new_rate_changes_only_egress() -> None:
    link = Link(rate=100_000_000)
    for before, rate in ((100_000_000, 10_000_000), (None, 10_000_000), (10_000_000, None)):
        (command,) = reshape(link, before, rate, ingress=False)
        assert command[:2] == ["tc", "qdisc"] and command[4] == "eth0"
