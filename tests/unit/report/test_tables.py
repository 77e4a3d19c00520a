"""Tables: what is in them, what is a dash, and that a spreadsheet runs nothing in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.report.load import load
from testbed.report.model import Cell, chapters
from testbed.report.page import write
from testbed.report.tables import Table, payload_shares, utilisation
from tests.support.synthetic import Conditions, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "node": {"cpus": 0.4}}


def cell_of(folder: Path) -> Cell:
    return chapters(load([folder]))[0].cells[0]


def test_the_split_of_a_step_shows_copies(tmp_path: Path) -> None:
    for mode in ("none", "ring"):
        make_run(tmp_path / mode, Conditions(copies=0.125), mode=mode, **LINK)
    split = next(table for table in write([tmp_path], tmp_path).sections[0].tables if table.name == "split")
    rows = {row[0]: dict(zip(split.header, row, strict=True)) for row in split.rows}
    assert (rows["none"]["copies"], rows["ring"]["copies"]) == ("0.000", "0.125")


def test_received_bytes_are_in_the_table_and_in_report_json(tmp_path: Path) -> None:
    summary = make_run(tmp_path / "gather", mode="gather", **LINK)
    changed = summary.model_copy(update={"received_per_step": [6e6, 1e6, 2e6, 3e6]})
    (tmp_path / "gather" / "summary.json").write_text(changed.model_dump_json(by_alias=True))
    (part,) = write([tmp_path], tmp_path).sections
    table = next(table for table in part.tables if table.name == "bytes")
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["received, rank 0"], row["received, others"]) == ("6.00", "2.00")
    figures = json.loads((tmp_path / "report" / "report.json").read_text())
    assert figures["experiments"]["adhoc"][0]["received_per_step"] == [6e6, 1e6, 2e6, 3e6]


def test_a_sample_of_the_links_is_shown_with_the_number_of_all_links(tmp_path: Path) -> None:
    make_run(tmp_path / "ring", mode="ring", **LINK)
    path = tmp_path / "ring" / "receipt.json"
    values = json.loads(path.read_text())
    shown = []
    for sampled_from in (None, 4032):
        path.write_text(json.dumps(values | {"sampled_from": sampled_from}))
        tables = write([tmp_path], tmp_path).sections[0].tables
        table = next(table for table in tables if table.name == "network")
        shown.append(dict(zip(table.header, table.rows[0], strict=True))["links"])
    assert shown == ["12", "12 of 4032"]


def test_a_run_beside_heavy_load_has_a_footnote_in_the_table_and_a_number_in_the_csv(tmp_path: Path) -> None:
    summary = make_run(tmp_path / "ring", mode="ring", **LINK)
    make_run(tmp_path / "tree", mode="tree", **LINK)
    load_of_others = {"ranks": [0, 1, 2, 3], "cores": 2, "others": 1.2, "load_at_start": 3.5}
    values = json.loads(summary.model_dump_json(by_alias=True)) | {"machines": [load_of_others]}
    (tmp_path / "ring" / "summary.json").write_text(json.dumps(values))
    (part,) = write([tmp_path], tmp_path).sections
    table = next(table for table in part.tables if table.name == "modes")
    cells = {row[0]: row[table.header.index("s/iter")] for row in table.rows}
    assert cells["ring"].endswith(" *") and not cells["tree"].endswith("*")
    assert table.note.endswith(" *: other processes used 1.20 of 2 cores during the steps; limit 0.2; run it alone.")
    assert "*" not in table.csv() and cells["ring"].removesuffix(" *") in table.csv()
    figures = json.loads((tmp_path / "report" / "report.json").read_text())["experiments"]["adhoc"]
    assert {each["mode"]: each["machines"] for each in figures} == {
        "ring": [[load_of_others | {"own": None}]],
        "tree": [[]],
    }


def test_utilisation_of_a_slow_link_is_by_its_own_rate(tmp_path: Path) -> None:
    """A ring sends as much over the slow link as over the others, and waits for it."""
    make_run(tmp_path / "ring", Conditions(slow_link={2: 0.25}, noise=0.0), mode="ring", **LINK)
    make_run(tmp_path / "equal" / "ring", Conditions(noise=0.0), mode="ring", **LINK)
    slow, equal = (cell_of(tmp_path / name) for name in ("ring", "equal"))
    assert utilisation(slow) == pytest.approx(utilisation(equal), rel=0.01)


def test_what_was_not_recorded_is_a_dash_and_not_zero(tmp_path: Path) -> None:
    make_run(tmp_path / "plain", mode="ring", spans=False, **LINK)
    make_run(tmp_path / "ring", mode="ring", **LINK)
    part = write([tmp_path], tmp_path).sections[0]
    split = next(table for table in part.tables if table.name == "split")
    rows = {row[2] == "-": row for row in split.rows}
    assert rows[True][2:] == ["-"] * 9 and rows[False][3] != "-"
    assert [plot.svg.count("ring: ") for plot in part.plots if plot.name == "where-time-goes"] == [1]


def test_payload_shares_of_a_restarted_run_are_of_its_last_attempt(tmp_path: Path) -> None:
    """Its end record counts the payload of that attempt alone; counters of earlier steps are of another attempt."""
    make_run(tmp_path / "whole", mode="ring", **LINK)
    whole = payload_shares(cell_of(tmp_path / "whole"))
    make_run(tmp_path / "run", mode="ring", **LINK)
    for path in (tmp_path / "run").glob("rank*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "step"]
        lines[-1]["before"] = steps[3]["sent"]
        for line in steps[:4]:
            line |= {"attempt": 1, "sent": line["sent"] * 9}
        lines[-1]["payload"] = {kind: value * 8 // 12 for kind, value in lines[-1]["payload"].items()}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert payload_shares(cell_of(tmp_path / "run"))[:5] == whole[:5] and whole[0] != "-"


def test_workers_by_batch_has_three_tables(tmp_path: Path) -> None:
    for batch in (32, 128):
        values = {"batch": None, "batch_per_rank": batch, **LINK}
        make_run(tmp_path / f"single-{batch}", Conditions(compute=batch / 32), mode="single", **values)
        for nodes in (2, 4):
            made = Conditions(compute=batch / 32)
            make_run(tmp_path / f"ddp-{batch}-{nodes}", made, mode="ddp", nodes=nodes, **values)
    tables = {table.name: table for table in write([tmp_path], tmp_path).sections[0].tables}
    assert {"workers-time", "workers-split", "workers-bandwidth"} <= set(tables)
    assert [row[0] for row in tables["workers-time"].rows] == ["1", "2", "4"]
    speed_up = [float(row[2]) for row in tables["workers-time"].rows]
    assert speed_up[0] == 1.0 and speed_up[0] < speed_up[1] < speed_up[2]


def test_a_cell_that_a_spreadsheet_would_run_is_text() -> None:
    table = Table("t", "t", ["a", "b"], [["=cmd()", "-1.5"], ["-", "-cmd"]])
    assert table.csv().splitlines()[1:] == ["'=cmd(),-1.5", "-,'-cmd"]
