"""A node finds its own interface, address and port."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from testbed.net import endpoint

HERE = "127.0.0.1"


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
