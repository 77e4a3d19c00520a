"""Known numbers: what is sent before training, what must come out, and how far off rounding may be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from testbed.rank.group import single_rank_group
from testbed.rank.sync.buckets import make_buckets
from testbed.rank.sync.check import (
    MAX_NUMBERS,
    MIN_NUMBERS,
    Case,
    check_mode,
    cut_case,
    expected_numbers,
    known_numbers,
    tolerance,
)
from testbed.spec.run import RunSpec

VGG = [torch.Size(shape) for shape in ([64, 3, 3, 3], [64], [512, 512, 3, 3], [512], [256, 128, 3, 3], [10, 512], [10])]


def case_of(mode: str, nodes: int = 4, shapes: list[torch.Size] = VGG, **values: Any) -> Case:
    return cut_case(RunSpec(mode=mode, nodes=nodes, batch_per_rank=1, **values), shapes)  # type: ignore[arg-type]


def buffers(case: Case) -> list[int]:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in case.shapes]
    return [sum(p.numel() for p in bucket) for bucket in make_buckets(parameters, case.mode)]


def test_a_small_model_is_sent_as_it_is() -> None:
    shapes = [torch.Size([7, 3]), torch.Size([]), torch.Size([61])]
    case = case_of("ring/bucket:1KiB/overlap", shapes=shapes)
    assert (case.shapes, str(case.mode)) == (shapes, "ring/bucket:1KiB/overlap")


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 64, 256])
@pytest.mark.parametrize("rate", [None, "1gbit", "1mbit", "64kbit"])
@pytest.mark.parametrize("mode", ["ring", "ring/param", "ring/bucket:2MiB", "ddp", "ring/bucket:2MiB/pipeline", "none"])
def test_a_large_model_is_cut_to_what_a_link_sends_in_milliseconds(mode: str, rate: str | None, nodes: int) -> None:
    case = case_of(mode, nodes, link={"rate": rate})
    total = sum(shape.numel() for shape in case.shapes)
    bits_per_s = case.spec.link.rate or math.inf
    assert total * 32 * nodes <= max(0.05 * bits_per_s, 32 * nodes * max(MIN_NUMBERS, 8 * nodes))
    assert total <= max(MAX_NUMBERS // nodes, 8 * nodes)


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("mode", ["ring", "ring/param", "ring/bucket:2MiB"])
def test_cut_buffers_have_the_remainders_of_the_full_ones(mode: str, nodes: int) -> None:
    case = case_of(mode, nodes, link={"rate": "10mbit"})
    parameters = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in VGG]
    full = [sum(p.numel() for p in bucket) for bucket in make_buckets(parameters, case.spec.mode)]
    found = buffers(case)
    assert len(found) == (3 if mode == "ring/param" else len(full))  # the first is the shortest, too
    assert {length % nodes for length in found} <= {length % nodes for length in full}
    assert found[0] % nodes == full[0] % nodes and found[-1] % nodes == full[-1] % nodes


def test_a_mode_with_buckets_has_several_of_them_when_it_is_cut() -> None:
    assert len(buffers(case_of("ring/bucket:2MiB/overlap"))) > 1
    for mode in ("ddp", "ddp/bucket:2MiB", "ring/bucket:2MiB/pipeline"):
        case = case_of(mode)
        assert 1 < 4 * sum(shape.numel() for shape in case.shapes) / (case.mode.bucket or 0) < 4


def test_every_k_is_cut_to_two_local_steps_after_one_common_one() -> None:
    assert str(case_of("ring/every:50@1000").mode) == "ring/every:2@1"
    assert str(case_of("ring/every:50").mode) == "ring/every:2"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_known_numbers_differ_between_ranks_and_within_a_rank(dtype: str) -> None:
    case = case_of("ring", dtype=dtype)
    one, other = (torch.cat([values.reshape(-1) for values in known_numbers(case, rank)]) for rank in (0, 1))
    assert one.dtype == getattr(torch, dtype)
    assert len(one.unique()) == len(one) and not bool((one == other).any())
    assert float(one.min()) >= 1 and float(one.max()) <= 2


@pytest.mark.parametrize("r", [1, 2, 7])
def test_matrices_have_the_rank_that_powersgd_reproduces_and_so_has_their_mean(r: int) -> None:
    case = case_of(f"ring/powersgd:{r}", dtype="float64")
    (one,), (other,) = ([v for v in known_numbers(case, rank) if v.dim() > 1] for rank in (0, 1))
    for matrix in (one, other, (one + other) / 2):
        assert int(torch.linalg.matrix_rank(matrix, rtol=1e-9)) == r
        assert float(matrix.min()) >= 0 and float(matrix.max()) <= 3


def test_what_must_come_out_is_the_mean_of_all_ranks() -> None:
    case = case_of("ring", 3)
    numbers = [known_numbers(case, rank) for rank in range(3)]
    for found, *parts in zip(expected_numbers(case, 0, 3), *numbers, strict=True):
        torch.testing.assert_close(found, sum(part.double() for part in parts) / 3, rtol=1e-15, atol=0.0)


def test_without_synchronisation_a_rank_keeps_its_own() -> None:
    case = case_of("none", 3)
    for found, own in zip(expected_numbers(case, 2, 3), known_numbers(case, 2), strict=True):
        assert torch.equal(found, own.double())


def test_topk_sends_only_the_largest_of_each_bucket() -> None:
    case = case_of("direct/topk:0.1", 2, shapes=[torch.Size([20]), torch.Size([30])])
    numbers = [torch.cat(known_numbers(case, rank)).double() for rank in range(2)]
    kept = [torch.where(values >= values.topk(5).values.min(), values, 0.0) for values in numbers]
    torch.testing.assert_close(torch.cat(expected_numbers(case, 0, 2)), (kept[0] + kept[1]) / 2, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("n", [2, 4, 64])
def test_a_sum_that_was_not_divided_is_never_within_the_tolerance(n: int) -> None:
    """It is off by N - 1 times the mean, which is 1 at least; the largest number is 2, or 4 for powersgd."""
    for codec, largest in {"": 2, "/fp16": 2, "/bf16": 2, "/int8": 2, "/topk:0.1": 2, "/powersgd:1": 4}.items():
        assert largest * tolerance(case_of(f"direct{codec}", n), n) < n - 1


def test_a_single_rank_is_tried_too() -> None:
    spec = RunSpec(mode="single", batch=1)  # type: ignore[arg-type]
    model = torch.nn.Linear(3, 2)
    before = torch.get_rng_state()
    check_mode(spec, model, single_rank_group())
    assert torch.equal(torch.get_rng_state(), before)
