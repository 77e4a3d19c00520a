"""Runs with faults on purpose: told of in a section of their own, drawn on one clock, marked in the trace."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from synthetic import make_faulted, make_run

from testbed.report.load import load
from testbed.report.trace import write_trace
from testbed.report.write import write

FAULT = "kill:rank2@step8"


def test_a_failed_run_is_in_no_table_but_its_fault_is_told(tmp_path: Path) -> None:
    make_run(tmp_path / "good", mode="ring")
    make_faulted(tmp_path / "bad", FAULT, mode="ring")
    loaded = load([tmp_path])
    assert [run.folder.path.name for run in loaded.runs] == ["good"]
    assert [skip.path.name for skip in loaded.skipped] == ["bad"]
    (told,) = loaded.faulted
    assert told.row[1:] == (FAULT, "0.30 s", "yes", "6 6 -9 6", "no")


def test_the_page_has_a_section_with_a_row_and_a_plot_for_it(tmp_path: Path) -> None:
    make_faulted(tmp_path / "runs" / "bad", FAULT, mode="ring")
    made = write([tmp_path / "runs"], tmp_path)
    page = made.page.read_text()
    assert made.parts == [] and 'id="faults-fault-1"' in page and 'id="faults-faults"' in page
    assert "the others know after 0.30 s and name it" in page
    assert FAULT in (tmp_path / "report" / "faults-faults.csv").read_text()
    assert FAULT in (tmp_path / "report" / "report.md").read_text()


def test_what_was_undone_lasts_as_long_as_it_did(tmp_path: Path) -> None:
    make_faulted(tmp_path / "run", "pause:rank1@step3+3s", over=3.0, mode="ring")
    (told,) = load([tmp_path]).faulted
    assert told.row[-1] == "went on"
    (episode,) = told.episodes
    assert episode.rank == 1 and episode.end == pytest.approx(episode.begin + 3.0)


def test_a_damaged_history_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "good", mode="ring")
    make_faulted(tmp_path / "bad", FAULT, mode="ring")
    (tmp_path / "bad" / "faults.jsonl").write_text('{"event": "injected", "rank": "x", "fault": 3, "begun": "?"}\n')
    loaded = load([tmp_path])
    assert len(loaded.runs) == 1 and loaded.faulted == [] and "damaged" in loaded.skipped[0].reason


@pytest.mark.parametrize(
    ("name", "size"), [("faults.jsonl", 16 << 20), ("rank0.jsonl", 128 << 20), ("rank0.attempt1.jsonl", 128 << 20)]
)
def test_a_history_without_end_is_named_and_not_read(tmp_path: Path, name: str, size: int) -> None:
    make_faulted(tmp_path / "bad", FAULT, mode="ring")
    (tmp_path / "bad" / name).touch()
    os.truncate(tmp_path / "bad" / name, size + 1)
    loaded = load([tmp_path])
    assert loaded.faulted == [] and f"at most {size} are read" in loaded.skipped[0].reason


@pytest.mark.parametrize("name", ["faults.jsonl", "rank0.attempt1.jsonl"])
def test_a_history_that_lies_elsewhere_is_named_and_not_read(tmp_path: Path, name: str) -> None:
    make_faulted(tmp_path / "runs" / "bad", FAULT, mode="ring")
    path, elsewhere = tmp_path / "runs" / "bad" / name, tmp_path / name
    elsewhere.write_text(path.read_text() if path.exists() else "")
    path.unlink(missing_ok=True)
    path.symlink_to(elsewhere)
    loaded = load([tmp_path / "runs"])
    assert loaded.faulted == [] and "is a link" in loaded.skipped[0].reason


@pytest.mark.parametrize(("fault", "over", "shape"), [(FAULT, None, "i"), ("cut:rank2@step3+2s", 2.0, "X")])
def test_the_trace_of_a_run_marks_what_was_done_and_who_lost_whom(
    tmp_path: Path, fault: str, over: float | None, shape: str
) -> None:
    make_faulted(tmp_path / "run", fault, over=over, mode="ddp")
    events = json.loads(write_trace(tmp_path / "run")[0].read_text())["traceEvents"]
    (done,) = [event for event in events if event["name"] == fault]
    assert (done["ph"], done["pid"], done["tid"]) == (shape, 4, 2) and done["ts"] >= 0
    lost = {event["pid"] for event in events if event["name"] == "lost another rank"}
    assert lost == (set() if over else {0, 1, 3})
