"""What leads out of a container's network, as commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from testbed.net.isolation import RESOLVER, default_routes, isolate

NAMESPACE = "testbed-isolation-test"


def test_default_routes_gateways_and_the_name_server_are_removed() -> None:
    routes = [{"dst": "default", "gateway": "172.18.0.1", "dev": "eth0", "flags": []}]
    commands = [" ".join(command) for command in isolate(routes, ["172.18.0.1", "172.18.0.9"])]
    assert commands == [
        "ip route del default via 172.18.0.1 dev eth0",
        "ip route replace throw 172.18.0.1/32",
        "ip route replace throw 172.18.0.9/32",
        f"ip route replace blackhole {RESOLVER}/32 table local",
    ]


def test_a_network_without_a_way_out_keeps_only_its_name_server_to_remove() -> None:
    assert len(isolate([])) == 1


@pytest.fixture
def inside() -> Iterator[list[str]]:
    """The prefix of commands in a namespace with eth0, a subnet and a default route."""
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    prefix = ["ip", "netns", "exec", NAMESPACE]
    try:
        for command in (
            "ip link set lo up",
            "ip link add eth0 type veth peer name other",
            "ip address add 10.91.0.2/24 dev eth0",
            "ip link set eth0 up",
            "ip link set other up",
            "ip route add default via 10.91.0.1",
        ):
            subprocess.run([*prefix, *command.split()], check=True)
        yield prefix
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=True)


@pytest.mark.net
def test_the_kernel_has_no_route_out_afterwards_and_twice_is_as_good_as_once(inside: list[str]) -> None:
    def output(*argv: str) -> str:
        return subprocess.run([*inside, *argv], capture_output=True, text=True, check=True).stdout

    def routed(address: str) -> bool:
        return subprocess.run([*inside, "ip", "route", "get", address], capture_output=True).returncode == 0

    addresses = ["10.91.0.3", "10.91.0.1", "192.0.2.1", RESOLVER, "127.0.0.1"]
    assert [routed(address) for address in addresses] == [True] * 5
    for _ in range(2):
        for command in isolate(json.loads(output(*default_routes()) or "[]")):
            output(*command)
        assert [routed(address) for address in addresses] == [True, False, False, False, True]
