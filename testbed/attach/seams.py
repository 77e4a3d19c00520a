"""The seams: functions of torch that are replaced so that the observer sees what a script does.

Each `watch_*` installs one seam. None changes a result, draws a random number or adds communication. If installing one
fails, the others still work.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from testbed.attach.events import Collective, Hub, call_site
from testbed.results.collectives import group_of

# operations of torch.ops.c10d, and the name that users know
OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
# Operations whose size is that of their input: all parts of a reduce_scatter and an all_to_all, one part of a gather.
# Of the others the first argument counts: all parts of an all_gather, one part of a scatter.
BY_INPUT = ("reduce_scatter", "gather", "all_to_all")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
# functions of torch.distributed that return when the collective has ended, unless they return a Work
BLOCKING = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
)


class Position:
    """Where the script is: the phase that the last event began."""

    def __init__(self) -> None:
        self.phase = "other"


def watch_collectives(hub: Hub, position: Position) -> None:
    """Every collective, by c10d's dispatcher: also those of DDP's reducer and of FSDP."""
    library = torch.library.Library("c10d", "IMPL")
    _KEPT.append(library)
    for name, operation in OPERATIONS.items():
        if not hasattr(torch.ops.c10d, name):
            continue
        overload = getattr(torch.ops.c10d, name).default
        library.impl(name, _kernel(hub, position, overload, operation), "AutogradCPU", with_keyset=True)


_KEPT: list[Any] = []  # a Library ends with its object


def _kernel(hub: Hub, position: Position, overload: Any, operation: str) -> Callable[..., Any]:
    places = {argument.name: place for place, argument in enumerate(overload._schema.arguments)}
    whole = 1 if operation in BY_INPUT else 0  # the argument whose size counts

    def kernel(keys: Any, *arguments: Any, **named: Any) -> Any:
        if hub.muted():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **named)
        collective = None
        try:
            tensors = tuple(_tensors(arguments[whole:]))
            collective = Collective(
                operation,
                sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                hub.clock(),
                call_site(),
                position.phase,
                _whose(places, arguments, operation),
                tensors,
            )
            hub.emit("collective_began", collective)
        except Exception as error:
            hub.failed("collectives", error)
        result = overload.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **named)
        if collective is not None:
            try:
                collective.tensors = ()
                _follow(hub, collective, result)
            except Exception as error:
                hub.failed("collectives", error)
        return result

    return kernel


def _whose(places: dict[str, int], arguments: Any, operation: str) -> dict[str, Any]:
    """Root and ranks of a collective, as far as they are not rank 0 and all ranks; numbers are of the whole run."""
    if "process_group" not in places or not dist.is_initialized():
        return {}
    group = dist.ProcessGroup.unbox(arguments[places["process_group"]])
    ranks = dist.get_process_group_ranks(group)
    detail: dict[str, Any] = {}
    if operation in ROOTED and ranks[arguments[places["root_rank"]]]:
        detail["root"] = ranks[arguments[places["root_rank"]]]
    if own := group_of(ranks, dist.get_world_size()):
        detail["ranks"] = list(own)
    return detail


def _tensors(values: Any) -> Any:
    """The tensors of a nested list of arguments that this rank contributes or receives: of the first that has any."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
            return
        if isinstance(value, list | tuple):
            found = [each for each in _flat(value) if isinstance(each, torch.Tensor)]
            if found:
                yield from found
                return


def _flat(value: Any) -> Any:
    for each in value:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        else:
            yield each


def _follow(hub: Hub, collective: Collective, result: Any) -> None:
    """Report the end of a collective: when its future is done, or when the script has waited for it."""
    work = result[-1] if isinstance(result, tuple | list) else result
    if collective.operation in ("send", "recv", "barrier"):
        _WITHOUT_FUTURE.append(collective)
        return

    def done(_: Any) -> None:
        collective.ended = hub.clock()
        hub.emit("collective_ended", collective)

    distributed_c10d.Work.unbox(work).get_future().add_done_callback(done)


_WITHOUT_FUTURE: list[Collective] = []  # send, recv and barrier: the wait that ends them counts


def watch_waits(hub: Hub) -> None:
    """Blocked time, with the script's line: blocking functions of torch.distributed, and Work.wait."""
    depth = threading.local()

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            if hub.muted():
                return original(*arguments, **named)
            outer = getattr(depth, "value", 0)
            depth.value = outer + 1
            since = hub.clock()
            try:
                result = original(*arguments, **named)
            finally:
                depth.value = outer
            if outer == 0 and not isinstance(result, dist.Work):
                until = hub.clock()
                _end_without_future(hub, until)
                hub.emit("waited", since, until, call_site())
            return result

        return wrapper

    for name in BLOCKING:
        for module in (dist, distributed_c10d):  # dynamo refuses one function object at two places
            if hasattr(module, name):
                setattr(module, name, timed(getattr(module, name)))
    dist.Work.wait = timed(dist.Work.wait)  # type: ignore[method-assign]


def _end_without_future(hub: Hub, until: float) -> None:
    while _WITHOUT_FUTURE:
        collective = _WITHOUT_FUTURE.pop()
        collective.ended = until
        hub.emit("collective_ended", collective)


def watch_group(hub: Hub) -> None:
    """The default process group."""
    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        hub.emit("group_made")
        return result

    dist.init_process_group = init_process_group
    distributed_c10d.init_process_group = init_process_group


def watch_backward(hub: Hub, position: Position) -> None:
    """The backward pass and the loss."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
        position.phase = "backward"
        hub.emit("backward_began", tensors)
        try:
            return original(tensors, *arguments, **named)
        finally:
            position.phase = "sync"
            hub.emit("backward_ended")

    torch.autograd.backward = backward  # Tensor.backward calls it by this name


def watch_optimizers(hub: Hub, position: Position) -> None:
    """Every optimizer's step, by torch's global hooks."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def before(optimizer: Any, arguments: Any, named: Any) -> None:
        position.phase = "update"
        hub.emit("update_began", optimizer)

    def after(optimizer: Any, arguments: Any, named: Any) -> None:
        position.phase = "other"
        hub.emit("update_ended", optimizer)

    _KEPT.append(register_optimizer_step_pre_hook(before))
    _KEPT.append(register_optimizer_step_post_hook(after))


def watch_data(hub: Hub, position: Position) -> None:
    """Batches of every DataLoader."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__

    @functools.wraps(original)
    def fetch(self: Any) -> Any:
        position.phase = "data"
        hub.emit("data_began", self)
        try:
            batch = original(self)
        finally:
            position.phase = "forward"
        hub.emit("data_ended", self, batch)
        return batch

    _BaseDataLoaderIter.__next__ = fetch  # type: ignore[method-assign]
    # subclasses inherit it; `next` is the same method under an older name


def watch_wrappers(hub: Hub) -> None:
    """DistributedDataParallel and the options it gets."""
    import inspect

    kind = torch.nn.parallel.DistributedDataParallel
    original = kind.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def construct(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        bound = signature.bind(self, *arguments, **named)
        bound.apply_defaults()
        plain = (int, float, str, bool, type(None))
        options = {key: value for key, value in bound.arguments.items() if isinstance(value, plain)}
        hub.emit("wrapped", "DistributedDataParallel", self, options)

    kind.__init__ = construct  # type: ignore[method-assign]


def watch_optimizers_made(hub: Hub) -> None:
    """Every optimizer, when it is made."""
    original = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def construct(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        hub.emit("optimizer_made", self)

    torch.optim.Optimizer.__init__ = construct  # type: ignore[method-assign]


def watch_samplers(hub: Hub) -> None:
    """Passes over DistributedSamplers."""
    from torch.utils.data.distributed import DistributedSampler

    original = DistributedSampler.__iter__

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        hub.emit("sampler_began", self)
        return _passing(hub, self, original(self))

    DistributedSampler.__iter__ = iterate  # type: ignore[method-assign]


def _passing(hub: Hub, sampler: Any, indices: Any) -> Any:
    given = []
    for index in indices:
        given.append(index)
        yield index
    hub.emit("sampler_passed", sampler, given)


def watch_clipping(hub: Hub) -> None:
    """Gradient clipping by torch.nn.utils."""
    from torch.nn.utils import clip_grad

    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        for module in (torch.nn.utils, clip_grad):  # dynamo refuses one function object at two places
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, _before(original, functools.partial(hub.emit, "clipping_began")))


def _before(original: Callable[..., Any], event: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        event()
        return original(*arguments, **named)

    return wrapper
