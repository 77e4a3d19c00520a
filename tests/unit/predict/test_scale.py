"""What a user asks for, and predictions with their bands."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.predict import scale
from testbed.predict.calibrate import Parameter, calibrate
from testbed.predict.scale import Draw, Point, Predictor
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
    with pytest.raises(SpecError, match="mode single is for one node"):
        scale.check_modes([SyncMode.parse("single")], [8])
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


def test_a_mode_that_cannot_be_computed_has_no_fit(predictor: Predictor) -> None:
    """A method of the user's own: its messages are unknown."""
    own = predictor.calibration
    method = replace(own.measured[0], mode=SyncMode("averaging"), folder=Path("method"))
    with_method = Predictor(replace(own, measured=[*own.measured, method]))
    assert with_method.misfit[method.folder] is None
    other = SyncMode.parse("tree")
    assert with_method.typical_misfit(other) == predictor.typical_misfit(other) > 0.0


def test_the_control_says_nothing_of_modes_that_send(predictor: Predictor) -> None:
    modes = {str(each.mode): abs(predictor.misfit[each.folder] or 0.0) for each in predictor.calibration.measured}
    sending = statistics.median(off for name, off in modes.items() if name != "none")
    assert predictor.typical_misfit(SyncMode.parse("tree")) == sending
    assert predictor.typical_misfit(SyncMode.parse("none")) == modes["none"]


def test_every_parameter_that_has_an_uncertainty_is_drawn(predictor: Predictor) -> None:
    own = predictor.calibration
    wire, copies = replace(own.wire, uplink=1e6, acks=0.01), dict.fromkeys(own.copies, 1e-9)
    calibration = replace(own, wire=wire, copies=copies)
    names = [
        "acks",
        "codec (int8)",
        "uplink",
        "ready",
        "segment",
        "copy (buffers)",
        "copy (reference)",
        "copy (pipeline)",
    ]
    others = [each for each in calibration.parameters if each.name not in names]
    made = [Parameter(name, 1.0, "", "made", 0.3) for name in names]
    draws = Predictor(replace(calibration, parameters=[*others, *made])).draws
    values: list[set[float]] = [
        {each.wire.acks for each in draws},
        {each.codes["int8"] for each in draws},
        {each.wire.uplink or 0.0 for each in draws},
        {each.ready for each in draws},
        {each.wire.segment for each in draws},
        *({each.copies[name] for each in draws} for name in ("buffers", "reference", "pipeline")),
    ]
    assert [len(each) for each in values] == [scale.DRAWS] * len(values)


def test_a_draw_makes_gradients_earlier_or_later_in_the_same_backward(predictor: Predictor) -> None:
    own = predictor.calibration
    late = scale.drawn(own.work, Draw(own.node, own.wire, own.copies, own.codes, ready=2.0))
    assert sum(late.backward) == pytest.approx(sum(own.work.backward))
    assert late.backward[-1] == pytest.approx(own.work.backward[-1] ** 2 / sum(own.work.backward))
    longer = scale.drawn(own.work, Draw(own.node, own.wire, own.copies, own.codes, compute=1.5))
    assert longer.compute == pytest.approx(1.5 * own.work.compute)


def test_dilation_makes_what_the_processor_does_shorter_and_nothing_else(predictor: Predictor) -> None:
    """With times c that were dilated and o that were not, a step shows c + o / K."""
    own = replace(predictor.calibration, wire=replace(predictor.calibration.wire, message=0.005, wakeup=0.01))
    for mode in ("halving", "direct/int8", "gather"):
        shown = [at(Predictor(own), mode, 8, dilation=factor).step.seconds for factor in (1.0, 2.0, 4.0)]
        assert shown[0] - shown[1] == pytest.approx(2 * (shown[1] - shown[2])) and shown[0] > 1.01 * shown[1]
    usual, slower = (at(predictor, "ring", 8, delay=0.05, dilation=factor).step.seconds for factor in (1.0, 8.0))
    assert slower == pytest.approx(usual, rel=0.02)  # a delay is dilated as well


def test_without_a_network_in_the_question_others_are_predicted_too(predictor: Predictor) -> None:
    others = scale.other_networks(Point(8), predictor.calibration)
    assert others == [Point(8, rate=5e9), Point(8, delay=0.025)]
