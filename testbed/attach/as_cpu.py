"""Run a script that was written for CUDA on the CPU: `testbed exec --as-cpu`.

Where a script names a CUDA device, the CPU is used: for tensors, modules, autocast, GradScaler, DDP and device meshes.
NCCL becomes Gloo. `torch.cuda.is_available()` and `torch.accelerator.is_available()` are True for the script's own
code, so that the script executes its code for GPUs. For libraries, torch included, both functions are False.
A script finds one GPU, or as many as CUDA_VISIBLE_DEVICES lists. `torch.device(0)` and `torch.Generator("cuda")` are
not replaced.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.utils import _device

from testbed.attach.events import is_library, note_once

CHANGED = "--as-cpu: CUDA devices, autocast and GradScaler became those of the CPU"
GLOO = "--as-cpu: NCCL became Gloo"
BATCHNORM = "--as-cpu: SyncBatchNorm has no code for the CPU: it took the statistics of each rank's own batch"
FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange"),
    *("linspace", "logspace", "eye", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("randint_like", "tril_indices", "triu_indices", "from_file", "load", "set_default_device", "empty_strided"),
    "set_default_tensor_type",
)
METHODS = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full", "type")
ZERO = (  # functions of torch.cuda and torch.accelerator that return 0
    *("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("current_device_index", "current_device_idx"),
)
SILENT = (
    *("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated", "init"),
    *("ipc_collect", "reset_accumulated_memory_stats", "set_device_index", "set_device_idx"),
)


def install(changed: list[str]) -> None:
    """Replace the functions of torch that take a CUDA device. Append to `changed` the sentences for the report page."""
    changed.append(CHANGED)
    # torch caches the functions that `with torch.device(...)` acts on. The cache must have the originals.
    _device._device_constructors()
    for name in FACTORIES:
        if hasattr(torch, name):
            setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    for owner, name in ((torch.Tensor, "to"), (torch.nn.Module, "to"), (torch.nn.Module, "to_empty")):
        setattr(owner, name, _on_cpu(getattr(owner, name), index=True))
    for kind in (_device.DeviceContext, device_mesh.DeviceMesh):
        kind.__init__ = _on_cpu(kind.__init__)  # type: ignore[method-assign]
    dist.init_device_mesh = device_mesh.init_device_mesh = _on_cpu(device_mesh.init_device_mesh)
    torch.Tensor.cuda = torch.nn.Module.cuda = _itself  # type: ignore[method-assign]
    torch.Tensor.pin_memory = _itself  # type: ignore[method-assign]
    for scaling in (torch.amp.autocast, torch.amp.GradScaler):
        scaling.__init__ = _on_cpu(scaling.__init__, default="device", value="cpu")  # type: ignore[method-assign]
    _replace_cuda()
    _replace_accelerator()
    _replace_groups(changed)
    _replace_ddp()
    _replace_batchnorm(changed)


def devices() -> int:
    """Return the number of GPUs that a script finds."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([each for each in listed.split(",") if each.strip()]) or 1


def cpu(value: Any) -> Any:
    """Return the CPU for a CUDA device or its name. Return any other value unchanged."""
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    if isinstance(value, str) and value.startswith("torch.cuda."):  # a type of tensor
        return value.replace(".cuda", "", 1)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, dict):  # map_location of torch.load
        return {cpu(key): cpu(each) for key, each in value.items()}
    return value


def _on_cpu(
    original: Callable[..., Any], default: str = "", value: str = "", index: bool = False
) -> Callable[..., Any]:
    """Return a function that replaces CUDA by the CPU in its arguments, then calls `original`.

    `default` names an argument that is CUDA if it is not given; `value` is passed for it. With `index`, the first
    argument after self may be the number of a device.
    """

    @functools.wraps(original)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        if index and len(arguments) > 1 and _is_index(arguments[1]):
            arguments = (arguments[0], "cpu", *arguments[2:])
        if default and len(arguments) < 2 and not any(key.startswith(default) for key in named):
            arguments = (*arguments, value)
        arguments = tuple(cpu(each) if isinstance(each, str | torch.device) else each for each in arguments)
        for key in ("device", "map_location", "device_type"):
            if key in named:
                named[key] = "cpu" if _is_index(named[key]) else cpu(named[key])
        return original(*arguments, **named)

    return wrapper


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _itself(self: Any, *arguments: Any, **named: Any) -> Any:
    return self


def _replace_cuda() -> None:
    """Replace the functions of torch.cuda that scripts call."""
    cuda: Any = torch.cuda
    for name, value in {"is_available": True, "device_count": devices()}.items():
        setattr(cuda, name, _for_scripts(getattr(cuda, name), value))
    _replace_plain(cuda)
    for name in [each for each in dir(cuda) if each.endswith("Tensor") and hasattr(torch, each)]:
        setattr(cuda, name, getattr(torch, name))
    for name in ("mark", "range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *arguments, **named: None)
    cuda.mem_get_info = lambda *arguments, **named: (0, 0)
    properties = SimpleNamespace(name="CPU", total_memory=0, major=0, minor=0, multi_processor_count=1)
    cuda.get_device_properties = lambda *arguments, **named: properties
    cuda.get_device_name = lambda *arguments, **named: "CPU"
    cuda.get_device_capability = lambda *arguments, **named: (0, 0)
    cuda.is_bf16_supported = lambda *arguments, **named: True
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *arguments, **named: _Stream()
    cuda.stream = cuda.device = lambda *arguments, **named: contextlib.nullcontext()


def _replace_plain(module: Any) -> None:
    """Replace the functions that do nothing on the CPU by functions that return a constant."""
    for names, value in ((ZERO, 0), (SILENT, None)):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, _constant(value))


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: value


def _replace_accelerator() -> None:
    """Replace the functions of torch.accelerator that scripts call."""
    module: Any = torch.accelerator
    values = {"is_available": True, "device_count": devices(), "current_accelerator": torch.device("cuda")}
    for name, value in values.items():
        setattr(module, name, _for_scripts(getattr(module, name), value))
    _replace_plain(module)
    module.device_index = _constant(contextlib.nullcontext())


def _for_scripts(original: Callable[..., Any], value: Any) -> Callable[..., Any]:
    """Return a function that returns `value` to a script, and the result of `original` to a library."""

    @functools.wraps(original)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return original(*arguments, **named) if is_library(sys._getframe(1).f_code.co_filename) else value

    return wrapper


class _Stream:
    """Replaces torch.cuda.Stream. On the CPU an operation has ended when its call returns, so no method waits."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = record_event = lambda self, *arguments: None


class _Event(_Stream):
    """Replaces torch.cuda.Event. An event has happened as soon as it is recorded."""

    def record(self, *arguments: Any) -> None:
        import time

        self.at = time.monotonic()

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds between this event and the other."""
        return float(other.at - self.at) * 1e3

    def query(self) -> bool:
        return True


def _replace_groups(changed: list[str]) -> None:
    """Replace NCCL by Gloo, and leave out the arguments that Gloo does not accept."""
    for name in ("init_process_group", "new_group"):
        original = getattr(distributed_c10d, name)
        replaced = _with_gloo(original, changed)
        setattr(dist, name, replaced)
        setattr(distributed_c10d, name, replaced)
    dist.is_nccl_available = lambda: True
    barrier = distributed_c10d.barrier

    @functools.wraps(barrier)
    def without_devices(*arguments: Any, **named: Any) -> Any:
        named.pop("device_ids", None)
        return barrier(*arguments, **named)

    dist.barrier = distributed_c10d.barrier = without_devices


def _with_gloo(original: Callable[..., Any], changed: list[str]) -> Callable[..., Any]:
    place = 0 if original.__name__ == "init_process_group" else 2  # position of the argument `backend`

    @functools.wraps(original)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        given = named.get("backend", arguments[place] if len(arguments) > place else None)
        if given is not None and "nccl" in str(given).lower():
            note_once(changed, GLOO)
            if "backend" in named:
                named["backend"] = "gloo"
            else:
                arguments = (*arguments[:place], "gloo", *arguments[place + 1 :])
        named.pop("device_id", None)
        return original(*arguments, **named)

    return wrapper


def _replace_ddp() -> None:
    kind = torch.nn.parallel.DistributedDataParallel
    original = kind.__init__

    @functools.wraps(original)
    def construct(self: Any, module: Any, *arguments: Any, **named: Any) -> None:
        named = {key: value for key, value in named.items() if key not in ("device_ids", "output_device")}
        original(self, module, *((None, None)[: len(arguments)]), *arguments[2:], **named)

    kind.__init__ = construct  # type: ignore[method-assign]


def _replace_batchnorm(changed: list[str]) -> None:
    forward = torch.nn.modules.batchnorm._BatchNorm.forward

    def plain(self: Any, batch: torch.Tensor) -> torch.Tensor:
        note_once(changed, BATCHNORM)
        return forward(self, batch)

    torch.nn.SyncBatchNorm.forward = plain  # type: ignore[method-assign, assignment]
