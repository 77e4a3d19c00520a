"""The observer's lines reach rankN.jsonl; what a script forges is bounded."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from testbed.attach.intake import Intake, Records

START = {"kind": "start", "rank": 0}
STEP = {"kind": "step", "step": 0}


def send(path: Path, *records: object) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        connection.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in records))


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


def test_lines_sent_before_the_end_are_all_written(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    intake = Intake(tmp_path / "socket", records)
    send(tmp_path / "socket", START, *[STEP] * 500)
    intake.finish(timeout_s=30)
    records.close()
    assert kinds(tmp_path / "rank0.jsonl") == ["start", *["step"] * 500] and records.steps == 500


def test_the_first_process_that_starts_is_the_rank(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    for connection, record in ((0, START), (1, START), (1, STEP), (0, STEP)):
        records.accept(connection, json.dumps(record).encode())
    records.close()
    assert kinds(tmp_path / "rank0.jsonl") == ["start", "step"] and records.processes == 2


def test_what_is_no_record_of_an_observer_is_dropped(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl", limit_bytes=100)
    for line in (b"not json", b"[1]", b'{"kind":"end"}', b'{"kind":"error"}', b"[" * 100_000, b"\xff"):
        records.accept(0, line)
    records.accept(0, json.dumps(STEP | {"loss": "x" * 200}).encode())  # too large
    records.close()
    assert (tmp_path / "rank0.jsonl").read_text() == "" and records.steps == 0


def test_the_limit_is_reported_once(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    called: list[int] = []
    records.on_limit = lambda: called.append(1)
    for _ in range(2):
        records.accept(0, b'{"kind":"limit","steps":5}')
    records.close()
    assert records.reached_limit and called == [1]
