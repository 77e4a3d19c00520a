"""The pipeline: how it divides the buffers, what several ranks do together, and what a forward waits for."""

from __future__ import annotations

import functools
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

from testbed.rank.group import Group
from testbed.rank.optim import Optimizer
from testbed.rank.sync.pipeline import MAX_BUCKETS, Bucket, ForwardWaits, Pipeline, bucket_bounds, divide
from testbed.rank.watchdog import is_lost_peer
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
    buckets = divide(parameters, flat, flat.clone(), limit_bytes=4 * 4, n=1)
    cuts = bucket_bounds(12, 4)
    for bucket, a, b in zip(buckets, cuts, cuts[1:], strict=False):
        expected = [
            p for p, (begin, end) in zip(parameters, [(0, 6), (6, 7), (7, 12)], strict=True) if a < end and begin < b
        ]
        assert [id(p) for p in bucket.parameters] == [id(p) for p in expected]


@pytest.mark.parametrize(("length", "limit"), [(1_100_000, 1024), (9_231_114, 8 << 10)], ids=["small", "vgg11"])
def test_too_many_buckets_are_refused_with_a_size_that_works(length: int, limit: int) -> None:
    parameters, flat = [nn.Parameter(torch.zeros(length))], torch.zeros(length)
    with pytest.raises(
        SpecError, match=r"would make (429\d|451\d) buckets of this model.*Use bucket:\d+KiB"
    ) as refused:
        divide(parameters, flat, flat.clone(), limit, n=1)
    size = parse_size(str(refused.value).rpartition("bucket:")[2].rstrip("."))
    assert len(divide(parameters, flat, flat.clone(), size, n=1)) <= MAX_BUCKETS


# --- several ranks in one process ---------------------------------------------------------------------------------


SEEDING = threading.Lock()  # the threads of all ranks share torch's random generator


def two_layers(dtype: torch.dtype) -> nn.Sequential:
    """The same model on every call."""
    with SEEDING:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


class Rig:
    """One rank with a small model in buckets of four numbers; `passed` is called between its layers' backward."""

    def __init__(
        self, rank: int = 0, n: int = 1, store: dist.Store | None = None, clip: float | None = 1.0, **changes: Any
    ) -> None:
        self.passed: Callable[[Tensor], None] = lambda gradient: None
        self.dtype = changes.get("dtype", torch.float32)
        self.model = two_layers(self.dtype)
        self.rule = OptimizerSpec(lr=0.1, clip=clip)
        self.group = Group(rank, n, store or dist.HashStore(), changes.get("deadline", DEADLINE))
        self.pipeline = Pipeline(SyncMode.parse("ring/bucket:16B/pipeline"), self.group, Timeline())
        self.module = self.pipeline.attach(self.model, Optimizer(self.rule, self.model, batch=1, total=2))
        self.model[0].register_forward_hook(lambda layer, inputs, output: output.register_hook(self._pass) and None)

    def _pass(self, gradient: Tensor) -> None:
        self.passed(gradient)

    def step(self, number: int = 0) -> None:
        self.pipeline.zero()
        image = torch.full((1, 3), 1.0 + self.group.rank + number, dtype=self.dtype)
        self.module(image).square().sum().backward()
        self.pipeline.step()

    def values(self) -> list[Tensor]:
        return [value.detach().clone() for value in self.model.parameters()]


@pytest.fixture
def together() -> Iterator[Callable[..., list[Any]]]:
    """`together(n, work)` calls work(rank, store) in a thread for each of n ranks and returns what each returned."""
    with ThreadPoolExecutor(16) as pool:

        def run(n: int, work: Callable[[int, dist.Store], Any]) -> list[Any]:
            store = dist.HashStore()
            calls = [pool.submit(work, rank, store) for rank in range(n)]
            return [call.exception(60) or call.result() for call in calls]

        yield run


def plain_steps(n: int, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """The same training in one process, with the mean of all ranks' gradients."""
    model = two_layers(dtype)
    optimizer = Optimizer(OptimizerSpec(lr=0.1, clip=1.0), model, batch=1, total=2)
    for step in range(steps):
        model.zero_grad()
        for rank in range(n):
            image = torch.full((1, 3), 1.0 + rank + step, dtype=dtype)
            (model(image).square().sum() / n).backward()
        optimizer.step()
    return [value.detach() for value in model.parameters()]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 0.1)])
def test_ranks_step_by_the_mean_and_end_with_equal_bits(
    together: Callable[..., list[Any]], n: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Buckets of four numbers and fewer, so with seven ranks most shards are empty; with clipping."""

    def work(rank: int, store: dist.Store) -> tuple[list[Tensor], Counter[str]]:
        rig = Rig(rank, n, store, deadline=30.0, dtype=dtype)
        for number in range(4):
            rig.step(number)
        rig.pipeline.close()
        return rig.values(), rig.group.payload

    found = together(n, work)
    assert all(torch.equal(a, b) for values, _ in found for a, b in zip(values, found[0][0], strict=True))
    for got, wanted in zip(found[0][0], plain_steps(n, 4, dtype), strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    numbers = sum(value.numel() for value in found[0][0])
    sent = sum((payload for _, payload in found), Counter())
    assert sent["parameters"] == 4 * (n - 1) * numbers * dtype.itemsize
    assert sent["gradients"] == sent["parameters"] + 4 * (n - 1) * n * dtype.itemsize  # and the sums of squares


def test_each_of_sixteen_ranks_needs_no_more_threads_connections_and_memory_than_each_of_two(
    together: Callable[..., list[Any]],
) -> None:
    """In one process: the threads of all ranks are counted while all are attached."""

    def measured(n: int) -> tuple[list[Tensor], int, int, int]:
        attached, counted = threading.Barrier(n), threading.Barrier(n)

        def work(rank: int, store: dist.Store) -> tuple[list[Tensor], int, int, int]:
            rig = Rig(rank, n, store, clip=None, deadline=30.0)
            attached.wait(60)
            threads = sum(thread.name == "ring" for thread in threading.enumerate())
            sockets = sum(isinstance(value, socket.socket) for value in vars(rig.pipeline.transport).values())
            counted.wait(60)
            for number in range(2):
                rig.step(number)
            rig.pipeline.close()
            buffers = [rig.pipeline.scratch, *(s for bucket in rig.pipeline.buckets for s in bucket.scratch)]
            return rig.values(), threads, sockets, sum(buffer.nbytes for buffer in buffers)

        found = together(n, work)
        assert all(torch.equal(a, b) for values, *_ in found for a, b in zip(values, found[0][0], strict=True))
        return found[0]

    (_, *few), (_, *many) = measured(2), measured(16)
    assert few[:2] == [2, 2] and many[:2] == [16, 2]
    assert many[2] <= few[2]


def test_a_rank_that_is_ahead_waits_and_nothing_is_mixed_up(together: Callable[..., list[Any]]) -> None:
    """Its gradients arrive while the slow rank still computes, and wait in scratch."""

    def work(rank: int, store: dist.Store) -> list[Tensor]:
        rig = Rig(rank, 3, store, deadline=30.0)
        rig.passed = lambda gradient: time.sleep(0.1 * (rank == 1))
        for number in range(3):
            rig.step(number)
        rig.pipeline.close()
        return rig.values()

    for values in together(3, work):
        for got, wanted in zip(values, plain_steps(3, 3, torch.float32), strict=True):
            torch.testing.assert_close(got, wanted)


def test_a_sparse_gradient_is_averaged_as_a_dense_one(together: Callable[..., list[Any]]) -> None:
    """Each rank looks up another row of an embedding; the same training with dense gradients is what is expected."""

    def work(rank: int, store: dist.Store, sparse: bool) -> list[Tensor]:
        with SEEDING:
            torch.manual_seed(3)
            model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 2))
        pipeline = Pipeline(SyncMode.parse("ring/bucket:16B/pipeline"), Group(rank, 2, store, 30.0), Timeline())
        pipeline.attach(model, Optimizer(OptimizerSpec(lr=0.1, clip=None), model, batch=1, total=3))
        for number in range(3):
            pipeline.zero()
            model(torch.tensor([rank + number, 1])).square().sum().backward()
            pipeline.step()
        pipeline.close()
        return [value.detach().clone() for value in model.parameters()]

    expected = together(2, functools.partial(work, sparse=False))
    for found, wanted in zip(together(2, functools.partial(work, sparse=True)), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_rank_that_ends_is_reported_as_a_lost_connection_by_its_neighbours(
    together: Callable[..., list[Any]],
) -> None:
    def work(rank: int, store: dist.Store) -> None:
        rig = Rig(rank, 3, store, deadline=30.0)
        rig.step()
        rig.pipeline.flush()
        if rank == 1:
            return rig.pipeline.transport.abort()
        rig.step(1)
        return rig.pipeline.close()

    for rank, error in enumerate(together(3, work)):
        if rank != 1:
            assert type(error) is RuntimeError and is_lost_peer(error), error


def test_a_silent_rank_is_waited_for_until_the_deadline(together: Callable[..., list[Any]]) -> None:
    silent = threading.Event()

    def work(rank: int, store: dist.Store) -> None:
        rig = Rig(rank, 2, store)
        if rank == 1:
            silent.wait(10)
            return rig.pipeline.transport.abort()
        try:
            rig.step()
            return rig.pipeline.close()
        finally:
            silent.set()

    error, _ = together(2, work)
    assert type(error) is RankFailed and "was not complete within 1 s" in str(error)


# --- failures in the transport's thread ---------------------------------------------------------------------------


def test_an_error_of_the_thread_is_raised_in_the_loop() -> None:
    rig = Rig()
    rig.pipeline.update.step_shard = lambda number, gradient: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    for finish in (rig.step, rig.pipeline.flush, rig.pipeline.close):
        with pytest.raises(ZeroDivisionError):
            finish()
            rig.pipeline.flush()


def test_a_failing_backward_leaves_waits_that_time_out() -> None:
    """Launched buckets wait for the squares of the others, which never come; the thread ends with the process."""
    rig = Rig()

    def broken(gradient: Tensor) -> None:
        raise ValueError("backward broke")

    rig.passed = broken
    with pytest.raises(ValueError, match="backward broke"):
        rig.step()
    for finish in (rig.pipeline.flush, rig.pipeline.close):
        with pytest.raises(RankFailed, match="was not complete within"):
            finish()


def test_a_backward_longer_than_the_deadline_is_no_failure() -> None:
    rig = Rig()
    rig.passed = lambda gradient: time.sleep(1.3 * DEADLINE)
    before = rig.values()
    rig.step()
    rig.pipeline.close()
    assert not any(torch.equal(a, b) for a, b in zip(before, rig.values(), strict=True))


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


def normed(layer: nn.Linear) -> nn.Module:
    return nn.utils.weight_norm(layer)  # type: ignore[no-any-return]


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.5)  # type: ignore[no-any-return, no-untyped-call]


by_hook = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


@by_hook
@pytest.mark.parametrize("changed", [normed, pruned])
def test_a_layer_waits_before_a_hook_that_computes_its_weight(changed: Callable[[nn.Linear], nn.Module]) -> None:
    layer = changed(nn.Linear(2, 2))
    watched = Watched(layer, torch.ones(1, 2))
    hooks: dict[int, Any] = layer._forward_pre_hooks
    for key, hook in hooks.items():
        if getattr(hook, "__self__", None) is not watched.waits:
            hooks[key] = lambda *inputs, hook=hook: watched.events.append("hook") or hook(*inputs)
    assert [event.split()[0] for event in watched.forward()] == ["wait", "hook", "end"]


@by_hook
@pytest.mark.parametrize("changed", [normed, pruned])
def test_a_layer_whose_weight_a_hook_computes_is_trained_as_by_one_node(
    together: Callable[..., list[Any]], changed: Callable[[nn.Linear], nn.Module]
) -> None:
    """Exactly: two ranks with equal samples. Parameters are still on their way when the next forward begins."""

    def make() -> nn.Module:
        with SEEDING:
            torch.manual_seed(3)
            return nn.Sequential(changed(nn.Linear(3, 4)), changed(nn.Linear(4, 2)))

    def late(step_shard: Callable[..., None], *shard: Any) -> None:
        time.sleep(0.02)
        step_shard(*shard)

    def work(rank: int, store: dist.Store) -> list[Tensor]:
        model = make()
        pipeline = Pipeline(SyncMode.parse("ring/bucket:16B/pipeline"), Group(rank, 2, store, 30.0), Timeline())
        optimizer = Optimizer(OptimizerSpec(lr=0.1), model, batch=1, total=4)
        pipeline.attach(model, optimizer)
        optimizer.step_shard = functools.partial(late, optimizer.step_shard)  # type: ignore[method-assign]
        for number in range(4):
            pipeline.zero()
            model(torch.full((1, 3), 1.0 + number)).square().sum().backward()
            pipeline.step()
        pipeline.close()
        return [value.detach().clone() for value in model.parameters()]

    control = make()
    optimizer = Optimizer(OptimizerSpec(lr=0.1), control, batch=1, total=4)
    for number in range(4):
        optimizer.zero(keep=False)
        control(torch.full((1, 3), 1.0 + number)).square().sum().backward()
        optimizer.step()
    for values in together(2, work):
        assert all(torch.equal(a, b) for a, b in zip(values, control.parameters(), strict=True))


class ChangingReader(nn.Module):
    """From the second step on another module reads the weight of a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(2, 2, bias=False)
        self.early, self.late = Borrower(self.owner), Borrower(self.owner)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return (self.late if self.steps == 1 else self.early)(x)  # type: ignore[no-any-return]


def test_a_parameter_that_a_forward_read_too_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the step is one with parameters of the step before, equal on all ranks, so that no comparison finds it."""
    model = ChangingReader()
    pipeline = Pipeline(SyncMode.parse("ring/bucket:1KiB/pipeline"), Group(0, 1, dist.HashStore(), 30.0), Timeline())
    pipeline.attach(model, Optimizer(OptimizerSpec(lr=0.1), model, batch=1, total=2))
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_update", lambda bucket: None)  # as if the parameters were still on their way
        pipeline.zero()
        model(torch.ones(1, 2)).sum().backward()
        pipeline.step()
        pipeline.zero()
        with pytest.raises(SpecError, match="did not read in the first step"):
            model(torch.ones(1, 2)).sum().backward()
    pipeline.transport.abort()


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


def test_a_compiled_model_waits_for_all_buckets_before_its_forward(together: Callable[..., list[Any]]) -> None:
    """It calls no hooks, so that without this wait it would compute with parameters of the step before."""

    models = [
        torch.jit.script(two_layers(torch.float64)) for _ in range(2)
    ]  # here: a thread may not compile beside another

    def work(rank: int, store: dist.Store) -> list[Tensor]:
        model = models[rank]
        pipeline = Pipeline(SyncMode.parse("ring/bucket:16B/pipeline"), Group(rank, 2, store, 30.0), Timeline())
        pipeline.attach(model, Optimizer(OptimizerSpec(lr=0.1, clip=1.0), model, batch=1, total=2))
        for number in range(4):
            pipeline.zero()
            assert all(bucket.complete.is_set() for bucket in pipeline.buckets)
            model(torch.full((1, 3), 1.0 + rank + number, dtype=torch.float64)).square().sum().backward()
            pipeline.step()
        pipeline.close()
        return [value.detach().clone() for value in model.parameters()]

    for values in together(2, work):
        for found, wanted in zip(values, plain_steps(2, 4, torch.float64), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


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
