"""The observer's lines reach the launcher; a launcher that is gone does not matter to the script."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.attach import channel
from testbed.attach.channel import Channel
from testbed.attach.intake import Intake, Records
from testbed.results.observations import Where
from testbed.results.records import read
from tests.support.observer_lines import START
from tests.support.processes import until


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


def test_the_line_of_the_script_is_found() -> None:
    found = channel.position(sys._getframe())
    assert found["site"].startswith("test_channel.py:") and found["waits"] is False
    assert channel.position(None) == {"kind": "where", "site": "", "waits": False}


def test_a_frame_of_torch_distributed_waits() -> None:
    program = compile("frame = sys._getframe()", "/x/site-packages/torch/distributed/c10d.py", "exec")
    names = {"sys": sys}
    exec(program, names)
    assert channel.position(names["frame"])["waits"] is True  # type: ignore[arg-type]


def test_the_launcher_gets_an_answer(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    intake = Intake(tmp_path / "socket", records, os.geteuid())
    before = threading.active_count()
    channel.listen(str(tmp_path / "socket"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
        rank.connect(str(tmp_path / "socket"))
        rank.sendall(json.dumps(START).encode() + b"\n")
        until(lambda: records.rank is not None and threading.active_count() > before)
        until(lambda: intake.ask() or (tmp_path / "rank0.jsonl").read_text().count('"where"') > 0)
    found = [each for each in (tmp_path / "rank0.jsonl").read_text().splitlines() if '"where"' in each]
    (tmp_path / "where.jsonl").write_text(found[0] + "\n")
    (record,) = read(tmp_path / "where.jsonl")
    assert isinstance(record, Where) and record.site.startswith(("test_channel.py:", "processes.py:"))
