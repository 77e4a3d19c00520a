"""Buckets: every parameter is in exactly one, gradients are views of the buffers, and buckets launch in order."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from testbed.rank.group import Group, single_rank_group
from testbed.rank.models import lenet5
from testbed.rank.sync.buckets import (
    Readiness,
    choose_bucket,
    flat_gradients,
    flat_parameters,
    in_order_of,
    make_buckets,
    memory_shape,
    split,
)
from testbed.spec.mode import SyncMode

MODES = ["ring/param", "ring/flat", "ring/bucket:1B", "ring/bucket:4KiB", "ring/bucket:100KiB", "ring/bucket:1GiB"]


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def shapes_of(groups: list[list[nn.Parameter]]) -> list[list[int]]:
    return [[p.numel() for p in group] for group in groups]


def bytes_of(group: list[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in group)


# --- choosing their size -------------------------------------------------------------------------------------------

VGG11_BYTES = 36_924_456


def two_ranks(*rates: float | None) -> list[Group]:
    """Both ranks of a group, with the rates (byte/s) that each knows."""
    store = torch.distributed.HashStore()
    return [Group(rank, 2, store, 5.0, rate=rate) for rank, rate in enumerate(rates)]


def test_all_ranks_choose_the_size_that_rank_0_chooses() -> None:
    slow, unknown = two_ranks(10e6 / 8, None)
    with ThreadPoolExecutor() as pool:
        chosen = list(
            pool.map(lambda g: choose_bucket(SyncMode.parse("ring/pipeline"), VGG11_BYTES, g), (slow, unknown))
        )
    assert chosen[0] == chosen[1] and str(chosen[0].mode) == "ring/bucket:256KiB/pipeline"
    why = "buckets of 256KiB, for a gradient of 36.9 MB, 2 ranks and 10 Mbit/s (measured)"
    assert chosen[0].why == f"ring/pipeline: {why}"


def test_a_requested_rate_comes_first_and_a_resumed_run_keeps_its_size() -> None:
    group, mode = single_rank_group(), SyncMode.parse("ring/pipeline")
    group.rate = 1.0
    assert choose_bucket(mode, VGG11_BYTES, group, [10**9, 10**8]).why.endswith("100 Mbit/s (requested)")
    before = choose_bucket(mode, VGG11_BYTES, single_rank_group(), [10**9], "ring/bucket:512KiB/pipeline")
    assert str(before.mode) == "ring/bucket:512KiB/pipeline" and before.why.endswith("as in the attempt before")


@pytest.mark.parametrize("mode", ["ring", "ddp", "ring/bucket:3MiB/pipeline", "ring/param/overlap"])
def test_a_mode_that_leaves_nothing_open_stays_as_it_is(mode: str) -> None:
    assert choose_bucket(SyncMode.parse(mode), 1, single_rank_group()) == (SyncMode.parse(mode), "")


# --- making buckets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_parameter_is_in_one_bucket_last_layer_first(mode: str) -> None:
    model = lenet5(10, (1, 32, 32))
    ordered = [p for group in make_buckets(list(model.parameters()), SyncMode.parse(mode)) for p in group]
    assert [id(p) for p in ordered] == [id(p) for p in reversed(list(model.parameters()))]


def test_param_is_one_buffer_each_and_flat_is_one_for_all() -> None:
    some = parameters(3, 1, 2)
    assert shapes_of(make_buckets(some, SyncMode.parse("ring/param"))) == [[2], [1], [3]]
    assert shapes_of(make_buckets(some, SyncMode.parse("ring/flat"))) == [[2, 1, 3]]


def test_a_bucket_is_filled_to_its_limit_and_a_larger_tensor_gets_its_own() -> None:
    some = parameters(5, 100, 3, 2, 4, 1)  # float32: the limit of 24 bytes is six elements
    assert shapes_of(make_buckets(some, SyncMode.parse("ring/bucket:24B"))) == [[1, 4], [2, 3], [100], [5]]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 400))
def test_no_bucket_exceeds_its_limit_unless_it_holds_one_tensor(sizes: list[int], limit: int) -> None:
    groups = make_buckets(parameters(*sizes), SyncMode.parse(f"ring/bucket:{limit}B"))
    assert [size for group in shapes_of(groups) for size in group] == sizes[::-1]
    assert all(groups)
    assert all(bytes_of(group) <= limit or sum(p.numel() > 0 for p in group) == 1 for group in groups)
    for one, following in itertools.pairwise(groups):
        assert bytes_of([*one, following[0]]) > limit  # no bucket was closed early


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_are_in_no_bucket(mode: str) -> None:
    frozen, moving = parameters(4, 6)
    frozen.requires_grad_(False)
    assert [[id(p) for p in group] for group in make_buckets([frozen, moving], SyncMode.parse(mode))] == [[id(moving)]]
    assert make_buckets([frozen], SyncMode.parse(mode)) == []


# --- gradients in buffers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_backward_writes_into_the_buffers(mode: str) -> None:
    torch.manual_seed(0)
    model, twin = lenet5(10, (1, 32, 32)), lenet5(10, (1, 32, 32))
    twin.load_state_dict(model.state_dict())
    groups = make_buckets(list(model.parameters()), SyncMode.parse(mode))
    buffers = flat_gradients(groups)
    images = torch.randn(2, 1, 32, 32)
    for net in (model, twin):
        net(images).square().sum().backward()
    wanted = {id(p): q.grad for p, q in zip(model.parameters(), twin.parameters(), strict=True)}
    for buffer, group in zip(buffers, groups, strict=True):
        torch.testing.assert_close(buffer, torch.cat([wanted[id(p)].reshape(-1) for p in group]))  # type: ignore[union-attr]


def test_changing_a_buffer_changes_the_gradient_the_optimizer_sees() -> None:
    first, second = parameters(2, 3)
    (buffer,) = flat_gradients([[second, first]])
    buffer.copy_(torch.arange(5.0))
    assert second.grad is not None and second.grad.tolist() == [0.0, 1.0, 2.0]
    assert first.grad is not None and first.grad.tolist() == [3.0, 4.0]


def test_a_second_backward_adds_up_and_an_unused_parameter_counts_as_zero() -> None:
    used, unused = parameters(2, 3)
    (buffer,) = flat_gradients([[used, unused]])
    for _ in range(2):
        (used * torch.tensor([1.0, 5.0])).sum().backward()
    assert buffer.tolist() == [2.0, 10.0, 0.0, 0.0, 0.0]


def test_gradients_of_a_parameter_that_is_not_contiguous_land_in_the_right_places() -> None:
    turned = nn.Parameter(torch.zeros(3, 2).t())
    assert not turned.is_contiguous()
    (buffer,) = flat_gradients([[turned]])
    (turned * torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).sum().backward()
    assert turned.grad is not None and turned.grad.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert buffer.tolist() == [1.0, 4.0, 2.0, 5.0, 3.0, 6.0], "the parameter's order in memory"


def test_a_gradient_that_is_not_contiguous_lands_in_the_right_places() -> None:
    value = nn.Parameter(torch.zeros(2, 3))
    (buffer,) = flat_gradients([[value]])
    (value.t() * torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]])).sum().backward()
    assert buffer.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_buffers_have_the_type_of_their_parameters() -> None:
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert flat_gradients([[double]])[0].dtype == torch.float64


# --- parameters in buffers ---------------------------------------------------------------------------------------


def test_parameters_become_views_and_keep_their_values() -> None:
    turned = nn.Parameter(torch.arange(6.0).view(3, 2).t())
    plain = nn.Parameter(torch.tensor([7.0, 8.0]))
    (buffer,) = flat_parameters([[turned, plain]])
    assert turned.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    buffer.add_(1)
    assert turned.tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert plain.tolist() == [8.0, 9.0]


LAYOUTS = {  # how a tensor is in memory, and its dimensions from the outermost
    "channels last": (torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last), (4, 2, 5, 3)),
    "transposed": (torch.randn(3, 2).t(), (3, 2)),
    "contiguous": (torch.randn(2, 1, 3), (2, 1, 3)),
    "a number": (torch.randn(()), ()),
    "no elements": (torch.randn(2, 0), (2, 0)),
}


@pytest.mark.parametrize(("value", "shape"), LAYOUTS.values(), ids=LAYOUTS)
def test_parameters_and_gradients_keep_their_order_in_memory(value: Tensor, shape: tuple[int, ...]) -> None:
    before, after = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(2))
    parameter = nn.Parameter(value.clone())
    assert parameter.stride() == value.stride()
    bucket = [before, parameter, after]
    (values,), (gradients,) = flat_parameters([bucket]), flat_gradients([bucket])
    assert parameter.grad is not None and parameter.stride() == parameter.grad.stride() == value.stride()
    assert torch.equal(parameter, value)
    in_memory = value.as_strided((value.numel(),), (1,))
    assert torch.equal(values, torch.cat([torch.zeros(3), in_memory, torch.ones(2)]))
    assert torch.equal(in_order_of(parameter, value.contiguous()), in_memory) and memory_shape(parameter) == shape
    (parameter * value).sum().backward()
    assert torch.equal(gradients, torch.cat([torch.zeros(3), in_memory, torch.zeros(2)]))


def test_a_parameter_with_gaps_in_memory_gets_none() -> None:
    parameter = nn.Parameter(torch.arange(12.0).view(3, 4)[:, :2])
    (values,) = flat_parameters([[parameter]])
    assert values.tolist() == [0.0, 1.0, 4.0, 5.0, 8.0, 9.0] and parameter.is_contiguous()


def test_an_optimizer_made_before_still_moves_the_buffer() -> None:
    (value,) = parameters(2)
    optimizer = torch.optim.SGD([value], lr=1.0)
    (buffer,) = flat_parameters([[value]])
    flat_gradients([[value]])[0].fill_(3.0)
    optimizer.step()
    assert buffer.tolist() == [-3.0, -3.0]


# --- shards and segments -----------------------------------------------------------------------------------------


@given(st.integers(0, 100), st.integers(1, 20))
def test_a_split_covers_the_buffer_in_slices_of_almost_one_length(length: int, count: int) -> None:
    buffer = torch.arange(length)
    slices = split(buffer, count)
    assert len(slices) == count and torch.equal(torch.cat(slices), buffer)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


# --- readiness ---------------------------------------------------------------------------------------------------


def test_buckets_launch_in_their_order_in_whatever_order_gradients_come() -> None:
    a, b, c, unused = (nn.Parameter(torch.zeros(1)) for _ in range(4))
    launched: list[int] = []
    readiness = Readiness(SyncMode.parse("ring/param/overlap"), [[a], [b, c], [c], [unused]], launched.append)
    readiness.ready(c)
    readiness.ready(b)
    assert launched == []
    readiness.ready(a)
    assert launched == [0, 1, 2]
    assert readiness.absent() == [unused]
    readiness.finish()
    assert launched == [0, 1, 2, 3]
    readiness.start()
    with readiness.pause():
        readiness.ready(a)
    assert launched == [0, 1, 2, 3]
