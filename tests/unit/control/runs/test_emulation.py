"""What is decided before a run with emulated compute: its profile, its time dilation, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.control.runs import emulation
from testbed.control.runs.emulation import (
    bytes_per_sync,
    compute_s,
    for_cores,
    needed_dilation,
    profile_spec,
    wire_s,
    with_dilation,
    with_profile,
)
from testbed.control.runs.locks import folder_lock
from testbed.control.runs.select import SUBSTRATES, SubstrateChoice
from testbed.results.folder import RunFolder
from testbed.results.profile import Profile, ProfiledLayer
from testbed.results.theory import CODE_S_PER_BYTE
from testbed.spec.errors import SpecError, Unavailable, UsageError
from testbed.spec.run import RunSpec

NETNS, PROCESS = (SubstrateChoice(SUBSTRATES[name], "case") for name in ("netns", "process"))
PROFILE = Profile(
    model="vgg11",
    batch_per_rank=24,
    layers=(ProfiledLayer(name="0", sizes=(36_924_456,), forward_s=0.3, backward_s=0.7),),
    data_s=0.0,
    zero_s=0.0,
    loss_s=0.0,
    optimizer_s=0.02,
)


def spec(**changes: object) -> RunSpec:
    keys = {"compute": "emulated:p.json", "mode": "ring", "nodes": 8, "batch_per_rank": 24}
    return RunSpec.load(keys | {"link": {"rate": "100mbit"}} | changes, "case")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The profile, in the present folder; two cores, and enough memory."""
    monkeypatch.setattr(emulation, "RANK_BYTES", 0)
    monkeypatch.setattr(emulation, "COPIES", 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(emulation, "usable_cores", lambda: [0, 1])
    monkeypatch.setattr(
        SUBSTRATES["netns"].__class__, "drop_unsupported", staticmethod(lambda spec: spec), raising=False
    )
    PROFILE.write(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_no_dilation_where_half_of_the_cores_are_enough() -> None:
    assert needed_dilation(spec(), PROFILE, cores=2) == 1.0
    assert needed_dilation(spec(nodes=8), PROFILE, cores=64) == 1.0


def test_the_dilation_grows_with_nodes_and_rate() -> None:
    """A byte costs 4.8e-9 core-seconds, and half of two cores may be used: 32 nodes at 100 Mbit/s need 1.92 of 1."""
    at_32 = needed_dilation(spec(nodes=32), PROFILE, cores=2)
    assert 1.9 <= at_32 <= 2.4
    faster = needed_dilation(spec(nodes=32, link={"rate": "1gbit"}), PROFILE, cores=2)
    assert 9 * at_32 < 10 * faster / 1.05 and faster > 19
    assert needed_dilation(spec(nodes=32), PROFILE, cores=4) == pytest.approx(at_32 / 2, abs=0.1)


def test_a_mode_that_uses_one_link_at_a_time_needs_less() -> None:
    assert needed_dilation(spec(nodes=32, mode="gather"), PROFILE, cores=2) == 1.0
    assert needed_dilation(spec(nodes=32, mode="single"), PROFILE, cores=2) == 1.0


@pytest.mark.parametrize(("mode", "share"), [("direct/int8", 0.25), ("ring/fp16", 0.5), ("direct/topk:0.01", 0.02)])
def test_a_codec_sends_less_and_takes_processor_time(mode: str, share: float) -> None:
    coded = spec(nodes=8, mode=mode)
    plain = spec(nodes=8, mode=mode.partition("/")[0])
    rounds = 4 if "topk" in mode else 1  # every rank sends to all others: N/2 times as much as an all-reduce on 8 ranks
    assert wire_s(coded, PROFILE) == pytest.approx(rounds * share * wire_s(plain, PROFILE))
    assert bytes_per_sync(coded, PROFILE) == pytest.approx(rounds * share * bytes_per_sync(plain, PROFILE))


def test_ranks_that_encode_at_the_same_moment_are_made_slower() -> None:
    """32 ranks on two cores: 30 of them wait, so the codec takes 15 times as long more, of at most 5 % of a step."""
    coded = spec(nodes=32, mode="direct/int8")
    waits = 15 * CODE_S_PER_BYTE * PROFILE.gradient_bytes
    least = max(compute_s(coded, PROFILE), wire_s(coded, PROFILE))
    assert needed_dilation(coded, PROFILE, cores=2) == pytest.approx(waits / 0.05 / least, abs=0.1)
    assert needed_dilation(coded, PROFILE, cores=32) == 1.0
    assert for_cores(coded, PROFILE, cores=2) > for_cores(spec(nodes=32, mode="single"), PROFILE, cores=2)


def test_a_dilation_that_a_codec_needs_names_it(file: Path) -> None:
    with pytest.raises(SpecError, match=r"ranks would wait for a core while others encode: it takes \d"):
        with_dilation(spec(nodes=32, mode="direct/int8", dilation=2.0), NETNS)


def test_the_dilation_is_chosen_and_a_smaller_one_is_refused(file: Path) -> None:
    chosen = with_dilation(spec(nodes=32), NETNS).dilation
    assert chosen is not None and chosen > 1.9
    assert with_dilation(spec(), NETNS).dilation == 1.0
    assert with_dilation(spec(dilation=3.0), NETNS).dilation == 3.0
    with pytest.raises(SpecError, match=f"more than half of this machine's cores: it takes {chosen:g} or more"):
        with_dilation(spec(nodes=32, dilation=1.5), NETNS)


def test_a_point_that_cannot_be_dilated_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="needs links with a rate"):
        with_dilation(spec(nodes=200, link={}, dilation=None), PROCESS)
    with pytest.raises(UsageError, match="dilation"):
        with_dilation(spec(dilation=2.0), PROCESS)
    with pytest.raises(Unavailable, match="needs a time dilation of"):
        with_dilation(spec(nodes=200, link={"rate": "10gbit"}), NETNS)


def test_the_kernel_of_one_processor_is_refused(file: Path) -> None:
    with pytest.raises(Unavailable, match=r"kernel of uml has one processor.*Use --on netns"):
        with_dilation(spec(nodes=2), SubstrateChoice(SUBSTRATES["uml"], "case"))
    real = RunSpec.load({"nodes": 2}, "case")
    assert with_dilation(real, SubstrateChoice(SUBSTRATES["uml"], "case")) is real


def test_a_profile_of_zeros_needs_links_with_a_rate(file: Path) -> None:
    layer = ProfiledLayer(name="0", sizes=(36_924_456,), forward_s=0.0, backward_s=0.0)
    PROFILE.model_copy(update={"layers": (layer,), "optimizer_s": 0.0}).write(file)
    with pytest.raises(Unavailable, match="needs links with a rate"):
        with_dilation(spec(link={}), NETNS)
    assert with_dilation(spec(), NETNS).dilation == 1.0


def test_ranks_that_do_not_fit_into_memory_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "RANK_BYTES", 1 << 50)
    with pytest.raises(Unavailable, match=r"8 ranks need about .* MiB are free"):
        with_dilation(spec(), NETNS)


def test_real_compute_is_left_as_it_is() -> None:
    real = RunSpec.load({"nodes": 8}, "case")
    assert with_dilation(real, NETNS) is real
    assert with_profile(real, lambda spec, folder: pytest.fail("recorded")) is real


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "resnet18"}, "'resnet18': the profile p.json was recorded with vgg11"),
        ({"batch_per_rank": 32}, "32: the profile p.json was recorded with 24"),
        ({"threads": 2}, "2: the profile p.json was recorded with 1"),
        ({"optimizer": {"name": "adam"}}, "optimizer.*adam.*: the profile p.json was recorded with sgd"),
        ({"batch_per_rank": None, "batch": 48, "data": {"shares": [12, 36]}, "nodes": 2}, "recorded with 24"),
    ],
)
def test_a_profile_of_something_else_is_refused(file: Path, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        with_profile(spec(**changes), lambda spec, folder: None)


def test_a_profile_of_micro_batches_fits_a_larger_batch(file: Path) -> None:
    accumulated = spec(batch_per_rank=96, accumulate=4)
    assert with_profile(accumulated, lambda spec, folder: None) == accumulated


def test_a_run_folder_stands_for_its_profile(file: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    PROFILE.write(RunFolder(tmp_path / "run").layers)
    assert with_profile(spec(compute="emulated:run"), lambda spec, folder: None).compute == "emulated:run/profile.json"
    with pytest.raises(SpecError, match=r"none/profile\.json|none: cannot be read"):
        with_profile(spec(compute="emulated:none"), lambda spec, folder: None)


def test_a_profile_that_is_not_named_is_recorded_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_RUNS", "runs")
    recorded: list[RunSpec] = []

    def record(spec: RunSpec, folder: Path) -> None:
        recorded.append(spec)
        folder.mkdir(parents=True)
        PROFILE.write(RunFolder(folder).layers)

    wanted = spec(compute="emulated", node={"cpus": 0.4})
    first, second = with_profile(wanted, record), with_profile(wanted, record)
    assert first == second and first.compute.startswith("emulated:runs/profiles/vgg11-float32-batch24")
    (made,) = recorded
    assert made == profile_spec(wanted) and made.layers and str(made.mode) == "single" and made.cpus_of(0) == 0.4
    assert made.batch_per_rank == 24 and not made.emulated and not made.link.shaped


@pytest.mark.parametrize(
    ("changes", "equal"),
    [
        ({"data": {"size": 64}}, False),
        ({"optimizer": {"name": "adam"}}, False),
        ({"batchnorm": "local"}, False),
        ({"nodes": 3, "mode": "tree", "link": {}, "name": "other", "experiment": "other", "seed": 3}, True),
        ({"node": {"congestion": "reno"}, "start_deadline": 7.0, "steps": 9}, True),
    ],
)
def test_the_name_of_a_recorded_profile_tells_work_apart(changes: dict[str, object], equal: bool) -> None:
    """Where `equal` is True, the same profile is used again."""
    name = profile_spec(spec(model="resnet18", compute="emulated")).name
    assert name.startswith("resnet18-float32-batch24-threads1-")
    assert (profile_spec(spec(model="resnet18", compute="emulated", **changes)).name == name) is equal


def test_a_changed_file_of_the_users_own_is_another_profile(tmp_path: Path) -> None:
    model = tmp_path / "mine.py"
    names = set()
    for width in (1, 2):
        model.write_text(f"WIDTH = {width}\ndef build(): ...\n")
        made = profile_spec(spec(model=f"{model}:build", compute="emulated"))
        assert list(made.files) == [str(model)]
        assert RunSpec.from_json(made.model_dump_json(by_alias=True), "spec.json") == made  # as a rank reads it
        names.add(made.name)
    assert len(names) == 2


def test_a_profile_that_another_process_records_is_not_set_aside(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_RUNS", "runs")
    wanted = spec(compute="emulated")
    folder = Path("runs/profiles") / profile_spec(wanted).name
    folder.mkdir(parents=True)
    with folder_lock(folder), pytest.raises(Unavailable, match="in use by process"):
        with_profile(wanted, lambda spec, folder: pytest.fail("recorded"))
    assert folder.is_dir() and not Path("runs/profiles/.superseded").exists()


def test_a_recording_that_failed_is_set_aside(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_RUNS", "runs")
    wanted = spec(compute="emulated")
    folder = Path("runs/profiles") / profile_spec(wanted).name
    folder.mkdir(parents=True)

    def record(spec: RunSpec, folder: Path) -> None:
        folder.mkdir()
        PROFILE.write(RunFolder(folder).layers)

    with_profile(wanted, record)
    assert [path.name for path in Path("runs/profiles/.superseded").iterdir()] == [f"{folder.name}~0"]


def test_the_segments_of_a_pipeline_take_processor_time() -> None:
    """32 ranks with 1,240 segments of 0.4 ms each: 15.9 core-seconds in a step of 5.7 s, and one core may be used."""

    def needed(mode: str) -> float:
        return emulation.for_cores(spec(nodes=32, mode=mode), PROFILE, cores=2)

    assert needed("ring/pipeline") - needed("ring") == pytest.approx(32 * 62 * 20 * 0.0004 / 5.72, abs=0.1)
    assert needed("ring") < needed("ring/bucket:8MiB/pipeline") < needed("ring/pipeline")
    assert needed_dilation(spec(nodes=32, mode="ring/pipeline"), PROFILE, cores=2) > 4


def test_a_pipeline_looks_further_ahead_than_the_threads_of_its_core_let_it_wait() -> None:
    """At 100 Mbit/s 64 KiB last 5.2 ms; four threads a core may need 0.4 ms each."""
    at_8 = emulation.for_wake_ups(spec(mode="ring/pipeline"), cores=2)
    assert at_8 == pytest.approx(4 * 8 / 2 * 0.0004 / 0.00524, rel=0.01)
    assert needed_dilation(spec(mode="ring/pipeline"), PROFILE, cores=2) == pytest.approx(at_8, abs=0.1)
    faster = spec(mode="ring/pipeline", link={"rate": "1gbit"})
    assert emulation.for_wake_ups(faster, cores=2) == pytest.approx(10 * at_8)
    assert needed_dilation(spec(mode="ring/pipeline"), PROFILE, cores=64) == 1.0
    assert emulation.for_wake_ups(spec(mode="ddp"), cores=2) == 0.0


def test_a_dilation_that_wakes_ranks_too_late_is_refused(file: Path) -> None:
    with pytest.raises(SpecError, match=r"dilation.*woken too late: it takes 1\.3 or more"):
        with_dilation(spec(mode="ring/pipeline", dilation=1.1), NETNS)


def test_a_check_is_dilated_as_its_runs_need_it_and_not_less_than_requested(file: Path) -> None:
    keys = {"compute": "emulated:p.json", "nodes": 32, "batch_per_rank": 24, "link": {"rate": "100mbit"}}
    needed = needed_dilation(spec(nodes=32), PROFILE, cores=2)
    assert emulation.dilation_for(keys | {"mode": "ring"}, PROFILE, least=1.0) == needed
    assert emulation.dilation_for(keys | {"mode": "ring"}, PROFILE, least=7.0) == 7.0
