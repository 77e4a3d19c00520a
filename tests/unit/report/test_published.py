"""Published figures beside ours, the rules that check published findings, and every experiment file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.report.load import load
from testbed.report.model import chapters
from testbed.report.published import MEASURES, RULES, Published, published
from testbed.results.folder import RunFolder
from testbed.spec.experiment import Experiment
from tests.support.synthetic import Conditions, make_run

FILES = sorted((Path(__file__).parents[3] / "experiments").glob("*.toml"))
EXPERIMENTS = [path for path in FILES if path.name != "tuned.toml"]  # which `testbed tune` leaves there
LINK: dict[str, Any] = {"link": {"rate": "500mbit"}}


def with_published(folder: Path, shape: list[dict[str, Any]]) -> Published:
    figures = {"seconds_per_step": {"single": 1.9, "gather": 1.3, "ddp": 0.7}, "shape": shape}
    experiment = {"name": "adhoc", "title": "t", "published": figures}
    make_run(folder / "single", Conditions(compute=1.6), mode="single", **LINK)
    for mode in ("gather", "ring", "ddp"):
        make_run(folder / mode, Conditions(compute=1.6), mode=mode, **LINK)
    (folder / "experiment.json").write_text(json.dumps(experiment))
    found = published(chapters(load([folder]))[0])
    assert found is not None
    return found


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
    assert found.table.rows[0][:2] == ["single", "1.9"]


def test_published_shares_are_compared_with_those_of_the_profiler(tmp_path: Path) -> None:
    shares = {"compute_share_percent": {"ring": 45}, "communication_share_percent": {"ring": 17}}
    make_run(tmp_path / "ring", mode="ring", **LINK)
    (tmp_path / "experiment.json").write_text(json.dumps({"name": "adhoc", "title": "t", "published": shares}))

    def ours() -> list[str]:
        found = published(chapters(load([tmp_path]))[0])
        assert found is not None
        return found.table.rows[0]

    assert ours() == ["ring", "45", "-", "17", "-"]
    for rank in range(4):
        profile = {"compute": 0.5, "communication": 0.1 * rank, "overlap": 0.0, "other": 0.5 - 0.1 * rank}
        RunFolder(tmp_path / "ring").profile(rank).write_text(json.dumps(profile))
    assert ours() == ["ring", "45", "50", "17", "15"]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_can_be_planned_and_its_claims_checked(path: Path) -> None:
    experiment = Experiment.read(path)
    assert experiment.runs() and "minutes on two cores" in experiment.takes
    for key in set(experiment.published) - {"source", "shape"}:
        assert key in MEASURES, key
    for claim in experiment.published.get("shape", []):
        assert claim["says"] and any(rule in claim for rule in RULES)
        assert "measure" not in claim or claim["measure"] in MEASURES


def test_the_documented_experiments_exist() -> None:
    named = {path.stem for path in EXPERIMENTS}
    assert {"r0", "r1", "r2", "r3", "r4", "nodes", "buckets", "skip", "bandwidth", "batch", "straggler"} <= named
