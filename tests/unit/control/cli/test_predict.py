"""`testbed predict`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.control.cli.main import call
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "1 to 1024 nodes"),
        (["--nodes", "1", "--modes", "ring"], "needs at least 2"),
        (["--modes", "hierarchical"], "averages inside racks first"),
        (["--modes", "rong"], "unknown algorithm"),
        (["--speed", "0"], "so many times faster"),
        (["--profile", "missing.json"], "missing.json"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    quick: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("testbed", ["predict", str(quick), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and len(printed.err.splitlines()) == 1
