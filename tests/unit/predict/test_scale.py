"""What a user asks for, and predictions with their bands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testbed.predict import scale
from testbed.predict.calibrate import calibrate
from testbed.predict.scale import Point, Predictor
from testbed.spec.errors import SpecError, TestbedError
from testbed.spec.mode import SyncMode
from tests.support.synthetic import Conditions, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "experiment": "quick"}


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    folder = tmp_path_factory.mktemp("quick")
    for seed, mode in enumerate(("none", "ring", "gather", "ddp")):
        make_run(folder / mode, Conditions(compute=1.6, seed=seed), mode=mode, **LINK)
    return Predictor(calibrate([folder]))


def at(predictor: Predictor, mode: str, nodes: int, **place: Any) -> scale.Prediction:
    return predictor.at(SyncMode.parse(mode), Point(nodes, **place))


def test_nodes_are_lists_and_ranges_that_double() -> None:
    assert scale.parse_nodes("8..1024") == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert scale.parse_nodes("3..20") == [3, 6, 12, 20]
    assert scale.parse_nodes("16,8, 2..4") == [2, 4, 8, 16]


@pytest.mark.parametrize("text", ["0", "0..8", "2000", "-1", "many", "4..", "", "1e3", "99999999999"])
def test_other_nodes_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--nodes") as refusal:
        scale.parse_nodes(text)
    assert refusal.value.exit_code == 2


def test_delays_speeds_and_modes_have_short_forms() -> None:
    assert scale.parse_delays("0ms,25ms, 0") == [0.0, 0.025, 0.0]
    assert scale.parse_speeds("1,10,0.5") == [1.0, 10.0, 0.5]
    modes = [str(mode) for mode in scale.parse_modes("ring,pipeline,every:8,ddp,ring")]
    assert modes == ["ring", "ring/pipeline", "ring/every:8", "ddp"]


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (scale.parse_rates, "fast"),
        (scale.parse_rates, ","),
        (scale.parse_delays, "long"),
        (scale.parse_speeds, "0"),
        (scale.parse_speeds, "nan"),
        (scale.parse_modes, "rong"),
        (scale.parse_modes, "ddp/flat"),
    ],
)
def test_other_values_are_refused(parse: Any, text: str) -> None:
    with pytest.raises(TestbedError) as refusal:
        parse(text)
    assert refusal.value.exit_code == 2


def test_a_mode_that_cannot_exist_at_a_number_of_nodes_is_refused(predictor: Predictor) -> None:
    with pytest.raises(SpecError, match="mode ring needs at least 2"):
        scale.check_modes([SyncMode.parse("ring")], [1, 2])
    scale.check_modes([SyncMode.parse("single")], [1])
    with pytest.raises(SpecError, match="racks"):
        at(predictor, "hierarchical", 8)
    with pytest.raises(SpecError, match="observed"):
        scale.check_modes([SyncMode.parse("script")], [4])


def test_a_band_is_around_its_prediction_and_wider_where_less_is_known(predictor: Predictor) -> None:
    for mode in ("ring", "ddp", "gather", "ring/pipeline", "ring/every:8"):
        found = at(predictor, mode, 64)
        assert 0 < found.low <= found.step.seconds <= found.high
    near, far = at(predictor, "ring", 4), at(predictor, "ring", 1024)
    assert (far.high - far.low) / far.step.seconds > (near.high - near.low) / near.step.seconds


def test_the_same_folders_give_the_same_bands(predictor: Predictor) -> None:
    again = Predictor(predictor.calibration)
    assert at(again, "ddp", 32) == at(predictor, "ddp", 32)


def test_rate_delay_and_speed_move_a_step_the_right_way(predictor: Predictor) -> None:
    usual = at(predictor, "ring", 8).step.seconds
    assert at(predictor, "ring", 8, rate=1e9).step.seconds < usual < at(predictor, "ring", 8, rate=1e8).step.seconds
    assert at(predictor, "ring", 8, delay=0.2).step.seconds > usual
    assert at(predictor, "ring", 8, speed=10.0).step.seconds < usual
    assert at(predictor, "ring", 8, rate=500e6).step.seconds == pytest.approx(usual)


def test_efficiency_compares_with_one_node_of_the_same_batch_per_rank(predictor: Predictor) -> None:
    found = at(predictor, "ring", 8)
    assert found.efficiency == pytest.approx(predictor.work.compute / found.step.seconds)
    assert found.speed_up == pytest.approx(8 * found.efficiency)
    assert at(predictor, "none", 8).efficiency == pytest.approx(1.0)


def test_racks_of_more_nodes_have_the_size_of_those_of_the_run() -> None:
    racks, mode = ((0, 1), (2, 3)), SyncMode.parse("hierarchical")
    assert scale.racks_for(mode, 4, racks) == racks
    assert scale.racks_for(mode, 6, racks) == ((0, 1), (2, 3), (4, 5))
    assert scale.racks_for(SyncMode.parse("ring"), 6, ()) == ()


def test_the_default_modes_are_those_of_the_runs_and_the_usual_ones(predictor: Predictor) -> None:
    modes = [str(mode) for mode in scale.default_modes(predictor.calibration)]
    assert modes == ["ddp", "gather", "ring", "ring/pipeline", "ring/every:8"]


def test_a_misfit_widens_the_band(predictor: Predictor) -> None:
    off = Predictor(predictor.calibration)
    off.misfit = {each.folder: 0.2 for each in off.calibration.measured}
    assert at(off, "ring", 8).high > 1.15 * at(off, "ring", 8).step.seconds
    exact = Predictor(replace(predictor.calibration, measured=[]))
    assert exact.typical_misfit(SyncMode.parse("ring")) == 0.0
