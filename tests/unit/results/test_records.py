"""Records: what a rank appends is what others read, also while it is still writing; damaged lines are refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from testbed.results.records import (
    MAX_LINE_BYTES,
    SECONDS,
    End,
    Error,
    Eval,
    Hash,
    Record,
    Start,
    Step,
    encode,
    read,
)
from testbed.spec.errors import SchemaError, SpecError
from testbed.spec.run import SCHEMA

START = Start(rank=0, world=2, unix=1.0, parameters=10, gradient_bytes=40, tensors=2, deadline=60.0, counter="tcp")
STEP = Step(
    step=0,
    epoch=0,
    at=1.0,
    data=0.1,
    forward=0.2,
    backward=0.3,
    sync=0.4,
    update=0.1,
    total=1.0,
    loss=2.3,
    images=8,
    sent=100,
    received=None,
)
EVAL = Eval(step=1, epoch=0, loss=2.0, correct=3, images=10, scope="this rank", train_loss=2.1, train_accuracy=0.2)
HASH = Hash(step=1, parameters="ab", agree=True)
END = End(steps=1, seconds=1.5, sent=100, received=100)
ERROR = Error(code=3, message="rank 1 lost a peer:\n “gone”")


def write(path: Path, *records: Record) -> None:
    path.write_text("".join(encode(record) + "\n" for record in records), encoding="utf-8")


@pytest.mark.parametrize("record", [START, STEP, EVAL, HASH, END, ERROR], ids=lambda r: r.kind)
def test_a_record_is_one_line_that_reads_back_with_its_kind(record: Record, tmp_path: Path) -> None:
    assert "\n" not in encode(record)
    write(tmp_path / "r.jsonl", record)
    assert list(read(tmp_path / "r.jsonl")) == [record]


def test_a_half_written_last_line_is_left_out_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    write(path, START, STEP)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        assert [record.kind for record in read(path)] == ["start"]


def test_a_file_that_is_not_there_yet_has_no_records(tmp_path: Path) -> None:
    assert list(read(tmp_path / "rank0.jsonl")) == []


def test_reading_again_while_it_grows_sees_more(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    with path.open("w", buffering=1) as out:
        out.write(encode(START) + "\n")
        assert len(list(read(path))) == 1
        out.write(encode(STEP) + "\n")
        assert len(list(read(path))) == 2


def test_records_of_another_schema_are_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(json.dumps({"kind": "start", "schema": SCHEMA + 1}) + "\n")
    with pytest.raises(SchemaError, match=f"rank0.jsonl: schema {SCHEMA + 1}, this testbed reads schema {SCHEMA}"):
        list(read(path))


LINES = {
    "no JSON": (b"step", "is not JSON"),
    "no object": (b"[]", "must be a table"),
    "no text": (b"\xff\xfe", "is not JSON"),
    "no kind": (b'{"step": 1}', "kind"),
    "an unknown kind": (b'{"kind": "stop"}', "must have a kind, one of 'start', "),
    "a nest of brackets": (b"[" * 100_000, "is not JSON"),
    "a number as text": (b'{"kind": "hash", "step": "1", "parameters": "a", "agree": true}', r"hash\.step"),
    "a negative step": (b'{"kind": "hash", "step": -1, "parameters": "a", "agree": true}', r"hash\.step"),
    "a huge number": (b'{"kind": "error", "code": 1e999, "message": ""}', r"error\.code"),
    "a key is missing": (b'{"kind": "hash", "step": 1, "agree": true}', r"hash\.parameters: is missing"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_damaged_line_is_refused_with_its_number_and_key(case: str, tmp_path: Path) -> None:
    path, (line, words) = tmp_path / "rank0.jsonl", LINES[case]
    path.write_bytes(encode(START).encode() + b"\n" + line + b"\n")
    with pytest.raises(SpecError, match=rf"rank0.jsonl: line 2 is damaged \(.*{words}"):
        list(read(path))


def test_a_line_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(b"x" * (MAX_LINE_BYTES + 1) + b"\n")
    with pytest.raises(SpecError, match="line 1 is damaged"):
        list(read(path))


def test_a_loss_that_is_no_number_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    write(path, Step(**{**vars(STEP), "loss": math.nan}))
    (step,) = read(path)
    assert isinstance(step, Step) and math.isnan(step.loss)


def test_times_of_a_dilated_run_are_divided_when_they_are_read(tmp_path):
    path = tmp_path / "rank0.jsonl"
    start = Start(rank=0, world=1, unix=0.0, parameters=1, gradient_bytes=4, tensors=1, deadline=9.0, counter="none")
    times = {"data": 0.4, "forward": 4.0, "backward": 8.0, "sync": 2.0, "update": 1.0, "total": 16.0}
    times |= {"blocked": 2.0, "busy": 4.0, "hidden": 2.0, "copies": 0.8}
    step = Step(
        **{"step": 0, "epoch": 0, "at": 400.0, "loss": 1.0, "images": 8, "sent": 100, "received": 200, "cpu": 0.5},
        **times,
        phases=[("forward", 0.4, 4.0)],
        comm=[("bucket 0", 8.0, 4.0, 64)],
        stalls=[(12.4, 2.0)],
        copying=[(12.0, 0.4)],
    )
    end = End(steps=1, seconds=16.0, sent=100, received=200, measured=16.0, machine_cpu=3.0, own_cpu=2.0)
    path.write_text("".join(encode(each) + "\n" for each in (replace(start, dilation=4.0), step, end)))
    _, read_step, read_end = read(path)
    assert {name: getattr(read_step, name) for name in times} == {name: value / 4 for name, value in times.items()}
    assert read_step.at == 100.0 and read_step.phases == [("forward", 0.1, 1.0)]
    assert read_step.comm == [("bucket 0", 2.0, 1.0, 64)]
    assert (read_step.stalls, read_step.copying) == ([(3.1, 0.5)], [(3.0, 0.1)])
    assert (read_step.cpu, read_step.sent) == (0.5, 100), "processor times and bytes are those of the machine"
    assert (read_end.seconds, read_end.measured, read_end.own_cpu) == (4.0, 16.0, 2.0)
    assert list(read(path, raw=True))[1:] == [step, end]
    path.write_text(encode(replace(start, dilation=0.0)) + "\n")
    with pytest.raises(SpecError, match="dilation"):
        list(read(path))


def test_every_time_of_a_step_is_divided_or_named_here():
    """A new field of Step has to be one of these, or in SECONDS."""
    kept = {"kind", "step", "epoch", "loss", "images", "sent", "received", "attempt", "evaluated"}
    processor = {"cpu", "copies_cpu", "kernel", "used", "delayed", "process"}
    lists = {"phases", "comm", "stalls", "copying"}
    assert {each.name for each in fields(Step)} == kept | processor | lists | set(SECONDS)
