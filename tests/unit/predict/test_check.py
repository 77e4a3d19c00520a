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
from testbed.predict.calibrate import WAKEUP_S, Calibration, calibrate
from testbed.predict.check import Checked, Verdict
from testbed.predict.scale import Point, Predictor
from testbed.results.folder import RunFolder
from testbed.results.profile import Profile
from testbed.results.validity import MachineLoad
from testbed.spec.errors import RankFailed, SpecError, UsageError
from testbed.spec.link import Link
from testbed.spec.mode import SyncMode
from testbed.spec.run import RunSpec
from testbed.spec.topology import Topology
from tests.support.scripted_runs import Script, make_script_run
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
        self.others = 0.0  # cores that other processes use

    def __call__(self, *, out: Path, quiet: bool, **keys: Any) -> Run:
        points = json.loads((self.out / check.PREDICTIONS).read_text())["points"]
        assert keys["mode"] in [each["mode"] for each in points]  # written before it is measured
        RunSpec.load(keys, "")  # legal keys of a run
        self.requested.append(keys)
        if keys["mode"] == self.failing:
            raise RankFailed("rank 3 was killed")
        make_run(out, Conditions(compute=1.6), mode=keys["mode"], nodes=keys["nodes"], **LINK)
        path = RunFolder(out).summary
        machine = MachineLoad(ranks=[0], cores=2, others=self.others).model_dump()
        path.write_text(json.dumps(json.loads(path.read_text()) | {"machines": [machine]}))
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


def test_what_was_measured_is_written_with_commits_and_machine(calibration: Calibration, bench: Bench) -> None:
    bench.failing = "gather"
    found = checked(calibration, bench)
    content = json.loads((bench.out / check.MEASURED).read_text())
    predicted = json.loads((bench.out / check.PREDICTIONS).read_text())["points"]
    ours = ("measured", "missing", "busy", "measured_at")
    assert [{k: v for k, v in each.items() if k not in ours} for each in content["points"]] == predicted
    assert [each["measured"] for each in content["points"]] == [each.measured for each in found]
    assert {each["missing"] for each in content["points"]} == {"", "rank 3 was killed"}
    assert content["commit"] == check.commit() and content["machine"] == "synthetic (2 cores), Linux 6.1"
    assert {each["mode"] for each in content["calibration"]} == {"none", "ring"}
    assert content["verdict"].startswith("4 points: median error") and content["calibrated_on"] == 4


def test_a_point_keeps_the_commit_at_which_it_was_measured(
    calibration: Calibration, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.failing = "gather"
    for now in ("first", "second"):
        monkeypatch.setattr(check, "commit", lambda now=now: now)
        checked(calibration, bench)
        bench.failing = ""
    points = json.loads((bench.out / check.MEASURED).read_text())["points"]
    assert {each["measured_at"] for each in points if each["mode"] == "gather"} == {"second"}
    assert {each["measured_at"] for each in points if each["mode"] != "gather"} == {"first"}


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


def test_dilation_counts_where_a_point_takes_too_long(calibration: Calibration, bench: Bench) -> None:
    ring, points = MODES[:1], POINTS[:1]
    (fits,) = check.check(calibration, ring, points, bench.out, run=bench, slower=lambda keys, profile: 10.0)
    assert fits.measured and fits.predicted * 10 < check.MAX_STEP_S < fits.predicted * 100
    other = Bench(bench.out / "other")
    (found,) = check.check(calibration, ring, points, other.out, run=other, slower=lambda keys, profile: 100.0)
    assert other.requested == [] and found.missing.endswith("s, 100 times slower as it is measured")


def test_a_point_that_other_work_disturbed_is_measured_again(calibration: Calibration, bench: Bench) -> None:
    bench.others = 1.0
    assert [each.busy for each in checked(calibration, bench)] == [True] * 6
    bench.others = 0.0
    again = checked(calibration, bench)
    assert [each.busy for each in again] == [False] * 6 and len(bench.requested) == 12
    assert all(each.measured for each in checked(calibration, bench)) and len(bench.requested) == 12


def test_points_of_earlier_checks_in_the_folder_count(calibration: Calibration, bench: Bench) -> None:
    """So gather is measured on 8 nodes only, and compared with the other modes."""
    check.check(calibration, MODES[:1], [Point(8), Point(16)], bench.out, run=bench)
    found = check.check(calibration, MODES[1:2], [Point(8)], bench.out, run=bench)
    assert [(str(each.mode), each.point.nodes) for each in found] == [("ring", 8), ("ring", 16), ("gather", 8)]
    assert all(each.measured for each in found) and len(bench.requested) == 3
    judged = check.verdict(found)
    assert judged is not None and (judged.points, judged.pairs) == (3, 1)


def test_predictions_of_something_else_are_refused(calibration: Calibration, bench: Bench) -> None:
    checked(calibration, bench)
    other = replace(calibration, profile=calibration.profile.model_copy(update={"model": "other"}))
    with pytest.raises(UsageError, match="model = vgg11, and the runs have other"):
        checked(other, bench)
    for damaged in ("{}", json.dumps({"schema": check.VERSION, "points": [{"mode": "ring"}]})):
        (bench.out / check.PREDICTIONS).write_text(damaged)
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
        found = check.keys(ring.mode, Point(nodes), racked, bench.out / check.PROFILE)
        assert found["topology"]["racks"] == wanted


def test_another_rate_is_one_of_the_links_and_not_of_the_uplinks(calibration: Calibration) -> None:
    topology = Topology(racks=((0, 1), (2, 3)), uplink="200mbit")
    wire = replace(calibration.wire, uplink=200e6 / 8 * calibration.efficiency)
    racked = replace(calibration, wire=wire, base=calibration.base.model_copy(update={"topology": topology}))
    point = Point(8, rate=1e8)
    predicted, requested = Predictor(racked).wire(point), check.keys(MODES[0], point, racked, "p.json")
    assert requested["topology"]["uplink"] == "200mbit" and requested["link"]["rate"] == "100mbit"
    assert predicted.uplink == wire.uplink and predicted.rate == pytest.approx(1e8 / 8 * calibration.efficiency)


def test_nodes_that_sleep_are_not_slowed(calibration: Calibration) -> None:
    found = check.emulated(calibration)
    assert found.node.sleeps and found.node.jitter == (1.0,)


def test_a_point_is_predicted_with_the_dilation_that_it_is_measured_with(
    calibration: Calibration, bench: Bench
) -> None:
    def slower(keys: dict[str, Any], profile: Profile) -> float:
        assert profile.step_s == pytest.approx(calibration.profile.step_s / (1 if keys["nodes"] == 8 else 10))
        return 3.0

    points = [Point(8), Point(16, speed=10.0)]
    found = check.check(calibration, MODES[:2], points, bench.out, run=bench, slower=slower)
    assert [each["dilation"] for each in bench.requested] == [3.0] * 4
    written = json.loads((bench.out / check.PREDICTIONS).read_text())["points"]
    assert [each["dilation"] for each in written] == [3.0] * 4
    again = check.check(calibration, MODES[:2], points, bench.out, run=bench)  # would be measured at 1 now
    assert [each.point for each in again] == [each.point for each in found]
    assert check.verdict(found).pairs > 0  # type: ignore[union-attr]


def test_a_larger_dilation_than_that_of_the_file_is_refused(calibration: Calibration, bench: Bench) -> None:
    """What was measured with the smaller one would be shown as if it had the larger one."""
    check.check(calibration, MODES[:1], POINTS[:1], bench.out, run=bench)
    with pytest.raises(UsageError, match=r"time dilation of 1, and 2 is needed or requested\. Give another folder"):
        check.check(calibration, MODES[:1], POINTS[:1], bench.out, run=bench, slower=lambda keys, profile: 2.0)


def test_a_point_whose_run_would_be_refused_is_predicted_and_the_refusal_is_its_reason(
    calibration: Calibration, bench: Bench
) -> None:
    def refuses(keys: dict[str, Any], profile: Profile) -> float:
        raise SpecError("too many nodes")

    (found,) = check.check(calibration, MODES[:1], POINTS[:1], bench.out, run=bench, slower=refuses)
    assert found.predicted > 0 and found.point.dilation == 1.0


def test_the_first_steps_of_every_k_at_m_are_not_measured(calibration: Calibration, bench: Bench) -> None:
    late, never = SyncMode.parse("ring/every:8@100"), SyncMode.parse("ring/every:8@1000")
    found = check.check(calibration, [late, never], POINTS[:1], bench.out, run=bench)
    (requested,) = bench.requested
    assert requested["warmup"] == check.WARMUP + 100 and requested["steps"] - requested["warmup"] == 8
    assert "the first 1000 steps synchronise" in found[1].missing
    exact = check.keys(SyncMode.parse("ring/every:8"), POINTS[0], calibration, "p.json")
    assert exact["warmup"] == check.WARMUP


@pytest.mark.parametrize(("delay", "jitter"), [(None, "5ms"), (0.02, "5ms"), (0.002, "2ms"), (0.0, None)])
def test_the_jitter_of_the_runs_is_cut_to_the_delay_of_a_point(
    calibration: Calibration, delay: float | None, jitter: str | None
) -> None:
    link = calibration.base.link.model_copy(update={"delay": 0.01, "jitter": 0.005})
    far = replace(calibration, base=calibration.base.model_copy(update={"link": link}))
    keys = check.keys(MODES[0], replace(POINTS[0], delay=delay), far, "p.json")
    assert keys["link"].get("jitter") == jitter
    assert Link.load(keys["link"], "") is not None


def test_congestion_control_is_that_of_the_calibrating_runs(calibration: Calibration, bench: Bench) -> None:
    node = calibration.base.node.model_copy(update={"congestion": "bbr"})
    other = replace(calibration, base=calibration.base.model_copy(update={"node": node}))
    checked(other, bench)
    assert all(each["node"] == {"congestion": "bbr"} for each in bench.requested)
    with pytest.raises(UsageError, match="congestion = bbr, and the runs have cubic"):
        checked(calibration, bench)


def test_a_user_s_script_is_checked_by_a_run_that_replays_its_profile(tmp_path: Path) -> None:
    make_script_run(tmp_path / "own" / "script", Script(compute=0.2), experiment="own")
    own = calibrate([tmp_path / "own"])
    assert own.profile.model == "main.py:script"
    assert any("`python main.py --rank {rank} --world {world}`" in note for note in own.notes)
    bench = Bench(tmp_path / "check")
    (found,) = check.check(own, MODES[:1], POINTS[:1], bench.out, run=bench)
    assert found.error is not None
    check_profile(RunSpec.load(bench.requested[0], ""), own.profile, bench.out)


def test_accumulated_passes_are_replayed(tmp_path: Path) -> None:
    for mode in ("none", "ring"):
        make_run(tmp_path / "quick" / mode, Conditions(compute=1.6), mode=mode, accumulate=4, **LINK)
    own = calibrate([tmp_path / "quick"])
    assert own.passes == 4 and own.profile.batch_per_rank == 4  # of 64 images on 4 ranks
    keys = check.keys(MODES[0], POINTS[0], own, "p.json")
    assert keys["batch_per_rank"] == 16 and keys["accumulate"] == 4
    check_profile(RunSpec.load(keys, ""), own.profile, tmp_path)
    whole = calibrate_without_passes(tmp_path)
    assert own.work.compute == pytest.approx(whole.work.compute, rel=0.01)


def calibrate_without_passes(folder: Path) -> Calibration:
    for mode in ("none", "ring"):
        make_run(folder / "whole" / mode, Conditions(compute=1.6), mode=mode, **LINK)
    return calibrate([folder / "whole"])


def test_a_quota_lengthens_copies_and_hides_what_a_wake_up_takes(calibration: Calibration) -> None:
    node = calibration.base.node.model_copy(update={"cpus": 0.4})
    limited = replace(
        calibration,
        base=calibration.base.model_copy(update={"node": node}),
        wire=replace(calibration.wire, wakeup=0.009),
    )
    free = check.emulated(limited)
    assert free.wire.wakeup == WAKEUP_S and free.codes["int8"] == pytest.approx(0.4 * calibration.codes["int8"])
    assert free.copies["buffers"] == pytest.approx(0.4 * calibration.copies["buffers"])
    assert check.emulated(calibration).copies == calibration.copies


def test_a_point_without_delay_has_another_folder_than_one_as_in_the_runs() -> None:
    names = {Checked(MODES[0], Point(8, delay=delay), 1.0, 1.0, 1.0).name for delay in (None, 0.0, 0.005)}
    assert len(names) == 3


def test_the_verdict_counts_errors_and_ranks() -> None:
    ring, gather = MODES[:2]
    found = [
        Checked(ring, POINTS[0], 1.1, 1.0, 1.2, measured=1.0),
        Checked(gather, POINTS[0], 3.0, 2.0, 4.0, measured=3.0),
        Checked(gather, POINTS[1], 3.0, 2.0, 4.0, missing="too long"),
    ]
    assert check.verdict(found) == Verdict(2, pytest.approx(0.05), pytest.approx(0.1), inside=2, pairs=1, right=1)
    assert check.verdict(found[2:]) is None
    wrong = replace(found[0], predicted=3.5)
    assert check.verdict([wrong, found[1]]).right == 0  # type: ignore[union-attr]
    outside = replace(found[0], low=1.05)
    assert check.verdict([outside, found[1]]).inside == 1  # type: ignore[union-attr]
    assert (
        "2 points: median error 5.0 %, worst 10.0 %; 2 of 2 inside their band; 1 of 1" in check.verdict(found).sentence
    )  # type: ignore[union-attr]


def test_points_that_other_work_disturbed_are_counted_apart() -> None:
    ring, gather = MODES[:2]
    found = [
        Checked(ring, POINTS[0], 1.01, 1.0, 1.2, measured=1.0),
        Checked(gather, POINTS[0], 3.0, 2.0, 4.0, measured=9.0, busy=True),
    ]
    judged = check.verdict(found)
    assert judged is not None and (judged.points, judged.disturbed, judged.pairs) == (1, 1, 0)
    assert judged.worst == pytest.approx(0.01)
    assert judged.sentence.endswith("; 1 more were measured beside other work and do not count")
    alone = check.verdict(found[1:])
    assert alone is not None and alone.median is alone.worst is None  # not an error of 0
    assert alone.sentence == "1 more were measured beside other work and do not count"


def test_what_is_measured_is_of_the_kind_of_its_profile(calibration: Calibration, bench: Bench) -> None:
    """A run that replays the profile of another model, type, optimizer or number of threads is refused."""
    kind = {"model": "gpt", "dtype": "float64", "threads": 2, "optimizer": "adam"}
    adam = replace(calibration, profile=calibration.profile.model_copy(update=kind))
    (ring,) = checked(adam, bench)[:1]
    check_profile(
        RunSpec.load(check.keys(ring.mode, ring.point, adam, bench.out / check.PROFILE), ""), adam.profile, bench.out
    )
