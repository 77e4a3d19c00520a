"""The request of a rank: what variables and arguments become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.rank.request import Request, read_request
from testbed.results.folder import RunFolder
from testbed.spec.errors import SpecError
from testbed.spec.link import Link
from testbed.spec.run import RunSpec
from testbed.spec.words import Place, reading


def test_without_variables_the_request_is_the_default_spec() -> None:
    request = read_request([], {})
    assert (str(request.spec.mode), request.spec.nodes, request.spec.link, request.rank) == ("ring", 4, Link(), 0)
    assert (request.spec.experiment, request.spec.name) == ("compose", "ring-n4")


def test_every_variable_reaches_its_key() -> None:
    env = {"MODE": "gather/flat", "NODES": "2", "RATE": "200mbit", "MODEL": "lenet5", "DATA": "mnist", "BATCH": "64"}
    env |= {"STEPS": "7", "SEED": "3", "CPU_QUOTA": "2500", "CONGESTION": "reno", "RANK": "1"}
    request = read_request([], env | {"SET": "warmup=1 optimizer.lr=0.5"})
    spec = request.spec
    assert (str(spec.mode), spec.nodes, spec.model, spec.data.name) == ("gather/flat", 2, "lenet5", "mnist")
    assert (spec.link.rate, spec.batch, spec.steps, spec.seed) == (200_000_000, 64, 7, 3)
    assert (spec.node.cpus, spec.node.congestion, request.rank) == (0.25, "reno", 1)
    assert (spec.warmup, spec.optimizer.lr) == (1, 0.5)


def test_the_number_of_nodes_that_compose_has_may_be_requested() -> None:
    assert read_request([], {"NODES": "4", "NODES_REQUESTED": "4"}) == read_request([], {"NODES": "4"})


def test_an_empty_variable_counts_as_unset() -> None:
    assert read_request([], {"MODE": "", "RATE": "", "STEPS": "", "SET": "", "SHAPING": ""}) == read_request([], {})


def test_a_node_has_the_link_of_its_override() -> None:
    env = {"RATE": "1gbit", "SET": "overrides.node2.link.rate=100mbit"}
    assert [read_request([], env | {"RANK": str(k)}).link.rate for k in range(4)] == [10**9, 10**9, 10**8, 10**9]


def test_shaping_off_takes_the_rate_out_of_the_spec_and_says_so() -> None:
    request = read_request([], {"RATE": "1gbit", "SHAPING": "off"})
    assert request.spec.link.rate is None
    assert "SHAPING=off" in request.not_shaped
    assert read_request([], {"RATE": "1gbit", "SHAPING": "egress"}).spec.link.rate == 10**9


def test_under_a_launcher_world_size_is_the_number_of_nodes_and_nothing_is_shaped() -> None:
    request = read_request([], {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "h0", "MASTER_PORT": "29999"})
    assert (request.spec.nodes, request.rank, request.master, request.port) == (2, 1, "h0", 29999)
    assert (request.substrate, request.spec.experiment, request.shaping, request.not_shaped) == (
        "launched",
        "launched",
        "none",
        "",
    )
    assert request.interface == "" and request.spec.node.congestion is None
    assert not request.spec.node.pinned, "nothing pins a launcher's ranks"
    both = read_request([], {"WORLD_SIZE": "2", "NODES": "4"})
    assert (both.substrate, both.spec.nodes, both.interface) == ("compose", 4, "eth0")


REFUSALS = {
    "a rate under a launcher": ({"WORLD_SIZE": "2", "RATE": "1gbit"}, "RATE '1gbit': ranks that a launcher starts"),
    "a share under a launcher": ({"WORLD_SIZE": "2", "CPU_QUOTA": "4000"}, "CPU_QUOTA '4000': ranks that a launcher"),
    "congestion under a launcher": ({"WORLD_SIZE": "2", "CONGESTION": "reno"}, "CONGESTION 'reno'"),
    "another number of nodes than containers": (
        {"NODES": "4", "NODES_REQUESTED": "8"},
        "NODES '8': compose.yaml has 4 nodes. Leave it out, or use `testbed run --on compose --nodes 8`.",
    ),
    "rate": ({"RATE": "fast"}, "RATE='fast': needs a number"),
    "mode": ({"MODE": "rong"}, "MODE='rong': unknown algorithm"),
    "mode with quotes": ({"MODE": 'ri"ng'}, "unknown algorithm"),
    "batch": ({"BATCH": "10"}, "BATCH=10: must be divisible by the 4 ranks. Use 8 or 12."),
    "batch under a launcher": ({"WORLD_SIZE": "3", "BATCH": "10"}, "3 ranks. Use 9 or 12, or SET=batch_per_rank."),
    "nodes under a launcher": ({"WORLD_SIZE": "1"}, "WORLD_SIZE=1: mode ring needs at least 2. Use MODE=single, or"),
    "data": ({"DATA": "imagenet"}, "DATA='imagenet': is not a known data set"),
    "shaping": ({"SHAPING": "some"}, "'some'"),
    "rank": ({"RANK": "4"}, "4 nodes"),
    "rank that is no number": ({"RANK": "-1"}, "'-1'"),
    "quota": ({"CPU_QUOTA": "0.4"}, "'0.4'"),
    "steps": ({"STEPS": "many"}, "STEPS='many': must be a whole number. Write e.g. STEPS=40."),
    "setting": ({"SET": "lr"}, "'lr'"),
    "open quote": ({"SET": "a='b"}, "No closing quotation"),
    "unknown key": ({"SET": "speed=9"}, "'speed'"),
}


@pytest.mark.parametrize(("env", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_bad_value_is_refused_with_a_sentence(env: dict[str, str], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_request([], env)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "setting", ["link.rate=50mbit", "overrides.node1.link.rate=50mbit", "node.congestion=reno", "node.cpus=0.4"]
)
def test_a_setting_that_nothing_applies_under_a_launcher_is_refused(setting: str) -> None:
    with pytest.raises(SpecError, match=rf"SET '{setting}': ranks that a launcher starts .*docker compose up"):
        read_request([], {"WORLD_SIZE": "2", "SET": f"warmup=1 {setting}"})


@pytest.mark.parametrize("setting", ["faults=['kill:rank1@step2']", "retries=2"])
def test_what_needs_a_controller_is_refused(setting: str) -> None:
    with pytest.raises(SpecError, match=r"faults, retries.*testbed run --on compose"):
        read_request([], {"SET": f'"{setting}"'})


def test_notes_of_the_entrypoint_are_kept() -> None:
    assert read_request(["--note", "one", "--note", "two"], {}).notes == ("one", "two")


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"MODEL": "nosuch"}, "MODEL='nosuch': unknown. Use one of vgg11"),
        ({"MODEL": "vit_b_16"}, "MODEL='vit_b_16': takes images of 224 x 224, and these have 32 x 32. Use SET=data.si"),
        ({"SET": "data.subset=60000"}, "SET=data.subset=60000: cifar10 has 50000 training images"),
        ({"MODE": "my-method"}, "unknown algorithm 'my-method'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_ranks_meet(variables: dict[str, str], reason: str) -> None:
    for rank in range(4):
        with reading(Place.COMPOSE), pytest.raises(SpecError) as refusal:
            read_request([], {"NODES": "4", "RANK": str(rank), "RATE": "1gbit"} | variables)
        assert reason in str(refusal.value)


# --- from a file ---------------------------------------------------------------------------------------------------


def supervised(tmp_path: Path, **env: str) -> Request:
    RunFolder(tmp_path / "r").create(RunSpec.load({"nodes": 2, "threads": 3}, "test"))
    return read_request(["--folder", str(tmp_path / "r"), "--resume"], {"RANK": "1", "WORLD_SIZE": "2"} | env)


def test_a_run_folder_with_its_spec_means_that_a_controller_supervises(tmp_path: Path) -> None:
    request = supervised(tmp_path, MASTER_ADDR="10.0.0.1", MASTER_PORT="4711", GLOO_SOCKET_IFNAME="eth7", BATCH="none")
    assert request.supervised and request.resume and request.folder == tmp_path / "r"
    assert (request.rank, request.spec.threads, request.master, request.port) == (1, 3, "10.0.0.1", 4711)
    assert (request.interface, request.shaping, request.not_shaped) == ("eth7", "none", "")


def test_the_spec_of_the_entrypoint_replaces_the_variables_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(RunSpec.load({"nodes": 2, "experiment": "compose", "name": "x"}, "test").to_json())
    env = {"NODES": "2", "RANK": "1", "SHAPING": "egress", "BATCH": "no number: it was read before"}
    request = read_request(["--spec", str(path), "--synthetic", "no data"], env)
    assert not request.supervised and request.spec.name == "x" and request.folder is None
    assert (request.rank, request.shaping, request.substrate, request.synthetic) == (1, "egress", "compose", "no data")
    made = read_request(["--spec", str(path), "--folder", str(tmp_path / "made")], env | {"RANK": "0"})
    assert not made.supervised and made.folder == tmp_path / "made"


@pytest.mark.parametrize(
    "start",
    [
        lambda folder: (["--folder", str(folder)], {"RANK": "0"}),
        lambda folder: (["--spec", str(folder / "spec.json")], {"NODES": "4"}),
        lambda folder: ([], {"NODES": "4", "BATCH": "64", "RATE": "1gbit"}),
    ],
    ids=["controller", "entrypoint", "launcher"],
)
def test_the_spec_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    RunFolder(tmp_path / "r").create(RunSpec.load({"experiment": "compose"}, "test"))
    parsed: list[str] = []
    load = RunSpec.load.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        RunSpec, "load", classmethod(lambda cls, *args, **kw: parsed.append("") or load(cls, *args, **kw))
    )
    read_request(*start(tmp_path / "r"))
    assert len(parsed) == 1
