"""Pipeline: reduce under backward, update this rank's own shards, gather under the next forward.

Same mathematics and same bytes as an all-reduce, but the second half of the communication is hidden behind the next
forward, and each rank's optimizer updates 1/N of the parameters. All parameters are in one flat buffer, last layer
first. It is divided into buckets of the given size, also inside a tensor, and each bucket into N shards. A
layer's forward waits for its own buckets only.

    training loop   forward (waits for buckets) | backward: a hook copies each gradient and launches complete buckets
    bucket thread   one per bucket: adds what is received, updates this rank's shard, sends it, marks it complete
    sender thread   gives shards to Gloo: the bucket that the next forward needs first goes first, and within one
                    bucket gradients go before parameters

Receives are posted a whole step ahead, because Gloo sends nothing before the other side has posted its receive. That
is safe: no rank sends step t+1's shards of a bucket before step t's have arrived on all ranks.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from testbed.net.tcp import tcp_sockets
from testbed.rank.group import Group, Work
from testbed.rank.sync.algorithms import Plan, RankRound, plan_for
from testbed.rank.sync.buckets import Readiness, flat_parameters, split, trained
from testbed.rank.sync.synchronizer import BaseSynchronizer, Update
from testbed.results.timeline import Timeline
from testbed.spec.errors import RankFailed, refuse
from testbed.spec.mode import SyncMode
from testbed.spec.units import format_size

MAX_BUCKETS = 256  # each has a thread
MAX_ROUNDS = 512  # of reduce, and of gather: the number of a round is part of a message's tag
LAST_BUCKETS = (8, 4, 2)  # the last buckets have 1/8, 1/4 and 1/2 of the usual size
WINDOW_BYTES = 512 << 10  # given to Gloo and not yet accepted by the kernel: enough to keep the link busy
UNSENT_BYTES = 128 << 10  # accepted by a socket of the kernel and not yet sent
TCP_NOTSENT_LOWAT = 25  # Linux's socket option; Python has no name for it
GLOO_THREAD = "gloo_tcp_loop"  # the name of Gloo's thread that reads and writes its sockets

Urgency = tuple[int, ...]  # the smaller is sent first


class Pipeline(BaseSynchronizer):
    """The synchronizer: what the training loop calls, and what the thread of a bucket does in one step."""

    def __init__(self, mode: SyncMode, group: Group, timeline: Timeline) -> None:
        super().__init__(mode, group, timeline)
        self.plan = plan_for(mode.algorithm, group.rank, group.size)
        self.failure: Exception | None = None  # the first error of any thread
        self.clipping: Clipping | None = None

    def attach(self, model: Module, update: Update) -> Module:
        parameters = list(reversed(trained(model)))
        values = flat_parameters([parameters])[0]
        self.gradients = torch.zeros_like(values)
        self.buckets = divide(parameters, self.gradients, values, self.mode.bucket or 0, self.plan, self.group)
        update.own_shards([bucket.values[self.group.rank] for bucket in self.buckets])
        self.views = dict(zip(parameters, self.gradients.split([p.numel() for p in parameters]), strict=True))
        self.readiness = Readiness([bucket.parameters for bucket in self.buckets], self._launch)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take_gradient)
        self.forward = ForwardWaits(model, self.buckets, self._wait_before_forward)
        self.clipping = Clipping(self.group, update, len(self.buckets)) if update.clips else None
        use_sched_batch_in_gloo()
        self.sender = Sender(self.group, self._fail)
        self.threads = [threading.Thread(target=self._serve, args=(b,), daemon=True) for b in self.buckets]
        for thread in self.threads:
            thread.start()
        return super().attach(model, update)

    def zero(self) -> None:
        """Begin a step: post its receives. Gradients need no clearing, because the hook of backward removes them."""
        since = self.timeline.now()
        self.readiness.start()
        self.receives = [Receives(bucket) for bucket in self.buckets]
        for receives in self.receives:
            bucket = receives.bucket
            for number, round_ in enumerate(self.plan.reduce):
                receives.reduce.append(self._receive(round_, bucket.scratch[number], bucket.tag(0, number)))
            for number, round_ in enumerate(self.plan.gather):
                shards = [bucket.values[hop.shard] for hop in round_.receives]
                receives.gather.append(self._receive(round_, shards, bucket.tag(1, number)))
        self.timeline.copied(since)

    def accumulating(self) -> AbstractContextManager[object]:
        return self.readiness.pause()

    def step(self) -> None:
        """Launch what backward left out. The next forward waits for the rest, layer by layer."""
        absent = self.readiness.absent()
        self._wait_for([bucket for bucket in self.buckets if any(bucket.holds(p) for p in absent)])
        for parameter in absent:  # its layer was used in no pass of the step, or not in the last pass
            if parameter.grad is None:
                self.views[parameter].zero_()  # the last step's gradient is still there
            else:
                self._copy_gradient(parameter)
        self.readiness.finish()
        self.forward.finish_first_forward()

    def flush(self) -> None:
        self._wait_for(self.buckets)

    def close(self) -> None:
        self.flush()
        for bucket in self.buckets:
            bucket.launched.put(None)
        for thread in self.threads:
            thread.join()
        self.sender.stop()
        use_sched_batch_in_gloo(False)
        self._raise_failure()

    # Hooks of backward

    def _take_gradient(self, parameter: Parameter) -> None:
        """Copy a complete gradient to the buffer that it is sent from."""
        if not self.readiness.paused:
            with self.timeline.copying():
                self._copy_gradient(parameter)
                self.readiness.ready(parameter)

    def _copy_gradient(self, parameter: Parameter) -> None:
        assert parameter.grad is not None
        self.views[parameter].copy_(parameter.grad.reshape(-1))
        parameter.grad = None

    def _launch(self, number: int) -> None:
        """Give a bucket whose gradients are all complete to its thread."""
        receives = self.receives[number]
        self._wait_for([receives.bucket])  # returns at once, unless a layer was not called in forward
        receives.bucket.complete.clear()
        # If a thread failed before `clear`, its `set` was just erased and is not repeated, so check here.
        self._raise_failure()
        receives.bucket.launched.put(receives)

    # The thread of a bucket

    def _serve(self, bucket: Bucket) -> None:
        use_sched_batch()
        try:
            while (receives := bucket.launched.get()) is not None:
                self._reduce(bucket, receives)
                self._update(bucket)
                self._gather(bucket, receives)
                bucket.complete.set()
        except threading.BrokenBarrierError:
            return  # of clipping: another thread failed and reports the reason
        except Exception as error:  # any error: without this the loop would wait for ever
            self._fail(error)

    def _reduce(self, bucket: Bucket, receives: Receives) -> None:
        """This rank's shard becomes the mean over all ranks."""
        with self.timeline.comm(f"bucket {bucket.number} reduce", bucket.size):
            for number, round_ in enumerate(self.plan.reduce):
                self._send(round_, bucket.gradients, bucket.tag(0, number), (-bucket.number, 0), "gradients")
                self.group.wait(*receives.reduce[number])
                for hop, received in zip(round_.receives, bucket.scratch[number], strict=True):
                    bucket.gradients[hop.shard].add_(received)
        bucket.gradients[self.group.rank].div_(self.group.size)

    def _update(self, bucket: Bucket) -> None:
        gradient = bucket.gradients[self.group.rank]
        if self.clipping is not None:
            gradient.mul_(self.clipping.coefficient(bucket.number, gradient))
        self.update.step_shard(bucket.number, gradient)

    def _gather(self, bucket: Bucket, receives: Receives) -> None:
        """All ranks get every owner's shard; what forward needs first is sent first."""
        with self.timeline.comm(f"bucket {bucket.number} gather", bucket.size):
            for number, round_ in enumerate(self.plan.gather):
                self._send(round_, bucket.values, bucket.tag(1, number), (-bucket.number, 1), "parameters")
                self.group.wait(*receives.gather[number])

    def _send(self, round_: RankRound, shards: list[Tensor], tag: int, urgency: Urgency, kind: str) -> None:
        for hop in round_.sends:
            shard = shards[hop.shard]
            self.sender.put(urgency, shard.nbytes, partial(self.group.send, shard, hop.peer, tag, kind))

    def _receive(self, round_: RankRound, shards: list[Tensor], tag: int) -> list[Work]:
        hops = zip(round_.receives, shards, strict=True)
        return [self.group.receive(shard, hop.peer, tag) for hop, shard in hops]

    # Waits and failures

    def _wait_before_forward(self, buckets: Sequence[Bucket]) -> None:
        """The hook of a layer's forward: block the loop until the layer's buckets are complete."""
        since = self.timeline.now()
        self._wait_for(buckets)
        self.timeline.copied(since)

    def _wait_for(self, buckets: Sequence[Bucket]) -> None:
        """Block the loop until these buckets are complete; raise RankFailed after the deadline."""
        missing = [bucket for bucket in buckets if not bucket.complete.is_set()]
        if missing:
            with self.timeline.blocked():
                deadline_s = self.group.deadline.total_seconds()
                for bucket in missing:
                    if not bucket.complete.wait(deadline_s):
                        self._raise_failure()
                        late = f"bucket {bucket.number} was not complete within {deadline_s:g} s"
                        raise RankFailed(f"{late}: another rank is too slow or has stopped sending")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _fail(self, error: Exception) -> None:
        """Record the first error of any thread and wake the loop, which raises it."""
        self.failure = self.failure or error
        for bucket in self.buckets:
            bucket.complete.set()
        if self.clipping is not None:
            self.clipping.abort()  # last: it blocks while the norm is being sent


@dataclass(eq=False)
class Bucket:
    """A slice of the two flat buffers; `gradients` and `values` are its N shards."""

    number: int
    size: int  # bytes
    gradients: list[Tensor]
    values: list[Tensor]
    scratch: list[list[Tensor]]  # per round of reduce: where shards are received before they are added
    parameters: list[Parameter]  # all that have at least one element in it
    complete: threading.Event = field(
        default_factory=threading.Event
    )  # set when all shards of the last step have arrived
    launched: queue.SimpleQueue[Receives | None] = field(default_factory=queue.SimpleQueue)  # None: end of the thread

    def __post_init__(self) -> None:
        self.complete.set()
        self._ids = {id(p) for p in self.parameters}

    def holds(self, parameter: Parameter) -> bool:
        return id(parameter) in self._ids

    def tag(self, half: int, round_number: int) -> int:
        """One tag per bucket, half (0 reduce, 1 gather) and round, the same on both ends."""
        return (2 * self.number + half) * MAX_ROUNDS + round_number


@dataclass(eq=False)
class Receives:
    """The receives of one bucket in one step, per round."""

    bucket: Bucket
    reduce: list[list[Work]] = field(default_factory=list)
    gather: list[list[Work]] = field(default_factory=list)


def divide(
    parameters: Sequence[Parameter], gradients: Tensor, values: Tensor, limit_bytes: int, plan: Plan, group: Group
) -> list[Bucket]:
    """Buckets of two flat buffers that hold the parameters in this order; raise SpecError if they are too many."""
    ends = list(accumulate(p.numel() for p in parameters))
    bounds = bucket_bounds(len(values), max(1, limit_bytes // values.element_size()))
    if len(bounds) - 1 > MAX_BUCKETS:
        rule = f"would make {len(bounds) - 1} buckets of this model, and each has a thread; at most {MAX_BUCKETS} work"
        enough = values.nbytes // (MAX_BUCKETS - len(LAST_BUCKETS)) // 2**10 + 1  # in addition to the LAST_BUCKETS
        raise refuse("bucket", format_size(limit_bytes), rule, f"Use bucket:{enough}KiB.")
    buckets = []
    for number, (a, b) in enumerate(pairwise(bounds)):
        shards = split(gradients[a:b], group.size)
        scratch = [[torch.empty_like(shards[hop.shard]) for hop in round_.receives] for round_ in plan.reduce]
        inside = [p for p, end in zip(parameters, ends, strict=True) if a < end and end - p.numel() < b]
        buckets.append(Bucket(number, values[a:b].nbytes, shards, split(values[a:b], group.size), scratch, inside))
    return buckets


def bucket_bounds(total: int, most: int) -> list[int]:
    """Where buckets begin and end: `most` elements each, and fewer in the LAST_BUCKETS.

    The end of the buffer is the first layer. Its gradient is the last to be complete and its values are needed first,
    so nothing hides the time of its bucket.
    """
    sizes: list[int] = []
    rest = total
    for divisor in LAST_BUCKETS:
        sizes.append(min(rest, max(1, most // divisor)))
        rest -= sizes[-1]
    while rest:
        sizes.append(min(rest, most))
        rest -= sizes[-1]
    return [0, *accumulate(size for size in reversed(sizes) if size)]


class ForwardWaits:
    """Before its forward each module waits for the buckets of its own parameters, and of others that it reads.

    A module may read parameters of a layer that is never called, or that is called later: `out_proj` of
    nn.MultiheadAttention, a weight that an embedding and a head share. The forward of the first step, which has nothing
    to wait for, shows which module reads which parameter. A layer that is not called, and whose parameters nothing was
    seen to read, is waited for at the nearest module above it that is called.
    """

    def __init__(self, model: Module, buckets: list[Bucket], wait: Callable[[Sequence[Bucket]], None]) -> None:
        self.model, self.buckets, self.wait = model, buckets, wait
        self.waits = {module: self._buckets_of(list(module.parameters(recurse=False))) for module in model.modules()}
        self.hooks = {module: module.register_forward_pre_hook(self._before) for module in hookable(model)}
        self.reads: Reads | None = Reads(model)

    def _buckets_of(self, parameters: list[Parameter]) -> list[Bucket]:
        return [bucket for bucket in self.buckets if any(bucket.holds(p) for p in parameters)]

    def _before(self, module: Module, inputs: Any) -> None:
        if self.waits[module]:
            self.wait(self.waits[module])

    def finish_first_forward(self) -> None:
        """After the forward of the first step: each module waits for all that it was seen to read."""
        if self.reads is None:
            return
        reads, self.reads = self.reads, None
        reads.stop()
        parents = parents_of(self.model)
        for module in list(self.waits):
            own = list(module.parameters(recurse=False))
            for parameter in own:
                readers = reads.readers.get(id(parameter), set())
                if not readers and module not in reads.called:
                    readers = nearest_called(module, parents, reads.called) or {self.model}
                for reader in readers - {module}:
                    known = self.waits[reader]
                    self.waits[reader] = known + [b for b in self._buckets_of([parameter]) if b not in known]
        for module in [module for module in self.hooks if not self.waits[module]]:
            self.hooks.pop(module).remove()


class Reads(TorchFunctionMode):
    """Finds which module's forward reads which parameter: the innermost that is being called when torch gets it."""

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.readers: dict[int, set[Module]] = {}  # by id of the parameter
        self.called: set[Module] = set()
        self._inside: list[Module] = []  # the modules that are being called, outermost first
        self._ids = {id(p) for p in model.parameters()}
        self._hooks = [hook for module in hookable(model) for hook in self._watch(module)]

    def _watch(self, module: Module) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: Module, inputs: Any) -> None:
        self.called.add(module)
        if not self._inside:
            self.__enter__()  # type: ignore[no-untyped-call]
        self._inside.append(module)

    def _leave(self, module: Module, inputs: Any, output: Any) -> None:
        self._inside.pop()
        if not self._inside:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        is_property = getattr(func, "__name__", "") == "__get__"
        if self._inside and (not is_property or isinstance(found, Tensor)):  # a dtype or a shape is no value
            self._note([*args, *(kwargs or {}).values()])
        return found

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and id(value) in self._ids:
                self.readers.setdefault(id(value), set()).add(self._inside[-1])
            elif isinstance(value, list | tuple):
                self._note(value)


def hookable(model: Module) -> list[Module]:
    """The modules that tell when they are called: all but compiled ones."""
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


def parents_of(model: Module) -> dict[Module, set[Module]]:
    """The modules that have each module as a child; several, if it is shared."""
    found: dict[Module, set[Module]] = {module: set() for module in model.modules()}
    for module in found:
        for child in module.children():
            found[child].add(module)
    return found


def nearest_called(module: Module, parents: dict[Module, set[Module]], called: set[Module]) -> set[Module]:
    """On each way up from a module, the first one that is called."""
    found: set[Module] = set()
    for parent in parents[module]:
        found |= {parent} if parent in called else nearest_called(parent, parents, called)
    return found


class Clipping:
    """The norm of the whole gradient: each rank sums the squares of its own shards, and all ranks add those sums.

    So no shard is updated before all are reduced: with clipping the pipeline loses half of its overlap.
    """

    def __init__(self, group: Group, update: Update, buckets: int) -> None:
        self.group, self.update = group, update
        self.squares = [torch.zeros(())] * buckets  # by bucket: the order of the sum is fixed
        self.barrier = threading.Barrier(buckets, action=self._total)

    def coefficient(self, bucket: int, gradient: Tensor) -> float:
        """What this step's gradient is multiplied by; blocks until the thread of every bucket has called it.

        It has no timeout: most of the wait is this rank's own backward, which may take any time. Messages have their
        own timeouts, and a thread that misses one aborts the barrier.
        """
        self.squares[bucket] = gradient.square().sum()
        self.barrier.wait()
        return self.found

    def abort(self) -> None:
        """Wake all threads with BrokenBarrierError, because one of them will not call `coefficient`."""
        self.barrier.abort()

    def _total(self) -> None:
        square = self.group.total(torch.stack(self.squares).sum())
        self.found = self.update.clip_coefficient(float(square) ** 0.5)


class Sender:
    """A thread that sends all shards of a rank, the most urgent first.

    Whatever Gloo and the kernel have queued is sent before what is urgent, on every hop. So both queues are kept short:
    Gloo's by giving it little at a time, the kernel's by a limit on what its sockets may hold unsent. The kernel's own
    limit is a tenth of a second at 400 Mbit, and a ring has 2(N-1) hops.
    """

    def __init__(self, group: Group, fail: Callable[[Exception], None]) -> None:
        self._group, self._fail = group, fail
        self._waiting: list[tuple[Urgency, int, int, Callable[[], Work]]] = []
        self._numbers = itertools.count()  # equally urgent messages are sent in the order of `put`
        self._changed = threading.Condition()
        self._stopped = False
        limit_unsent(UNSENT_BYTES)
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def put(self, urgency: Urgency, size: int, send: Callable[[], Work]) -> None:
        """Queue a message; `send` is called when it is the most urgent and the window has room."""
        with self._changed:
            heapq.heappush(self._waiting, (urgency, next(self._numbers), size, send))
            self._changed.notify()

    def stop(self) -> None:
        """Send what is queued, then end the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        limit_unsent(0)  # the kernel's default again: another mode may use these sockets next

    def _run(self) -> None:
        use_sched_batch()
        sending: deque[tuple[int, Work]] = deque()
        outstanding = 0
        try:
            while (size := self._most_urgent()) is not None:
                if sending and outstanding + size > WINDOW_BYTES:
                    freed, work = sending.popleft()
                    self._group.wait(work)
                    outstanding -= freed  # then choose again: a more urgent message may have been queued
                else:
                    sending.append(self._take())
                    outstanding += sending[-1][0]
            self._group.wait(*(work for _, work in sending))
        except Exception as error:  # any error: without this the loop would wait for ever
            self._fail(error)

    def _most_urgent(self) -> int | None:
        """The size of the most urgent message, once there is one; None after `stop`."""
        with self._changed:
            while not self._waiting and not self._stopped:
                self._changed.wait()
            return self._waiting[0][2] if self._waiting else None

    def _take(self) -> tuple[int, Work]:
        """Send what is most urgent now, which may be another message than `_most_urgent` returned."""
        with self._changed:
            _, _, size, send = heapq.heappop(self._waiting)
        return size, send()


def limit_unsent(size: int) -> None:
    """Limit the unsent bytes of every TCP socket of this process, because Gloo does not expose its sockets."""
    for sock in tcp_sockets():
        with contextlib.suppress(OSError):  # a socket that was closed meanwhile
            sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, size)


# --- scheduling class of the threads that move bytes -----------------------------------------------------------------
#
# By default Linux wakes them for every packet or two, and they preempt the thread that computes: four ranks on two
# cores switch threads ten thousand times a step. A thread of class SCHED_BATCH preempts no other, so it handles more
# packets each time that it runs.


def use_sched_batch(thread: int = 0, enabled: bool = True) -> None:
    """Set the scheduling class of a thread of this process (0: the calling one); nothing changes without permission."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH if enabled else os.SCHED_OTHER, os.sched_param(0))


def use_sched_batch_in_gloo(enabled: bool = True) -> None:
    """The same for Gloo's threads, which exist after the rendezvous. Other modes use them too: undo it at the end."""
    for thread in gloo_threads():
        use_sched_batch(thread, enabled)


def gloo_threads() -> Iterator[int]:
    """Thread ids of Gloo's threads in this process."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            if (task / "comm").read_text().strip() == GLOO_THREAD:
                yield int(task.name)
