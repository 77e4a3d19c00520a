"""Collectives without communication: compute the result that a collective has where all ranks have equal inputs.

    all_reduce, reduce            this rank's tensor times a factor: N for a sum
    gather, all_gather            N copies of this rank's tensor
    scatter, broadcast            the tensor of that length that this rank gathered or reduced last, or its own tensor
    reduce_scatter                this rank's shard times a factor
    all_gather after it           all shards of the input of that reduce_scatter

The factors are measured once, by running the collective on equal inputs (`learn`). From then on `apply` computes the
results and sends nothing. Large tensors are copied on write.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from testbed.attach.lineage import storage
from testbed.spec.errors import NoClosedForm

TOLERANCE = 1e-3  # relative error of a factor, and largest residual
LAZY_NUMBERS = 4096  # shorter tensors are copied at once
# names of the arguments in their order
SIGNATURES = {
    "all_reduce": ("tensor", "op", "group", "async_op"),
    "reduce": ("tensor", "dst", "op", "group", "async_op", "group_dst"),
    "broadcast": ("tensor", "src", "group", "async_op", "group_src"),
    "gather": ("tensor", "gather_list", "dst", "group", "async_op", "group_dst"),
    "scatter": ("tensor", "scatter_list", "src", "group", "async_op", "group_src"),
    "all_gather": ("tensor_list", "tensor", "group", "async_op"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor", "group", "async_op"),
    "reduce_scatter": ("output", "input_list", "op", "group", "async_op"),
    "reduce_scatter_tensor": ("output", "input", "op", "group", "async_op"),
}
REPLACED = tuple(SIGNATURES)
GATHERS = ("all_gather", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter", "reduce_scatter_tensor")
Site = tuple[str, str]  # operation, line of the script


class Call:
    """The arguments of one collective of torch.distributed by their names, with the rank and the number of ranks."""

    def __init__(
        self, operation: str, arguments: tuple[Any, ...], named: dict[str, Any], rank: int, world: int
    ) -> None:
        self.operation, self.rank, self.world = operation, rank, world
        self.named = dict(zip(SIGNATURES[operation], arguments, strict=False)) | named
        first = {"all_gather_into_tensor": "input_tensor"} | dict.fromkeys(SCATTERS, "output")
        self.tensor: Tensor = self.named[first.get(operation, "tensor")]
        self.group = self.named.get("group")
        self.asynchronous = bool(self.named.get("async_op"))

    @property
    def blocking(self) -> dict[str, Any]:
        return self.named | {"async_op": False}

    @property
    def inputs(self) -> list[Tensor]:
        """The shards that a scattering collective reads on this rank."""
        if "input" in self.named:
            return list(self.named["input"].reshape(-1).chunk(self.world))
        return list(self.named.get("scatter_list") or self.named.get("input_list") or [])

    @property
    def results(self) -> list[Tensor]:
        """The tensors that the collective writes on this rank."""
        if self.operation == "all_gather_into_tensor":
            return list(self.named["output_tensor"].view(-1).chunk(self.world))
        if self.operation in ("gather", "all_gather"):
            return list(self.named.get("gather_list") or self.named.get("tensor_list") or [])
        return [self.tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tensor, *self.inputs, *self.results]

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    @property
    def is_root(self) -> bool:
        roots = (self.named.get(name) for name in ("dst", "src", "group_dst", "group_src"))
        return next((root for root in roots if root is not None), 0) == self.rank

    @property
    def multiple(self) -> float | None:
        """The factor by which a reduction of equal inputs multiplies them; None if it is neither a sum nor a mean."""
        operation = self.named.get("op", dist.ReduceOp.SUM)
        if operation == dist.ReduceOp.SUM:
            return float(self.world)
        return 1.0 if operation == dist.ReduceOp.AVG else None


class Done(dist.Work):
    """The Work that a replaced asynchronous collective returns. It has always ended."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self.results = results

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self.results

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self.results)
        return future


class Kept(NamedTuple):
    """A tensor that was sent, its version counter at that time (torch counts writes), and a copy if one was made."""

    tensor: Tensor
    version: int
    copy: Tensor | None

    @property
    def value(self) -> Tensor | None:
        """The tensor as it was when it was sent; None if it has changed and there is no copy."""
        return self.tensor if self.tensor._version == self.version else self.copy

    @property
    def differs(self) -> bool:
        """True if the tensor has other values than its copy."""
        return self.copy is not None and not torch.equal(self.tensor, self.copy)


class ClosedForms:
    """The closed forms of all collectives of a script that carry gradients."""

    def __init__(self, own_call: Callable[[], AbstractContextManager[None]]) -> None:
        self.own_call = own_call  # context manager for communication that is not the script's
        self.factors: dict[Site, float] = {}
        self.of_shards: set[Site] = set()  # each is an all_gather of the results of a reduce_scatter
        self.copied: set[int] = set()  # lengths of tensors that the script changes after sending and before receiving
        self.start()

    def start(self) -> None:
        """Begin a step: forget the tensors that were sent in the last one."""
        self.sent: dict[int, deque[Kept]] = defaultdict(deque)  # by length, in the order in which they were sent
        self.shards: dict[int, deque[Kept]] = defaultdict(deque)  # inputs of reduce_scatter, by the length of a shard

    def learn(self, site: Site, call: Call, original: Callable[..., Any]) -> None:
        """Run the collective once and measure its factor. Raise NoClosedForm if the factor is none of 1, N and 1/N."""
        shards = self._sharded(call, learning=True)
        own = self._own(call, learning=True).clone()
        kept = call.tensor.clone()
        with self.own_call():
            original(**call.blocking)
        if call.operation == "reduce" and not call.is_root:
            call.tensor.copy_(kept)  # reduce leaves the result undefined on all ranks but the root
            return
        if shards is not None and self._learn_shards(site, call, shards):
            return
        for result in call.results:
            self._set_factor(site, round_factor(result, own, call.world))

    def _set_factor(self, site: Site, factor: float | None) -> None:
        if factor is None:
            raise NoClosedForm("does not give a multiple of the gradient on equal inputs")
        if factor and self.factors.setdefault(site, factor) != factor:
            raise NoClosedForm("scales gradients differently from call to call")

    def _learn_shards(self, site: Site, call: Call, shards: list[Tensor]) -> bool:
        """Return True if an all_gather returned all shards of the input of a reduce_scatter, times one factor."""
        pairs = [(r, s) for k, (r, s) in enumerate(zip(call.results, shards, strict=True)) if k != call.rank]
        found = {round_factor(result, shard, call.world) for result, shard in pairs} - {0.0}
        if None in found or len(found) > 1:
            return False
        self.of_shards.add(site)
        for factor in found:
            self._set_factor(site, factor)
        return True

    def apply(self, site: Site, call: Call) -> None:
        """Write the results of the collective. Raise NoClosedForm if an input of reduce_scatter has changed."""
        shards = self._sharded(call, learning=False)
        own = self._own(call, learning=False)
        factor = self.factors.get(site, 1.0)
        with torch.no_grad():
            if shards is not None and site in self.of_shards:
                for k, (result, shard) in enumerate(zip(call.results, shards, strict=True)):
                    write(result, own, 1.0) if k == call.rank else write(result, shard, factor)
            elif call.operation in ("gather", *GATHERS):
                fill(call.results, own, factor)
            elif call.operation != "reduce" or call.is_root:
                write(call.tensor, own, factor)

    def multiply(self, call: Call) -> None:
        """Multiply the tensor by the factor that all_reduce has on equal inputs. The mode averages the tensor later.

        Both operations are linear, so their order does not matter. Raise NoClosedForm if it is no such all_reduce.
        """
        if call.operation != "all_reduce" or call.multiple is None:
            raise NoClosedForm("runs during backward, where only all_reduce is replaced")
        with torch.no_grad():
            write(call.tensor, call.tensor, call.multiple)

    def _sharded(self, call: Call, learning: bool) -> list[Tensor] | None:
        """Keep the input of a reduce_scatter. For an all_gather after it return that input's shards, else None."""
        if call.operation in SCATTERS:
            inputs = call.inputs
            alone = "input" in call.named and storage(inputs[0]) != storage(call.tensor)
            whole = call.named["input"].reshape(-1) if alone else torch.cat([each.reshape(-1) for each in inputs])
            self._keep(self.shards[call.numel], whole, copied=learning or call.numel in self.copied)
        elif call.operation in GATHERS and self.shards[call.numel]:
            taken = self._take(self.shards[call.numel], call.numel, learning)
            if taken is None:
                raise NoClosedForm("follows a reduce_scatter whose input has changed meanwhile")
            return list(taken.chunk(call.world))
        return None

    def _own(self, call: Call, learning: bool) -> Tensor:
        """Return the tensor of this rank whose multiple is the result of the collective."""
        own = call.inputs[call.rank] if call.inputs else call.tensor
        if call.operation in ("gather", "reduce"):
            copied = learning or call.operation == "reduce" or call.numel in self.copied
            self._keep(self.sent[call.numel], call.tensor, copied)
        elif call.operation in ("scatter", "broadcast") and self.sent[call.numel]:
            sent = self._take(self.sent[call.numel], call.numel, learning)
            own = own if sent is None else sent.reshape(call.tensor.shape)
        return own.detach()

    def _keep(self, queue: deque[Kept], tensor: Tensor, copied: bool) -> None:
        tensor = tensor.detach()
        queue.append(Kept(tensor, tensor._version, tensor.clone() if copied else None))

    def _take(self, queue: deque[Kept], length: int, learning: bool) -> Tensor | None:
        kept = queue.popleft()
        if learning and kept.differs:
            self.copied.add(length)
        return kept.copy if learning else kept.value


def round_factor(result: Tensor, own: Tensor, n: int) -> float | None:
    """Return result / own if it is 1, N or 1/N. Return 0 if both are zero, None in all other cases."""
    a, b = result.detach().double().reshape(-1), own.detach().double().reshape(-1)
    for factor in (1.0, float(n), 1.0 / n):
        if float((a - factor * b).norm()) <= TOLERANCE * float(a.norm()):
            return factor if float(a.norm()) > 0 else 0.0
    return None


def write(result: Tensor, own: Tensor, factor: float) -> None:
    """Write `own` times `factor` to `result`, which may be the same tensor."""
    if result.data_ptr() == own.data_ptr():
        result.mul_(factor) if factor != 1 else None
    elif factor == 1:
        result.copy_(own.view_as(result))
    else:
        torch.mul(own.view_as(result), factor, out=result)


def fill(results: list[Tensor], own: Tensor, factor: float) -> None:
    """Write `own` times `factor` to all results. Those with memory of their own share one copy until a write to it."""
    if own.numel() < LAZY_NUMBERS:
        for result in results:
            write(result, own, factor)
        return
    made = own * factor if factor != 1 else own.clone()
    for result in results:
        if result.data_ptr() == own.data_ptr():
            write(result, own, factor)
        elif result._base is None and result.untyped_storage().nbytes() == result.nbytes and result.dtype == own.dtype:
            result.data = torch._lazy_clone(made.view_as(result))
        else:
            result.copy_(made.view_as(result))
