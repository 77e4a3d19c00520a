"""Samples of a script's gradients, parameters and data, taken in the same way on all ranks.

Samples are taken at the updates 0, 1, 3, 7, ... of every optimizer. `Sampling` reads gradients three times: as backward
accumulated them, before any synchronisation (local); when backward has ended (reduced); and as the optimizer gets them
(given). The positions that are read depend on the shapes alone, so they are equal on all ranks. This module draws from
no random generator, does not communicate, and changes no tensor. The step records have the time that it takes
(`observing`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from testbed.attach.events import Collective, Part, call_site

MAX_VALUES = 2000  # of one sample, but at least one of every tensor
MAX_OPTIMIZERS = 4  # sampled; a script with an optimizer for each parameter has hundreds
MAX_EXAMINED = 64  # collectives of one line whose tensors are looked up in steps without a sample
EXAMINED_SHARE = 0.01  # of the parameters' bytes: smaller collectives are not looked up in such steps
MAX_IMAGES, MAX_IMAGE_BYTES = 512, 16 << 20  # largest batch whose images are hashed one by one
MAX_AVERAGES = 6  # hashes of parameters that are taken after a communication of parameters
FLAT_SHARE = 0.9  # of the parameters' bytes: a collective of this size carries a flat copy of all
MAX_TERMS = 64  # nodes of the graph of a loss that are looked at
SUM_REDUCTION = 2  # at::Reduction::Sum
MIXER = 0x9E3779B97F4A7C15  # the increment of splitmix64
MASK = (1 << 64) - 1

Values = list[float]
F = TypeVar("F", bound=Callable[..., None])


def is_sampled(number: int) -> bool:
    """Return True if the update of this number is sampled: 0, 1, 3, 7, ..."""
    return (number + 1) & number == 0


def positions(sizes: list[int]) -> list[list[int]]:
    """Return positions in tensors of these sizes: pseudo-random, equal on all ranks, at least one in each tensor."""
    share = max(1, MAX_VALUES // max(1, len(sizes)))
    chosen = []
    for tensor, size in enumerate(sizes):
        if size <= share:
            chosen.append(list(range(size)))
        else:
            chosen.append(sorted({_mix(tensor * MASK // 3 + draw) % size for draw in range(share)}))
    return chosen


def _mix(value: int) -> int:
    value = (value + MIXER) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def digest(tensors: Iterator[torch.Tensor]) -> str:
    """Return a hash of dtype, shape and all bytes of the tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        plain = _plain(tensor)
        found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        if plain.numel() and plain.device.type == "cpu":
            size = plain.numel() * plain.element_size()
            found.update((ctypes.c_char * size).from_address(plain.data_ptr()))
    return found.hexdigest()[:32]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or this rank's part of a DTensor, as a contiguous dense tensor."""
    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    if local.is_sparse:
        local = local.to_dense()
    return local.contiguous()


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _as_bytes(indices: list[Any]) -> bytes:
    """Return indices as bytes for a hash. Indices of torch's samplers are integers."""
    try:
        return array("q", indices).tobytes()
    except (TypeError, OverflowError):
        return repr(indices).encode()


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr()) if local.layout == torch.strided else 0


def loss_scale(loss: Any) -> float:
    """Return the product of the constants that a loss was last multiplied by, e.g. 0.25 after `loss = loss / 4`."""
    value = loss[0] if isinstance(loss, list | tuple) else loss
    node, scale = getattr(value, "grad_fn", None), 1.0
    while node is not None and node.name() in ("DivBackward0", "MulBackward0"):
        others = [each for each in (node._saved_self, node._saved_other) if each is not None]
        if len(others) != 1 or others[0].numel() != 1:
            break
        constant = float(others[0])
        scale = scale / constant if node.name() == "DivBackward0" else scale * constant
        node = node.next_functions[0][0] or node.next_functions[-1][0]
    return scale


def is_sum(loss: Any) -> bool:
    """Return True if a term of a loss is a sum over a batch, not a mean, as far as the graph of the loss shows it."""
    value = loss[0] if isinstance(loss, list | tuple) else loss
    nodes, found = [getattr(value, "grad_fn", None)], 0
    while nodes and found < MAX_TERMS:
        node, found = nodes.pop(), found + 1
        if node is None:
            continue
        if node.name().startswith("SumBackward") or getattr(node, "_saved_reduction", None) == SUM_REDUCTION:
            return True
        if node.name().startswith(("Add", "Sub", "Neg", "Mul", "Div")):
            nodes += [each for each, _ in node.next_functions]
    return False


def hook_first(parameter: torch.Tensor, hook: Callable[[Any], None]) -> Any:
    """Call `hook` when a gradient was accumulated, before the script's own hooks. Return its handle."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: Any = parameter._post_accumulate_grad_hooks
    for key in [key for key in hooks if key != handle.id]:  # to the end: torch calls them in this order
        hooks[key] = hooks.pop(key)
    return handle


class Tracked:
    """One optimizer: its parameters, the positions that are read, and the samples of its present update."""

    def __init__(self, number: int, optimizer: Any) -> None:
        self.number, self.optimizer = number, optimizer
        self.updates = 0
        self.begun = False  # the first backward pass of this optimizer has begun
        self.average_pending = self.hash_pending = False
        self.averages = 0
        self.seconds_in_hooks = 0.0
        self.handles: list[Any] = []
        self.parameters: list[torch.Tensor] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the optimizer's parameters again, because a script may add some. Forget the samples."""
        groups = self.optimizer.param_groups
        found = [p for group in groups for p in group["params"] if isinstance(p, torch.Tensor)]
        found = [p for p in found if p.requires_grad and p.is_leaf]
        if not self.parameters or [id(p) for p in found] != [id(p) for p in self.parameters]:
            self.parameters = found
            self.sharded = any(hasattr(p, "to_local") or type(p).__name__ == "FlatParameter" for p in found)
            self.sizes = [_plain(p).numel() for p in found]
            self.places = [torch.tensor(each, dtype=torch.long) for each in positions(self.sizes)]
            self.names = [f"{k} {'x'.join(map(str, p.shape))}" for k, p in enumerate(found)]
            self.bytes = sum(p.numel() * p.element_size() for p in found)
        self.clear()

    def clear(self) -> None:
        """Forget the samples of the last update."""
        count = len(self.parameters)
        self.local: list[Values | None] = [None] * count
        self.base: list[Values | None] = [None] * count
        self.start: list[Values | None] = [None] * count  # `local` when the present pass began
        self.fired: list[int] = [0] * count
        self.local_norms: list[float] = [0.0] * count
        self.pass_bytes: list[int] = []  # of collectives in each backward pass
        self.pass_sites: list[str] = []  # the line of the script that called each backward pass
        self.between: dict[tuple[str, str, str, str], list[int]] = {}
        self.reduced: list[Values] = []
        self.unclipped: list[Values] = []
        self.loss_scale = 1.0
        self.loss_is_sum = False

    @property
    def sampled(self) -> bool:
        return is_sampled(self.updates)

    def read(self, k: int) -> Values | None:
        """Return the sampled values of gradient k; None if there is none, or if its size differs (not sharded yet)."""
        gradient = self.parameters[k].grad
        if gradient is None:
            return None
        plain = _plain(gradient).reshape(-1)
        if plain.numel() != self.sizes[k]:
            return None
        return [float(value) for value in plain[self.places[k]].tolist()]

    def read_all(self) -> list[Values]:
        return [self.read(k) or [] for k in range(len(self.parameters))]

    def add_hooks(self) -> None:
        """Begin a backward pass: read all gradients, and hook their accumulation before the script's hooks."""
        self.base = [self.read(k) for k in range(len(self.parameters))]
        if not any(value for values in self.base for value in values or ()):  # zero_grad
            self.pass_bytes.clear()
            self.pass_sites.clear()
            self.between.clear()
            self.local = [None] * len(self.parameters)
            self.fired = [0] * len(self.parameters)
        self.start = list(self.local)
        self.unclipped = []  # read after an earlier pass, so without the gradients of this one
        self.pass_bytes.append(0)
        self.pass_sites.append(call_site())
        if self.handles:
            return
        for k, parameter in enumerate(self.parameters):
            self.handles.append(hook_first(parameter, functools.partial(self._accumulated, k)))

    def _accumulated(self, k: int, parameter: torch.Tensor) -> None:
        began = time.perf_counter()
        try:
            self.fired[k] += 1
            now, base, before = self.read(k), self.base[k], self.start[k]
            if now is None:
                self.sharded = True
            elif before is None or base is None or not any(base) or base == before:
                self.local[k] = now
            else:  # the gradient was synchronised after the last pass: add only what this one adds
                self.local[k] = [a + (b - c) for a, b, c in zip(before, now, base, strict=True)]
            if parameter.grad is not None:
                self.local_norms[k] = float(torch.linalg.vector_norm(_plain(parameter.grad)))
        except Exception:  # autograd would raise it in the script
            self.sharded = True
        self.seconds_in_hooks += time.perf_counter() - began

    def remove_hooks(self) -> None:
        """Remove the hooks that `add_hooks` has made."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def on(self, collective: Collective) -> str:
        """Return what a collective carries: "gradients", "parameters", "all" (a flat copy of either) or "other"."""
        addresses = {_address(tensor) for tensor in collective.tensors}
        if addresses & {_address(p.grad) for p in self.parameters if p.grad is not None}:
            return "gradients"
        if addresses & {_address(p) for p in self.parameters}:
            return "parameters"
        return "all" if self.bytes and collective.size >= FLAT_SHARE * self.bytes else "other"


def _timed(event: F) -> F:
    """Return the event handler with its duration added to `_seconds`, for the step records."""

    @functools.wraps(event)
    def timed(self: Sampling, *arguments: Any) -> None:
        began = time.perf_counter()
        try:
            with torch.no_grad():
                event(self, *arguments)
        finally:
            self._seconds += time.perf_counter() - began

    return timed  # type: ignore[return-value]


class Sampling(Part):
    """Writes gradients, parameters, batch and pass records."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self.send = send
        self.tracked: list[Tracked] = []
        self.batches = 0
        self.passes = 0
        self.open: dict[int, dict[str, Any]] = {}  # by id of the sampler: the latest pass, not sent yet
        self.uses: dict[tuple[str, str, str, str], int] = {}  # (operation, site, phase, what it carries) -> count
        self.examined: dict[str, int] = {}
        self.in_backward = False
        self.wrapped_at = ""  # the line that makes the first wrapper
        self.untracked = False  # an optimizer that is not tracked has updated
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Return the seconds that samples took since the last call."""
        hooks = sum(each.seconds_in_hooks for each in self.tracked)
        for each in self.tracked:
            each.seconds_in_hooks = 0.0
        taken, self._seconds = self._seconds + hooks, 0.0
        return round(taken, 6)

    # events

    def wrapped(self, kind: str, module: Any, options: dict[str, Any]) -> None:
        self.wrapped_at = self.wrapped_at or call_site()

    def optimizer_made(self, optimizer: Any) -> None:
        if len(self.tracked) < MAX_OPTIMIZERS and self._of(optimizer) is None:
            self.tracked.append(Tracked(len(self.tracked), optimizer))

    def _of(self, optimizer: Any) -> Tracked | None:
        return next((each for each in self.tracked if each.optimizer is optimizer), None)

    def backward_began(self, loss: Any) -> None:
        self.in_backward = True
        for each in self.tracked:
            if each.sampled or each.hash_pending or each.average_pending or not each.begun:
                self._prepare(each, loss)

    @_timed
    def _prepare(self, each: Tracked, loss: Any) -> None:
        if not each.begun:
            each.refresh()
            each.begun = True
            self._hash(each, "start")
        if each.hash_pending or each.average_pending:
            self._hash(each, "step")
        if each.sampled:
            each.add_hooks()
            each.loss_scale, each.loss_is_sum = loss_scale(loss), is_sum(loss)

    def backward_ended(self, reduced: list[Collective]) -> None:
        self.in_backward = False
        for each in self.tracked:
            if each.handles:
                self._read_reduced(each)

    @_timed
    def _read_reduced(self, each: Tracked) -> None:
        if any(each.fired):
            each.reduced = each.read_all()

    def clipping_began(self) -> None:
        for each in self.tracked:
            if each.handles and not each.unclipped and each.pass_bytes:
                self._read_unclipped(each)

    @_timed
    def _read_unclipped(self, each: Tracked) -> None:
        each.unclipped = each.read_all()

    def update_began(self, optimizer: Any) -> None:
        each = self._of(optimizer)
        if each is None:
            self.optimizer_made(optimizer)
            if self._of(optimizer) is None and not self.untracked:
                self.untracked = True
                what = f"gradients and parameters of more than {MAX_OPTIMIZERS} optimizers are not sampled"
                self.send({"kind": "unseen", "seam": "Sampling", "error": what})
        elif each.sampled and each.pass_bytes:
            self._write_gradients(each)

    def update_ended(self, optimizer: Any) -> None:
        each = self._of(optimizer)
        if each is not None:
            each.hash_pending = each.hash_pending or each.sampled
            each.updates += 1
            if each.handles:
                each.remove_hooks()
                each.refresh()

    def collective_began(self, collective: Collective) -> None:
        for each in self.tracked:
            if self.in_backward:
                if each.handles:
                    each.pass_bytes[-1] += collective.size
            elif each.handles or self._unknown(each, collective):
                self._examine(each, collective)

    def _unknown(self, each: Tracked, collective: Collective) -> bool:
        if collective.phase == "sync":  # between backward and update: examined in sampled updates only
            return False
        few = self.examined.get(collective.site, 0) < MAX_EXAMINED
        return few and collective.size >= EXAMINED_SHARE * each.bytes

    @_timed
    def _examine(self, each: Tracked, collective: Collective) -> None:
        if not each.begun:  # e.g. DDP's constructor sends the parameters
            return
        self.examined[collective.site] = self.examined.get(collective.site, 0) + 1
        carries = each.on(collective)
        key = (collective.operation, collective.site, collective.phase, carries)
        self.uses[key] = self.uses.get(key, 0) + 1
        if each.handles and each.pass_bytes:
            row = each.between.setdefault(key, [0, 0])
            row[0] += 1
            row[1] += collective.size
        elif each.updates and carries in ("parameters", "all") and each.averages < MAX_AVERAGES:
            each.average_pending = True

    def data_ended(self, loader: Any, batch: Any) -> None:
        if torch.is_grad_enabled():
            if is_sampled(self.batches):
                self._write_batch(batch)
            self.batches += 1

    def sampler_began(self, sampler: Any) -> None:
        self._end_pass(id(sampler))
        self.open[id(sampler)] = {"updates": self._updates(), "training": torch.is_grad_enabled(), "site": call_site()}

    def sampler_passed(self, sampler: Any, indices: list[int]) -> None:
        made = self.open.get(id(sampler))
        if made is not None:
            made["record"] = {
                "kind": "pass",
                "number": self.passes,
                "epoch": int(getattr(sampler, "epoch", -1)),
                "order": hashlib.sha256(_as_bytes(indices)).hexdigest()[:32],
                "length": len(indices),
                "shuffled": bool(getattr(sampler, "shuffle", False)),
                "site": made["site"],
                "detail": {"sampler": type(sampler).__name__, "training": made["training"]},
            }
            self.passes += 1

    def _end_pass(self, sampler: int) -> None:
        """Send the record of the sampler's last pass, with its number of updates, if the pass was complete."""
        made = self.open.pop(sampler, {})
        if "record" in made:
            made["record"]["detail"]["updates"] = self._updates() - made["updates"]
            self.send(made["record"])

    def _updates(self) -> int:
        return sum(each.updates for each in self.tracked)

    def ends(self) -> None:
        for each in self.tracked:
            if each.hash_pending or each.average_pending:
                self._hash(each, "step")
        for sampler in list(self.open):
            self._end_pass(sampler)

    # records

    @_timed
    def _write_gradients(self, each: Tracked) -> None:
        given = each.read_all()
        seen = any(each.fired)
        local = [
            ([] if not (seen and got) else values if values is not None else [0.0] * len(got))
            for values, got in zip(each.local, given, strict=True)
        ]
        norms = [0.0 if p.grad is None else float(torch.linalg.vector_norm(_plain(p.grad))) for p in each.parameters]
        self.send(
            {
                "kind": "gradients",
                "step": each.updates,
                "passes": len(each.pass_bytes),
                "names": each.names,
                "local": local,
                "given": given,
                "reduced": [] if each.reduced == given else each.reduced,
                "unclipped": each.unclipped,
                "detail": {
                    "optimizer": each.number,
                    "site": call_site(),
                    "sharded": each.sharded,
                    "norms": norms,
                    "local_norms": each.local_norms,
                    "pass_bytes": each.pass_bytes,
                    "pass_sites": each.pass_sites,
                    "bytes": each.bytes,
                    "between": [[*key, *row] for key, row in each.between.items()],
                    "unused": sum(1 for fired in each.fired if fired < len(each.pass_bytes)),
                    "loss_scale": each.loss_scale,
                    "loss_is_sum": each.loss_is_sum,
                    "wrapped": self.wrapped_at,
                },
            }
        )

    def _hash(self, each: Tracked, moment: str) -> None:
        if moment == "step":
            each.averages += each.average_pending
            each.hash_pending = each.average_pending = False
        self.send(
            {
                "kind": "parameters",
                "step": max(0, each.updates - 1),
                "moment": moment,
                "hash": digest(iter(each.parameters)),
                "detail": {
                    "optimizer": each.number,
                    "sharded": each.sharded,
                    "tensors": len(each.parameters),
                    "bytes": each.bytes,
                    "uses": [[*key, count] for key, count in self.uses.items()],
                },
            }
        )

    @_timed
    def _write_batch(self, batch: Any) -> None:
        tensors = list(_tensors(batch))
        images = next((int(each.shape[0]) for each in tensors if each.dim()), 0)
        detail: dict[str, Any] = {"tensors": len(tensors), "site": call_site()}
        first = next((each for each in tensors if each.dim() > 1 and each.is_floating_point()), None)
        if (
            first is not None
            and first.shape[0] <= MAX_IMAGES
            and first.numel() * first.element_size() <= MAX_IMAGE_BYTES
        ):
            detail["samples"] = [digest(iter([each]))[:16] for each in first]  # to find images that two ranks share
        self.send(
            {"kind": "batch", "step": self.batches, "hash": digest(iter(tensors)), "images": images, "detail": detail}
        )
