"""CPU shares become a quota per period, and cores of a node's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.control.runs.select import SUBSTRATES
from testbed.spec.errors import SpecError
from testbed.spec.resources import (
    check_memory,
    divide_cores,
    least_memory_bytes,
    limit_of_container,
    quota_and_period,
    read_limit,
)
from testbed.spec.run import RunSpec


@pytest.mark.parametrize(("cpus", "expected"), [(0.4, (4000, 10_000)), (2, (20_000, 10_000)), (0.05, (1000, 20_000))])
def test_the_period_is_10_ms_unless_the_quota_gets_too_small(cpus: float, expected: tuple[int, int]) -> None:
    assert quota_and_period(cpus) == expected


def test_no_share_means_no_quota() -> None:
    assert quota_and_period(None) == (-1, 10_000)


@pytest.mark.parametrize("cpus", [0, -1, float("nan"), float("inf")])
def test_a_share_that_is_no_positive_number_is_refused(cpus: float) -> None:
    with pytest.raises(SpecError, match=r"node\.cpus"):
        quota_and_period(cpus)


def test_nodes_take_turns_on_the_cores_that_there_are() -> None:
    assert divide_cores(1, [0.4] * 4, [0, 5]) == [{0}, {5}, {0}, {5}]
    assert divide_cores(2, [None] * 2, [0, 1, 2, 3]) == [{0, 1}, {2, 3}]


def test_cores_that_cannot_be_divided_evenly_are_left_to_the_kernel() -> None:
    assert divide_cores(1, [0.4] * 4, range(3)) == [None] * 4
    assert divide_cores(1, [1.5] * 4, range(2)) == [None] * 4


VGG = RunSpec.load({}, "")
MIB = 1 << 20


def test_a_limit_below_what_a_rank_needs_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        SpecError, match=r"MEM_LIMIT '64m': a rank that trains vgg11 needs more than 2\d\dm\. Use e\.g\. MEM_LIMIT=2g"
    ):
        check_memory(VGG, 64 * MIB)
    check_memory(VGG, least_memory_bytes(VGG))
    check_memory(VGG, None)


def test_a_larger_model_and_a_wider_type_need_more() -> None:
    small, wide = RunSpec.load({"model": "lenet5"}, ""), RunSpec.load({"dtype": "float64"}, "")
    assert least_memory_bytes(small) < least_memory_bytes(VGG) < least_memory_bytes(wide) < 2 << 30


def test_adam_needs_more_than_sgd_and_a_sharded_optimizer_less() -> None:
    adam = {"optimizer": {"name": "adam"}}
    whole, sharded = RunSpec.load(adam, ""), RunSpec.load(adam | {"mode": "ring/bucket:5MiB/pipeline"}, "")
    assert least_memory_bytes(sharded) == least_memory_bytes(VGG) < least_memory_bytes(whole)


def test_the_usual_limit_is_refused_for_a_model_that_it_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """630 million parameters, three times 4 bytes each."""
    monkeypatch.delenv("MEM_LIMIT", raising=False)
    spec = RunSpec.load({"model": "vit_h_14", "data": {"size": 224}}, "")
    with pytest.raises(SpecError, match=r"MEM_LIMIT '2048m': .* vit_h_14 needs more than 7\d\d\dm\. .*MEM_LIMIT=15g"):
        SUBSTRATES["compose"].check_size(spec)


@pytest.mark.parametrize(
    ("text", "size"), [("2g", 2 << 30), ("512M", 512 * MIB), ("64mb", 64 * MIB), ("1.5g", 1536 * MIB), ("4096", 4096)]
)
def test_a_limit_is_read_as_docker_reads_it(text: str, size: int) -> None:
    assert read_limit(text) == size


@pytest.mark.parametrize("text", ["lots", "", "-1g", "2 gigabytes"])
def test_a_limit_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"MEM_LIMIT .*Write e\.g\. MEM_LIMIT=2g"):
        read_limit(text)


@pytest.mark.parametrize(
    ("files", "limit"),
    [({"memory.max": "67108864\n"}, 64 * MIB), ({"memory.max": "max\n"}, None), ({}, None)],
)
def test_the_limit_of_a_container_is_that_of_its_cgroup(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert limit_of_container(tmp_path) == limit


def test_the_limit_of_cgroups_v1_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("67108864\n")
    assert limit_of_container(tmp_path) == 64 * MIB


def test_a_controller_refuses_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEM_LIMIT", "64m")
    with pytest.raises(SpecError, match="MEM_LIMIT '64m'"):
        SUBSTRATES["compose"].check_size(VGG)
