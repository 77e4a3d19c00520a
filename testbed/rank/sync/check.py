"""Check: before training every mode averages known numbers once, and the result is compared with the float64 mean.

The numbers are the gradients of a small model, and the mode is built, attached and stepped as in training. So the
whole path is tried: buckets, schedule, codec, algorithm, update. Nothing of it is kept: model, optimizer, mode,
timeline and byte counters are the check's own, and torch's random generator is restored.

What is covered: the run's dtype and number of ranks, and all of its tensors if they are small. Otherwise a
full gradient would take seconds on a slow link. Then the first, the last, the shortest and the longest of its buckets
are sent, each cut so that its length has the same remainder when it is divided by N: shards are as uneven as the run's.
The size of buckets is cut alike, so that there are several. What depends on the full length of a buffer is not covered:
a user's method is watched in its first exchange, too (SampledMethod in verify.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from testbed.rank.group import Group
from testbed.rank.optim import Optimizer
from testbed.rank.own_code import describe_error
from testbed.rank.sync.buckets import make_buckets, trained
from testbed.rank.sync.codecs import MAX_INT8
from testbed.rank.sync.ddp import POWERSGD_FROM_STEP
from testbed.rank.sync.schedules import Averager, build
from testbed.rank.sync.synchronizer import Synchronizer
from testbed.rank.sync.verify import SampledMethod, WrongNumbers, agree_on, differs, rounding
from testbed.rank.watchdog import Heartbeat, is_lost_peer
from testbed.results.timeline import Timeline
from testbed.spec.errors import SpecError, TestbedError
from testbed.spec.mode import ALGORITHMS, SyncMode
from testbed.spec.own_files import method_path, own_method
from testbed.spec.run import OptimizerSpec, RunSpec

WIRE_S = 0.05  # what N buffers may take on the slowest link
MAX_NUMBERS = 1 << 20  # over all ranks: every rank computes all of them
MIN_NUMBERS = 256  # per rank, however slow the link is
CUT_BUCKETS = 3  # of the reduced model, with modes that divide the whole gradient into buckets themselves
NO_CLIPPING = 1e30  # larger than any norm: the code of clipping runs, but changes no gradient
POWERSGD_STEPS = POWERSGD_FROM_STEP + 1  # the last one is compressed


def check_mode(spec: RunSpec, model: nn.Module, group: Group) -> None:
    """Try the mode of a run on known numbers. Raises the same SpecError on all ranks if a rank has a wrong result."""
    seconds = group.deadline.total_seconds()
    own = Group(group.rank, group.size, group.store, seconds, group.heartbeat, group.racks)  # own counters
    case = cut_case(spec, [p.shape for p in trained(model)])
    with _tried(spec.mode, group.heartbeat):
        try:
            with torch.random.fork_rng(devices=[]):
                found = _try(case, own)
        except (Exception, SystemExit) as error:
            raise _error_of_method(spec.mode, error) or error from None
        agree_on(spec.mode, f"known numbers in {spec.dtype}", found, group, "check")


# --- what is averaged ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The shapes whose gradients are known numbers, in the order of a model's parameters, and the mode for them."""

    spec: RunSpec
    mode: SyncMode
    shapes: list[torch.Size]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype


def cut_case(spec: RunSpec, shapes: Sequence[torch.Size]) -> Case:
    """The case for a model with parameters of these shapes: all of them if they are small, else some, cut."""
    mode = replace(spec.mode, every=min(spec.mode.every, 2), every_from=min(spec.mode.every_from, 1))
    most = _most_numbers(spec)
    if sum(shape.numel() for shape in shapes) <= most:
        return Case(spec, mode, list(shapes))
    itemsize = getattr(torch, spec.dtype).itemsize
    last_first = list(reversed(shapes))  # the order of buckets
    if mode.silent or mode.is_reference or mode.schedule == "pipeline":  # one buffer, which the mode divides itself
        cut = [_cut(last_first, most, mode, spec.world)]
        bucket = itemsize * most // CUT_BUCKETS
    else:
        with torch.device("meta"):
            parameters = [nn.Parameter(torch.empty(shape, dtype=getattr(torch, spec.dtype))) for shape in shapes]
        chosen = _ends_and_extremes([[p.shape for p in bucket] for bucket in make_buckets(parameters, mode)])
        share = max(most // len(chosen), 2 * spec.world)
        cut = [_cut(each, share, mode, spec.world) for each in chosen]
        bucket = itemsize * max(_length(each) for each in cut)
    if mode.granularity == "bucket" or mode.is_reference:
        mode = replace(mode, granularity="bucket", bucket=bucket)
    return Case(spec, mode, list(reversed([shape for each in cut for shape in each])))


def _most_numbers(spec: RunSpec) -> int:
    """How many numbers each rank may send, so that it takes about WIRE_S on the slowest link."""
    rates = spec.limiting_rates
    itemsize = getattr(torch, spec.dtype).itemsize
    sent = int(min(rates) / 8 * WIRE_S / spec.world / itemsize) if rates else MAX_NUMBERS
    return max(MIN_NUMBERS, min(sent, MAX_NUMBERS // spec.world))


def _ends_and_extremes(buffers: list[list[torch.Size]]) -> list[list[torch.Size]]:
    """The first, the last, the shortest and the longest, in their order."""
    lengths = [_length(each) for each in buffers]
    kept = {0, len(buffers) - 1, lengths.index(min(lengths)), lengths.index(max(lengths))}
    return [buffers[k] for k in sorted(kept)]


def _cut(shapes: list[torch.Size], most: int, mode: SyncMode, n: int) -> list[torch.Size]:
    """At most `most` numbers whose count has the shapes' remainder when divided by n: a matrix and a vector, or one."""
    if _length(shapes) <= most:
        return shapes
    length = most - (most - _length(shapes)) % n
    rows = math.isqrt(length // 2)
    matrix, rest = torch.Size([rows, rows]), torch.Size([length - rows * rows])
    if mode.granularity == "param":  # one tensor is one buffer
        return [matrix] if mode.codec == "powersgd" else [torch.Size([length])]
    return [matrix, rest]


def _length(shapes: Iterable[torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes)


def known_numbers(case: Case, rank: int) -> list[Tensor]:
    """The numbers of one rank, from 0 to 3. No two of a rank are equal, unless they are a matrix for PowerSGD."""
    found, first = [], 0
    for shape in case.shapes:
        if case.mode.codec == "powersgd" and len(shape) > 1:
            numbers = _low_rank(shape[0], shape.numel() // shape[0], first, rank, int(case.mode.codec_number or 0))
        else:
            numbers = _fractions(first, shape.numel(), rank)
        found.append(numbers.reshape(shape).to(case.dtype))
        first += shape.numel()
    return found


def _low_rank(rows: int, columns: int, first: int, rank: int, r: int) -> Tensor:
    """A matrix U V^T of rank r, where U is the same on all ranks: PowerSGD of rank r reproduces the mean exactly."""
    places = (torch.arange(rows, dtype=torch.float64) + 0.5) * math.pi / rows
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    for k in range(min(r, rows, columns)):
        waves = torch.cos(k * places) * (0.5 / r if k else 1.0)  # orthogonal, and small enough to leave all positive
        matrix.add_(torch.outer(waves, _fractions(first + k * columns, columns, rank)))
    return matrix


def _fractions(first: int, count: int, rank: int) -> Tensor:
    """Numbers from 1 to 2 that look random; the modulus is a prime larger than any index."""
    index = torch.arange(first, first + count, dtype=torch.int64)
    return 1 + (index * 7919 + rank * 104_729) % 1_048_583 / torch.tensor(1_048_583.0, dtype=torch.float64)


# --- what must come out ----------------------------------------------------------------------------------------------


def expected_numbers(case: Case, rank: int, n: int) -> list[Tensor]:
    """What one step must apply on this rank, in float64: the mean, its own numbers, or the mean of what topk sends."""
    if case.mode.silent:
        return [numbers.double() for numbers in known_numbers(case, rank)]
    total = [torch.zeros(shape, dtype=torch.float64) for shape in case.shapes]
    for each in range(n):
        numbers = known_numbers(case, each)
        numbers = _largest(case, numbers) if case.mode.codec == "topk" else numbers
        for so_far, values in zip(total, numbers, strict=True):
            so_far.add_(values.double())
    return [values / n for values in total]


def _largest(case: Case, numbers: list[Tensor]) -> list[Tensor]:
    """Zeros instead of all but the largest fraction F of every bucket."""
    parameters = [nn.Parameter(values) for values in numbers]
    for bucket in make_buckets(parameters, case.mode):
        together = torch.cat([p.detach().reshape(-1) for p in bucket])
        count = math.ceil((case.mode.codec_number or 0) * len(together))
        floor = torch.topk(together, count).values.min()
        for parameter in bucket:
            parameter.data[parameter.data < floor] = 0
    return [p.detach() for p in parameters]


def tolerance(case: Case, n: int) -> float:
    """The largest difference that rounding explains, as a share of the largest number: the codec's own definition."""
    eps = torch.finfo(case.dtype).eps
    relative: dict[str | None, float] = {
        None: rounding(eps, n),
        "fp16": (n + 2) * torch.finfo(torch.float16).eps,  # rounded, n - 1 additions, divided
        "bf16": (n + 2) * torch.finfo(torch.bfloat16).eps,
        "int8": 2 / MAX_INT8,  # one of 127 levels when shards are sent, and one when their means are
        "topk": rounding(eps, n) + torch.finfo(torch.float32).eps,  # values are sent as float32
        "powersgd": math.sqrt(eps),  # a matrix of its rank is reproduced up to rounding of products and a QR
    }
    return relative[case.mode.codec]


# --- the trial -------------------------------------------------------------------------------------------------------


class Known(nn.Module):
    """A model whose gradients are given: its loss is the sum of parameter x gradient. Parameters begin at zero."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        for number, shape in enumerate(case.shapes):
            self.register_parameter(f"tensor{number}", nn.Parameter(torch.zeros(shape, dtype=case.dtype)))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(parameter * gradient).sum() for parameter, gradient in pairs]).sum()


def _try(case: Case, group: Group) -> WrongNumbers:
    """Step through the mode; return what is wrong on this rank.

    With SGD and a learning rate of 1, k steps leave minus k times the mean in the parameters. With `every:K` they are
    compared when they must be equal: after a step that averages gradients, and after parameters are averaged.
    """
    timeline, model = Timeline(detailed=case.spec.spans), Known(case)
    clip = NO_CLIPPING if case.spec.optimizer.clip else None
    optimizer = Optimizer(OptimizerSpec(lr=1.0, momentum=0.0, weight_decay=0.0, clip=clip), model, batch=1, total=1)
    sync = build(case.mode, case.spec.placement, group, timeline, case.spec.seed)
    module = sync.attach(model, optimizer)
    group.at(0, "sync")
    numbers, expected = known_numbers(case, group.rank), _flat(expected_numbers(case, group.rank, group.size))
    most = max(tolerance(case, group.size), _own_tolerance(sync)) * float(_flat(numbers).max())
    steps = POWERSGD_STEPS if case.mode.is_reference and case.mode.codec == "powersgd" else 1
    compared = [case.mode.every_from, case.mode.every_from + case.mode.every] if case.mode.every > 1 else [steps]
    wrong: WrongNumbers = {}
    for step in range(1, compared[-1] + 1):
        timeline.start()
        sync.zero()
        module(numbers).backward()
        sync.step()
        if step in compared and not wrong:
            found = _flat(_applied(case, sync, model, step))
            wrong = differs(found, expected, _flat(numbers), step * most, group.size)
    sync.close()
    return wrong


def _own_tolerance(sync: Synchronizer) -> float:
    """What a user's method declares; 0 for a built-in one."""
    return sync.mean_.method.tolerance if isinstance(sync, Averager) and isinstance(sync.mean_, SampledMethod) else 0.0


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def _applied(case: Case, sync: Synchronizer, model: nn.Module, step: int) -> list[Tensor]:
    """What each step has applied; if the mean comes after the step, what it left in the gradients."""
    sync.flush()
    if case.spec.placement == "after-step":
        return [p.grad for p in model.parameters() if p.grad is not None]
    return [-p.detach() / step for p in model.parameters()]


# --- a method that fails ---------------------------------------------------------------------------------------------


@contextmanager
def _tried(mode: SyncMode, heartbeat: Heartbeat | None) -> Iterator[None]:
    """Tell the heartbeat that a user's method is being tried: a deadlock then refuses the method and names no rank."""
    if heartbeat and mode.algorithm not in ALGORITHMS:
        heartbeat.own_method, heartbeat.trying = f"mean_ of {own_method(mode.algorithm).path}", True
    yield  # after an error `trying` stays True, because rank 0's watchdog decides later who failed
    if heartbeat:
        heartbeat.trying = False


def _error_of_method(mode: SyncMode, error: BaseException) -> TestbedError | None:
    """The SpecError for an error that a user's method raised; None if it is not the method's."""
    if mode.algorithm in ALGORITHMS or isinstance(error, TestbedError):
        return None
    if isinstance(error, RuntimeError) and is_lost_peer(error):
        return None
    reason = describe_error(method_path(mode.algorithm), error, own_method(mode.algorithm).path)
    return SpecError(f"mode {str(mode)!r}: {reason} (known numbers, before the first step). Fix mean_, then try again.")
