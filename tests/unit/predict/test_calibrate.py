"""Calibration from synthetic run folders, whose parameters are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.predict.calibrate import Calibration, calibrate
from testbed.predict.scale import Point, Predictor
from testbed.spec.errors import SchemaError, SpecError, UsageError
from testbed.spec.mode import SyncMode
from tests.support.scripted_runs import GRADIENT_BYTES as SCRIPT_BYTES
from tests.support.scripted_runs import Script, make_script_run
from tests.support.synthetic import GRADIENT_BYTES, UPDATE_S, Conditions, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "experiment": "quick"}
MODES = ("none", "ring", "allreduce", "ddp")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, mode in enumerate(MODES):
        make_run(tmp_path / "quick" / mode, Conditions(compute=1.6, seed=seed, overhead=1.0), mode=mode, **LINK)
    return tmp_path / "quick"


def value(calibration: Calibration, name: str) -> float:
    return next(each.value for each in calibration.parameters if each.name == name)


def test_compute_comes_from_the_control_and_the_rate_from_the_receipt(folder: Path) -> None:
    found = calibrate([folder])
    a_rank = 1.6 / 4 + UPDATE_S
    assert value(found, "compute") == pytest.approx(a_rank, rel=0.02)
    assert found.work.compute == pytest.approx(a_rank, rel=0.02)
    assert found.work.size == GRADIENT_BYTES
    assert 8 * found.wire.rate == pytest.approx(500e6 * 1448 / 1514, rel=0.02)
    source = next(each.source for each in found.parameters if each.name == "compute")
    assert "none" in source


def test_it_predicts_what_it_was_calibrated_on(folder: Path) -> None:
    predictor = Predictor(calibrate([folder]))
    off = {str(each.mode): predictor.misfit[each.folder] for each in predictor.calibration.measured}
    assert set(off) == set(MODES)
    assert abs(off["none"]) < 0.01 and abs(off["ring"]) < 0.03


def test_what_the_runs_do_not_show_is_assumed_and_said(tmp_path: Path) -> None:
    make_run(tmp_path / "ring", mode="ring", **LINK)
    found = calibrate([tmp_path])
    assumed = {each.name for each in found.parameters if each.assumed}
    assert {"ready", "message", "wakeup", "byte_cpu"} <= assumed
    assert any("proportion" in note for note in found.notes)


def test_a_profile_replaces_the_compute_of_the_runs(folder: Path, tmp_path: Path) -> None:
    layers = [{"name": "a", "sizes": [4_000_000], "forward_s": 0.1, "backward_s": 0.3}]
    times = {"data_s": 0.0, "zero_s": 0.0, "loss_s": 0.0, "optimizer_s": 0.1}
    content = {"schema": 1, "model": "other", "batch_per_rank": 4, "layers": layers, **times}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    found = calibrate([folder], path)
    assert found.work.compute == pytest.approx(0.5) and found.work.size == 4_000_000
    assert found.measured == []  # the runs are of another model
    path.write_text(json.dumps(content | {"schema": 99}))
    with pytest.raises(SchemaError, match="schema 99"):
        calibrate([folder], path)


def test_a_run_without_a_receipt_is_refused_or_left_out(folder: Path) -> None:
    (folder / "ring" / "receipt.json").unlink()
    with pytest.raises(SpecError, match="no receipt"):
        calibrate([folder / "ring"])
    assert any("ring is left out: it has no receipt" in note for note in calibrate([folder]).notes)


def test_an_invalid_run_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "bad", mode="ring", status="invalid", reason="a link is too slow", **LINK)
    with pytest.raises(UsageError, match="a link is too slow"):
        calibrate([tmp_path / "bad"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no run folder"):
        calibrate([tmp_path / "empty"])


def test_a_single_node_shows_no_network(tmp_path: Path) -> None:
    make_run(tmp_path / "single", mode="single", experiment="quick")
    with pytest.raises(SpecError, match="one node"):
        calibrate([tmp_path])


def test_runs_of_other_work_are_left_out(folder: Path) -> None:
    make_run(folder / "other", mode="ring", batch=128, **LINK)
    found = calibrate([folder])
    assert {str(mode) for mode in found.modes} == set(MODES)
    assert any("1 runs train something else" in note for note in found.notes)


def test_jitter_is_what_differs_between_ranks_in_one_step(tmp_path: Path) -> None:
    make_run(tmp_path / "none", Conditions(slow_cpu={2: 1.5}, noise=0.0), mode="none", **LINK)
    jitter = calibrate([tmp_path]).node.jitter
    assert jitter[0] < 1.01 and jitter[-1] > 1.4
    make_run(tmp_path / "even" / "none", Conditions(slowed={5: 3.0}, noise=0.0), mode="none", **LINK)
    assert max(calibrate([tmp_path / "even"]).node.jitter) < 1.05  # all ranks were slow at once: none waits


def test_a_user_s_script_shows_its_compute_and_the_network(tmp_path: Path) -> None:
    make_script_run(tmp_path / "script", Script(compute=0.2), experiment="own")
    found = calibrate([tmp_path])
    assert found.work.compute == pytest.approx(0.2, rel=0.1)
    assert found.work.size == SCRIPT_BYTES and found.profile.batch_per_rank == 16
    assert 8 * found.wire.rate == pytest.approx(200e6 * 1448 / 1514, rel=0.02)
    assert found.modes == [] and found.measured == []
    assert Predictor(found).at(SyncMode.parse("ring"), Point(8)).step.seconds > 0.2


def test_a_script_whose_gradient_was_not_seen_is_refused(tmp_path: Path) -> None:
    make_script_run(tmp_path / "script", Script(), experiment="own")
    for rank in range(4):
        records = tmp_path / "script" / f"rank{rank}.jsonl"
        start, *rest = records.read_text().splitlines()
        lines = [json.dumps(json.loads(start) | {"gradient_bytes": 0}), *rest]
        records.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(SpecError, match="no gradient"):
        calibrate([tmp_path])


def test_racks_and_their_uplink_are_part_of_the_network(tmp_path: Path) -> None:
    racks: dict[str, Any] = {"topology": {"racks": [[0, 1], [2, 3]], "uplink": "100mbit"}}
    for mode in ("none", "ring", "hierarchical"):
        make_run(tmp_path / mode, Conditions(compute=1.6, overhead=1.0), mode=mode, **LINK, **racks)
    predictor = Predictor(calibrate([tmp_path]))
    assert predictor.calibration.wire.uplink == pytest.approx(100e6 / 8 * 1448 / 1514, rel=0.02)
    pipelined = predictor.at(SyncMode.parse("ring/pipeline"), Point(16)).step.seconds
    across = 2 * 15 / 16 * GRADIENT_BYTES / predictor.calibration.wire.uplink
    assert across < pipelined < 1.1 * across
    hierarchical = [predictor.at(SyncMode.parse("hierarchical"), Point(n)).step.seconds for n in (4, 8, 16)]
    assert hierarchical == sorted(hierarchical)
