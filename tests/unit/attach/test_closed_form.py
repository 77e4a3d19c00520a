"""Collectives without communication: what they give where all ranks have equal inputs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from testbed.attach.closed_form import LAZY_NUMBERS, Call, ClosedForms, Done, fill, round_factor, write
from testbed.spec.errors import NoClosedForm

LONG = LAZY_NUMBERS + 1


def call(operation: str, *arguments: Any, rank: int = 0, world: int = 2, **named: Any) -> Call:
    return Call(operation, arguments, named, rank, world)


def test_factors_of_a_collective_are_one_n_or_its_inverse() -> None:
    own = torch.tensor([1.0, -2.0])
    assert [round_factor(f * own, own, 4) for f in (1, 4, 0.25, 3, 0)] == [1.0, 4.0, 0.25, None, None]
    assert round_factor(0 * own, 0 * own, 4) == 0.0


def test_arguments_are_found_by_place_and_by_name() -> None:
    tensor, parts = torch.ones(3), [torch.zeros(3), torch.zeros(3)]
    made = call("gather", tensor, parts, dst=0, async_op=True)
    assert made.tensor is tensor and made.results == parts and made.asynchronous
    assert made.blocking["async_op"] is False and made.numel == 3
    assert call("all_gather", parts, tensor).tensor is tensor


def test_results_of_one_tensor_are_its_shards() -> None:
    whole, own = torch.arange(6.0), torch.zeros(2)
    assert [list(each) for each in call("all_gather_into_tensor", whole, own, world=3).results] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    assert [list(each) for each in call("reduce_scatter_tensor", own, whole, world=3).inputs] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


@pytest.mark.parametrize(("operation", "multiple"), [("SUM", 3.0), ("AVG", 1.0), ("MAX", None)])
def test_a_reduction_multiplies_equal_inputs_by_its_definition(operation: str, multiple: float | None) -> None:
    assert call("all_reduce", torch.ones(2), op=getattr(dist.ReduceOp, operation), world=3).multiple == multiple


def test_all_reduce_is_multiplied_and_needs_no_copy() -> None:
    forms, tensor = ClosedForms(nullcontext), torch.ones(4)
    forms.factors["all_reduce", "a.py:1"] = 2.0
    forms.apply(("all_reduce", "a.py:1"), call("all_reduce", tensor))
    assert tensor.tolist() == [2.0] * 4


@pytest.mark.parametrize("length", [3, LONG])
def test_gather_gives_copies_that_are_independent(length: int) -> None:
    own, parts = torch.full((length,), 5.0), [torch.zeros(length), torch.zeros(length)]
    ClosedForms(nullcontext).apply(("gather", "a.py:1"), call("gather", own, parts))
    parts[0] += 1
    own += 2
    assert [float(each[0]) for each in (own, *parts)] == [7.0, 6.0, 5.0]


def test_shards_of_a_larger_tensor_are_written_in_place() -> None:
    whole, own = torch.zeros(2 * LONG), torch.ones(LONG)
    fill(list(whole.chunk(2)), own, 1.0)
    assert whole.tolist() == [1.0] * (2 * LONG)


def test_scatter_gives_what_was_gathered_bit_by_bit() -> None:
    """Rank 0 of three would get (a + a + a) / 3 from the script's own arithmetic, the others a."""
    forms, gradient = ClosedForms(nullcontext), torch.tensor([0.1, 0.3])
    parts = [torch.zeros(2) for _ in range(3)]
    before, version = gradient.clone(), gradient._version
    forms.apply(("gather", "a.py:1"), call("gather", gradient, parts, world=3))
    mean = torch.nextafter(gradient, torch.ones(2))
    forms.apply(("scatter", "a.py:2"), call("scatter", gradient, [mean] * 3, world=3))
    assert torch.equal(gradient, before)
    assert gradient._version == version  # nothing was written


def test_two_loops_of_gather_and_scatter_are_paired_in_their_order() -> None:
    forms, first, second = ClosedForms(nullcontext), torch.tensor([1.0]), torch.tensor([2.0])
    for gradient in (first, second):
        forms.apply(("gather", "a.py:1"), call("gather", gradient, rank=1))
    received = [torch.zeros(1), torch.zeros(1)]
    for tensor in received:
        forms.apply(("scatter", "a.py:2"), call("scatter", tensor, rank=1))
    assert [each.item() for each in received] == [1.0, 2.0]


def test_reduce_keeps_what_was_sent_for_the_broadcast() -> None:
    """A rank that is no root divides what it has left; the broadcast brings the mean."""
    forms, gradient = ClosedForms(nullcontext), torch.tensor([4.0])
    forms.apply(("reduce", "a.py:1"), call("reduce", gradient, 0, rank=1))
    gradient /= 2
    forms.apply(("broadcast", "a.py:2"), call("broadcast", gradient, 0, rank=1))
    assert gradient.item() == 4.0


def test_an_all_gather_after_reduce_scatter_gives_all_shards() -> None:
    forms, whole, own = ClosedForms(nullcontext), torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(2)
    scatter, gather = ("reduce_scatter_tensor", "a.py:1"), ("all_gather_into_tensor", "a.py:2")

    def summed(output: Tensor, input: Tensor, async_op: bool) -> None:
        output.copy_(2 * input[2:])

    def gathered(output_tensor: Tensor, input_tensor: Tensor, async_op: bool) -> None:
        output_tensor.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))  # rank 0 has divided its shard, too

    forms.learn(scatter, call("reduce_scatter_tensor", own, whole, rank=1), summed)
    assert own.tolist() == [6.0, 8.0]
    own /= 2
    forms.learn(gather, call("all_gather_into_tensor", whole, own, rank=1), gathered)
    assert forms.factors == {scatter: 2.0, gather: 1.0} and forms.of_shards == {gather}
    forms.start()
    whole = torch.tensor([5.0, 6.0, 7.0, 8.0])
    forms.apply(scatter, call("reduce_scatter_tensor", own, whole, rank=1))
    own /= 2
    result = torch.zeros(4)
    forms.apply(gather, call("all_gather_into_tensor", result, own, rank=1))
    assert result.tolist() == [5.0, 6.0, 7.0, 8.0]


def test_what_is_no_multiple_on_equal_inputs_has_no_closed_form() -> None:
    def shifted(tensor: Tensor, async_op: bool) -> None:
        tensor += torch.tensor([1.0, 0.0])

    with pytest.raises(NoClosedForm, match="does not give a multiple"):
        ClosedForms(nullcontext).learn(("all_reduce", "a.py:1"), call("all_reduce", torch.ones(2)), shifted)


def test_during_backward_only_a_sum_or_mean_is_replaced() -> None:
    forms, tensor = ClosedForms(nullcontext), torch.ones(2)
    forms.multiply(call("all_reduce", tensor, world=3))
    assert tensor.tolist() == [3.0, 3.0]
    with pytest.raises(NoClosedForm, match="only all_reduce"):
        forms.multiply(call("broadcast", tensor, 0))


def test_writing_to_itself_multiplies_in_place() -> None:
    tensor = torch.ones(2)
    write(tensor, tensor.view(2), 3.0)
    assert tensor.tolist() == [3.0, 3.0]


def test_a_replaced_work_has_ended_and_has_a_future() -> None:
    result = [torch.ones(1)]
    done = Done(result)
    assert done.wait() and done.is_completed() and done.is_success()
    assert done.get_future().wait() is result or done.get_future().wait() == result
