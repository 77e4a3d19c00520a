"""The section on a user's script: collectives, phases and set-up from records, on the page, in Markdown and JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.report.load import load
from testbed.report.model import Cell, Chapter, chapters, comparable
from testbed.report.page import write
from testbed.report.script import ScriptPart, collectives, ranges, script_parts, size_in_words
from testbed.results.observations import SEVERITIES
from testbed.results.table import caption, format_results
from tests.support.scripted_runs import DDP, GATHER_SCATTER, Script, make_script_run, plant_sum
from tests.support.synthetic import make_run

WRAPPED = {"DistributedDataParallel": {"bucket_cap_mb": 25, "find_unused_parameters": False}}
LINK = {"link": {"rate": "200mbit"}}
Make = Callable[[Script], Chapter]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    def make(script: Script) -> Chapter:
        make_script_run(tmp_path / "run", script)
        (chapter,) = chapters(load([tmp_path]))
        return chapter

    return make


def part_of(chapter: Chapter) -> ScriptPart:
    (part,) = script_parts(chapter)
    return part


def cell_of(chapter: Chapter) -> Cell:
    (cell,) = chapter.cells
    return cell


def test_a_script_s_collectives_are_rows_per_line(made: Make) -> None:
    rows = collectives(cell_of(made(Script(collectives=GATHER_SCATTER, overlap=False))))
    assert [(row["operation"], row["site"], row["ranks"]) for row in rows] == [
        ("gather", "main.py:40", [0, 1, 2, 3]),
        ("scatter", "main.py:44", [0, 1, 2, 3]),
    ]
    assert rows[0]["calls_per_step"] == 1 and rows[0]["bytes_per_call"] == 4_000_000
    assert rows[0]["in_flight_seconds_per_step"] == pytest.approx(rows[0]["blocked_seconds_per_step"])


def test_two_calls_of_one_line_in_a_step_are_counted_twice(made: Make) -> None:
    table = next(t for t in part_of(made(Script(wrappers=WRAPPED))).tables if t.name.endswith("collectives"))
    (row,) = table.rows
    assert row[:7] == ["all_reduce", "main.py:31", "backward", "DistributedDataParallel", "0-3", "2", "2 MB"]


def test_the_root_of_a_collective_is_named(made: Make) -> None:
    table = part_of(made(Script(collectives=(("broadcast a.py:3, root 2", 8),)))).tables[0]
    assert table.rows[0][0] == "broadcast, root 2" and table.rows[0][6] == "8 B"


def test_time_in_no_phase_is_shown(made: Make) -> None:
    table = next(t for t in part_of(made(Script(rest=0.05))).tables if t.name.endswith("phases"))
    assert [row[table.header.index("no phase")] for row in table.rows] == ["0.0500"] * 4
    assert [row[table.header.index("images")] for row in table.rows] == ["16"] * 4


def test_the_set_up_has_wrappers_and_the_ranks_that_differ(made: Make, tmp_path: Path) -> None:
    made(Script(wrappers=WRAPPED))
    path = tmp_path / "run" / "rank2.jsonl"
    path.write_text(
        path.read_text().replace('"optimizers": ["SGD"], "threads": 1', '"optimizers": ["SGD"], "threads": 2')
    )
    (chapter,) = chapters(load([tmp_path]))
    rows = {row[0]: row[1] for row in part_of(chapter).tables[-1].rows}
    assert rows["wrappers"] == "DistributedDataParallel (bucket_cap_mb=25, find_unused_parameters=False)"
    assert rows["process group"] == "gloo, 4 ranks"
    assert rows["threads of torch"] == "1 (rank 0-1, 3); 2, by its own choice; requested 1 (rank 2)"


def test_options_that_are_not_given_are_not_listed(made: Make) -> None:
    part = part_of(made(Script(wrappers={"DistributedDataParallel": {"device_ids": None, "static_graph": True}})))
    rows = {row[0]: row[1] for row in part.tables[-1].rows}
    assert rows["wrappers"] == "DistributedDataParallel (static_graph=True)"


def test_threads_that_the_script_has_set_are_its_own_choice(made: Make) -> None:
    chapter = made(Script(threads=3))
    assert "3 threads each, by its own choice" in caption(chapter.summaries)
    rows = {row[0]: row[1] for row in part_of(chapter).tables[-1].rows}
    assert rows["threads of torch"] == "3, by its own choice; requested 1"
    assert "1 thread each," in caption([make_script_run(Path(chapter.cells[0].first.folder.path).parent / "one")])


def test_the_batch_is_the_usual_one_and_the_last_of_a_pass(made: Make) -> None:
    chapter = made(Script(images=128, last_images=96))
    assert "batches of 128 per rank, the last 96 (observed)" in caption(chapter.summaries)
    table = next(t for t in part_of(chapter).tables if t.name.endswith("phases"))
    assert [row[table.header.index("images")] for row in table.rows] == ["128, the last 96"] * 4


def test_images_that_no_loader_gave_are_not_seen(made: Make) -> None:
    chapter = made(Script(images=0))
    assert "batch not seen: the script uses no DataLoader" in caption(chapter.summaries)
    table = next(t for t in part_of(chapter).tables if t.name.endswith("phases"))
    assert {row[table.header.index("images")] for row in table.rows} == {"not seen"}


def test_files_that_it_wrote_are_named_with_their_folder(made: Make) -> None:
    written = {"kind": "files", "count": 2, "bytes": 1_500_000, "names": ["last.pt", "log/<b>"], "left_out": 1}
    part = part_of(made(Script(more=(written | {"reasons": ["only regular files"]},))))
    assert part.notes == [
        "Rank 0-3 wrote 2 files (1.5 MB): last.pt, log/<b>; collected in rank0.files to rank3.files. 1 more were not"
        " collected: only regular files."
    ]


def test_few_bytes_are_in_kilobytes(made: Make, tmp_path: Path) -> None:
    summary = made(Script(collectives=(("all_reduce main.py:3", 20_000),))).summaries[0]
    assert re.search(r"\d\d\.\d kB, \d\d\.\d kB", format_results([summary], tmp_path))


def test_notes_say_what_was_changed_sampled_and_not_seen(made: Make) -> None:
    part = part_of(made(Script(changed=("NCCL became Gloo",), sampled=(3, 7), unseen=("watch_waits",))))
    assert part.notes == [
        "Changed for this run: NCCL became Gloo.",
        "In 2 of 10 steps (step 4, 8) gradients and parameters were sampled. Such a step took 0.43 s and is in no other"
        " time here.",
        "Not seen on rank 0-3: watch_waits (ValueError: made to fail).",
    ]


def test_a_script_with_another_mode_is_compared_with_itself_and_says_what_was_replaced(tmp_path: Path) -> None:
    swap = {"kind": "swap", "step": 4, "mode": "ring", "detail": {"replaced": ["gather at main.py:40"]}}
    make_script_run(tmp_path / "own", Script(collectives=GATHER_SCATTER, overlap=False))
    instead = Script(collectives=(("bucket 0", 4_000_000),), more=(swap,), compute=0.6)
    make_script_run(tmp_path / "ring", instead, mode="ring", warmup=6)
    (chapter,) = chapters(load([tmp_path]))
    assert chapter.keys == [] and len(comparable(chapter)) == 2
    own, ring = script_parts(chapter) if chapter.cells[0].spec.mode.is_script else reversed(script_parts(chapter))
    assert own.notes == [] and ring.title == "What this script does: main.py + ring"
    assert ring.notes == ["From step 5 on ring synchronised the script's gradients in place of gather at main.py:40."]
    assert ring.cell.needed() == [6_000_000.0] * 4, "theory of the mode, with the bytes of its buffers"
    assert caption(chapter.summaries).endswith("steps after warm-up")


def test_the_times_of_sampled_steps_are_in_no_median(made: Make) -> None:
    cell = cell_of(made(Script(sampled=(3, 7))))
    assert cell.n == 8 and cell.seconds.high == pytest.approx(cell.seconds.low)


def test_findings_are_on_the_page_in_markdown_and_in_json(made: Make, tmp_path: Path) -> None:
    """The optimizer of every rank gets the sum of four different gradients."""
    made(Script(differ=True))
    plant_sum(tmp_path / "run", site="main.py:<b>9</b>")
    write([tmp_path], tmp_path)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report" / "report.md").read_text()
    (cell,) = json.loads((tmp_path / "report" / "report.json").read_text())["experiments"]["adhoc"]
    found = cell["script"]["findings"]
    assert [each["severity"] for each in found] == sorted((e["severity"] for e in found), key=SEVERITIES.index)
    assert "summed" in {each["rule"] for each in found}
    for each in found:
        assert f"**{each['severity']}**: {each['title']}" in text and f"  Fix: {each['fix']}" in text
        assert each["title"] in html.unescape(page)
    assert "<b>9</b>" not in page
    assert cell["script"]["collectives"][0]["site"] == "main.py:31" and cell["images_per_second"] > 0


def test_defaults_of_our_loop_are_nowhere_in_the_report_of_a_script(made: Make, tmp_path: Path) -> None:
    made(Script())
    report = write([tmp_path], tmp_path)
    files = [report.page, *(tmp_path / "report").glob("*.md"), *(tmp_path / "report").glob("*.json")]
    for path in files:
        text = path.read_text()
        assert not [word for word in ("vgg11", "cifar10", "batch_per_rank", "nesterov") if word in text], path


def test_a_script_beside_our_own_modes_has_a_row_and_a_section_but_no_verdict(tmp_path: Path) -> None:
    for mode in ("ring", "ddp"):
        make_run(tmp_path / mode, mode=mode, **LINK)
    make_script_run(tmp_path / "script", Script(collectives=DDP))
    report = write([tmp_path], tmp_path)
    (section,) = report.sections
    assert [row[0] for row in section.tables[0].rows] == ["ring", "ddp", "main.py"]
    assert [part.title for part in section.scripts] == ["What this script does: main.py"]
    assert "main.py" not in section.verdict.headline, "it trains another model with another batch"
    losses = [plot.finding for plot in section.plots if plot.name.startswith("loss")]
    assert losses == ["Loss against time", "Training loss of each step"]


def test_ranges_and_sizes_in_words() -> None:
    assert ranges([0, 1, 2, 5]) == "0-2, 5" and ranges([3]) == "3"
    assert [size_in_words(size) for size in (8, 1500, 2_000_000)] == ["8 B", "1.5 kB", "2 MB"]


def test_forged_details_and_names_do_no_harm(tmp_path: Path) -> None:
    make_script_run(tmp_path / "run", Script(collectives=GATHER_SCATTER, overlap=False))
    hostile = "<img src=x onerror=alert(1)>"
    for path in (tmp_path / "run").glob("rank*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for row in (row for line in lines if line["kind"] == "calls" for row in line["rows"]):
            row["site"] = row["by"] = hostile
            row["detail"] = {"root": "x", "smallest": "a", "largest": {}, "ranks": 7}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (chapter,) = chapters(load([tmp_path]))
    text = part_of(chapter).markdown()
    assert "<img" not in text and "&lt;img" in text
    assert {row["root"] for row in part_of(chapter).rows} == {0}
