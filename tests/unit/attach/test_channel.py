"""The observer's lines reach the launcher; a launcher that is gone does not matter to the script."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.attach import channel
from testbed.attach.channel import Channel


@pytest.fixture
def server(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(tmp_path / "observer"))
        made.listen(4)
        made.settimeout(10)
        yield made


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Channel]:
    """A channel to the server, if there is one."""
    with contextlib.closing(Channel(str(tmp_path / "observer"))) as channel:
        yield channel


def received(server: socket.socket) -> bytes:
    """What the next connection has sent."""
    with server.accept()[0] as connection:
        return connection.recv(1 << 16)


def test_records_are_sent_as_lines(made: Channel, server: socket.socket) -> None:
    made.send({"kind": "step", "loss": 1.5})
    made.send({"kind": "step", "path": Path("x")})
    lines = received(server).splitlines()
    assert [json.loads(line) for line in lines] == [{"kind": "step", "loss": 1.5}, {"kind": "step", "path": "x"}]


def test_a_launcher_that_is_not_there_is_no_error(made: Channel) -> None:
    made.send({})
    assert made.broken


def test_a_launcher_that_goes_is_no_error(made: Channel, server: socket.socket) -> None:
    made.send({})
    assert received(server) == b"{}\n"
    for _ in range(3):
        made.send({"kind": "step"})
    assert made.broken


def test_a_launcher_that_does_not_read_is_treated_as_gone(
    made: Channel, server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "SEND_TIMEOUT_S", 0.05)
    made.send({"text": "x" * (8 << 20)})  # more than a socket holds
    assert made.broken


def test_what_is_no_json_is_dropped(made: Channel, server: socket.socket) -> None:
    made.send({(1, 2): "a key that JSON does not have"})  # type: ignore[dict-item]
    made.send({"kind": "step"})
    assert received(server) == b'{"kind":"step"}\n' and not made.broken


def test_a_forked_process_has_a_connection_of_its_own(made: Channel, server: socket.socket) -> None:
    made.send({"from": "parent"})
    child = os.fork()
    if child == 0:
        made.reopen()
        made.send({"from": "child"})
        os._exit(0)
    os.waitpid(child, 0)
    assert [received(server), received(server)] == [b'{"from":"parent"}\n', b'{"from":"child"}\n']
