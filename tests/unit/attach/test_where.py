"""Where a script is that makes no step."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

from testbed.attach import where
from testbed.attach.intake import Intake, Records
from testbed.results.observations import Where
from testbed.results.records import read
from tests.support.observer_lines import START
from tests.support.processes import until


def test_the_line_of_the_script_is_found() -> None:
    found = where.position(sys._getframe())
    assert found["site"].startswith("test_where.py:") and found["waits"] is False
    assert where.position(None) == {"kind": "where", "site": "", "waits": False}


def test_a_frame_of_torch_distributed_waits() -> None:
    program = compile("frame = sys._getframe()", "/x/site-packages/torch/distributed/c10d.py", "exec")
    names = {"sys": sys}
    exec(program, names)
    assert where.position(names["frame"])["waits"] is True  # type: ignore[arg-type]


def test_the_launcher_gets_an_answer(tmp_path: Path) -> None:
    records = Records(tmp_path / "rank0.jsonl")
    intake = Intake(tmp_path / "socket", records)
    before = threading.active_count()
    where.listen(str(tmp_path / "socket"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
        rank.connect(str(tmp_path / "socket"))
        rank.sendall(json.dumps(START).encode() + b"\n")
        until(lambda: records.rank is not None and threading.active_count() > before)
        until(lambda: intake.ask() or (tmp_path / "rank0.jsonl").read_text().count('"where"') > 0)
    found = [each for each in (tmp_path / "rank0.jsonl").read_text().splitlines() if '"where"' in each]
    (tmp_path / "where.jsonl").write_text(found[0] + "\n")
    (record,) = read(tmp_path / "where.jsonl")
    assert isinstance(record, Where) and record.site.startswith(("test_where.py:", "processes.py:"))
