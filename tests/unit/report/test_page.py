"""The page and its files: complete, escaped, self-contained, and written in ten seconds for 200 runs."""

from __future__ import annotations

import html
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from testbed.control.cli.main import app
from testbed.report.page import Report, write
from testbed.report.tables import Table
from testbed.spec.errors import UsageError
from tests.support.synthetic import Conditions, make_faulted, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "node": {"cpus": 0.4}}
MODES = ("single", "none", "gather", "allreduce", "ring", "ddp")


def quick(folder: Path) -> Path:
    for seed, mode in enumerate(MODES):
        make_run(folder / mode, Conditions(compute=1.6, seed=seed), mode=mode, experiment="quick", **LINK)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    folder = quick(tmp_path_factory.mktemp("quick"))
    make_run(folder / "dead", mode="tree", experiment="quick", status="failed", reason="rank 2 died", **LINK)
    report = write([folder], folder)
    return report, report.page.read_text()


def test_a_run_that_failed_is_listed_and_in_no_table(made: tuple[Report, str]) -> None:
    report, page = made
    assert [skipped.path.name for skipped in report.skipped] == ["dead"] and "rank 2 died" in page
    assert all(row[0] != "tree" for table in report.sections[0].tables for row in table.rows)


def test_every_figure_and_table_is_also_a_file(made: tuple[Report, str]) -> None:
    report, _ = made
    files = {path.name for path in (report.page.parent / "report").iterdir()}
    for plot in report.sections[0].plots:
        assert {f"quick-{plot.name}.svg", f"quick-{plot.name}.png"} <= files
    assert {f"quick-{table.name}.csv" for table in report.sections[0].tables} <= files
    assert {"report.md", "report.json"} <= files
    figures = json.loads((report.page.parent / "report" / "report.json").read_text())
    assert [cell["mode"] for cell in figures["experiments"]["quick"]] == list(MODES)


def test_report_json_is_valid_json_even_if_the_loss_diverged(tmp_path: Path) -> None:
    make_run(tmp_path / "one", Conditions(loss=float("nan")), mode="ring", **LINK)
    text = (write([tmp_path], tmp_path).page.parent / "report" / "report.json").read_text()
    figures = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert figures["experiments"]["adhoc"][0]["test_loss"] is None


def test_the_page_loads_nothing_from_the_network(made: tuple[Report, str]) -> None:
    _, page = made
    urls = set(re.findall(r'(?:src|href|action|data)="([^"#][^"]*)"', page)) | set(
        re.findall(r"url\((?!#)[^)]*\)", page)
    )
    assert urls == set() and "@import" not in page


def test_no_two_parts_of_the_page_share_an_id(made: tuple[Report, str]) -> None:
    ids = re.findall(r'\bid="([^"]+)"', made[1])
    assert len(ids) == len(set(ids))


def test_a_report_folder_that_is_a_link_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    make_run(tmp_path / "theirs" / "one", mode="ring", **LINK)
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs" / "report").symlink_to(tmp_path / "mine")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "theirs")])
    assert isinstance(done.exception, UsageError) and "is a symlink" in str(done.exception)
    assert list((tmp_path / "mine").iterdir()) == [] and not (tmp_path / "theirs" / "report.html").exists()


def test_links_in_place_of_report_files_are_replaced_and_not_followed(tmp_path: Path) -> None:
    make_run(tmp_path / "theirs" / "one", mode="ring", **LINK)
    files = [path.relative_to(tmp_path / "theirs") for path in write_all(tmp_path / "theirs")]
    mine = tmp_path / "mine"
    mine.write_text("precious")
    for name in files:
        (tmp_path / "theirs" / name).unlink()
        (tmp_path / "theirs" / name).symlink_to(mine)
    again = write_all(tmp_path / "theirs")
    assert mine.read_text() == "precious" and not any(path.is_symlink() for path in again)
    assert {path.suffix for path in again} == {".html", ".png", ".svg", ".csv", ".md", ".json"}


def write_all(folder: Path) -> list[Path]:
    """Write the report; return all its files."""
    page = write([folder], folder).page
    return [page, *(page.parent / "report").iterdir()]


def test_values_from_a_run_folder_are_escaped(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    make_run(tmp_path / "one", mode="ring", **LINK)
    make_run(tmp_path / "dead", mode="ring", status="failed", reason=evil, **LINK)
    rank = tmp_path / "one" / "rank0.jsonl"
    lines = [json.loads(line) for line in rank.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            line["comm"] = [[evil, *rest] for _, *rest in line["comm"]]
    rank.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    summary["environment"] = {evil: evil}
    summary["substrate"] = evil
    (tmp_path / "one" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "experiment.json").write_text(
        json.dumps({"name": "adhoc", "title": evil, "published": {"source": evil}})
    )
    page = write([tmp_path], tmp_path).page.read_text()
    assert "<script>alert" not in page and "<img" not in page
    assert "&lt;script&gt;alert" in page


def test_nothing_to_show_is_refused_with_the_reason_of_each_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        write([tmp_path], tmp_path)
    make_run(tmp_path / "dead", mode="ring", status="failed", reason="rank 2 died")
    with pytest.raises(UsageError, match=r"none of 1 run folders can be shown \(dead: .*rank 2 died\)\. Give a folder"):
        write([tmp_path], tmp_path)
    for number in range(5):
        make_run(tmp_path / f"ended{number}", mode="ring", status="interrupted", reason="stopped")
    with pytest.raises(UsageError, match=r"none of 6 .*ended0: .*stopped; .*; 1 more\)\. Give a folder"):
        write([tmp_path], tmp_path)


def test_the_command_prints_where_the_page_is(tmp_path: Path) -> None:
    quick(tmp_path)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "spec.json").write_text("{")
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"report: {tmp_path / 'report.html'}" in done.output and "half" in done.output


def test_the_command_prints_no_control_characters(tmp_path: Path) -> None:
    """Neither from the reason nor from the name of a run folder."""
    make_run(tmp_path / "bad\x1b]0;owned\x07", name="bad", mode="ring", status="failed", reason="\x1b[31mrank 2 died")
    nothing = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "(bad?]0;owned?: failed: ?[31mrank 2 died)" in str(nothing.exception)
    make_run(tmp_path / "good", mode="ring", **LINK)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0 and "bad?]0;owned?: failed: ?[31mrank 2 died" in done.output, done.output
    assert "\x1b" not in done.output and "\x07" not in done.output


def test_a_single_run_makes_a_report(tmp_path: Path) -> None:
    make_run(tmp_path / "only", mode="single", steps=4, evaluate="never")
    assert write([tmp_path / "only"], tmp_path).sections[0].verdict.headline.startswith("One node takes")


@pytest.mark.quiet
def test_two_hundred_runs_take_less_than_ten_seconds(tmp_path: Path) -> None:
    """Processor time, because other processes may run on this machine."""
    for number in range(200):
        mode = MODES[2 + number % 4]
        rate = f"{100 + 10 * (number // 4)}mbit"
        make_run(tmp_path / f"run{number}", Conditions(seed=number), mode=mode, experiment="many", link={"rate": rate})
    begun = time.process_time()
    report = write([tmp_path], tmp_path)
    taken = time.process_time() - begun
    assert len(report.sections[0].tables[0].rows) == 200
    assert taken < 10, f"{taken:.1f} s"


def test_report_md_says_which_checks_failed(tmp_path: Path) -> None:
    for mode, compute in (("none", 2.0), ("ring", 4.0)):
        make_run(tmp_path / mode, Conditions(compute=compute), mode=mode, **LINK)
    write([tmp_path], tmp_path)
    text = (tmp_path / "report" / "report.md").read_text()
    assert "- FAILED: Control: " in text and "- passed: Times: " in text


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Every table that a Markdown parser finds: its rows of cells, the header first."""
    tables: list[list[list[str]]] = []
    cell = False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type in ("th_open", "td_open"):
            cell = True
        elif token.type == "inline" and cell:
            tables[-1][-1].append(html.unescape(token.content))  # names are no markup
            cell = False
    return tables


def add_epoch(folder: Path) -> None:
    """One more test of the model, so that the run has two epochs."""
    for path in folder.glob("rank*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        last = next(line for line in lines if line["kind"] == "eval")
        path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:-1], last | {"epoch": 1}, lines[-1]]))


def all_tables(folder: Path) -> list[Table]:
    """Write a report that has every table there is; return the tables in the order of report.md."""
    for mode in ("single", "ring"):
        make_run(folder / "few" / mode, mode=mode, experiment="few", **LINK)
        add_epoch(folder / "few" / mode)
    published = {"test_loss": {"single": 1.0, "ring|after": 2.0}}
    (folder / "few" / "experiment.json").write_text(json.dumps({"name": "few", "title": "t", "published": published}))
    for batch in (32, 128):
        values = {"batch": None, "batch_per_rank": batch, "experiment": "workers", **LINK}
        make_run(folder / "workers" / f"single-{batch}", mode="single", **values)
        make_run(folder / "workers" / f"ddp-{batch}", mode="ddp", **values)
    make_faulted(folder / "killed", "kill:rank2@step8", mode="ring", experiment="faults")
    history = folder / "killed" / "faults.jsonl"
    history.write_text(history.read_text().replace("kill:rank2@step8", "kill|rank2"))
    report = write([folder], folder)
    assert report.faults
    parts = [[*(part.published.tables if part.published else []), *part.tables] for part in report.sections]
    return [*(table for tables in parts for table in tables), report.faults.table]


def test_a_markdown_parser_reads_every_table_of_report_md(tmp_path: Path) -> None:
    tables = all_tables(tmp_path)
    assert {table.name for table in tables} == {
        *("modes", "workers-time", "workers-split", "workers-bandwidth", "split", "bytes", "wire", "epochs"),
        *("ranks", "compact", "network", "published", "faults"),
    }
    text = (tmp_path / "report" / "report.md").read_text()
    expected = [[[cell.strip() for cell in row] for row in (table.header, *table.rows)] for table in tables]
    assert markdown_tables(text) == expected
    assert any("|" in cell for rows in expected for row in rows for cell in row)
    rules = [line for line in text.splitlines() if line.startswith("|") and not line.strip("|-: ")]
    assert len(rules) == len(tables)
    assert all(len(rule) >= 3 for line in rules for rule in line.strip("| ").split(" | "))
