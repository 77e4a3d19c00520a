"""One host over SSH: quoting, host keys, transfers that stall. tests/hosts has real connections."""

from __future__ import annotations

import io
import shlex
import socket
from pathlib import Path

import paramiko
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.control.substrates.hosts.ssh import (
    Host,
    KeyRefused,
    check_host_keys,
    command_line,
    known_hosts,
    results_or_raise,
    run_on_all,
)
from testbed.spec.errors import ConnectionLost, HostFailed, TestbedError
from testbed.spec.inventory import HostNode
from tests.support.scripted_hosts import ScriptedHost, silent


@given(st.text(min_size=1).filter(lambda text: "\0" not in text))
def test_any_argument_survives_quoting(text: str) -> None:
    assert shlex.split(command_line(["a", text], 1))[-1] == text


def test_a_key_file_that_is_missing_is_named(tmp_path: Path) -> None:
    node = HostNode(name="a", address="192.0.2.1", key=str(tmp_path / "none"), user="first.last")
    with pytest.raises(HostFailed, match=r"^a: key .*none: no such file here"):
        Host(node).open()


class StuckChannel:
    """A channel whose other end accepts no data."""

    def settimeout(self, seconds: float) -> None: ...

    def sendall(self, data: bytes) -> None:
        raise TimeoutError

    def close(self) -> None: ...


class StuckHost(ScriptedHost):
    def start(self, argv: object, timeout_s: float) -> paramiko.Channel:
        return StuckChannel()  # type: ignore[return-value]


def test_a_transfer_that_stalls_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLost, match=r"node0: it accepted no data for 60 s during docker load.*command again"):
        StuckHost(silent).send(["docker", "load"], io.BytesIO(b"image"), 10, lambda count: None)


def client(home: Path, monkeypatch: pytest.MonkeyPatch, accept_new: bool) -> paramiko.SSHClient:
    """The client of a connection whose host keys are checked; it is not open."""
    monkeypatch.setenv("HOME", str(home))
    connection = Host(HostNode(name="node0", address="192.0.2.1"), accept_new).describe_connection()
    check_host_keys(connection, accept_new)
    return connection.client  # type: ignore[no-any-return]


def test_an_unknown_key_is_refused_with_the_command_that_adds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client(tmp_path, monkeypatch, accept_new=False)
    with pytest.raises(KeyRefused, match=r"ssh-keyscan -p 22 192\.0\.2\.1 >> ~/\.ssh/known_hosts, or .*--accept-new"):
        made._policy.missing_host_key(made, "192.0.2.1", paramiko.RSAKey.generate(1024))
    assert not (tmp_path / ".ssh").exists()


def test_accept_new_writes_the_key_for_the_next_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = client(tmp_path, monkeypatch, accept_new=True)
    key = paramiko.RSAKey.generate(1024)
    made._policy.missing_host_key(made, "192.0.2.1", key)
    again = client(tmp_path, monkeypatch, accept_new=False)
    assert again._system_host_keys.check("192.0.2.1", key)
    assert (tmp_path / ".ssh" / "known_hosts").stat().st_mode & 0o777 == 0o600


def test_known_hosts_are_where_the_ssh_configuration_says() -> None:
    assert known_hosts({"userknownhostsfile": "/a none /b"}) == [Path("/a"), Path("/b")]


def test_a_host_that_refuses_connections_is_named_with_address_port_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for address, shown in (("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")):
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
            port = server.getsockname()[1]  # closed again, so that nothing listens there
        with pytest.raises(HostFailed) as failure:
            Host(HostNode(name="node0", address=address, port=port)).open()
        fix = "Check that the host is up, and its address and port in the inventory."
        assert str(failure.value) == f"node0: no SSH connection to {shown}:{port} (Connection refused). {fix}"


def test_the_action_runs_on_all_hosts_and_all_failures_are_raised_together() -> None:
    hosts = [ScriptedHost(silent, name=f"node{k}") for k in range(4)]

    def call(host: Host) -> str:
        if host.name in ("node1", "node3"):
            raise HostFailed(f"{host}: is broken. Fix it")
        return host.name

    outcomes = run_on_all(hosts, call)
    assert [outcome.value for outcome in outcomes] == ["node0", None, "node2", None]
    with pytest.raises(TestbedError) as both:
        results_or_raise(outcomes)
    assert (
        str(both.value) == "node1: is broken. Fix it; node3: is broken. Fix it"
        and both.value.exit_code == HostFailed.exit_code
    )
    with pytest.raises(HostFailed, match=r"^node1"):
        results_or_raise(outcomes[:2])
    assert results_or_raise(outcomes[::2]) == ["node0", "node2"]


def test_an_unexpected_exception_on_one_host_is_an_outcome_too() -> None:
    outcomes = run_on_all([ScriptedHost(silent)], lambda host: 1 / 0)
    assert "node0: ZeroDivisionError" in str(outcomes[0].error)
