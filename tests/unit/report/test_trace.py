"""The trace follows the rules of Chrome's trace format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.report.trace import COPIES, WIRE, write_trace
from testbed.spec.errors import UsageError
from tests.support.synthetic import Conditions, make_run

Event = dict[str, Any]
PIPELINE = "ring/bucket:2MiB/pipeline"
ROUNDING = 0.002  # microseconds: times are written with three digits


def check(document: dict[str, Any]) -> list[Event]:
    """Rules of the format: known phases, whole numbers for ids, no negative time, spans of a thread nest."""
    assert set(document) >= {"traceEvents"} and document.get("displayTimeUnit") in ("ms", "ns")
    threads: dict[tuple[int, int], list[Event]] = {}
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M") and isinstance(event["name"], str)
        assert type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0, event
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
        else:
            assert event["args"], event
    for spans in threads.values():
        _nested(spans)
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def _nested(spans: list[Event]) -> None:
    open_ends: list[float] = []
    for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        while open_ends and open_ends[-1] <= span["ts"] + ROUNDING:
            open_ends.pop()
        end = span["ts"] + span["dur"]
        assert not open_ends or end <= open_ends[-1] + ROUNDING, f"{span['name']} ends after the span that contains it"
        open_ends.append(end)


def spans_of(folder: Path, made: Conditions | None = None, **values: Any) -> list[Event]:
    make_run(folder, made, link={"rate": "500mbit"}, **values)
    path, count = write_trace(folder)
    spans = check(json.loads(path.read_text()))
    assert len(spans) == count
    return spans


@pytest.mark.parametrize("mode", ["single", "none", "gather", "ring", "ddp", "server", PIPELINE])
def test_the_trace_of_every_mode_obeys_the_rules(tmp_path: Path, mode: str) -> None:
    spans = spans_of(tmp_path / "run", mode=mode)
    assert {span["pid"] for span in spans} == set(range(1 if mode == "single" else 4))
    names = {span["name"] for span in spans}
    assert {"step 0", "step 11", "data", "forward", "backward", "sync", "update"} <= names


def test_buckets_are_inside_their_step(tmp_path: Path) -> None:
    spans = spans_of(tmp_path / "run", mode="ddp")
    steps = {(s["pid"], s["name"]): s for s in spans if s["name"].startswith("step")}
    buckets = [span for span in spans if span["tid"] >= WIRE]
    assert len(buckets) == 4 * 12 * 4
    for bucket in buckets:
        step = steps[bucket["pid"], f"step {bucket['args']['step']}"]
        assert step["ts"] - ROUNDING <= bucket["ts"]
        assert bucket["ts"] + bucket["dur"] <= step["ts"] + step["dur"] + ROUNDING


def test_a_buffer_that_crosses_the_end_of_a_step_has_two_spans(tmp_path: Path) -> None:
    spans = [span for span in spans_of(tmp_path / "run", mode=PIPELINE) if span["name"].startswith("bucket 3 gather")]
    of_rank = [span for span in spans if span["pid"] == 1]
    rests = [span for span in of_rank if span["args"]["continued"]]
    assert len(of_rank) == 12 + 11 and len(rests) == 11
    assert {span["name"] for span in rests} == {"bucket 3 gather (cont.)"} and rests[0]["args"]["step"] == 1


def test_copies_have_a_thread_of_their_own(tmp_path: Path) -> None:
    spans = spans_of(tmp_path / "run", Conditions(copies=0.1), mode="ring")
    copies = [span for span in spans if span["tid"] == COPIES]
    assert len(copies) == 4 * 12 and {round(span["dur"]) for span in copies} == {100_000}


def test_clocks_of_hosts_are_converted_to_one(tmp_path: Path) -> None:
    spans = spans_of(tmp_path / "run", Conditions(offsets=[0.0, 7.0, -4.0, 1.0], noise=0.0), mode="ring")
    begins = [span["ts"] for span in spans if span["name"] == "step 3"]
    assert max(begins) - min(begins) < 1000  # microseconds


def test_a_path_that_is_not_a_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        write_trace(tmp_path)
    way_out = "Give a folder that `testbed run` or `testbed sweep` wrote."
    assert (
        str(refusal.value) == f"no trace can be made. {tmp_path}: has no spec.json, so it is no run folder. {way_out}"
    )
