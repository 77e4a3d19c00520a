"""Findings along a swept quantity, on curves whose answer is known; published shapes; every experiment file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.report.load import load
from testbed.report.model import chapters, crossings
from testbed.report.page import Part, write
from testbed.report.published import MEASURES, RULES, Published, published
from testbed.results.folder import RunFolder
from testbed.spec.experiment import Experiment
from tests.support.synthetic import Made, make_run

FILES = sorted((Path(__file__).parents[3] / "experiments").glob("*.toml"))
EXPERIMENTS = [path for path in FILES if path.name != "tuned.toml"]  # which `testbed tune` leaves there
LINK: dict[str, Any] = {"link": {"rate": "500mbit"}}


def part_of(folder: Path) -> Part:
    return write([folder], folder).parts[0]


def findings(part: Part) -> dict[str, str]:
    return {plot.name: plot.finding for plot in part.plots}


def test_curves_cross_where_they_should() -> None:
    lines = [[(1e7, 4.0), (1e9, 1.0)], [(1e7, 2.0), (1e9, 2.0)]]
    (met,) = crossings(["a", "b"], lines)
    assert met.at == pytest.approx(1e8) and (met.left, met.right) == ("b", "a")


def test_scaling_is_told_node_by_node(tmp_path: Path) -> None:
    make_run(tmp_path / "single", Made(compute=3.6), mode="single", batch=48, **LINK)
    for mode in ("gather", "ddp"):
        for nodes in (2, 3, 4):
            make_run(tmp_path / f"{mode}-{nodes}", Made(compute=3.6), mode=mode, nodes=nodes, batch=48, **LINK)
    said = findings(part_of(tmp_path))
    assert "ddp gets faster with every node" in said["nodes"] and "gather gets slower from" in said["nodes"]
    assert said["efficiency"].startswith("At 4 nodes ddp makes use of")


def test_the_rate_from_which_a_mode_pays_is_told(tmp_path: Path) -> None:
    make_run(tmp_path / "single", Made(compute=4.0), mode="single")
    for mode in ("gather", "ddp"):
        for rate in ("10mbit", "100mbit", "1gbit"):
            make_run(tmp_path / f"{mode}-{rate}", Made(compute=4.0), mode=mode, link={"rate": rate})
    said = findings(part_of(tmp_path))["bandwidth"]
    assert said.startswith("ddp beats one node from ") and "gather from " in said


def test_bucket_sizes_and_skipping_have_their_curves(tmp_path: Path) -> None:
    for size, buckets in (("1MiB", 36), ("25MiB", 2)):
        make_run(tmp_path / size, Made(buckets=buckets), mode=f"ddp/bucket:{size}", **LINK)
    for every in (2, 8):
        make_run(tmp_path / f"e{every}", Made(accuracy=0.9 - every / 100), mode=f"ring/every:{every}", steps=18, **LINK)
    said = findings(part_of(tmp_path))
    assert {"buckets", "skipping-speed", "skipping-accuracy"} <= set(said)
    assert "every:8 costs ring 6.0 points" in said["skipping-accuracy"]


@pytest.mark.parametrize(
    ("other", "said"),
    [("ddp", "the same path for 5 steps; then rounding"), ("ring/fp16", "do not train the same model")],
)
def test_exact_modes_part_by_rounding_and_others_do_not_train_the_same(tmp_path: Path, other: str, said: str) -> None:
    make_run(tmp_path / "runs" / "ring", Made(loss_rate=0.05), mode="ring")
    make_run(tmp_path / "runs" / "other", Made(loss_rate=0.06), mode=other)
    (part,) = write([tmp_path / "runs"], tmp_path).parts
    assert said in next(plot.finding for plot in part.plots if plot.name == "loss-by-iteration")


def test_two_places_stand_side_by_side(tmp_path: Path) -> None:
    for place in ("netns", "compose"):
        for mode in ("ring", "ddp"):
            make_run(tmp_path / f"{place}-{mode}", Made(substrate=place, noise=0.0), mode=mode, **LINK)
    part = part_of(tmp_path)
    assert findings(part)["places"].startswith("compose and netns agree within 0.1 %")
    assert "on" in part.tables[0].header


@pytest.mark.parametrize(("slow", "cause"), [({"slow_cpu": {2: 2.0}}, "CPU"), ({"slow_link": {2: 0.25}}, "link")])
def test_the_straggler_is_on_the_page_with_its_cause(tmp_path: Path, slow: dict[str, Any], cause: str) -> None:
    make_run(tmp_path / "ring", Made(compute=2.0, **slow), mode="ring", **LINK)
    why = " ".join(part_of(tmp_path).verdict.why)
    assert f"Straggler ({cause}): rank 2" in why


def test_workers_and_batch_make_the_three_tables(tmp_path: Path) -> None:
    for batch in (32, 128):
        values = {"batch": None, "batch_per_rank": batch, **LINK}
        make_run(tmp_path / f"single-{batch}", Made(compute=batch / 32), mode="single", **values)
        for nodes in (2, 4):
            made = Made(compute=batch / 32)
            make_run(tmp_path / f"ddp-{batch}-{nodes}", made, mode="ddp", nodes=nodes, **values)
    tables = {table.name: table for table in part_of(tmp_path).tables}
    assert {"workers-time", "workers-split", "workers-bandwidth"} <= set(tables)
    assert [row[0] for row in tables["workers-time"].rows] == ["1", "2", "4"]
    speed_up = [float(row[2]) for row in tables["workers-time"].rows]
    assert speed_up[0] == 1.0 and speed_up[0] < speed_up[1] < speed_up[2]


# --- published figures ---------------------------------------------------------------------------------------------


def with_published(folder: Path, shape: list[dict[str, Any]]) -> Published:
    figures = {"seconds_per_step": {"single": 1.9, "gather": 1.3, "ddp": 0.7}, "shape": shape}
    experiment = {"name": "adhoc", "title": "t", "published": figures}
    make_run(folder / "single", Made(compute=1.6), mode="single", **LINK)
    for mode in ("gather", "ring", "ddp"):
        make_run(folder / mode, Made(compute=1.6), mode=mode, **LINK)
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
    "a busiest rank where all are alike": ({"busiest": 0, "mode": "ring"}, "no"),
    "more nodes": ({"measure": "speed_up", "mode": "ddp", "over": "nodes", "from": 1, "to": 4, "goes": "up"}, "yes"),
    "a measure nobody knows": ({"measure": "beauty", "rising": ["ring", "ddp"]}, "open"),
    "no rule": ({}, "open"),
}


@pytest.mark.parametrize(("claim", "state"), CLAIMS.values(), ids=CLAIMS.keys())
def test_a_published_shape_is_judged_by_its_rule(tmp_path: Path, claim: dict[str, Any], state: str) -> None:
    found = with_published(tmp_path, [{"says": "so it is", **claim}])
    assert found.sentences[-1].state == state and found.sentences[-1].text.startswith("so it is")
    assert found.table.rows[0][:2] == ["single", "1.9"]


def test_published_shares_are_held_against_the_profilers_and_not_against_our_split(tmp_path: Path) -> None:
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
        RunFolder(tmp_path / "ring").shares(rank).write_text(json.dumps(profile))
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


def test_the_experiments_that_were_promised_are_here() -> None:
    named = {path.stem for path in EXPERIMENTS}
    assert {"r0", "r1", "r2", "r3", "r4", "nodes", "buckets", "skip", "bandwidth", "batch", "straggler"} <= named
