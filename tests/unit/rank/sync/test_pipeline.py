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
