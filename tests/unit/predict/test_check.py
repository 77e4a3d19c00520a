"""The check: predictions are written first and never changed, points are measured once, errors are counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.control.api import Run
from testbed.control.runs.emulation import check_profile
from testbed.predict import check
from testbed.predict.calibrate import Calibration, calibrate
from testbed.predict.check import Checked, Verdict
from testbed.predict.scale import Point
from testbed.spec.errors import RankFailed, SpecError, UsageError
from testbed.spec.mode import SyncMode
from testbed.spec.run import RunSpec
from testbed.spec.topology import Topology
from tests.support.synthetic import Conditions, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "experiment": "quick"}
MODES = [SyncMode.parse(text) for text in ("ring", "gather", "ring/every:8", "none")]
POINTS = [Point(8), Point(8, rate=1e8, delay=0.01, speed=10.0)]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    folder = tmp_path_factory.mktemp("quick")
    for seed, mode in enumerate(("none", "ring")):
        make_run(folder / mode, Conditions(compute=1.6, seed=seed), mode=mode, **LINK)
    return calibrate([folder])


class Bench:
    """Instead of `testbed.run`: makes a synthetic run, and keeps what was requested."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.requested: list[dict[str, Any]] = []
        self.failing = ""

    def __call__(self, *, out: Path, quiet: bool, **keys: Any) -> Run:
        points = json.loads((self.out / check.PREDICTIONS).read_text())["points"]
        assert keys["mode"] in [each["mode"] for each in points]  # written before it is measured
        RunSpec.load({key: value for key, value in keys.items() if key != "compute"}, "")  # legal keys of a run
        self.requested.append(keys)
        if keys["mode"] == self.failing:
            raise RankFailed("rank 3 was killed")
        make_run(out, Conditions(compute=1.6), mode=keys["mode"], nodes=keys["nodes"], **LINK)
        return Run(out)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def checked(calibration: Calibration, bench: Bench) -> list[Checked]:
    return check.check(calibration, MODES, POINTS, bench.out, run=bench)


def test_predictions_are_written_first_with_the_commit(calibration: Calibration, bench: Bench) -> None:
    found = checked(calibration, bench)
    content = json.loads((bench.out / check.PREDICTIONS).read_text())
    assert len(content["points"]) == len(found) == 6  # of two points and three modes that send something
    assert all(each["commit"] == check.commit() and each["written"] > 0 for each in content["points"])
    assert all(each.error is not None for each in found)


def test_a_check_is_continued_and_a_prediction_is_never_changed(calibration: Calibration, bench: Bench) -> None:
    bench.failing = "gather"
    first = checked(calibration, bench)
    assert [each.missing for each in first if str(each.mode) == "gather"] == ["rank 3 was killed"] * 2
    path, times = bench.out / check.PREDICTIONS, len(bench.requested)
    before = path.read_text()
    bench.failing = ""
    other = replace(calibration, wire=replace(calibration.wire, rate=calibration.wire.rate / 2))
    again = checked(other, bench)
    assert len(bench.requested) == times + 2  # only what was missing
    assert [each.predicted for each in again] == [each.predicted for each in first]
    assert path.read_text() == before


def test_what_is_requested_is_the_point_with_emulated_compute(calibration: Calibration, bench: Bench) -> None:
    checked(calibration, bench)
    usual, other = bench.requested[0], bench.requested[3]
    assert usual["link"]["rate"] == "500mbit" and usual["compute"] == f"emulated:{bench.out / check.PROFILE}"
    assert other["link"]["rate"] == "100mbit" and other["link"]["delay"] == "10ms"
    assert other["compute"].endswith("profile-x10.json") and other["nodes"] == 8
    every = next(each for each in bench.requested if "every" in each["mode"])
    assert (every["steps"] - every["warmup"]) % 8 == 0


def test_a_point_that_takes_too_long_is_not_measured(calibration: Calibration, bench: Bench) -> None:
    found = check.check(calibration, MODES[:2], [Point(64, rate=1e7)], bench.out, run=bench)
    assert [bool(each.missing) for each in found] == [True, True] and bench.requested == []
    assert "a step would take" in found[1].missing


def test_predictions_of_something_else_are_refused(calibration: Calibration, bench: Bench) -> None:
    checked(calibration, bench)
    other = replace(calibration, profile=calibration.profile.model_copy(update={"model": "other"}))
    with pytest.raises(UsageError, match="model = vgg11, and the runs have other"):
        checked(other, bench)
    (bench.out / check.PREDICTIONS).write_text("{}")
    with pytest.raises(SpecError, match="no predictions"):
        checked(calibration, bench)


def test_points_are_not_measured_with_another_profile_than_the_first_ones(
    calibration: Calibration, bench: Bench
) -> None:
    checked(calibration, bench)
    with pytest.raises(UsageError, match="profile = "):
        checked(check.faster(calibration, 2.0), bench)


def test_predictions_for_another_network_are_refused(calibration: Calibration, bench: Bench) -> None:
    checked(calibration, bench)
    link = calibration.base.link.model_copy(update={"rate": 10**9})
    other = replace(calibration, base=calibration.base.model_copy(update={"link": link}))
    with pytest.raises(UsageError, match=r"link = .*500mbit.*, and the runs have .*1gbit"):
        checked(other, bench)


def test_what_is_measured_has_the_racks_of_the_prediction(calibration: Calibration, bench: Bench) -> None:
    topology = Topology(racks=((0, 2), (1, 3)), uplink="100mbit")
    racked = replace(calibration, base=calibration.base.model_copy(update={"topology": topology}))
    (ring,) = checked(calibration, bench)[:1]
    for nodes, wanted in ((4, [[0, 2], [1, 3]]), (8, [[0, 1], [2, 3], [4, 5], [6, 7]])):
        point = replace(ring, point=Point(nodes))
        found = check.keys(point, racked, bench.out / check.PROFILE)
        assert found["topology"]["racks"] == wanted


def test_nodes_that_sleep_are_not_slowed(calibration: Calibration) -> None:
    found = check.emulated(calibration)
    assert found.node.sleeps and found.node.jitter == (1.0,)


def test_the_verdict_counts_errors_and_ranks() -> None:
    ring, gather = MODES[:2]
    found = [
        Checked(ring, POINTS[0], 1.1, 1.0, 1.2, measured=1.0),
        Checked(gather, POINTS[0], 3.0, 2.0, 4.0, measured=3.0),
        Checked(gather, POINTS[1], 3.0, 2.0, 4.0, missing="too long"),
    ]
    assert check.verdict(found) == Verdict(2, pytest.approx(0.05), pytest.approx(0.1), 1, 1)
    assert check.verdict(found[2:]) is None
    wrong = replace(found[0], predicted=3.5)
    assert check.verdict([wrong, found[1]]).right == 0  # type: ignore[union-attr]
    assert "2 points: median error 5.0 %, worst 10.0 %; 1 of 1" in check.verdict(found).sentence  # type: ignore[union-attr]


def test_what_is_measured_is_of_the_kind_of_its_profile(calibration: Calibration, bench: Bench) -> None:
    """A run that replays the profile of another model, type, optimizer or number of threads is refused."""
    kind = {"model": "gpt", "dtype": "float64", "threads": 2, "optimizer": "adam"}
    adam = replace(calibration, profile=calibration.profile.model_copy(update=kind))
    (ring,) = checked(adam, bench)[:1]
    check_profile(RunSpec.load(check.keys(ring, adam, bench.out / check.PROFILE), ""), adam.profile, bench.out)
