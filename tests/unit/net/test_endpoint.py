"""A node finds its own interfaces, addresses and port."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.net import endpoint
from testbed.net.endpoint import address_of, interface_of, route_to

HERE = "127.0.0.1"
IPV6 = """\
fe80000000000000021122fffe334455 02 40 20 80     eth7
20010db8000000000000000000000007 02 40 00 80     eth7
"""


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.77") == ""


def test_the_address_of_an_interface_is_found() -> None:
    assert address_of("lo") == "127.0.0.1" and address_of("no-such") == ""


def test_an_interface_without_ipv4_has_its_global_ipv6_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "if_inet6").write_text(IPV6)
    monkeypatch.setattr(endpoint, "IPV6_ADDRESSES", tmp_path / "if_inet6")
    assert address_of("eth7") == "2001:db8::7" and interface_of("2001:db8::7") == "eth7"


def test_the_own_address_on_the_way_to_a_host() -> None:
    assert route_to("127.0.0.1", 1) == "127.0.0.1"


def test_a_node_takes_the_interface_of_its_route_and_a_free_port() -> None:
    found = endpoint.describe("a", ["a", "b"], [HERE, HERE], 0, ["/"])
    assert (found["interface"], found["address"], found["missing"], found["busy"]) == ("lo", HERE, [], "")
    port = int(str(found["port"]))
    assert endpoint.describe("a", ["a"], ["x"], port, [])["port"] == port


def test_a_port_in_use_a_missing_file_and_a_wrong_name_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "SEEN_TIMEOUT_S", 0.0)
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        found = endpoint.describe("a", ["a", "b"], [HERE, HERE], port, ["/no/such/file", "/"])
    assert found["busy"] == "Address already in use" and found["missing"] == ["/no/such/file"]
    assert "no route to nowhere.invalid" in str(
        endpoint.describe("b", ["a", "b"], ["nowhere.invalid", HERE], 0, [])["problem"]
    )


def test_it_prints_one_line_of_json() -> None:
    argv = [
        sys.executable,
        "-m",
        "testbed.net.endpoint",
        "--names",
        "a,b",
        "--addresses",
        f"{HERE},{HERE}",
        "--sees",
        "/",
    ]
    env = os.environ | {"SLURMD_NODENAME": "b"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["node"] == "b" and json.loads(done.stdout)["port"] == 0
