"""Calibration from synthetic run folders, whose parameters are known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.predict.calibrate import Calibration, _launches, _wire_of, calibrate
from testbed.predict.scale import Point, Predictor
from testbed.report.load import Comm, load
from testbed.results.profile import Profile, ProfiledLayer
from testbed.spec.errors import SchemaError, SpecError, UsageError
from testbed.spec.mode import SyncMode
from testbed.spec.own_files import digest_of
from tests.support.scripted_runs import ARGV, Script, make_script_run
from tests.support.scripted_runs import GRADIENT_BYTES as SCRIPT_BYTES
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
    assert abs(off["none"] or 0.0) < 0.01 and all(off[mode] is not None and abs(off[mode]) < 0.03 for mode in MODES)


def recorded(phases: list[tuple[str, float, float]], launches: list[float], **pauses: Any) -> Any:
    """A run of one step that launches equal buckets at these moments."""
    comm = [Comm(f"bucket {k}", offset, 0.2, 1000) for k, offset in enumerate(launches)]
    steps = {"phases": [phases], "comm": [comm], "stalls": [pauses.get("stalls", [])], "copying": [[]]}
    return SimpleNamespace(kept=[SimpleNamespace(**steps | pauses.get("others", {}))])


def test_waits_and_copies_inside_backward_are_no_part_of_what_makes_gradients() -> None:
    """0.3 s of backward, after which DDP waits for 0.8 s: a launch after 0.12 s is at 40 %."""
    waits = recorded([("forward", 0.0, 0.1), ("backward", 0.1, 1.1)], [0.22, 0.4], stalls=[(0.4, 0.8)])
    assert _launches(waits) == [(0.5, pytest.approx(0.4))]
    copies = recorded([("backward", 0.0, 0.4)], [0.2, 0.4], others={"copying": [[(0.1, 0.1)]]})
    assert _launches(copies) == [(0.5, pytest.approx(1 / 3))]


def test_buckets_are_launched_in_the_backward_of_the_last_pass() -> None:
    passes = [("forward", 0.0, 0.1), ("backward", 0.1, 0.2), ("forward", 0.3, 0.1), ("backward", 0.4, 0.2)]
    assert _launches(recorded(passes, [0.45, 0.6])) == [(0.5, pytest.approx(0.25))]


def test_the_time_that_ddp_waits_does_not_move_the_moment_at_which_gradients_are_ready(tmp_path: Path) -> None:
    ready = []
    for rate in ("100mbit", "500mbit"):
        run = make_run(tmp_path / rate, Conditions(compute=1.6, noise=0.0), mode="ddp", link={"rate": rate})
        assert run.status == "ok"
        ready.append(_launches(load([tmp_path / rate]).runs[0])[0])
    assert ready == [(0.25, pytest.approx(0.5)), (0.25, pytest.approx(0.5))]


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


def same_work(**changes: Any) -> Profile:
    """A profile of the work of the runs."""
    layer = ProfiledLayer(name="0", sizes=(GRADIENT_BYTES,), forward_s=0.1, backward_s=0.2)
    times = {"data_s": 0.0, "zero_s": 0.0, "loss_s": 0.0, "optimizer_s": UPDATE_S}
    return Profile(**{"model": "vgg11", "batch_per_rank": 16, "layers": (layer,), **times, **changes})


def test_a_profile_of_the_same_work_is_compared_with_the_runs(folder: Path, tmp_path: Path) -> None:
    same_work().write(tmp_path / "p.json")
    assert len(calibrate([folder], tmp_path / "p.json").measured) == len(MODES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_per_rank": 64}, "batch_per_rank 64, not 16"),
        ({"dtype": "bfloat16"}, "dtype bfloat16, not float32"),
        ({"threads": 2}, "threads 2, not 1"),
        ({"cpus": 0.4}, "node.cpus 0.4, not None"),
        ({"model": "resnet18"}, "model resnet18, not vgg11"),
    ],
)
def test_a_profile_of_other_work_is_not(folder: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    same_work(**changes, jitter=(0.9, 1.0, 1.4)).write(tmp_path / "p.json")
    found = calibrate([folder], tmp_path / "p.json")
    assert found.measured == [] and found.node.jitter == (0.9, 1.0, 1.4)
    assert any(said in note for note in found.notes)


def test_passes_of_the_runs_are_not_those_of_other_work(tmp_path: Path) -> None:
    make_run(tmp_path / "ring", Conditions(compute=1.6), mode="ring", accumulate=4, **LINK)
    for batch, passes in ((4, 4), (16, 1)):
        same_work(batch_per_rank=batch).write(tmp_path / "p.json")
        assert calibrate([tmp_path / "ring"], tmp_path / "p.json").passes == passes


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


@pytest.mark.parametrize("changes", [{"images": 32}, {"folder": "/home/user/other"}])
def test_runs_of_a_script_that_computed_something_else_are_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The same command: it divides a global batch, or it is another program."""
    script = {"argv": ARGV, "folder": changes.pop("folder", "/home/user/training")}
    for name in ("first", "second"):
        make_script_run(tmp_path / name, Script(), experiment="own")
    make_script_run(tmp_path / "third", Script(compute=0.9, **changes), experiment="own", nodes=2, script=script)
    found = calibrate([tmp_path])
    assert any("1 runs train something else" in note for note in found.notes)
    assert found.work.compute == pytest.approx(0.1, rel=0.2)


def test_runs_of_a_changed_model_are_left_out(tmp_path: Path) -> None:
    model = tmp_path / "mine.py"
    for number, mode in enumerate(("none", "ring", "tree")):
        model.write_text(f"WIDTH = {number // 2}\ndef build(): ...\n")
        files = {str(model): digest_of(model.read_bytes())}
        make_run(tmp_path / mode, Conditions(), mode=mode, model=f"{model}:build", files=files, **LINK)
    found = calibrate([tmp_path])
    assert {str(mode) for mode in found.modes} == {"none", "ring"}


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


def test_only_runs_on_the_network_of_the_predictions_are_compared_with_them(tmp_path: Path) -> None:
    near, far = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    for name, racks, uplink in (("base", near, "200mbit"), ("other", far, "200mbit"), ("slow", near, "100mbit")):
        for mode in ("none", "ring", "halving") if name == "base" else ("ring",):
            keys = LINK | {"topology": {"racks": racks, "uplink": uplink}}
            make_run(tmp_path / name / mode, Conditions(compute=1.6, overhead=9.0), mode=mode, **keys)
    make_run(tmp_path / "lossy", mode="ring", experiment="quick", link={"rate": "500mbit", "loss": "1%"})
    found = calibrate([tmp_path])
    assert {each.folder.parent.name for each in found.measured} == {"base"} and len(found.measured) == 3
    assert any("3 runs have other racks, uplinks or loss than" in note for note in found.notes)


def test_racks_without_an_uplink_are_the_same_network(folder: Path) -> None:
    make_run(folder / "racked", mode="tree", topology={"racks": [[0, 1], [2, 3]]}, **LINK)
    assert "tree" in {str(each.mode) for each in calibrate([folder]).measured}


def test_what_another_run_shows_is_computed_with_its_own_uplink_and_loss(folder: Path) -> None:
    """A codec's cost is what averaging took beyond sending: with the base run's network all of that is the codec."""
    slow = LINK | {"topology": {"racks": [[0, 2], [1, 3]], "uplink": "50mbit"}}
    usual = calibrate([folder]).wire
    make_run(folder / "int8", mode="direct/int8", **slow)
    (run,) = load([folder / "int8"]).runs
    own = _wire_of(run, usual, 0.9)
    assert own.uplink == pytest.approx(50e6 / 8 * 0.9) and usual.uplink is None
    make_run(folder / "lossy", mode="ring", experiment="quick", link={"rate": "500mbit", "loss": "1%"})
    (lossy,) = load([folder / "lossy"]).runs
    assert _wire_of(lossy, usual, 0.9).loss == 0.01


def test_each_codec_has_its_own_cost(folder: Path) -> None:
    """Sending takes `overhead` times its least time, and what is beyond that is the codec."""
    for mode, overhead in (("ring/fp16", 1.2), ("direct/int8", 3.0)):
        make_run(folder / mode.replace("/", "_"), Conditions(compute=1.6, overhead=overhead), mode=mode, **LINK)
    found = calibrate([folder])
    sent = 1.5 * GRADIENT_BYTES / (500e6 / 8 * 1448 / 1514)
    assert found.codes["fp16"] == pytest.approx(0.2 * 0.5 * sent / GRADIENT_BYTES, rel=0.1)
    assert found.codes["int8"] == pytest.approx(2.0 * 0.25 * sent / GRADIENT_BYTES, rel=0.1)
    named = {each.name: each for each in found.parameters}
    assert named["codec (topk)"].assumed and not named["codec (int8)"].assumed
    steps = {mode: Predictor(found).at(SyncMode.parse(mode), Point(4)).step for mode in ("direct/int8", "direct/fp16")}
    assert steps["direct/int8"].compute > steps["direct/fp16"].compute


def test_the_window_is_a_parameter_whatever_the_delay_of_the_runs(folder: Path) -> None:
    found = calibrate([folder])
    (window,) = (each for each in found.parameters if each.name == "window")
    assert window.value == found.wire.window and window.spread > 0 and window.assumed
    far = Predictor(found).at(SyncMode.parse("ring"), Point(8, rate=1e10, delay=0.025))
    assert far.high - far.low > 0.05 * far.step.seconds  # its uncertainty is in the band


@pytest.fixture
def replayed(tmp_path: Path) -> Path:
    """A profile of VGG-11 in one layer."""
    same_work().write(tmp_path / "p.json")
    return tmp_path / "p.json"


def replays(profile: Path) -> dict[str, Any]:
    """Keys of a run with emulated compute."""
    files = {str(profile): digest_of(profile.read_bytes())}
    return {"compute": f"emulated:{profile}", "evaluate": "never", "files": files}


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "adam"}},
        {"optimizer": {"clip": 1.0}},
        {"batchnorm": "local"},
        {"overrides": {"node2": {"cpus": 0.1}}},
        {"compute": "emulated"},
        {"accumulate": 2},
    ],
)
def test_runs_that_compute_something_else_are_not_pooled(folder: Path, replayed: Path, changes: dict[str, Any]) -> None:
    if "compute" in changes:
        changes = replays(replayed)
    make_run(folder / "other", mode="tree", **LINK, **changes)
    found = calibrate([folder])
    assert {str(mode) for mode in found.modes} == set(MODES)
    assert any("1 runs train something else" in note for note in found.notes)


def test_a_learning_rate_changes_nothing_that_is_timed(folder: Path) -> None:
    make_run(folder / "other", mode="tree", **LINK, optimizer={"lr": 0.1})
    assert "tree" in {str(mode) for mode in calibrate([folder]).modes}


def test_a_run_with_unequal_links_is_left_out_or_refused(folder: Path) -> None:
    slow = {"overrides": {"node2": {"link": {"rate": "50mbit"}}}}
    make_run(folder / "tree", Conditions(slow_link={2: 0.1}), mode="tree", **LINK, **slow)
    found = calibrate([folder])
    assert any("tree is left out: it gives node2 another link" in note for note in found.notes)
    with pytest.raises(SpecError, match=r"gives node2 another link.*Add a run without overrides"):
        calibrate([folder / "tree"])


def test_passes_of_a_step_are_those_of_the_runs(tmp_path: Path) -> None:
    for mode in ("none", "ring"):
        make_run(tmp_path / mode, Conditions(compute=1.6), mode=mode, accumulate=4, **LINK)
    found = calibrate([tmp_path])
    assert found.passes == 4 and found.profile.batch_per_rank == 4 and found.batch_per_rank == 16
    a_rank = 1.6 / 4 + UPDATE_S
    assert found.work.compute == pytest.approx(a_rank, rel=0.02)
    assert sum(found.work.backward) == pytest.approx(0.67 * 1.6 / 4 / 4, rel=0.02)  # of the last pass


def with_cpu(folder: Path, cpu_s: float, messages: int) -> None:
    """Write the processor time and the messages of a step into the last record of each rank."""
    for path in folder.glob("rank*.jsonl"):
        *lines, end = path.read_text().splitlines()
        record = json.loads(end)
        measured = record["steps"] - 2  # without the warm-up
        more = {"own_cpu": cpu_s * measured, "messages": {"gradients": messages * record["steps"], "metrics": 5}}
        path.write_text("".join(f"{line}\n" for line in [*lines, json.dumps(record | more)]))


BYTE_S, EACH_S = 3e-9, 120e-6


@pytest.fixture
def counted(folder: Path) -> Path:
    """Runs with 0.2 s of processor time a step, and the same for each byte and each message."""
    sent = 2 * 3 / 4 * GRADIENT_BYTES * 1514 / 1448
    with_cpu(folder / "none", 0.2, 0)
    with_cpu(folder / "ring", 0.2 + BYTE_S * sent + EACH_S * 120, 120)
    with_cpu(folder / "allreduce", 0.2 + BYTE_S * sent + EACH_S * 816, 816)
    return folder


def test_a_message_costs_what_modes_with_many_of_them_take_more(counted: Path) -> None:
    found = calibrate([counted])
    assert found.wire.message == pytest.approx(EACH_S, rel=0.02)
    assert found.node.byte_cpu == pytest.approx(BYTE_S, rel=0.02)
    named = {each.name: each for each in found.parameters}
    assert not named["message"].assumed and 0 < named["message"].spread < 0.2
    assert "allreduce, ring" in named["byte_cpu"].source


def test_a_message_that_noise_hides_is_assumed(counted: Path) -> None:
    sent = 2 * 3 / 4 * GRADIENT_BYTES * 1514 / 1448
    with_cpu(counted / "allreduce", 0.2 + BYTE_S * sent + EACH_S * 121, 816)  # as much as with 120 messages
    found = calibrate([counted])
    named = {each.name: each for each in found.parameters}
    assert named["message"].assumed and found.wire.message == named["message"].value


def test_seconds_of_the_processor_are_those_of_the_machine_whatever_the_dilation(
    tmp_path: Path, replayed: Path
) -> None:
    def copies(name: str, **changes: Any) -> float:
        for mode in ("none", "ring"):
            keys = LINK | replays(replayed) | changes
            make_run(tmp_path / name / mode, Conditions(copies=0.01), mode=mode, **keys)
        return calibrate([tmp_path / name]).copies["buffers"]

    assert copies("slower", dilation=4.0) == pytest.approx(4 * copies("usual"))
