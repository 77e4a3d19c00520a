"""The seams: functions of torch that are replaced, so that the observer is called when a script calls them.

Each `watch_*` function installs one seam. No seam changes a result, draws a random number or adds communication. If one
seam cannot be installed, the others still work. A seam that raises later is not called again (Hub.observe).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from testbed.attach.events import Collective, Hub, caller
from testbed.rank.counters import read_file
from testbed.results.timeline import group_of

# operation of torch.ops.c10d: its name in torch.distributed, and the argument whose bytes are counted
OPERATIONS = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "allgather_": ("all_gather", "output_tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "barrier": ("barrier", ""),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
}
ROOTS = {"root_rank": "root", "dst": "peer", "src": "peer"}  # arguments that name a rank
WITHOUT_FUTURE = ("send", "recv", "barrier")  # operations without a callback: each ends when the wait for it returns
# functions of torch.distributed that return when the collective has ended, except where they return a Work
BLOCKING = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "_all_gather_base",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
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
    "_broadcast_coalesced",  # DDP's buffers and first parameters
    "_verify_params_across_processes",  # DDP's constructor
)
# function that starts one collective of the same name: the argument whose bytes are counted, and that of the root
SIMPLE = {
    "all_reduce": ("tensor", ""),
    "broadcast": ("tensor", "src"),
    "reduce": ("tensor", "dst"),
    "gather": ("tensor", "dst"),
    "scatter": ("tensor", "src"),
    "all_gather": ("tensor_list", ""),
}
PLAIN = (torch.Tensor, torch.nn.Parameter)  # subclasses may start other operations
SEEN_BY = "AutogradCPU"  # the dispatch key of our kernels
CALLBACKS_TIMEOUT_S = 2.0  # a collective that has not ended when the script ends may never end
CALLBACK_S = 0.01
MAX_PENDING = 4096  # Works for which the script has not waited; the oldest is forgotten first


class Call:
    """A call of a function of torch.distributed that has not returned, and the collectives that it has started."""

    def __init__(self, operation: str, frame: Any = None) -> None:
        self.operation = operation  # reduce operation
        self.frame = frame  # of its caller
        self.started: list[tuple[Collective, Any]] = []  # with the Work (TorchScript); None: the call returns it


class Position:
    """The phase of the script, and its collectives in flight."""

    def __init__(self) -> None:
        self.phase = "other"  # the phase that the last event began
        self.backwards = 0  # backward passes that have not ended: a reentrant checkpoint calls one inside another
        self.dispatched = False  # our kernels are in c10d's dispatcher
        self.has_loader = False  # the script has fetched a training batch from a DataLoader
        self.has_ddp = False
        self.has_hook = False  # DDP with a communication hook
        self.reduced: list[Collective] = []  # collectives of this backward pass for whose end DDP waits
        self.pending: dict[int, tuple[Collective, Any]] = {}  # by id of the Work, which is kept until it ends
        self.called_back: set[int] = set()  # ids of collectives whose callback has not run yet
        self._groups: dict[tuple[str, int], tuple[list[int], list[int]]] = {}  # by name and size
        self._local = threading.local()

    @property
    def calls(self) -> list[Call]:
        """The calls of torch.distributed that this thread has not left, outermost first."""
        try:
            found: list[Call] = self._local.calls
        except AttributeError:
            found = self._local.calls = []
        return found

    def ranks(self, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
        """Return the ranks of a process group, and the list for records, which is empty if these are all ranks."""
        key = (group.group_name, group.size())
        if key not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[key] = (ranks, list(group_of(ranks, dist.get_world_size())))
        return self._groups[key]

    def forget(self) -> None:
        """Forget all collectives, because a forked process has none in flight."""
        self.phase, self.backwards, self.reduced, self.pending, self._groups = "other", 0, [], {}, {}
        self.called_back = set()
        self._local = threading.local()


_KEPT: list[Any] = []  # keeps objects alive: torch removes the kernels with the Library object


def watch_collectives(hub: Hub, position: Position) -> None:
    """Register kernels in c10d's dispatcher that report collectives, also those that DDP's reducer and FSDP start.

    Simple calls by the script itself (SIMPLE) are not reported here, because `watch_waits` reports them.
    """
    library = torch.library.Library("c10d", "IMPL")
    _KEPT.append(library)
    for name, (operation, counted) in OPERATIONS.items():
        if hasattr(torch.ops.c10d, name):
            overload = getattr(torch.ops.c10d, name).default
            kernel = _kernel(hub, position, overload, operation, counted)
            library.impl(name, kernel, SEEN_BY, with_keyset=True)
    position.dispatched = True


def _kernel(hub: Hub, position: Position, overload: Any, operation: str, counted: str) -> Callable[..., Any]:
    names = [argument.name for argument in overload._schema.arguments]
    place = names.index(counted) if counted else None
    group_place = names.index("process_group")
    root_place, root_word = next(((k, ROOTS[name]) for k, name in enumerate(names) if name in ROOTS), (None, ""))
    reduces = "reduce_op" in names
    after_autograd = torch._C._after_autograd_keyset

    def begin(arguments: tuple[Any, ...]) -> Collective:
        calls = position.calls
        ranks = position.ranks(dist.ProcessGroup.unbox(arguments[group_place]))
        detail = {} if root_place is None else {root_word: ranks[0][arguments[root_place]]}
        if reduces:  # DDP's reducer divides before it adds
            detail["reduce"] = calls[-1].operation if calls else "sum"
        tensors = () if place is None else _tensors(arguments[place])
        return begin_collective(hub, position, operation, tensors, ranks, detail)

    def follow(collective: Collective, result: Any) -> None:
        collective.launched = hub.clock()
        work = result[-1] if isinstance(result, (tuple, list)) else result
        if collective.phase == "backward" and (position.has_hook or collective.by == "DistributedDataParallel"):
            position.reduced.append(collective)
        calls = position.calls
        if calls:
            calls[-1].started.append((collective, work))  # the function returns when the collective has ended
        else:
            track(hub, position, collective, distributed_c10d.Work.unbox(work))

    def kernel(keys: Any, *arguments: Any, **named: Any) -> Any:
        if hub.muted():
            return overload.redispatch(keys & after_autograd, *arguments, **named)
        collective = hub.observe("collectives", begin, arguments)
        result = overload.redispatch(keys & after_autograd, *arguments, **named)
        if collective is not None:
            hub.observe("collectives", follow, collective, result)
        return result

    return kernel


def begin_collective(
    hub: Hub,
    position: Position,
    operation: str,
    tensors: tuple[torch.Tensor, ...],
    ranks: tuple[list[int], list[int]],
    detail: dict[str, Any],
) -> Collective:
    """Report that a collective begins, and return it. `ranks`: of its group, as Position.ranks returns them."""
    calls, phase = position.calls, position.phase
    detail["group"] = len(ranks[0])
    if ranks[1]:
        detail["ranks"] = ranks[1]
    size = 0
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
    site, by = caller(calls[-1].frame if calls else None)
    if not by and not calls and position.has_ddp and phase == "backward":
        by = "DistributedDataParallel"
    collective = Collective(operation, size, hub.clock(), site, phase, detail, tensors, by=by)
    hub.emit("collective_began", collective)
    collective.tensors = ()
    return collective


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of an argument, which is a tensor or a nested list of tensors."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (list, tuple)):
        if len(value) == 1:
            return _tensors(value[0])
        return tuple(tensor for each in value for tensor in _tensors(each))
    return ()


def track(hub: Hub, position: Position, collective: Collective, work: Any) -> None:
    """Report the end of a collective when its future is done, or when the script has waited for its Work.

    While `work` is kept, torch returns the same object to the script, so the id of the object identifies the wait.
    """
    if len(position.pending) >= MAX_PENDING:
        position.pending.pop(next(iter(position.pending)))
    key = id(work)
    position.pending[key] = (collective, work)

    def done(_: Any) -> None:
        def ended() -> None:
            hub.end(collective, hub.clock())
            kept = position.pending.get(key)
            if kept is not None and kept[0] is collective:
                del position.pending[key]

        hub.observe("ends", ended)
        position.called_back.discard(id(collective))

    if collective.operation not in WITHOUT_FUTURE:
        with contextlib.suppress(RuntimeError):  # this kind of Work has no future: it ends when the wait for it returns
            future = work.get_future()
            position.called_back.add(id(collective))
            future.add_done_callback(done)


def await_callbacks(position: Position) -> None:
    """Wait until all callbacks have run and no other thread runs, for at most CALLBACKS_TIMEOUT_S.

    A thread of Gloo that needs the interpreter while Python ends would abort the process. After the callback, such a
    thread still frees the tensors of its collective, which are Python objects.
    """
    begun = time.monotonic()
    while position.called_back and time.monotonic() < begun + CALLBACKS_TIMEOUT_S:
        time.sleep(CALLBACK_S)
    time.sleep(CALLBACK_S)
    while other_thread_runs() and time.monotonic() < begun + CALLBACKS_TIMEOUT_S:
        time.sleep(CALLBACK_S)


def other_thread_runs() -> bool:
    """Return True if another thread of this process runs or waits for a core."""
    own = str(threading.get_native_id())
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            state = read_file(f"/proc/self/task/{name}/stat").rpartition(b")")[2].split()[0]
            if name != own and state == b"R":
                return True
    return False


def watch_waits(hub: Hub, position: Position) -> None:
    """Report how long the script is blocked in functions of torch.distributed and in Work.wait."""
    for name in BLOCKING:
        for module in (dist, distributed_c10d):  # dynamo refuses one function object at two places
            if hasattr(module, name):
                setattr(module, name, _blocking(hub, position, getattr(module, name)))
    original = dist.Work.wait

    @functools.wraps(original)
    def wait(self: Any, *arguments: Any, **named: Any) -> Any:
        if position.calls or hub.muted():  # the function that calls wait reports the time
            return original(self, *arguments, **named)
        since, (collective, _) = hub.clock(), position.pending.get(id(self), (None, None))
        result = original(self, *arguments, **named)
        hub.observe("waits", _waited, hub, position, self, collective, since)
        return result

    dist.Work.wait = _not_compiled(wait)  # type: ignore[method-assign]


def _waited(hub: Hub, position: Position, work: Any, collective: Collective | None, since: float) -> None:
    until = hub.clock()
    if collective is not None:
        position.pending.pop(id(work), None)
        hub.end(collective, until)
    hub.emit("waited", since, until, [] if collective is None else [collective])


def _blocking(hub: Hub, position: Position, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `original` and reports how long the script waited in it.

    A kernel in the dispatcher costs as much time as the rest of the observer. So if the arguments show what is sent,
    the collective is reported here, and the dispatcher skips the observer's kernel.
    """
    operation_of, report = _reduce_operation(original), _simple_report(hub, position, original)
    unseen = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, SEEN_BY))

    def begin(arguments: tuple[Any, ...], named: dict[str, Any], frame: Any) -> tuple[Call, float]:
        call = Call(operation_of(arguments, named), frame)
        position.calls.append(call)
        return call, hub.clock()

    def end(call: Call, since: float, result: Any) -> None:
        until = hub.clock()
        if isinstance(result, dist.Work):
            for collective, work in call.started:
                track(hub, position, collective, result if work is None else distributed_c10d.Work.unbox(work))
            return
        collectives = [collective for collective, _ in call.started]
        for collective in collectives:
            hub.end(collective, until)
        if collectives or (not position.calls and original.__name__ == "monitored_barrier"):
            hub.emit("waited", since, until, collectives)

    @functools.wraps(original)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        if hub.muted():
            return original(*arguments, **named)
        begun = hub.observe("waits", begin, arguments, named, sys._getframe(1))
        if begun is None:
            return original(*arguments, **named)
        reported = report is not None and hub.observe("collectives", report, begun[0], arguments, named)
        try:
            if reported:
                with torch._C._ExcludeDispatchKeyGuard(unseen):
                    result = original(*arguments, **named)
            else:
                result = original(*arguments, **named)
        finally:
            position.calls.remove(begun[0])
        hub.observe("waits", end, *begun, result)
        return result

    return _not_compiled(wrapper)


def _simple_report(hub: Hub, position: Position, original: Callable[..., Any]) -> Callable[..., bool] | None:
    """Return a function that reports the collective of a call of `original`; None if `original` is not in SIMPLE."""
    operation, describe = original.__name__, _simple_call(original)
    if describe is None:
        return None

    def report(call: Call, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Report the collective if the arguments show what is sent. Return False if the dispatcher has to report it."""
        group, outer = dist.group.WORLD, len(position.calls) > 1
        if outer or group is None or position.phase == "backward" or not position.dispatched:
            return False
        if distributed_c10d._world.pg_coalesce_state or (described := describe(arguments, named)) is None:
            return False
        tensors, detail = described
        if "reduce" in operation:
            detail["reduce"] = call.operation
        collective = begin_collective(hub, position, operation, tensors, position.ranks(group), detail)
        call.started.append((collective, None))
        return True

    return report


Described = tuple[tuple[torch.Tensor, ...], dict[str, Any]]  # tensors that are sent; {"root": rank} or {}


def _simple_call(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Described | None] | None:
    """Return a function that returns what a call sends, or None if the arguments do not show it.

    Return None if `function` is not in SIMPLE.
    """
    if function.__name__ not in SIMPLE:
        return None
    counted, root = SIMPLE[function.__name__]
    names = list(inspect.signature(function).parameters)
    group_place, in_group = names.index("group"), f"group_{root}"  # the root by its number in the group

    def given(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        place = names.index(name)
        return arguments[place] if len(arguments) > place else named.get(name)

    def describe(arguments: tuple[Any, ...], named: dict[str, Any]) -> Described | None:
        if len(arguments) > group_place or named.get("group") is not None or in_group in named:
            return None
        tensors = _tensors(given(counted, arguments, named))
        for tensor in tensors:
            if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.is_complex() or tensor.is_sparse:
                return None
        return (tensors, {"root": given(root, arguments, named) or 0} if root else {}) if tensors else None

    return describe


def _not_compiled(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, marked so that dynamo does not compile it: torch.compiler.disable without its imports."""
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    return wrapper


def _reduce_operation(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """Return a function that returns the reduce operation of a call, e.g. "sum"."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # a function written in C++ has no signature
        names = []
    place = names.index("op") if "op" in names else None

    def operation(arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
        if place is None:
            return "sum"
        given = named.get("op", arguments[place] if len(arguments) > place else dist.ReduceOp.SUM)
        kind = getattr(given, "op", given)
        return str(getattr(kind, "name", kind)).rpartition(".")[2].lower()

    return operation


def watch_group(hub: Hub, position: Position) -> None:
    """Report when the default process group was made."""
    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        hub.observe("group", hub.emit, "group_made")
        return result

    dist.init_process_group = init_process_group
    distributed_c10d.init_process_group = init_process_group


def watch_backward(hub: Hub, position: Position) -> None:
    """Report the begin and end of each backward pass, and its loss. A pass inside another one is a part of it."""
    original = torch.autograd.backward

    def begin(tensors: Any) -> None:
        position.backwards += 1
        if position.backwards == 1:
            position.phase, position.reduced = "backward", []
            hub.emit("backward_began", tensors)

    def end(completed: bool) -> None:
        position.backwards = max(0, position.backwards - 1)  # a process that was forked in a pass began at 0
        if position.backwards:
            return
        reduced, position.reduced = position.reduced, []
        position.phase = "sync"
        if completed:
            now = hub.clock()
            for collective in reduced:  # DDP has waited for these collectives
                hub.end(collective, now)
        hub.emit("backward_ended", reduced)

    @functools.wraps(original)
    def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
        completed = False
        hub.observe("backward", begin, tensors)
        try:
            result = original(tensors, *arguments, **named)
            completed = True
        finally:
            hub.observe("backward", end, completed)
        return result

    torch.autograd.backward = _not_compiled(backward)  # Tensor.backward looks it up by this name


def watch_scalers(hub: Hub, position: Position) -> None:
    """Report each loss that a GradScaler multiplies, so that the unscaled loss is recorded."""
    kind = torch.amp.GradScaler
    original = kind.scale

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        hub.observe("scalers", hub.emit, "scaled", result, outputs)
        return result

    kind.scale = scale  # type: ignore[method-assign]


def watch_optimizers(hub: Hub, position: Position) -> None:
    """Report the begin and end of every optimizer's step, by torch's global hooks."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def began(optimizer: Any) -> None:
        position.phase = "update"
        hub.emit("update_began", optimizer)

    def ended(optimizer: Any) -> None:
        position.phase = "other" if position.has_loader else "forward"
        hub.emit("update_ended", optimizer)

    def before(optimizer: Any, arguments: Any, named: Any) -> None:
        hub.observe("optimizers", began, optimizer)

    def after(optimizer: Any, arguments: Any, named: Any) -> None:
        hub.observe("optimizers", ended, optimizer)

    _KEPT.append(register_optimizer_step_pre_hook(before))
    _KEPT.append(register_optimizer_step_post_hook(after))


def watch_data(hub: Hub, position: Position) -> None:
    """Report each batch of every DataLoader, and the end of each pass."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__

    def began(loader: Any) -> None:
        trains = torch.is_grad_enabled()
        position.has_loader |= trains
        position.phase = "data" if trains else "evaluation"
        hub.emit("data_began", loader)

    def ended(loader: Any, batch: Any) -> None:
        position.phase = "forward" if torch.is_grad_enabled() else "evaluation"
        hub.emit("data_ended", loader, batch)

    def exhausted(loader: Any) -> None:
        position.phase = "other"
        hub.emit("data_exhausted", loader)

    @functools.wraps(original)
    def fetch(self: Any) -> Any:
        hub.observe("data", began, self)
        try:
            batch = original(self)
        except StopIteration:
            hub.observe("data", exhausted, self)
            raise
        hub.observe("data", ended, self, batch)
        return batch

    _BaseDataLoaderIter.__next__ = fetch  # type: ignore[method-assign]


def watch_evaluation(hub: Hub, position: Position) -> None:
    """Report calls of Module.eval and Module.train."""
    kind = torch.nn.Module
    evaluate, train = kind.eval, kind.train

    @functools.wraps(evaluate)
    def eval_(self: Any) -> Any:
        hub.observe("evaluation", hub.emit, "evaluation_began")
        return evaluate(self)

    @functools.wraps(train)
    def train_(self: Any, mode: bool = True) -> Any:
        result = train(self, mode)
        if mode is True:
            hub.observe("evaluation", hub.emit, "evaluation_ended")
        return result

    kind.eval, kind.train = _not_compiled(eval_), _not_compiled(train_)  # type: ignore[method-assign]


def watch_wrappers(hub: Hub, position: Position) -> None:
    """Report each DistributedDataParallel with its non-default options and its hook."""
    kind = torch.nn.parallel.DistributedDataParallel
    original, register_hook = kind.__init__, kind.register_comm_hook
    signature = inspect.signature(original)

    def made(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        position.has_ddp = True
        given = signature.bind(module, *arguments, **named).arguments
        plain = {key: value for key, value in given.items() if isinstance(value, int | float | str)}
        options = {key: value for key, value in plain.items() if value != signature.parameters[key].default}
        hub.emit("wrapped", "DistributedDataParallel", module, options)

    def hooked(hook: Any) -> None:
        position.has_hook = True
        name = getattr(hook, "__qualname__", str(hook))
        hub.emit("wrapped", "communication hook", None, {"name": name})

    @functools.wraps(original)
    def construct(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        hub.observe("wrappers", made, self, arguments, named)

    @functools.wraps(register_hook)
    def register_comm_hook(self: Any, state: Any, hook: Any) -> Any:
        result = register_hook(self, state, hook)
        hub.observe("wrappers", hooked, hook)
        return result

    kind.__init__ = construct  # type: ignore[method-assign]
    kind.register_comm_hook = register_comm_hook  # type: ignore[method-assign]


def watch_optimizers_made(hub: Hub, position: Position) -> None:
    """Report every optimizer when it is constructed."""
    original = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def construct(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        hub.observe("optimizers made", hub.emit, "optimizer_made", self)

    torch.optim.Optimizer.__init__ = construct  # type: ignore[method-assign]


def watch_samplers(hub: Hub, position: Position) -> None:
    """Report the begin and end of each pass over a DistributedSampler."""
    from torch.utils.data.distributed import DistributedSampler

    original = DistributedSampler.__iter__

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        hub.observe("samplers", hub.emit, "sampler_began", self)
        given = list(original(self))  # torch, too, makes all indices at the begin of a pass
        return itertools.chain(given, _passed(hub, self, given))

    DistributedSampler.__iter__ = iterate  # type: ignore[method-assign]


def _passed(hub: Hub, sampler: Any, given: list[Any]) -> Iterator[Any]:
    """Yield nothing, but report the pass when the script has read all indices.

    Chained after the indices, this costs the script no Python code for each index.
    """
    hub.observe("samplers", hub.emit, "sampler_passed", sampler, given)
    yield from ()


def watch_clipping(hub: Hub, position: Position) -> None:
    """Report each gradient clipping by torch.nn.utils, before it begins."""
    from torch.nn.utils import clip_grad

    def began() -> None:
        hub.observe("clipping", hub.emit, "clipping_began")

    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        for module in (torch.nn.utils, clip_grad):  # dynamo refuses one function object at two places
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, _before(original, began))


def _before(original: Callable[..., Any], event: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        event()
        return original(*arguments, **named)

    return _not_compiled(wrapper)


SEAMS: dict[str, Callable[[Hub, Position], None]] = {
    "group": watch_group,
    "collectives": watch_collectives,
    "waits": watch_waits,
    "backward": watch_backward,
    "scalers": watch_scalers,
    "optimizers": watch_optimizers,
    "optimizers made": watch_optimizers_made,
    "data": watch_data,
    "samplers": watch_samplers,
    "clipping": watch_clipping,
    "evaluation": watch_evaluation,
    "wrappers": watch_wrappers,
}
