"""The page: findings, tables, escaping, self-containment, and 200 runs in ten seconds."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testbed.control.cli.main import app
from testbed.report.load import load
from testbed.report.model import chapters
from testbed.report.page import Report, write
from testbed.report.tables import utilisation
from testbed.spec.errors import UsageError
from tests.support.synthetic import Made, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "node": {"cpus": 0.4}}
MODES = ("single", "none", "gather", "allreduce", "ring", "ddp")


def quick(folder: Path) -> Path:
    for seed, mode in enumerate(MODES):
        make_run(folder / mode, Made(compute=1.6, seed=seed), mode=mode, experiment="quick", **LINK)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    folder = quick(tmp_path_factory.mktemp("quick"))
    make_run(folder / "dead", mode="tree", experiment="quick", status="failed", reason="rank 2 died", **LINK)
    report = write([folder], folder)
    return report, report.page.read_text()


def test_the_first_sentence_says_who_wins_and_by_how_much(made: tuple[Report, str]) -> None:
    headline = made[0].parts[0].verdict.headline
    assert re.search(
        r"At 500 Mbit/s each way ddp is 3\.\d times as fast as gather, and 1\.\d+ times as fast as one", headline
    )


def test_the_reason_is_in_bytes_and_seconds(made: tuple[Report, str]) -> None:
    why = " ".join(made[0].parts[0].verdict.why)
    assert "222 MB a step through rank 0's link" in why and "55 MB" in why and "The network limits ddp" in why


def test_numbers_are_held_against_one_another(made: tuple[Report, str]) -> None:
    checks = {check.text.partition(":")[0]: check.ok for check in made[0].parts[0].verdict.checks}
    assert checks == {"Rates": True, "Replicas": True, "Bytes": True, "Times": True, "Control": True}


def test_a_step_that_is_mostly_rest_adds_up_but_does_not_pass(tmp_path: Path) -> None:
    for mode in ("ring", "ddp"):
        make_run(tmp_path / mode, mode=mode, **LINK)
    times = next(c for c in write([tmp_path], tmp_path).parts[0].verdict.checks if c.text.startswith("Times"))
    assert times.ok and "the rest at most 0.1 % of it" in times.text
    for rank in range(4):  # a tenth more that nobody accounts for
        path = tmp_path / "ring" / f"rank{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        longer = [line | ({"total": 1.1 * line["total"]} if line["kind"] == "step" else {}) for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in longer))
    times = next(c for c in write([tmp_path], tmp_path).parts[0].verdict.checks if c.text.startswith("Times"))
    assert times.ok is False and "is the step within 0.1 %" in times.text and "9.2 % of it (ring)" in times.text


def test_bytes_received_are_in_the_table_and_in_the_figures(tmp_path: Path) -> None:
    summary = make_run(tmp_path / "gather", mode="gather", **LINK)
    changed = summary.model_copy(update={"received_per_step": [6e6, 1e6, 2e6, 3e6]})
    (tmp_path / "gather" / "summary.json").write_text(changed.model_dump_json(by_alias=True))
    (part,) = write([tmp_path], tmp_path).parts
    table = next(table for table in part.tables if table.name == "bytes")
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["received, rank 0"], row["received, others"]) == ("6.00", "2.00")
    figures = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert figures["experiments"]["adhoc"][0]["received_per_step"] == [6e6, 1e6, 2e6, 3e6]


def test_a_slow_link_is_used_as_much_as_its_own_rate_allows(tmp_path: Path) -> None:
    """A ring sends as much over the slow link as over the others, and waits for it."""
    make_run(tmp_path / "ring", Made(slow_link={2: 0.25}, noise=0.0), mode="ring", **LINK)
    make_run(tmp_path / "equal" / "ring", Made(noise=0.0), mode="ring", **LINK)
    slow, equal = (chapters(load([tmp_path / name]))[0].cells[0] for name in ("ring", "equal"))
    assert utilisation(slow) == pytest.approx(utilisation(equal), rel=0.01)


def test_a_run_that_failed_is_listed_and_in_no_table(made: tuple[Report, str]) -> None:
    report, page = made
    assert [skipped.path.name for skipped in report.skipped] == ["dead"] and "rank 2 died" in page
    assert all(row[0] != "tree" for table in report.parts[0].tables for row in table.rows)


def test_every_plot_and_table_is_also_a_file(made: tuple[Report, str]) -> None:
    report, _ = made
    files = {path.name for path in (report.page.parent / "report").iterdir()}
    for plot in report.parts[0].plots:
        assert {f"quick-{plot.name}.svg", f"quick-{plot.name}.png"} <= files
    assert {f"quick-{table.name}.csv" for table in report.parts[0].tables} <= files
    assert {"report.md", "summary.json"} <= files
    figures = json.loads((report.page.parent / "report" / "summary.json").read_text())
    assert [cell["mode"] for cell in figures["experiments"]["quick"]] == list(MODES)


def test_figures_for_scripts_are_json_also_where_the_loss_diverged(tmp_path: Path) -> None:
    make_run(tmp_path / "one", Made(loss=float("nan")), mode="ring", **LINK)
    text = (write([tmp_path], tmp_path).page.parent / "report" / "summary.json").read_text()
    figures = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert figures["experiments"]["adhoc"][0]["test_loss"] is None


def test_what_was_not_recorded_is_a_dash_and_no_zero(tmp_path: Path) -> None:
    make_run(tmp_path / "plain", mode="ring", spans=False, **LINK)
    make_run(tmp_path / "ring", mode="ring", **LINK)
    part = write([tmp_path], tmp_path).parts[0]
    split = next(table for table in part.tables if table.name == "split")
    rows = {row[2] == "-": row for row in split.rows}
    assert rows[True][2:] == ["-"] * 8 and rows[False][3] != "-"
    assert [plot.svg.count("ring: ") for plot in part.plots if plot.name == "where-time-goes"] == [1]


def test_the_control_is_held_only_against_runs_that_compute_alike(tmp_path: Path) -> None:
    make_run(tmp_path / "none", Made(compute=2.0), mode="none", experiment="quick", **LINK)
    others: dict[str, tuple[float, dict[str, Any]]] = {
        "alike": (2.0, {"link": {"rate": "200mbit"}}),
        "quota": (9.0, {"node": {"cpus": 0.1}}),
        "model": (5.0, {"model": "resnet18"}),
    }
    for name, (compute, more) in others.items():
        make_run(tmp_path / name, Made(compute=compute), mode="ring", experiment="quick", **LINK | more)
    checks = write([tmp_path], tmp_path).parts[0].verdict.checks
    (control,) = [check for check in checks if check.text.startswith("Control")]
    assert control.ok


@pytest.mark.parametrize(("cpu", "right"), [(0.6, True), (0.9, False)])
def test_the_same_work_may_take_longer_by_the_clock(tmp_path: Path, cpu: float, right: bool) -> None:
    """3 s of which 60 % are the loop's are the work of 2 s of which 90 % are; the rest of the processor moved bytes."""
    make_run(tmp_path / "none", Made(compute=2.0, cpu=0.9), mode="none", **LINK)
    make_run(tmp_path / "ring", Made(compute=3.0, cpu=cpu), mode="ring", **LINK)
    checks = write([tmp_path], tmp_path).parts[0].verdict.checks
    (control,) = [check for check in checks if check.text.startswith("Control")]
    assert control.ok is right and re.search(r"by the clock it takes up to (4[5-9]|5\d) % more \(ring\)", control.text)


def test_the_page_asks_the_network_for_nothing(made: tuple[Report, str]) -> None:
    _, page = made
    urls = set(re.findall(r'(?:src|href|action|data)="([^"#][^"]*)"', page)) | set(
        re.findall(r"url\((?!#)[^)]*\)", page)
    )
    assert urls == set() and "@import" not in page


def test_no_two_parts_of_the_page_share_an_id(made: tuple[Report, str]) -> None:
    ids = re.findall(r'\bid="([^"]+)"', made[1])
    assert len(ids) == len(set(ids))


def test_a_report_folder_that_is_a_link_is_refused_and_nothing_lands_outside(tmp_path: Path) -> None:
    make_run(tmp_path / "theirs" / "one", mode="ring", **LINK)
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs" / "report").symlink_to(tmp_path / "mine")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "theirs")])
    assert isinstance(done.exception, UsageError) and "is a link" in str(done.exception)
    assert list((tmp_path / "mine").iterdir()) == [] and not (tmp_path / "theirs" / "report.html").exists()


def test_links_that_a_stranger_put_where_files_go_are_replaced_and_not_followed(tmp_path: Path) -> None:
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
    """The report, and every file of it."""
    page = write([folder], folder).page
    return [page, *(page.parent / "report").iterdir()]


def test_a_stranger_cannot_put_code_into_the_page(tmp_path: Path) -> None:
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


def test_a_cell_that_a_spreadsheet_would_run_is_text() -> None:
    from testbed.report.tables import Table

    table = Table("t", "t", ["a", "b"], [["=cmd()", "-1.5"], ["-", "-cmd"]])
    assert table.csv().splitlines()[1:] == ["'=cmd(),-1.5", "-,'-cmd"]


def test_nothing_to_show_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        write([tmp_path], tmp_path)
    make_run(tmp_path / "dead", mode="ring", status="failed", reason="rank 2 died")
    with pytest.raises(UsageError, match="rank 2 died"):
        write([tmp_path], tmp_path)


def test_the_command_prints_where_the_page_is(tmp_path: Path) -> None:
    quick(tmp_path)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "spec.json").write_text("{")
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"report: {tmp_path / 'report.html'}" in done.output and "half" in done.output


def test_nothing_that_the_command_says_commands_a_terminal(tmp_path: Path) -> None:
    """Neither the words nor the name of a stranger's folder."""
    make_run(tmp_path / "bad\x1b]0;owned\x07", name="bad", mode="ring", status="failed", reason="\x1b[31mrank 2 died")
    nothing = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "bad?]0;owned?: failed: ?[31mrank 2 died." in str(nothing.exception)
    make_run(tmp_path / "good", mode="ring", **LINK)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0 and "bad?]0;owned?: failed: ?[31mrank 2 died" in done.output, done.output
    assert "\x1b" not in done.output and "\x07" not in done.output


def test_one_lonely_run_makes_a_report_too(tmp_path: Path) -> None:
    make_run(tmp_path / "only", mode="single", steps=4, evaluate="never")
    assert write([tmp_path / "only"], tmp_path).parts[0].verdict.headline.startswith("One node takes")


@pytest.mark.quiet
def test_two_hundred_runs_take_less_than_ten_seconds(tmp_path: Path) -> None:
    """Processor time: the machine that tests may be busy with something else."""
    for number in range(200):
        mode = MODES[2 + number % 4]
        rate = f"{100 + 10 * (number // 4)}mbit"
        make_run(tmp_path / f"run{number}", Made(seed=number), mode=mode, experiment="many", link={"rate": rate})
    begun = time.process_time()
    report = write([tmp_path], tmp_path)
    taken = time.process_time() - begun
    assert len(report.parts[0].tables[0].rows) == 200
    assert taken < 10, f"{taken:.1f} s"
