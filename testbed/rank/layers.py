"""Records how long each layer of a model computes, and writes profile.json (results/profile.py) at the end of a run.

A layer is a module that is called and calls no other module. Hooks record when each layer ends in forward, and when it
begins in backward; a hook takes about 3 microseconds. The time between two such moments belongs to one layer: in
forward to the layer that ends it, in backward to the layer that begins it. So the times of all layers add up to the
time of the whole pass. What the model computes between two layers is included.

The time of a pass is divided among its layers by their processor times. Elapsed times would be wrong: a CPU quota, or
another process on the same core, stops a rank for milliseconds in any layer. Seconds are medians over the passes. Under
a quota they are means, because a short step is either not stopped at all or stopped for several times its own length.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from testbed.rank.recorder import describe_environment
from testbed.rank.sync.buckets import trained
from testbed.results.folder import RunFolder
from testbed.results.profile import Profile, ProfiledLayer
from testbed.results.records import Step, read
from testbed.spec.errors import SpecError
from testbed.spec.run import RunSpec

MAX_PASSES = 200  # later passes are not recorded


class Moment(NamedTuple):
    """An event of one pass: the number of a layer, the monotonic time, the processor time of this thread."""

    layer: int
    at: float
    cpu: float


BEGIN, END = -1, -2  # instead of the number of a layer: forward begins, backward has ended


@dataclass
class Pass:
    """The events of one forward and its backward, in order."""

    forward: list[Moment] = field(default_factory=list)  # BEGIN, then the end of each layer
    backward: list[Moment] = field(default_factory=list)  # the beginning of each layer, then END


class LayerClock:
    """Hooks on all modules of a model. `names` and `passes` are filled while it trains."""

    def __init__(self, model: nn.Module) -> None:
        self.passes: list[Pass] = []
        self.names: list[str] = []  # the layers of one pass, in the order in which they are called
        self.modules: list[nn.Module] = []  # the same layers as modules
        self._calls: list[bool] = []  # a stack of the modules that are being called: has it called another module?
        self._last_node: object = None
        model.register_forward_pre_hook(self._begin)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave_as(name))

    def _now(self, layer: int) -> Moment:
        return Moment(layer, time.monotonic(), time.thread_time())

    def _begin(self, module: nn.Module, args: Any) -> None:
        """Begin a pass: called before forward of the whole model."""
        self._calls = []
        self._last_node = None
        self._recording = torch.is_grad_enabled() and len(self.passes) < MAX_PASSES
        if self._recording:
            self.passes.append(Pass())
            self.names, self.modules = [], []
            self.passes[-1].forward.append(self._now(BEGIN))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._calls:
            self._calls[-1] = True
        self._calls.append(False)

    def _leave_as(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not self._calls.pop() and self._recording:
                self._end_of_layer(name, module, output)

        return leave

    def _end_of_layer(self, name: str, module: nn.Module, output: Any) -> None:
        number, events = len(self.names), self.passes[-1]
        self.names.append(name)
        self.modules.append(module)
        events.forward.append(self._now(number))
        tensors = output if isinstance(output, tuple | list) else [output]
        node = next((each.grad_fn for each in tensors if isinstance(each, Tensor) and each.grad_fn is not None), None)
        if node is None or node is self._last_node:  # e.g. Identity returns the output of the layer before it
            return
        self._last_node = node

        def before(gradients: Any) -> None:
            if not events.backward:
                torch.autograd.Variable._execution_engine.queue_callback(ended)
            events.backward.append(self._now(number))

        def ended() -> None:
            events.backward.append(self._now(END))

        node.register_prehook(before)


def find_owners(model: nn.Module, clock: LayerClock) -> list[list[nn.Parameter]]:
    """Return the trained parameters of each layer. Each parameter belongs to exactly one layer:

    a parameter that a layer registers, to this layer
    a parameter of a module that is never called, to the layer that contains the module
    a parameter of a module that calls others, to the first layer that the module calls
    a parameter that several modules share, to the first of these layers in forward
    """
    first = {id(module): number for number, module in reversed(list(enumerate(clock.modules)))}
    named = dict(model.named_modules())
    owner: dict[int, int] = {}
    for name, module in named.items():
        layers = [number for each in named_parents(name) if (number := first.get(id(named[each]))) is not None]
        inside = [first[id(each)] for each in module.modules() if id(each) in first]
        found = layers[0] if layers else min(inside, default=0)
        for parameter in module.parameters(recurse=False):
            owner[id(parameter)] = min(found, owner.get(id(parameter), found))
    owned: list[list[nn.Parameter]] = [[] for _ in clock.modules]
    for parameter in trained(model):
        owned[owner[id(parameter)]].append(parameter)
    return owned


def named_parents(name: str) -> list[str]:
    """Return the name of a module and of all that contain it: a.b.c, a.b, a, and "" for the whole model."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


@contextmanager
def recorded_layers(spec: RunSpec, rank: int, model: nn.Module, folder: RunFolder) -> Iterator[None]:
    """Record the layers while the `with` block trains, then write profile.json.

    It does nothing on other ranks than rank 0, or if the spec does not request it.
    """
    if not spec.layers or rank != 0:
        yield
        return
    clock = LayerClock(model)
    yield
    steps = [each for each in read(folder.records(rank)) if isinstance(each, Step) and each.step >= spec.warmup]
    make_profile(spec, model, clock, steps).write(folder.layers)


def make_profile(spec: RunSpec, model: nn.Module, clock: LayerClock, steps: Sequence[Step]) -> Profile:
    """Make the profile from the events of the layers and the records of the steps after warm-up.

    Raises SpecError if no step was recorded, or if steps call different layers.
    """
    found = [(step, list(_passes(step, clock))) for step in steps]
    found = [(step, passes) for step, passes in found if len(passes) == spec.passes(0)]
    if not found:
        raise SpecError("layers = true: no step was recorded. Use more steps, and spans = true.")
    whole = [each for _, passes in found for each in passes]
    count = len(clock.names)
    if any(sorted(m.layer for m in each.forward) != [BEGIN, *range(count)] for each in whole):
        raise SpecError("layers = true: the model does not call the same layers in every step. Leave it out.")
    middle: Middle = statistics.median if spec.cpus_of(0) is None else statistics.fmean
    forward = _own_times([_differences(each.forward, 0) for each in whole], count, middle)
    backward = _own_times([_differences(each.backward, 1) for each in whole], count, middle)
    gaps = [_around(step, passes) for step, passes in found]
    totals = [step.total for step, _ in found]
    layers = [
        ProfiledLayer(
            name=name,
            sizes=tuple(p.numel() * p.element_size() for p in own),
            shapes=tuple(tuple(p.shape) for p in own),
            forward_s=f,
            backward_s=b,
        )
        for name, own, f, b in zip(clock.names, find_owners(model, clock), forward, backward, strict=True)
    ]
    return Profile(
        model=spec.model,
        dtype=spec.dtype,
        batch_per_rank=spec.local_batch(0) // spec.passes(0),
        threads=spec.threads,
        cpus=spec.cpus_of(0),
        optimizer=spec.optimizer.name,
        environment=describe_environment(),
        layers=tuple(layers),
        data_s=middle([step.data for step, _ in found]),
        zero_s=middle([zero for zero, _ in gaps]),
        loss_s=middle([loss for _, loss in gaps]),
        optimizer_s=middle([step.update for step, _ in found]),
        jitter=tuple(total / statistics.median(totals) for total in totals),
    )


def _passes(step: Step, clock: LayerClock) -> Iterator[Pass]:
    """Yield the complete passes of one step."""
    for each in clock.passes:
        complete = each.backward and each.backward[-1].layer == END
        if complete and step.at <= each.forward[0].at and each.backward[-1].at <= step.at + step.total:
            yield each


def _differences(moments: Sequence[Moment], first: int) -> dict[int, tuple[float, float]]:
    """Return seconds and processor time by layer.

    An interval belongs to the layer at its end if `first` is 0, to the layer at its beginning if `first` is 1.
    """
    times: dict[int, tuple[float, float]] = {}
    for a, b in itertools.pairwise(moments):
        layer = (b, a)[first].layer
        seconds, cpu = times.get(layer, (0.0, 0.0))
        times[layer] = (seconds + b.at - a.at, cpu + b.cpu - a.cpu)
    return times


Middle = Callable[[Sequence[float]], float]


def _own_times(passes: Sequence[dict[int, tuple[float, float]]], count: int, middle: Middle) -> list[float]:
    """Return each layer's seconds: the whole pass, divided in proportion to the medians of processor time."""
    whole = middle([sum(seconds for seconds, _ in times.values()) for times in passes])
    used = [statistics.median(times.get(k, (0.0, 0.0))[1] for times in passes) for k in range(count)]
    return [whole * each / (sum(used) or 1.0) for each in used]


def _around(step: Step, passes: Sequence[Pass]) -> tuple[float, float]:
    """Return the seconds of a step for clearing the gradients, and of a pass for the loss and its part of backward."""
    begins = {name: step.at + offset for name, offset, _ in reversed(step.phases)}
    ends = {name: step.at + offset + seconds for name, offset, seconds in step.phases}
    zero = max(0.0, begins["forward"] - ends["data"])
    computed = sum((p.forward[-1].at - p.forward[0].at) + (p.backward[-1].at - p.backward[0].at) for p in passes)
    return zero, max(0.0, step.forward + step.backward - computed) / len(passes)
