"""Published figures beside ours, the rules that check published findings, and every experiment file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from testbed.report.load import load
from testbed.report.model import chapters
from testbed.report.published import CURVES, MEASURES, RANK_MEASURES, RULES, Published, published
from testbed.results.folder import RunFolder
from testbed.results.table import flatten
from testbed.spec.experiment import Experiment
from tests.support.synthetic import Conditions, make_run

FILES = sorted((Path(__file__).parents[3] / "experiments").glob("*.toml"))
EXPERIMENTS = [path for path in FILES if path.name != "tuned.toml"]  # which `testbed tune` leaves there
LINK: dict[str, Any] = {"link": {"rate": "500mbit"}}


def with_published(folder: Path, shape: list[dict[str, Any]]) -> Published:
    make_run(folder / "single", Conditions(compute=1.6), mode="single", **LINK)
    for mode in ("gather", "ring", "ddp"):
        make_run(folder / mode, Conditions(compute=1.6), mode=mode, **LINK)
    return beside(folder, {"seconds_per_step": {"single": 1.9, "gather": 1.3, "ddp": 0.7}, "shape": shape})


CLAIMS = {
    "an order that holds": ({"measure": "speed_up", "rising": ["gather", "ring", "ddp"]}, "yes"),
    "an order that does not": ({"measure": "speed_up", "rising": ["ddp", "gather"]}, "no"),
    "a mode that was not run": ({"measure": "speed_up", "rising": ["tree", "ddp"]}, "open"),
    "below": ({"measure": "speed_up", "below": 1.0, "modes": ["gather"]}, "yes"),
    "above": ({"measure": "speed_up", "above": 1.0, "modes": ["gather", "ddp"]}, "no"),
    "equal": ({"measure": "test_loss", "equal": ["ring", "ddp"]}, "yes"),
    "apart": ({"measure": "test_loss", "apart": ["ring", "ddp"]}, "no"),
    "the busiest rank": ({"busiest": 0, "mode": "gather"}, "yes"),
    "a busiest rank where all send the same": ({"busiest": 0, "mode": "ring"}, "no"),
    "more nodes": ({"measure": "speed_up", "mode": "ddp", "over": "nodes", "from": 1, "to": 4, "goes": "up"}, "yes"),
    "an unknown measure": ({"measure": "beauty", "rising": ["ring", "ddp"]}, "open"),
    "no rule": ({}, "open"),
}


@pytest.mark.parametrize(("claim", "state"), CLAIMS.values(), ids=CLAIMS.keys())
def test_a_published_finding_is_checked_by_its_rule(tmp_path: Path, claim: dict[str, Any], state: str) -> None:
    found = with_published(tmp_path, [{"says": "so it is", **claim}])
    assert found.sentences[-1].state == state and found.sentences[-1].text.startswith("so it is")
    assert found.tables[0].rows[0][:2] == ["single", "1.9"]


def test_published_shares_are_compared_with_those_of_the_profiler(tmp_path: Path) -> None:
    shares = {"compute_share_percent": {"ring": 45}, "communication_share_percent": {"ring": 17}}
    make_run(tmp_path / "ring", mode="ring", **LINK)
    (tmp_path / "experiment.json").write_text(json.dumps({"name": "adhoc", "title": "t", "published": shares}))

    def ours() -> list[str]:
        found = published(chapters(load([tmp_path]))[0])
        assert found is not None
        return found.tables[0].rows[0]

    assert ours() == ["ring", "45", "-", "17", "-"]
    for rank in range(4):
        profile = {"compute": 0.5, "communication": 0.1 * rank, "overlap": 0.0, "other": 0.5 - 0.1 * rank}
        RunFolder(tmp_path / "ring").profile(rank).write_text(json.dumps(profile))
    assert ours() == ["ring", "45", "50", "17", "15"]


def rated(folder: Path, **figures: Any) -> Published:
    """One node, and gather and ddp at two rates, beside these published figures."""
    if not (folder / "single").exists():
        make_run(folder / "single", Conditions(compute=1.6), mode="single", **LINK)
        for mode in ("gather", "ddp"):
            for rate in ("50mbit", "500mbit"):
                make_run(folder / f"{mode}-{rate}", Conditions(compute=1.6), mode=mode, link={"rate": rate})
    return beside(folder, figures)


def beside(folder: Path, figures: dict[str, Any]) -> Published:
    (folder / "experiment.json").write_text(json.dumps({"name": "adhoc", "title": "t", "published": figures}))
    found = published(chapters(load([folder]))[0])
    assert found is not None
    return found


def explain(within: float, *rates: str, **figures: float) -> dict[str, Any]:
    explanations = [{"says": f"at {rate}", **{row: {"link.rate": rate} for row in figures}} for rate in rates]
    return {
        "slowdown": figures,
        "explain": {"measure": "slowdown", "within": within, "same": ["link.rate"]},
        "explanation": explanations,
    }


def test_the_explanation_with_the_smallest_distance_is_named(tmp_path: Path) -> None:
    ours = rated(tmp_path, **explain(0.1, gather=1.0)).tables[0].rows
    slow = {row[0]: float(row[2]) for row in ours}["gather"]
    found = rated(tmp_path, **explain(0.1, "500mbit", "50mbit", gather=slow * 1.05))
    claim = found.sentences[-1]
    assert claim.state == "yes" and claim.text.startswith(
        "by this explanation, which fits best: at 50mbit (distance 0.05 of gather; at most 0.1 fits; the next"
    )
    table = found.tables[-1]
    assert table.name == "explanations" and table.header == ["explanation", "link.rate", "distance, gather", "together"]
    assert [row[:2] for row in table.rows] == [["at 50mbit", "50mbit"], ["at 500mbit", "500mbit"]]
    assert float(table.rows[0][2]) == pytest.approx(0.05, abs=0.005) and float(table.rows[1][2]) > 0.5


def test_no_explanation_is_near_enough_or_none_has_runs(tmp_path: Path) -> None:
    far = rated(tmp_path, **explain(0.1, "500mbit", "50mbit", gather=1.0, ddp=900.0)).sentences[-1]
    assert far.state == "no" and far.text.startswith("by no explanation that was tried; the nearest is: at ")
    slow = {row[0]: float(row[2]) for row in rated(tmp_path, **explain(0.1, gather=1.0, ddp=1.0)).tables[0].rows}
    one_row = explain(0.1, "50mbit", gather=slow["gather"], ddp=slow["ddp"] * 1.15)
    assert rated(tmp_path, **one_row).sentences[-1].state == "no", "0.13 of one row is too far"
    assert rated(tmp_path, **explain(0.1, "1gbit", gather=1.0)).sentences[-1].state == "open"


def test_explanations_of_curves_are_compared_epoch_by_epoch(tmp_path: Path) -> None:
    """Two learning rates; each row of an explanation names its own run, and the batch is the same in both."""
    for batch, factor in ((32, 1.0), (64, 2.0)):
        for lr in (0.01, 0.04):
            folder = tmp_path / f"{batch}-{lr}"
            make_run(folder, mode="ring", optimizer={"lr": lr}, batch=batch, epochs=3, **LINK)
            for path in folder.glob("rank*.jsonl"):
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                each = next(line for line in lines if line["kind"] == "eval")
                epochs = [each | {"epoch": epoch, "train_loss": factor * lr * 100 / (epoch + 1)} for epoch in range(3)]
                lines = [*(line for line in lines if line["kind"] not in ("eval", "end")), *epochs, lines[-1]]
                path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = {
        "loss_curve": {"ring": {"1": 2.0, "3": 0.7}, "allreduce": {"1": 8.0, "2": 4.0}},
        "explain": {"measure": "loss_curve", "within": 0.1, "same": ["batch"]},
        "explanation": [
            {
                "says": "both the same",
                "ring": {"mode": "ring", "optimizer.lr": 0.01},
                "allreduce": {"mode": "ring", "optimizer.lr": 0.01},
            },
            {
                "says": "one a sum",
                "ring": {"mode": "ring", "optimizer.lr": 0.01},
                "allreduce": {"mode": "ring", "optimizer.lr": 0.04},
            },
        ],
    }
    found = beside(tmp_path, figures)
    assert found.sentences[-1].state == "yes" and "one a sum" in found.sentences[-1].text
    explanations, curves = found.tables
    assert explanations.rows[0] == ["one a sum", "64", "0.02", "0.00", "0.02"]
    assert explanations.rows[1][:2] == ["both the same", "64"]
    assert curves.rows == [["1", "2", "2", "8", "8"], ["2", "-", "1", "4", "4"], ["3", "0.7", "0.6667", "-", "2.667"]]


def test_figures_of_ranks_are_in_a_table_of_their_own(tmp_path: Path) -> None:
    losses = {"single": 3.5, "gather": {"0": 2.5, "3": 1.744663, "7": 1.0}}
    found = rated(tmp_path, test_loss={"gather": 2.0}, mean_loss=losses, mistakes=["1 + 1 = 3"])
    assert [table.name for table in found.tables] == ["published", "published-ranks"]
    rows = {row[0]: row[1:] for row in found.tables[1].rows}
    assert {name: row[0] for name, row in rows.items()} == {
        "single": "3.5",
        "gather, rank 0": "2.5",
        "gather, rank 3": "1.744663",
        "gather, rank 7": "1",
    }
    assert rows["gather, rank 7"][1] == "-" and float(rows["gather, rank 3"][1]) > 0
    assert found.mistakes == ["1 + 1 = 3"]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_the_arithmetic_in_mistakes_is_right(path: Path) -> None:
    """`3.381 - 2.27 = 1.111`: to the digits that are printed."""
    for mistake in Experiment.read(path).published.get("mistakes", []):
        for left, right in re.findall(r"([\d.()][\d.()+x/ -]*\d\)?(?: / \d+)?) = (\d+(?:\.\d+)?)", mistake):
            value = eval(left.replace("x", "*"), {"__builtins__": {}})  # digits and operators of our own file only
            assert value == pytest.approx(float(right), abs=0.5001 * 10.0 ** -len(right.partition(".")[2])), mistake


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_can_be_planned_and_its_claims_checked(path: Path) -> None:
    experiment = Experiment.read(path)
    assert experiment.runs() and "minutes on two cores" in experiment.takes
    others = {"source", "shape", "mistakes", "explain", "explanation"}
    for key in set(experiment.published) - others:
        assert key in MEASURES or key in RANK_MEASURES or key in CURVES, key
    if explained := experiment.published.get("explain"):
        assert explained["measure"] in experiment.published and experiment.published["explanation"]
        flat = {key for spec in experiment.runs() for key in flatten(spec)}
        for explanation in experiment.published["explanation"]:
            rows = {row: where for row, where in explanation.items() if row != "says"}
            assert set(rows) == set(experiment.published[explained["measure"]])
            assert {key for where in rows.values() for key in where} | set(explained["same"]) <= flat
    for claim in experiment.published.get("shape", []):
        assert claim["says"] and any(rule in claim for rule in RULES)
        assert "measure" not in claim or claim["measure"] in MEASURES


def test_the_documented_experiments_exist() -> None:
    named = {path.stem for path in EXPERIMENTS}
    assert {"r0", "r1", "r2", "r3", "r4", "nodes", "buckets", "skip", "bandwidth", "batch", "straggler"} <= named
