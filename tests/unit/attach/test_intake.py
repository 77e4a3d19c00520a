"""The observer's lines reach rankN.jsonl; what a script forges is bounded."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

import pytest

from testbed.attach import intake as module
from testbed.attach.intake import MAX_PROCESSES, READY, Intake, Records
from testbed.control.runs.progress import Silent
from testbed.control.runs.supervisor import RankState, Tail
from testbed.control.substrates.fake import FakeProcess
from testbed.results.folder import RunFolder
from testbed.results.records import Error
from tests.support.observer_lines import START, STEP
from tests.support.processes import until

ME = os.geteuid()


def send(path: Path, *records: object) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        connection.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in records))


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


def test_lines_sent_before_the_end_are_all_written(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    intake = Intake(tmp_path / "socket", records, ME)
    send(tmp_path / "socket", START, *[STEP] * 500)
    intake.finish(timeout_s=30)
    records.close()
    assert kinds(tmp_path / "rank0.jsonl") == ["start", *["step"] * 500] and records.steps == 500


def test_the_end_of_the_script_ends_the_pause_between_two_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 600.0)
    records = Records(tmp_path / "rank0.jsonl")
    intake = Intake(tmp_path / "socket", records, ME)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(tmp_path / "socket"))
        connection.sendall(json.dumps(START).encode() + b"\n")
        while records.rank is None:
            time.sleep(0.01)
        connection.sendall(json.dumps(STEP).encode() + b"\n")  # nobody reads it now
        assert records.steps == 0
    intake.finish(timeout_s=30)
    records.close()
    assert records.steps == 1


def test_the_first_process_that_starts_is_the_rank(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    for connection, record in ((0, START), (1, START), (1, STEP), (0, STEP)):
        records.accept(connection, json.dumps(record).encode())
    records.close()
    assert kinds(tmp_path / "rank0.jsonl") == ["start", "step"] and records.processes == 2
    assert kinds(tmp_path / "rank0.process1.jsonl") == ["start", "step"] and records.steps == 1


def test_what_processes_send_before_they_start_is_not_mixed(tmp_path: Path) -> None:
    """A fork sends hashes of its parameters and its batch before its first update."""
    records = Records(tmp_path / "rank0.jsonl")
    early = [(each, {"kind": "batch", "step": 0, "images": 8, "hash": str(each)}) for each in (2, 0, 1)]
    for connection, record in (*early, (1, START), (0, START)):
        records.accept(connection, json.dumps(record).encode())
    records.close()
    assert RunFolder(tmp_path).processes(0) == [tmp_path / "rank0.process1.jsonl"]
    for name, number in (("rank0.jsonl", "1"), ("rank0.process1.jsonl", "0")):
        first, second = (json.loads(line) for line in (tmp_path / name).read_text().splitlines())
        assert first["hash"] == number and second["kind"] == "start"


def test_what_was_seen_of_a_script_that_never_started_is_kept(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    records.accept(0, b'{"kind":"unseen","seam":"x","error":"y"}')
    records.write(Error(code=3, message="ended"))
    records.close()
    assert kinds(tmp_path / "rank0.jsonl") == ["unseen", "error"]


def test_forked_processes_have_a_limit_of_their_own(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl", limit_bytes=80_000)
    for connection in (0, *range(1, MAX_PROCESSES + 20)):
        records.accept(connection, json.dumps(START).encode())
    for _ in range(400):
        records.accept(1, json.dumps(STEP).encode())
    records.accept(0, json.dumps(STEP).encode())
    records.close()
    others = RunFolder(tmp_path).processes(0)
    assert len(others) == MAX_PROCESSES - 1 and sum(path.stat().st_size for path in others) <= 20_000
    assert kinds(tmp_path / "rank0.jsonl") == ["start", "step"]


def test_what_is_no_record_of_an_observer_is_dropped(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    for line in (b"not json", b"[1]", b'{"kind":"end"}', b'{"kind":"error"}', b"[" * 100_000, b"\xff"):
        records.accept(0, line)
    for forged in ({"kind": "step"}, STEP | {"step": "x"}, START | {"deadline": None}):
        records.accept(0, json.dumps(forged).encode())
    records.close()
    assert (tmp_path / "rank0.jsonl").read_text() == "" and records.steps == 0 and records.dropped == 5


def test_a_script_whose_records_are_full_still_makes_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a stored record count, and the controller sees that they are made."""
    monkeypatch.setattr(module, "MADE_S", 0.0)
    records = Records(tmp_path / "rank0.jsonl", limit_bytes=2000)
    rank = RankState(FakeProcess(1), Tail(tmp_path / "rank0.jsonl"))
    records.accept(0, json.dumps(START).encode())
    for step in range(20):
        records.accept(0, json.dumps(STEP | {"step": step, "comm": [["all_reduce", 0.0, 0.0, 4]] * step}).encode())
        assert rank.poll(0, Silent()) and rank.last_step == step
    records.accept(0, json.dumps(STEP | {"step": 20}).encode())  # it has room, but earlier steps are missing
    records.close()
    stored = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    steps = [each["step"] for each in stored if each["kind"] == "step"]
    assert steps == list(range(len(steps))) and 2 < len(steps) < 20 and records.steps == 21
    (unseen,) = (each for each in stored if each["kind"] == "unseen")
    assert "later steps are not stored" in unseen["error"]
    assert [each["steps"] for each in stored if each["kind"] == "made"] == list(range(len(steps) + 1, 22))


def test_the_limit_is_reported_once(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    called: list[int] = []
    records.on_limit = lambda: called.append(1)
    for _ in range(2):
        records.accept(0, b'{"kind":"limit","steps":5}')
    records.close()
    assert records.reached_limit and called == [1]


def test_an_answer_that_was_not_asked_for_is_not_written(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    intake = Intake(tmp_path / "socket", records, ME)
    answers = [{"site": f"main.py:{line}", "waits": True} for line in range(1000)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(tmp_path / "socket"))
        connection.sendall(READY)
        until(lambda: len(intake._asked) == 1)
        intake.ask()
        connection.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in answers))
    intake.finish(timeout_s=30)
    records.close()
    assert kinds(tmp_path / "rank0.jsonl") == ["where"]


def test_another_user_is_not_listened_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is in a folder that every user of the machine may enter, and its path is in command lines."""
    records = Records(tmp_path / "rank0.jsonl")
    monkeypatch.setattr(os, "geteuid", lambda: ME + 1)
    intake = Intake(tmp_path / "socket", records, ME + 2)
    with contextlib.suppress(OSError):  # the connection is closed
        send(tmp_path / "socket", START, STEP)
    intake.finish(timeout_s=30)
    records.close()
    assert (tmp_path / "rank0.jsonl").read_text() == ""


def test_more_connections_than_a_script_needs_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    records = Records(tmp_path / "rank0.jsonl")
    intake = Intake(tmp_path / "socket", records, ME)
    opened = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for connection in opened:
        connection.connect(str(tmp_path / "socket"))
    assert opened[2].recv(1) == b""  # closed by the other side
    opened[0].close()
    until(lambda: intake._room._value == 1)
    send(tmp_path / "socket", START, STEP)
    for connection in opened:
        connection.close()
    intake.finish(timeout_s=30)
    records.close()
    assert kinds(tmp_path / "rank0.jsonl") == ["start", "step"]
