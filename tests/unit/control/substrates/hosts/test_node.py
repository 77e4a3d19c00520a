"""Facts about hosts: account, engine, image, interface and address."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.control.substrates.hosts.node import (
    RUN_ID,
    Account,
    Endpoint,
    account,
    check_distinct,
    endpoint,
    engine_version,
    first_endpoint,
    image_content,
    run_id,
)
from testbed.spec.errors import HostCommandFailed, HostFailed, NetworkInvalid
from tests.support.scripted_hosts import ScriptedHost, failing, silent


@given(st.text(max_size=200))
def test_the_name_of_a_run_is_safe_for_any_folder(name: str) -> None:
    try:
        folder = Path("/runs") / name
    except ValueError:
        return
    assert RUN_ID.fullmatch(run_id(folder))


def test_the_rank_of_root_runs_as_nobody() -> None:
    assert account(ScriptedHost(lambda argv: "0\n0\n/root\n")).rank_user == "65534:65534"
    ann = account(ScriptedHost(lambda argv: "1000\n1001\n/home/ann\n"))
    assert ann == Account(1000, 1001, PurePosixPath("/home/ann")) and ann.rank_user == "1000:1001"
    assert str(ann.runs) == "/home/ann/.testbed/runs"


@pytest.mark.parametrize(
    ("code", "output", "fix"),
    [
        (127, "timeout: failed to run command 'docker': No such file or directory", "apt-get install docker.io"),
        (1, "Got permission denied while trying to connect to the Docker daemon socket", "usermod -aG docker"),
        (1, "Cannot connect to the Docker daemon. Is the docker daemon running?", "systemctl start docker"),
    ],
)
def test_a_host_without_an_engine_is_named_with_the_fix(code: int, output: str, fix: str) -> None:
    with pytest.raises(HostFailed, match=r"^node0: ") as refusal:
        engine_version(ScriptedHost(failing(code, output)))
    assert fix in str(refusal.value)


def test_a_missing_image_is_no_error() -> None:
    assert image_content(ScriptedHost(failing(1, "Error: No such image: testbed:latest"))) is None
    assert image_content(ScriptedHost(lambda argv: "abc\n")) == "abc"


def ip(argv: Sequence[str]) -> str:
    """A host with eth0 and ib0; all routes go through eth0."""
    if argv[2:4] == ["route", "get"]:
        return json.dumps([{"dst": argv[4], "dev": "eth0", "prefsrc": "10.0.0.7"}])
    if argv[2:5] == ["address", "show", "dev"] and argv[5] == "ib0":
        infos = [{"family": "inet6", "local": "fd00::7", "scope": "global"}, {"local": "169.254.1.1", "scope": "link"}]
        return json.dumps([{"addr_info": [*infos, {"family": "inet", "local": "10.9.0.7", "scope": "global"}]}])
    raise HostCommandFailed("node0: ip", 1, f'Device "{argv[-1]}" does not exist.')


def test_the_interface_is_the_inventorys_else_the_routes() -> None:
    assert endpoint(ScriptedHost(ip, interface="ib0"), "10.0.0.1") == Endpoint("ib0", "10.9.0.7")
    assert endpoint(ScriptedHost(ip), "10.0.0.1") == Endpoint("eth0", "10.0.0.7")
    assert first_endpoint(ScriptedHost(ip), "192.0.2.9") == Endpoint("eth0", "10.0.0.7")
    assert first_endpoint(ScriptedHost(ip), None) == Endpoint("lo", "127.0.0.1")
    with pytest.raises(HostFailed, match=r"interface eth9: .*does not exist"):
        endpoint(ScriptedHost(ip, interface="eth9"), "10.0.0.1")


def test_on_a_host_without_ip_the_images_ip_is_used() -> None:
    def answer(argv: Sequence[str]) -> str:
        if argv[0] == "ip":
            raise HostCommandFailed("node0: ip", 127, "not found")
        return ip(argv[argv.index("testbed:latest") :])

    assert endpoint(ScriptedHost(answer), "10.0.0.1") == Endpoint("eth0", "10.0.0.7")


def test_two_hosts_with_one_address_are_refused() -> None:
    pair = [ScriptedHost(silent, name) for name in ("a", "b")]
    with pytest.raises(NetworkInvalid, match=r"hosts a, b: all have the address 10\.0\.0\.1"):
        check_distinct(pair, [Endpoint("eth0", "10.0.0.1"), Endpoint("eth1", "10.0.0.1")])
    check_distinct(pair, [Endpoint("eth0", "10.0.0.1"), Endpoint("eth1", "10.0.0.2")])
