"""Runs with injected faults: their section of the page, their figures on one clock, their marks in the trace."""

from __future__ import annotations

import html
import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from testbed.report.compare import compare
from testbed.report.load import load
from testbed.report.page import Section, write
from testbed.report.trace import write_trace
from testbed.spec.errors import one_line
from tests.soak.hostile import OCTAL_SCRIPT, SCRIPT, TERMINAL_CODES
from tests.support.synthetic import Conditions, make_faulted, make_run

FAULT = "kill:rank2@step8"


def test_a_failed_run_is_in_no_table_but_its_fault_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "good", mode="ring")
    make_faulted(tmp_path / "bad", FAULT, mode="ring")
    loaded = load([tmp_path])
    assert [run.folder.path.name for run in loaded.runs] == ["good"]
    assert [skip.path.name for skip in loaded.skipped] == ["bad"]
    (told,) = loaded.faulted
    assert told.row[1:] == (FAULT, "0.30 s", "yes", "6 6 -9 6", "no")


def test_the_page_has_a_section_with_a_row_and_a_figure(tmp_path: Path) -> None:
    make_faulted(tmp_path / "runs" / "bad", FAULT, mode="ring")
    made = write([tmp_path / "runs"], tmp_path)
    page = made.page.read_text()
    assert made.sections == [] and 'id="faults-fault-1"' in page and 'id="faults-faults"' in page
    assert "all other ranks detect it after 0.30 s and name the right rank" in page
    assert FAULT in (tmp_path / "report" / "faults-faults.csv").read_text()
    assert FAULT in (tmp_path / "report" / "report.md").read_text()


ITSELF: dict[str, Any] = {"event": "saw", "rank": 2, "failed_rank": 0, "code": 6, "at": 7.0}
AGAIN: list[dict[str, Any]] = [{"event": "again", "at": 8.0}, ITSELF | {"rank": 1, "failed_rank": 2, "at": 9.0}]


@pytest.mark.parametrize(
    ("more", "median"), [([ITSELF], "1.45 s"), (AGAIN, "0.40 s")], ids=["the rank itself", "another attempt"]
)
def test_the_figure_shows_when_the_last_rank_noticed_and_the_table_the_median(
    tmp_path: Path, more: list[dict[str, Any]], median: str
) -> None:
    make_faulted(tmp_path / "runs" / "bad", FAULT, mode="ring")
    path = tmp_path / "runs" / "bad" / "faults.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    begun = events[0]["begun"]
    seen = [event for event in events if event["event"] == "saw"]
    for event, after in zip(seen, (0.3, 0.4, 2.5), strict=True):
        event["at"] = begun + after
    events += [event | {"at": begun + event["at"]} for event in more]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    (told,) = load([tmp_path / "runs"]).faulted
    assert told.history.last_notice_s == pytest.approx(2.5) and told.row[2] == median
    made = write([tmp_path / "runs"], tmp_path).faults
    assert made and "a fault that all other ranks detected within 2.5 s" in made.finding
    assert "all other ranks detect it after 2.50 s" in made.plots[0].finding


WORDS = {
    "a template": OCTAL_SCRIPT,
    "no template": r"\q",
    "mathematics": r"$\x$",
    "a script": f"{SCRIPT}</script>",
    "for a terminal": TERMINAL_CODES,
    "half a surrogate pair": "\ud800",
    "very long": "x" * 100_000,
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_the_name_of_a_fault_is_escaped_on_the_page(tmp_path: Path, words: str) -> None:
    make_faulted(tmp_path / "runs" / "bad", FAULT, mode="ring")
    path = tmp_path / "runs" / "bad" / "faults.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    told = [event | ({"fault": words} if "fault" in event else {}) for event in events]
    path.write_text("".join(json.dumps(event) + "\n" for event in told))
    page = write([tmp_path / "runs"], tmp_path).page.read_text()
    (label,) = re.findall(r'aria-label="([^"]*)"', page)
    assert html.unescape(label).startswith(
        f"{one_line(words)} {FAULT} (not injected) with ring: all other ranks detect it"
    )
    assert SCRIPT not in page and "\x1b" not in page and len(page) < 1 << 20
    assert SCRIPT not in (tmp_path / "report" / "faults-fault-1.svg").read_text()


def test_a_fault_history_without_faults_in_the_spec_is_ignored(tmp_path: Path) -> None:
    make_run(tmp_path / "one", mode="ring")
    make_faulted(tmp_path / "other", FAULT, mode="ring")
    (tmp_path / "other" / "faults.jsonl").replace(tmp_path / "one" / "faults.jsonl")
    loaded = load([tmp_path / "one"])
    assert len(loaded.runs) == 1 and loaded.faulted == [] and loaded.skipped == []


def test_a_run_whose_fault_was_not_injected_has_a_row_and_no_figure(tmp_path: Path) -> None:
    make_faulted(tmp_path / "runs" / "late", FAULT, over=1.0, mode="ring")
    path = tmp_path / "runs" / "late" / "faults.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"ended"' in line))
    (told,) = load([tmp_path / "runs"]).faulted
    assert told.row[1:] == (f"{FAULT} (not injected)", "-", "-", "0 0 0 0", "-") and told.episodes == []
    made = write([tmp_path / "runs"], tmp_path).faults
    assert made and made.plots == [] and made.finding == "1 run with injected faults; in 1 nothing was injected"
    assert "(not injected)" in (tmp_path / "report" / "report.md").read_text()
    assert write_trace(tmp_path / "runs" / "late")[1] > 0


def test_a_fault_with_a_duration_has_an_end(tmp_path: Path) -> None:
    make_faulted(tmp_path / "run", "pause:rank1@step3+3s", over=3.0, mode="ring")
    (told,) = load([tmp_path]).faulted
    assert told.row[-1] == "went on"
    (episode,) = told.episodes
    assert episode.rank == 1 and episode.end == pytest.approx(episode.begin + 3.0)


def test_a_damaged_history_is_named_and_other_runs_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "good", mode="ring")
    make_faulted(tmp_path / "bad", FAULT, mode="ring")
    (tmp_path / "bad" / "faults.jsonl").write_text('{"event": "injected", "rank": "x", "fault": 3, "begun": "?"}\n')
    loaded = load([tmp_path])
    assert len(loaded.runs) == 1 and loaded.faulted == [] and "damaged" in loaded.skipped[0].reason


@pytest.mark.parametrize(
    ("name", "size"), [("faults.jsonl", 16 << 20), ("rank0.jsonl", 128 << 20), ("rank0.attempt1.jsonl", 128 << 20)]
)
def test_a_too_large_history_is_named_and_not_read(tmp_path: Path, name: str, size: int) -> None:
    make_faulted(tmp_path / "bad", FAULT, mode="ring")
    (tmp_path / "bad" / name).touch()
    os.truncate(tmp_path / "bad" / name, size + 1)
    loaded = load([tmp_path])
    assert loaded.faulted == [] and f"at most {size} are read" in loaded.skipped[0].reason


@pytest.mark.parametrize("name", ["faults.jsonl", "rank0.attempt1.jsonl"])
def test_a_history_that_is_a_link_is_named_and_not_read(tmp_path: Path, name: str) -> None:
    make_faulted(tmp_path / "runs" / "bad", FAULT, mode="ring")
    path, elsewhere = tmp_path / "runs" / "bad" / name, tmp_path / name
    elsewhere.write_text(path.read_text() if path.exists() else "")
    path.unlink(missing_ok=True)
    path.symlink_to(elsewhere)
    loaded = load([tmp_path / "runs"])
    assert loaded.faulted == [] and "is a symlink" in loaded.skipped[0].reason


@pytest.mark.parametrize(("fault", "over", "shape"), [(FAULT, None, "i"), ("cut:rank2@step3+2s", 2.0, "X")])
def test_the_trace_marks_the_fault_and_the_ranks_that_noticed(
    tmp_path: Path, fault: str, over: float | None, shape: str
) -> None:
    make_faulted(tmp_path / "run", fault, over=over, mode="ddp")
    events = json.loads(write_trace(tmp_path / "run")[0].read_text())["traceEvents"]
    (done,) = [event for event in events if event["name"] == fault]
    assert (done["ph"], done["pid"], done["tid"]) == (shape, 4, 2) and done["ts"] >= 0
    lost = {event["pid"] for event in events if event["name"] == "lost another rank"}
    assert lost == (set() if over else {0, 1, 3})


RATE = "rate:rank2@step3=1mbit"
LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "experiment": "quick"}
SLOWED = {step: 9.0 for step in range(3, 12)}


def quick_with(folder: Path, **values: Any) -> Section:
    """Three modes in 12 steps of which 2 are warm-up; tree is the fastest where it is undisturbed."""
    make_run(folder / "single", Conditions(compute=8.0), mode="single", **LINK)
    make_run(folder / "ring", Conditions(compute=2.0), mode="ring", **LINK)
    slowed = Conditions(compute=1.0, slowed=SLOWED)
    make_faulted(folder / "tree", RATE, conditions=slowed, finished=True, mode="tree", **LINK | values)
    return write([folder], folder).sections[0]


def test_steps_under_a_fault_are_in_no_median_and_the_row_says_so(tmp_path: Path) -> None:
    part = quick_with(tmp_path)
    (row,) = [row for row in part.tables[0].rows if row[0] == "tree"]
    figures = dict(zip(part.tables[0].header, row, strict=True))
    assert figures["note"] == "9 of 10 steps left out: rate fault" and figures["n"] == "1"
    (tree,) = [cell for cell in part.chapter.cells if cell.label == "tree"]
    undisturbed = statistics.fmean(float(rank.steps.total[2]) for rank in tree.first.ranks)
    disturbed = min(float(rank.steps.total[3:].min()) for rank in tree.first.ranks)
    assert tree.seconds.centre == tree.split.step == pytest.approx(undisturbed) and undisturbed < disturbed - 1
    assert tree.first.summary.seconds_per_step == pytest.approx(undisturbed)
    assert "tree" not in {plot.name: plot.finding for plot in part.plots}["loss-by-time"]


def test_a_run_without_an_undisturbed_step_has_a_row_without_figures(tmp_path: Path) -> None:
    part = quick_with(tmp_path, warmup=3)
    (row,) = [row for row in part.tables[0].rows if row[0] == "tree"]
    figures = dict(zip(part.tables[0].header, row, strict=True))
    assert figures.pop("note") == "9 of 9 steps left out: rate fault"
    assert {figures[key] for key in ("s/iter", "n", "speed-up", "images/s")} == {"-"}
    said = [part.verdict.headline, *part.verdict.why, *(plot.finding for plot in part.plots)]
    assert not [sentence for sentence in said if "tree" in sentence]
    text = (tmp_path / "report" / "report.md").read_text()
    assert "no figure: 9 of 9 steps left out: rate fault" in text and "## 1 run with injected faults" in text
    faults = {path.name for path in (tmp_path / "report").iterdir() if path.name.startswith("faults-")}
    assert {"faults-faults.csv", "faults-fault-1.svg"} <= faults


def test_steps_under_a_fault_are_not_compared(tmp_path: Path) -> None:
    """Two steps under the fault take longer in B; the others take as long as in A."""
    slow: dict[int, float] = {3: 9.0, 4: 9.0}
    for side, slowed in (("a", {}), ("b", slow)):
        conditions = Conditions(compute=1.0, slowed=slowed, noise=0.0)
        values = {"mode": "ring", "steps": 24, **LINK}
        make_faulted(tmp_path / side, "slow:rank2@step3+1s=0.1cpu", 4.0, conditions, **values)
    (change,) = compare(tmp_path / "a", tmp_path / "b", 0.05).changes
    assert change.ratio == pytest.approx(1.0) and not change.worse
