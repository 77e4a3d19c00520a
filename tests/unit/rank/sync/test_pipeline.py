"""The pipeline: how it divides the buffers, what its threads do when one fails, and what is sent first."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from testbed.rank.group import Group, NoWork, single_rank_group
from testbed.rank.optim import Optimizer
from testbed.rank.sync.algorithms import plan_for
from testbed.rank.sync.pipeline import (
    GLOO_THREAD,
    MAX_BUCKETS,
    TCP_NOTSENT_LOWAT,
    UNSENT_BYTES,
    WINDOW_BYTES,
    Bucket,
    ForwardWaits,
    Pipeline,
    Sender,
    bucket_bounds,
    divide,
    use_sched_batch,
    use_sched_batch_in_gloo,
)
from testbed.results.timeline import Timeline
from testbed.spec.errors import RankFailed, SpecError
from testbed.spec.mode import SyncMode
from testbed.spec.run import OptimizerSpec
from testbed.spec.units import parse_size

DEADLINE = 1.0

# --- buckets and shards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "most"), [(1000, 100), (1000, 1), (7, 100), (1, 8), (175, 100), (188, 100)])
def test_buckets_cover_the_buffer_and_the_last_ones_are_small(total: int, most: int) -> None:
    cuts = bucket_bounds(total, most)
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    assert (cuts[0], cuts[-1]) == (0, total)
    assert min(sizes) > 0
    assert max(sizes) <= most
    if total >= most:
        assert sizes[-1] <= max(1, most // 8)


def test_a_bucket_lists_the_parameters_that_lie_in_it_wholly_or_in_part() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (6, 1, 5)]
    flat = torch.zeros(12)
    buckets = divide(
        parameters, flat, flat.clone(), limit_bytes=4 * 4, plan=plan_for("ring", 0, 1), group=single_rank_group()
    )
    cuts = bucket_bounds(12, 4)
    for bucket, a, b in zip(buckets, cuts, cuts[1:], strict=False):
        expected = [
            p for p, (begin, end) in zip(parameters, [(0, 6), (6, 7), (7, 12)], strict=True) if a < end and begin < b
        ]
        assert [id(p) for p in bucket.parameters] == [id(p) for p in expected]


@pytest.mark.parametrize(("length", "limit"), [(100_000, 1024), (9_231_114, 142 << 10)], ids=["small", "vgg11"])
def test_more_buckets_than_threads_are_refused_with_a_size_that_works(length: int, limit: int) -> None:
    parameters, flat, rounds = [nn.Parameter(torch.zeros(length))], torch.zeros(length), plan_for("ring", 0, 1)
    with pytest.raises(SpecError, match=r"would make (39\d|257) buckets of this model.*Use bucket:\d+KiB") as refused:
        divide(parameters, flat, flat.clone(), limit, rounds, single_rank_group())
    size = parse_size(str(refused.value).rpartition("bucket:")[2].rstrip("."))
    assert len(divide(parameters, flat, flat.clone(), size, rounds, single_rank_group())) <= MAX_BUCKETS


# --- failures in threads -----------------------------------------------------------------------------------------


class Disconnected(Group):
    """One rank that loses its connections when the norm is computed."""

    def total(self, number: Tensor) -> Tensor:
        raise RuntimeError("gloo: connection closed by peer")


class Rig:
    """A small model in buckets of four numbers, with clipping; `passed` is called between its layers' backward."""

    def __init__(self, kind: type[Group], passed: Callable[[Tensor], None] = lambda gradient: None) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        update = Optimizer(OptimizerSpec(lr=0.1, clip=1.0), model, batch=1, total=2)
        group = kind(0, 1, dist.HashStore(), DEADLINE)
        self.pipeline = Pipeline(SyncMode.parse("ring/bucket:16B/pipeline"), group, Timeline())
        self.module = self.pipeline.attach(model, update)

        def watch(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(passed)

        model[0].register_forward_hook(watch)

    def step(self) -> None:
        self.pipeline.zero()
        self.module(torch.ones(1, 3)).sum().backward()
        self.pipeline.step()

    def end(self) -> None:
        """End all threads; in a run the end of the process does."""
        assert self.pipeline.clipping
        self.pipeline.clipping.abort()
        for bucket in self.pipeline.buckets:
            bucket.launched.put(None)
        for thread in self.pipeline.threads:
            thread.join(5)
        self.pipeline.sender.stop()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*arguments: Any) -> Rig:
        made.append(Rig(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_the_first_error_is_raised_when_the_norm_cannot_be_computed(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread has the error; the broken barrier wakes the others before that thread has reported it."""
    made = rig(Disconnected)
    fail = made.pipeline._fail

    def late(error: Exception) -> None:
        time.sleep(0.2 * ("connection" in str(error)))
        fail(error)

    monkeypatch.setattr(made.pipeline, "_fail", late)
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        made.step()
        made.pipeline.flush()
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        made.pipeline.close()


def test_a_failing_thread_wakes_those_that_wait_for_the_norm(rig: Callable[..., Rig]) -> None:
    made = rig(Group, lambda gradient: made.pipeline._fail(RuntimeError("the sender broke")))
    with pytest.raises(RuntimeError, match="the sender broke"):
        made.step()
    for bucket in made.pipeline.buckets:
        bucket.launched.put(None)
    for thread in made.pipeline.threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in made.pipeline.threads)


def test_a_failing_backward_leaves_waits_that_time_out(rig: Callable[..., Rig]) -> None:
    """Launched buckets wait for the squares of the others, which never come; threads end with the process."""

    def broken(gradient: Tensor) -> None:
        raise ValueError("backward broke")

    made = rig(Group, broken)
    with pytest.raises(ValueError, match="backward broke"):
        made.step()
    for finish in (made.pipeline.flush, made.pipeline.close):
        with pytest.raises(RankFailed, match="was not complete within"):
            finish()
    assert all(thread.daemon for thread in made.pipeline.threads)


def test_a_backward_longer_than_the_deadline_is_no_failure(rig: Callable[..., Rig]) -> None:
    made = rig(Group, lambda gradient: time.sleep(1.3 * DEADLINE))
    before = [value.clone() for value in made.module.parameters()]
    made.step()
    made.pipeline.close()
    assert not any(torch.equal(a, b) for a, b in zip(before, made.module.parameters(), strict=True))


# --- the sender --------------------------------------------------------------------------------------------------


def test_the_sender_sends_the_most_urgent_shard_first() -> None:
    gate, order = threading.Event(), []

    class Held(NoWork):
        def wait(self, timeout: object) -> bool:
            return gate.wait(5)

    def send(name: str) -> Held:
        order.append(name)
        return Held()

    sender = Sender(single_rank_group(), fail=lambda error: order.append(repr(error)))
    sender.put((1, 0), WINDOW_BYTES, lambda: send("first"))
    while not order:
        time.sleep(0.001)  # until it is sent, and fills the window
    for urgency, name in (((1, 0), "values of layer 9"), ((1, -9), "values of layer 0"), ((0, 5), "gradients")):
        sender.put(urgency, WINDOW_BYTES, lambda name=name: send(name))
    gate.set()
    sender.stop()
    assert order == ["first", "gradients", "values of layer 0", "values of layer 9"], "chosen when there is room"


def test_a_sender_limits_the_kernels_queue_and_resets_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        before = len(list(Path("/proc/self/fd").iterdir()))
        sender = Sender(single_rank_group(), fail=lambda error: None)
        assert ours.getsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT) == UNSENT_BYTES
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        sender.stop()
        assert ours.getsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT) == 0, "the limit must not hold for the next mode"


def test_a_sender_reports_its_failure() -> None:
    told: list[str] = []

    def broken() -> NoWork:
        raise RuntimeError("peer is gone")

    sender = Sender(single_rank_group(), fail=lambda error: told.append(str(error)))
    sender.put((0,), 1, broken)
    sender.stop()
    assert told == ["peer is gone"]


# --- scheduling class --------------------------------------------------------------------------------------------


def test_sched_batch_applies_to_the_calling_thread_only() -> None:
    found: list[int] = []

    def work() -> None:
        use_sched_batch()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH] and os.sched_getscheduler(0) == os.SCHED_OTHER


def test_gloos_thread_is_found_by_its_name_and_reset() -> None:
    seen: list[int] = []
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(GLOO_THREAD)
        ready.set()
        done.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(10)
    for enabled in (True, False):
        use_sched_batch_in_gloo(enabled)
        seen.append(os.sched_getscheduler(thread.native_id or 0))
    done.set()
    thread.join()
    assert seen == [os.SCHED_BATCH, os.SCHED_OTHER] and os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_thread_that_has_ended_is_ignored() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    use_sched_batch(thread.native_id or 0)


# --- what a forward waits for ------------------------------------------------------------------------------------


class Watched:
    """A model after its first step: `waited` are the buckets of each wait of a later forward, one parameter each."""

    def __init__(self, model: nn.Module, *inputs: Any) -> None:
        self.model, self.inputs = model, inputs
        self.events: list[str] = []
        parameters = dict(model.named_parameters())
        self.names = {number: name for number, name in enumerate(parameters)}
        buckets = [Bucket(number, 0, [], [], [], [p]) for number, p in enumerate(parameters.values())]
        self.waits = ForwardWaits(model, buckets, self._wait)
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            module.register_forward_hook(lambda m, i, o, name=name: self.events.append(f"end {name}"))
        model(*inputs)
        self.waits.finish_first_forward()
        self.events.clear()

    def _wait(self, buckets: Any) -> None:
        self.events.append("wait " + " ".join(sorted(self.names[bucket.number] for bucket in buckets)))

    def forward(self) -> list[str]:
        self.model(*self.inputs)
        return self.events


def test_a_layer_waits_for_its_own_parameters_when_it_is_called() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    found = Watched(model, torch.ones(1, 2)).forward()
    assert found == ["wait 0.bias 0.weight", "end 0", "end 1", "wait 2.bias 2.weight", "end 2", "end "]


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(4, 2, batch_first=True) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, x, x)[0]
        return x


def test_multihead_attention_waits_for_its_own_projection_alone() -> None:
    """It reads `out_proj.weight` without a call of `out_proj`."""
    found = Watched(Blocks(2), torch.ones(1, 3, 4)).forward()
    own = ("in_proj_bias", "in_proj_weight", "out_proj.bias", "out_proj.weight")
    expected = [[f"wait {' '.join(f'blocks.{k}.{name}' for name in own)}", f"end blocks.{k}"] for k in range(2)]
    assert found == [*expected[0], *expected[1], "end "]


class Tied(nn.Module):
    """An embedding and a head with one weight; `by_call`: the head is a layer, else its weight is read."""

    def __init__(self, by_call: bool) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.by_call = by_call

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.middle(self.embedding(tokens))
        return self.head(x) if self.by_call else nn.functional.linear(x, self.head.weight)


@pytest.mark.parametrize("by_call", [True, False])
def test_a_tied_weight_is_waited_for_at_its_first_use(by_call: bool) -> None:
    found = Watched(Tied(by_call), torch.tensor([1, 2])).forward()
    assert found.index("wait embedding.weight") < found.index("end embedding")


class Borrower(nn.Module):
    """Reads the weight of a layer that is not its child."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.owner = [owner]  # not registered

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.owner[0].weight.t()


class Borrowing(nn.Module):
    def __init__(self, called: bool) -> None:
        super().__init__()
        self.first, self.owner = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.borrower = Borrower(self.owner)
        self.called = called

    def forward(self, x: Tensor) -> Tensor:
        x = self.borrower(self.first(x))
        return self.owner(x) if self.called else x


@pytest.mark.parametrize("called", [True, False])
def test_a_module_waits_for_a_weight_that_it_reads_from_another(called: bool) -> None:
    """Also if the other is called, because that is later."""
    found = Watched(Borrowing(called), torch.ones(1, 2)).forward()
    assert found[:4] == ["wait first.bias first.weight", "end first", "wait owner.weight", "end borrower"]


class Block(nn.Module):
    """Neither the call of a compiled layer nor what it reads is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled(x)  # type: ignore[no-any-return]


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.block = nn.Linear(2, 2), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.before(x))  # type: ignore[no-any-return]


def test_a_layer_that_nothing_is_seen_to_read_is_waited_for_at_the_nearest_module_that_is_called() -> None:
    found = Watched(Scripted(), torch.ones(1, 2)).forward()
    inner = "wait block.compiled.0.bias block.compiled.0.weight"
    assert found == ["wait before.bias before.weight", "end before", inner, "end block", "end "]


def test_an_error_in_the_first_forward_leaves_no_mode_behind() -> None:
    class Broken(nn.Module):
        fine = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            if not self.fine:
                raise ValueError("not yet")
            return x

    model = Broken()
    waits = ForwardWaits(model, [Bucket(0, 0, [], [], [], list(model.parameters()))], lambda buckets: None)
    with pytest.raises(ValueError, match="not yet"):
        model(torch.ones(1, 2))
    assert torch.overrides._get_current_function_mode() is None  # type: ignore[no-untyped-call]
    model.fine = True
    model(torch.ones(1, 2))
    waits.finish_first_forward()
    assert torch.overrides._get_current_function_mode() is None  # type: ignore[no-untyped-call]
