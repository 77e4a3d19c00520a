"""`testbed predict`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.control.cli.main import call
from testbed.predict.scale import Predictor
from tests.support.synthetic import Conditions, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "experiment": "quick"}


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    for seed, mode in enumerate(("none", "ring", "ddp")):
        make_run(tmp_path / "quick" / mode, Conditions(compute=1.6, seed=seed), mode=mode, **LINK)
    return tmp_path / "quick"


def test_it_prints_parameters_with_their_sources_the_fit_and_a_table(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("testbed", ["predict", str(quick), "--nodes", "8..32", "--modes", "ring,pipeline"]) == 0
    printed = capsys.readouterr().out
    assert "| compute " in printed and "receipt, 12 links" in printed and "assumed" in printed
    assert "| ring/pipeline |" in printed and "8 nodes" in printed and "32 nodes" in printed
    assert "measured mode" in printed and "| fastest " in printed


def test_json_has_every_point_of_every_axis(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["--nodes", "8,16", "--rate", "1gbit,10gbit", "--delay", "0ms,25ms", "--speed", "1,10", "--modes", "ring"]
    assert call("testbed", ["predict", str(quick), *axes, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    points = {(p["nodes"], p["rate"], p["delay"], p["speed"]) for p in document["predictions"]}
    assert len(points) == len(document["predictions"]) == 16
    assert all(0 < p["low"] <= p["seconds"] <= p["high"] for p in document["predictions"])


def test_a_method_whose_messages_are_unknown_has_no_fit(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Predictor, "_misfit", lambda self, measured: None if str(measured.mode) == "ring" else 0.01)
    assert call("testbed", ["predict", str(quick), "--nodes", "8", "--modes", "ring"]) == 0
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]
    assert [row[-1] for row in cells if row[:2] == ["ring", "4"]] == ["-"]
    assert call("testbed", ["predict", str(quick), "--nodes", "8", "--modes", "ring", "--json"]) == 0
    found = {each["mode"]: each["model_error"] for each in json.loads(capsys.readouterr().out)["measured"]}
    assert found["ring"] is None and found["none"] == 0.01


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "1 to 1024 nodes"),
        (["--nodes", "1", "--modes", "ring"], "needs at least 2"),
        (["--modes", "hierarchical"], "averages inside racks first"),
        (["--modes", "rong"], "unknown algorithm"),
        (["--speed", "0"], "so many times faster"),
        (["--profile", "missing.json"], "missing.json"),
        (["--nodes", "8", "--modes", "single"], "mode single is for one node"),
        (["--nodes", "8", "--check", "8"], "names the nodes that are measured"),
        (["--dilation", "2"], "only what --check measures"),
        (["--check", "8", "--dilation", "0.5"], "from 1 to 1000"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    quick: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("testbed", ["predict", str(quick), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and len(printed.err.splitlines()) == 1


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert call("testbed", ["predict", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    return printed.err


def test_a_run_without_a_receipt_is_refused(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (quick / "ring" / "receipt.json").unlink()
    said = refused([str(quick / "ring")], capsys)
    assert "has no receipt" in said and "--set probe=true" in said


def test_an_invalid_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "bad", mode="ring", status="invalid", reason="node2 is too slow", **LINK)
    assert "node2 is too slow" in refused([str(tmp_path / "bad")], capsys)


def test_a_profile_or_run_of_another_schema_is_refused(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = quick.with_name("profile.json")
    foreign.write_text(json.dumps({"schema": 99, "layers": []}))
    assert "schema 99" in refused([str(quick), "--profile", str(foreign)], capsys)
    summary = quick / "ring" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"schema": 99}))
    assert "99" in refused([str(quick / "ring")], capsys)


def test_by_default_one_node_to_a_thousand_on_this_network_and_others(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("testbed", ["predict", str(quick), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    assert {each["nodes"] for each in found} == {1 << k for k in range(11)}
    assert {(each["rate"], each["delay"]) for each in found} == {(None, None), (5e9, None), (None, 0.025)}
    alone = {each["seconds"] for each in found if each["nodes"] == 1}
    assert len(alone) == 1 and all(each["speed_up"] == 1 for each in found if each["nodes"] == 1)


def test_one_node_alone_is_predicted(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("testbed", ["predict", str(quick), "--modes", "single"]) == 0
    assert "| single |" in capsys.readouterr().out
