"""Pipeline: reduce under backward, update this rank's own shards, gather under the next forward.

Same mathematics and same bytes as an all-reduce, but the second half of the communication is hidden behind the next
forward, and each rank's optimizer updates 1/N of the parameters. All parameters are in one flat buffer, last layer
first. It is divided into buckets of the mode's size, also inside a tensor, and each bucket into N shards. A
layer's forward waits for its own buckets only.

    training loop     forward (waits for buckets) | backward: a hook copies each gradient and launches complete buckets
    transport thread  sends and receives shards round the ring, adds what is received, updates this rank's shard,
                      marks complete buckets. The bucket that the next forward needs first goes first, and within one
                      bucket gradients go before parameters

A neighbour may be ahead. Its gradients of a bucket wait in scratch until this rank has launched the bucket, also those
of step t+1 while parameters of step t are still on their way. It is never further ahead: no rank launches a bucket of
step t+1 before it has all parameters of step t, which it gets only when all ranks have reduced the bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from testbed.rank.group import Group
from testbed.rank.sync.buckets import Readiness, flat_parameters, split, trained, views
from testbed.rank.sync.synchronizer import BaseSynchronizer, Update
from testbed.rank.sync.transport import Segment, Transport, Urgency
from testbed.results.timeline import Timeline
from testbed.spec.errors import RankFailed, refuse
from testbed.spec.mode import LAST_BUCKETS, SyncMode, bucket_bounds
from testbed.spec.units import format_size

MAX_BUCKETS = 4096  # each has an optimizer of its own and 2(N-1) segments a step
GRADIENTS, PARAMETERS, SQUARES = range(3)  # kinds of segments; squares are one number a rank, for clipping
COUNTED_AS = ("gradients", "parameters", "gradients")  # by kind
MOST_URGENT: Urgency = (-MAX_BUCKETS, 0)


class Pipeline(BaseSynchronizer):
    """The synchronizer: what the training loop calls, and what the transport's thread does with a bucket."""

    def __init__(self, mode: SyncMode, group: Group, timeline: Timeline) -> None:
        super().__init__(mode, group, timeline)
        self.left, self.right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        self.failure: Exception | None = None  # the first error of the transport's thread
        self.clipping: Clipping | None = None

    def attach(self, model: Module, update: Update) -> Module:
        parameters = list(reversed(trained(model)))
        values = flat_parameters([parameters])[0]
        assert self.mode.bucket is not None, f"{self.mode}: choose_bucket chooses the size before"
        self.gradients = torch.zeros_like(values)
        self.buckets = divide(parameters, self.gradients, values, self.mode.bucket, self.group.size)
        longest = max(len(shard) for bucket in self.buckets for shard in bucket.values)
        self.scratch = torch.empty(longest, dtype=values.dtype)
        update.own_shards([bucket.values[self.group.rank] for bucket in self.buckets])
        self.views = dict(zip(parameters, views(self.gradients, parameters), strict=True))
        self.readiness = Readiness(self.mode, [bucket.parameters for bucket in self.buckets], self._launch)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take_gradient)
        self.forward = ForwardWaits(model, self.buckets, self._wait_before_forward)
        self.clipping = Clipping(self.group, update, len(self.buckets), values.dtype) if update.clips else None
        self.transport = Transport(self.group, self._place, self._received, self._expects, self._fail)
        return super().attach(model, update)

    def zero(self) -> None:
        """Begin a step. Gradients need no clearing, because the hook of backward removes them."""
        if not self.forward.can_wait:
            self.flush()
        since = self.timeline.now()
        self.readiness.start()
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
        try:
            self.flush()
        except Exception:
            self.transport.abort()
            raise
        self.transport.close()
        self._raise_failure()

    # Hooks of backward

    def _take_gradient(self, parameter: Parameter) -> None:
        """Copy a complete gradient to the buffer that it is sent from."""
        if not self.readiness.paused:
            with self.timeline.copying():
                self.readiness.check_first(parameter)
                self._check_waited(parameter)
                self._copy_gradient(parameter)
                self.readiness.ready(parameter)

    def _check_waited(self, parameter: Parameter) -> None:
        """Raise SpecError if a parameter is not complete when its gradient is there: the forward did not wait for it.

        Readers are known from the first step, and one that reads it in later steps only does not wait. That is not
        found if the parameter became complete after it was read.
        """
        numbers = self.readiness.places.get(id(parameter), ())
        if not all(self.buckets[number].complete.is_set() for number in numbers):
            rule = "a module reads a parameter of another one that it did not read in the first step"
            raise refuse("mode", str(self.mode), rule, "Use overlap instead of pipeline.")

    def _copy_gradient(self, parameter: Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        # That of nn.Embedding(sparse=True) has the rows that were looked up only.
        self.views[parameter].copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = None

    def _launch(self, number: int) -> None:
        """Give a bucket whose gradients are all complete to the transport's thread."""
        bucket = self.buckets[number]
        self._wait_for([bucket])  # returns at once, unless a layer was not called in forward
        bucket.complete.clear()
        # If the thread failed before `clear`, its `set` was just erased and is not repeated, so check here.
        self._raise_failure()
        bucket.span = self.timeline.begin_comm(f"bucket {number} reduce", bucket.size)
        self.transport.post(urgency(bucket, GRADIENTS), partial(self._begin_reduce, bucket))

    # In the transport's thread: a bucket from launch to completion

    def _begin_reduce(self, bucket: Bucket) -> None:
        """Start the own shard that travels furthest, and add this rank's gradients to what has come already."""
        bucket.launched = True
        if self.group.size > 1:
            self._send(GRADIENTS, bucket, self.left)
        early, bucket.early = bucket.early, []
        for shard in early:
            self._add(bucket, shard, bucket.scratch[shard])
        self._end_reduce_if_done(bucket)

    def _add(self, bucket: Bucket, shard: int, received: Tensor) -> None:
        bucket.gradients[shard].add_(received)
        bucket.reduced += 1
        if shard != self.group.rank:
            self._send(GRADIENTS, bucket, shard)

    def _end_reduce_if_done(self, bucket: Bucket) -> None:
        """When all shards have come, not only the own one, that one becomes the mean over all ranks."""
        if bucket.reduced < self.group.size - 1:
            return
        bucket.launched, bucket.reduced = False, 0
        self.timeline.end_comm(bucket.span)
        gradient = bucket.gradients[self.group.rank]
        gradient.div_(self.group.size)
        if self.clipping is None:
            self.transport.post(urgency(bucket, PARAMETERS), partial(self._update, bucket))
        elif self.clipping.add(bucket.number, gradient):
            if self.group.size > 1:
                self._send_square(self.group.rank)
            self._update_clipped_if_known()

    def _update_clipped_if_known(self) -> None:
        """Post the updates of all buckets if the norm of the whole gradient is known, else do nothing."""
        assert self.clipping is not None
        if (coefficient := self.clipping.coefficient()) is not None:
            for bucket in self.buckets:
                self.transport.post(urgency(bucket, PARAMETERS), partial(self._update, bucket, coefficient))

    def _update(self, bucket: Bucket, coefficient: float | None = None) -> None:
        """Update the own shard and send it round the ring."""
        gradient = bucket.gradients[self.group.rank]
        if coefficient is not None:
            gradient.mul_(coefficient)
        self.update.step_shard(bucket.number, gradient)
        bucket.updated = True
        bucket.span = self.timeline.begin_comm(f"bucket {bucket.number} gather", bucket.size)
        if self.group.size > 1:
            self._send(PARAMETERS, bucket, self.group.rank)
        self._complete_if_done(bucket)

    def _complete_if_done(self, bucket: Bucket) -> None:
        if bucket.updated and bucket.gathered == self.group.size - 1:
            bucket.updated, bucket.gathered = False, 0
            self.timeline.end_comm(bucket.span)
            bucket.complete.set()

    def _send(self, kind: int, bucket: Bucket, shard: int) -> None:
        body = bucket.bytes_of(kind, shard)
        self.group.count(len(body), COUNTED_AS[kind])
        self.transport.send(urgency(bucket, kind), Segment(kind, bucket.number, shard, len(body)), body)

    def _send_square(self, rank: int) -> None:
        assert self.clipping is not None
        body = self.clipping.bytes_of(rank)
        self.group.count(len(body), COUNTED_AS[SQUARES])
        self.transport.send(MOST_URGENT, Segment(SQUARES, 0, rank, len(body)), body)

    # In the transport's thread: segments of the left neighbour

    def _place(self, segment: Segment) -> memoryview | None:
        """Parameters are received where they belong, gradients in scratch. None: this mode has no such segment.

        If this rank's own gradient is there, they are added at once, in scratch that stays in the processor's cache.
        """
        kind, number, shard, _ = segment
        if kind == SQUARES and self.clipping is not None and number == 0 and shard < self.group.size:
            return self.clipping.bytes_of(shard)
        if kind not in (GRADIENTS, PARAMETERS) or number >= len(self.buckets) or shard >= self.group.size:
            return None
        bucket = self.buckets[number]
        if kind == PARAMETERS:
            return bucket.bytes_of(PARAMETERS, shard)
        own = bucket.gradients[shard]
        self.landing = self.scratch[: len(own)] if bucket.launched else bucket.scratch[shard]
        return as_bytes(self.landing)

    def _received(self, segment: Segment) -> None:
        kind, number, shard, _ = segment
        bucket = self.buckets[number]
        if kind == GRADIENTS and bucket.launched:
            self._add(bucket, shard, self.landing)
            self._end_reduce_if_done(bucket)
        elif kind == GRADIENTS:
            bucket.early.append(shard)
        elif kind == PARAMETERS:
            bucket.gathered += 1
            if shard != self.right:
                self._send(PARAMETERS, bucket, shard)
            self._complete_if_done(bucket)
        else:
            assert self.clipping is not None
            self.clipping.received += 1
            if shard != self.right:
                self._send_square(shard)
            self._update_clipped_if_known()

    def _expects(self) -> bool:
        return not all(bucket.complete.is_set() for bucket in self.buckets)

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
        """Keep the error of the transport's thread and wake the loop, which raises it."""
        self.failure = self.failure or error
        for bucket in self.buckets:
            bucket.complete.set()


@dataclass(eq=False)
class Bucket:
    """A slice of the two flat buffers; `gradients` and `values` are its N shards."""

    number: int
    size: int  # bytes
    gradients: list[Tensor]
    values: list[Tensor]
    scratch: list[Tensor]  # by shard: gradients that come before this rank's own
    parameters: list[Parameter]  # all that have at least one element in it
    complete: threading.Event = field(default_factory=threading.Event)  # set when all shards of the last step are there
    launched: bool = False  # the own gradient is there, and not all others
    early: list[int] = field(default_factory=list)  # shards in scratch
    reduced: int = 0  # shards that were received and added
    updated: bool = False  # the own shard is updated, and not all others are there
    gathered: int = 0  # shards of parameters that were received
    span: int = 0  # of the timeline

    def __post_init__(self) -> None:
        self.complete.set()
        self._ids = {id(p) for p in self.parameters}
        self._bytes = [[as_bytes(shard) for shard in shards] for shards in (self.gradients, self.values)]

    def holds(self, parameter: Parameter) -> bool:
        return id(parameter) in self._ids

    def bytes_of(self, kind: int, shard: int) -> memoryview:
        return self._bytes[kind][shard]


def urgency(bucket: Bucket, kind: int) -> Urgency:
    """The last bucket is needed first by the next forward."""
    return (-bucket.number, kind)


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of any dtype."""
    return tensor.view(torch.uint8).numpy().data


def divide(
    parameters: Sequence[Parameter], gradients: Tensor, values: Tensor, limit_bytes: int, n: int
) -> list[Bucket]:
    """Buckets of two flat buffers that hold the parameters in this order; raise SpecError if they are too many."""
    ends = list(accumulate(p.numel() for p in parameters))
    bounds = bucket_bounds(len(values), max(1, limit_bytes // values.element_size()))
    if len(bounds) - 1 > MAX_BUCKETS:
        rule = f"would make {len(bounds) - 1} buckets of this model, and at most {MAX_BUCKETS} work"
        enough = values.nbytes // (MAX_BUCKETS - len(LAST_BUCKETS)) // 2**10 + 1  # in addition to the LAST_BUCKETS
        raise refuse("bucket", format_size(limit_bytes), rule, f"Use bucket:{enough}KiB.")
    buckets = []
    for number, (a, b) in enumerate(pairwise(bounds)):
        shards = split(gradients[a:b], n)
        scratch = [torch.empty_like(shard) for shard in shards] if n > 1 else []
        inside = [p for p, end in zip(parameters, ends, strict=True) if a < end and end - p.numel() < b]
        buckets.append(Bucket(number, values[a:b].nbytes, shards, split(values[a:b], n), scratch, inside))
    return buckets


class ForwardWaits:
    """Before its forward each module waits for the buckets of its own parameters, and of others that it reads.

    A module may read parameters of a layer that is never called, or that is called later: `out_proj` of
    nn.MultiheadAttention, a weight that an embedding and a head share. The forward of the first step, which has nothing
    to wait for, shows which module reads which parameter. A layer that is not called, and whose parameters nothing was
    seen to read, is waited for at the nearest module above it that is called. A compiled model (ScriptModule) tells
    nothing: `can_wait` is False, and the step has to wait for all buckets before the forward.
    """

    def __init__(self, model: Module, buckets: list[Bucket], wait: Callable[[Sequence[Bucket]], None]) -> None:
        self.model, self.buckets, self.wait = model, buckets, wait
        self.can_wait = model in hookable(model)
        self.waits = {module: self._buckets_of(list(module.parameters(recurse=False))) for module in model.modules()}
        self.hooks = {module: self._hook(module) for module in hookable(model)}
        self.reads: Reads | None = Reads(model)

    def _hook(self, module: Module) -> RemovableHandle:
        """Wait before the hooks that the model has: those of weight_norm and prune compute the weight."""
        return module.register_forward_pre_hook(self._before, prepend=True)

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

    def __init__(self, group: Group, update: Update, buckets: int, dtype: torch.dtype) -> None:
        self.group, self.update = group, update
        self.squares = [torch.zeros(())] * buckets  # by bucket: the order of the sum is fixed
        self.reduced = 0  # buckets
        self.sums = torch.zeros(group.size, dtype=dtype)  # by rank: the order of the sum is the same on all
        self.received = 0  # sums of other ranks

    def add(self, bucket: int, gradient: Tensor) -> bool:
        """Add the squares of the own shard of a bucket; True if it was the last bucket."""
        self.squares[bucket] = gradient.square().sum()
        self.reduced += 1
        if self.reduced == len(self.squares):
            self.sums[self.group.rank] = torch.stack(self.squares).sum()
        return self.reduced == len(self.squares)

    def bytes_of(self, rank: int) -> memoryview:
        """The memory of a rank's sum."""
        return as_bytes(self.sums[rank : rank + 1])

    def coefficient(self) -> float | None:
        """Return the factor by which gradients are multiplied, and begin the count of the next step.

        Return None, and change nothing, while a sum is missing.
        """
        if self.reduced < len(self.squares) or self.received < self.group.size - 1:
            return None
        self.reduced = self.received = 0
        return self.update.clip_coefficient(float(self.sums.sum()) ** 0.5)
