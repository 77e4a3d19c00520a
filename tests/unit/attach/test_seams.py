"""Helpers of the seams; the seams themselves run in scripts (tests/gloo/test_observer_gloo.py)."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from testbed.attach import seams
from testbed.attach.events import Hub, Part
from testbed.attach.seams import BLOCKING, OPERATIONS, Position
from tests.support.processes import until


def test_every_operation_exists_and_has_the_argument_that_is_counted() -> None:
    for name, (_, counted) in OPERATIONS.items():
        names = [argument.name for argument in getattr(torch.ops.c10d, name).default._schema.arguments]
        assert "process_group" in names and (not counted or counted in names), name


def test_every_blocking_function_exists() -> None:
    assert [name for name in BLOCKING if not hasattr(dist, name) and not hasattr(seams.distributed_c10d, name)] == []


@pytest.mark.parametrize(
    ("arguments", "named", "operation"),
    [
        ((torch.zeros(1),), {}, "sum"),
        ((torch.zeros(1), dist.ReduceOp.MAX), {}, "max"),
        ((torch.zeros(1),), {"op": dist.ReduceOp.AVG}, "avg"),
    ],
)
def test_the_reduce_operation_of_a_call(
    arguments: tuple[object, ...], named: dict[str, object], operation: str
) -> None:
    assert seams._reduce_operation(dist.all_reduce)(arguments, named) == operation


def test_a_function_without_reduction_counts_as_a_sum() -> None:
    assert seams._reduce_operation(dist.broadcast)((torch.zeros(1), 0), {}) == "sum"


TENSOR = torch.zeros(2)


@pytest.mark.parametrize(
    ("function", "arguments", "named", "expected"),
    [
        (dist.all_reduce, (TENSOR,), {}, {}),
        (dist.all_reduce, (), {"tensor": TENSOR, "group": None, "async_op": True}, {}),
        (dist.broadcast, (TENSOR, 3), {}, {"root": 3}),
        (dist.reduce, (TENSOR,), {"dst": 2}, {"root": 2}),
        (dist.gather, (TENSOR, None), {}, {"root": 0}),
        (dist.scatter, (TENSOR, [TENSOR], 1), {}, {"root": 1}),
        (dist.all_gather, ([TENSOR], TENSOR), {}, {}),
    ],
)
def test_a_simple_call_says_what_it_sends(
    function: Callable[..., object], arguments: tuple[object, ...], named: dict[str, object], expected: object
) -> None:
    describe = seams._simple_call(function)
    assert describe is not None
    described = describe(arguments, named)
    assert described is not None and described[0] == (TENSOR,) and described[1] == expected


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (dist.all_reduce, (TENSOR, dist.ReduceOp.SUM, "a group"), {}),
        (dist.all_reduce, (TENSOR,), {"group": "a group"}),
        (dist.broadcast, (TENSOR,), {"group_src": 1}),
        (dist.all_reduce, (torch.zeros(2, dtype=torch.complex64),), {}),
        (dist.all_reduce, (torch.zeros(2).to_sparse(),), {}),
        (dist.all_reduce, (torch.zeros(2, device="meta"),), {}),
        (dist.all_reduce, ("no tensor",), {}),
        (dist.all_reduce, (), {}),
    ],
)
def test_what_the_arguments_do_not_say_is_left_to_the_dispatcher(
    function: Callable[..., object], arguments: tuple[object, ...], named: dict[str, object]
) -> None:
    describe = seams._simple_call(function)
    assert describe is not None and describe(arguments, named) is None


def test_functions_that_start_several_collectives_are_not_simple() -> None:
    assert seams._simple_call(dist.all_gather_object) is None and set(seams.SIMPLE) <= set(BLOCKING)


def test_tensors_are_found_in_nested_lists() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert list(seams._tensors([[one], (two,)])) == [one, two] and list(seams._tensors(3)) == []


def test_a_forked_process_has_nothing_in_flight() -> None:
    position = Position()
    position.phase = "backward"
    position.calls.append(seams.Call("sum"))
    position.forget()
    assert position.phase == "other" and position.calls == [] and position.pending == {}


def test_a_backward_pass_inside_another_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.utils.checkpoint(use_reentrant=True) calls torch.autograd.backward inside the script's backward pass."""

    class Passes(Part):
        def backward_began(self, loss: object) -> None:
            seen.append("began")

        def backward_ended(self, reduced: list[object]) -> None:
            seen.append("ended")

    seen: list[str] = []
    position = Position()
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # restored at the end
    seams.watch_backward(Hub(lambda *_: None, lambda: [Passes()]), position)
    layer = torch.nn.Linear(2, 2)
    for weight in layer.parameters():
        weight.register_post_accumulate_grad_hook(lambda _: seen.append(position.phase))
    inputs = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        checkpoint(layer, checkpoint(torch.tanh, inputs, use_reentrant=True), use_reentrant=True).sum().backward()
    assert seen == ["began", "backward", "backward", "ended"] * 2 and position.phase == "sync"


def test_a_thread_that_works_outside_python_is_seen_until_it_ends() -> None:
    begun, stop = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        while not stop.is_set():
            hashlib.sha256(bytes(1 << 22))  # without the lock of Python

    worker = threading.Thread(target=work)
    worker.start()
    begun.wait()
    until(seams.other_thread_runs)
    stop.set()
    worker.join()
    until(lambda: not seams.other_thread_runs())
