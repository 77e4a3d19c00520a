"""What a rank trains: data sets, model and optimizer, as the spec names them, or emulated ones that replay a profile.

Emulated compute takes the recorded time of real compute and little of the CPU. Everything that is sent is real: a layer
has parameters of the recorded sizes, and backward makes real gradients of them, in the recorded order, when the layer's
recorded time is over. So every mode, hook and codec runs unchanged, and many ranks fit on a few cores. Activations are
tiny, and so are samples. What is learned has no meaning.

An emulated gradient is its parameter times a small number that differs from rank to rank: replicas only stay equal if
the mode really averages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from testbed.rank.data import Batch, Crops, Dataset, Indices, open_datasets
from testbed.rank.models import build_model, build_own_model
from testbed.rank.optim import Optimizer
from testbed.results.folder import RunFolder
from testbed.results.profile import Profile, ProfiledLayer
from testbed.spec.datasets import Shape, data_dir, dataset_info
from testbed.spec.run import OptimizerSpec, RunSpec


class Workload(Protocol):
    """What the training loop needs. Weights and a user's data come from generators that the training loop seeds."""

    def datasets(self) -> tuple[Dataset, Dataset]: ...  # for training, for the test
    def model(self, dataset: Any, dtype: torch.dtype) -> nn.Module: ...
    def optimizer(self, model: nn.Module, total: int) -> Optimizer: ...  # total: steps of the run


def open_workload(spec: RunSpec, folder: RunFolder, rank: int) -> Workload:
    """Return the workload of a run. `folder` has copies of the user's own files. Raises SpecError if one is damaged."""
    return EmulatedWorkload(spec, folder, rank) if spec.emulated else NamedWorkload(spec, folder)


class NamedWorkload:
    """The data set, the model and the optimizer that the spec names."""

    def __init__(self, spec: RunSpec, folder: RunFolder) -> None:
        self.spec, self.folder = spec, folder

    def datasets(self) -> tuple[Dataset, Dataset]:
        data = self.spec.data
        return open_datasets(
            data.name,
            data_dir(),
            (data.subset, data.test_subset),
            seed=self.spec.seed,
            shape=self.spec.sample_shape(resized=False),
            size=data.size,
            own=self.folder.own_file(self.spec, "data.name"),
        )

    def model(self, dataset: Dataset, dtype: torch.dtype) -> nn.Module:
        name, classes, shape = self.spec.model, dataset.classes, dataset.shape
        own = self.folder.own_file(self.spec, "model")
        return build_own_model(name, own, classes, shape, dtype) if own else build_model(name, classes, shape, dtype)

    def optimizer(self, model: nn.Module, total: int) -> Optimizer:
        return Optimizer(self.spec.optimizer, model, self.spec.global_batch, total)


# --- emulated compute ------------------------------------------------------------------------------------------------

CLASSES = 2
GRADIENT = 1e-3  # of a parameter; parameters hardly change
DEVIATION = 0.02  # of the parameters at the start
FALLBACK_SAMPLES = 50_000  # of a data set whose size only the user's own file says
LATEST_S = 0.1  # a longer delay is not made up for: something else has stopped this rank, e.g. an injected fault


class Replay:
    """Sleeps until recorded seconds are over. What one sleep takes too long is deducted from the next ones.

    `slower`: all times are multiplied by it (time dilation).
    """

    def __init__(self, slower: float = 1.0) -> None:
        self.slower = slower
        self.late = 0.0  # seconds by which the recorded times were exceeded so far

    def until(self, seconds: float, since: float) -> None:
        """Return `seconds` after the monotonic time `since`, which may be over already."""
        wanted = seconds * self.slower - self.late
        rest = since + wanted - time.monotonic()
        if rest > 0:
            time.sleep(rest)
        self.late = min(LATEST_S, time.monotonic() - since - wanted)


class _Compute(torch.autograd.Function):
    """One layer: the same small tensor both ways, the layer's time, and real gradients for its parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, *parameters: Tensor) -> Tensor:
        since = time.monotonic()
        ctx.layer = layer
        y = x.clone()
        layer.replay.until(layer.recorded.forward_s, since)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        since = time.monotonic()
        layer: Layer = ctx.layer
        with torch.no_grad():
            made = [parameter * layer.gradient for parameter in layer.parameters(recurse=False)]
        layer.replay.until(layer.recorded.backward_s, since)
        return gradients[0], None, *made


class Layer(nn.Module):
    """A recorded layer with its own parameters."""

    def __init__(self, recorded: ProfiledLayer, dtype: torch.dtype, replay: Replay, gradient: float) -> None:
        super().__init__()
        self.recorded, self.replay, self.gradient = recorded, replay, gradient
        shapes = recorded.shapes or [(size // dtype.itemsize,) for size in recorded.sizes]
        for number, shape in enumerate(shapes):
            self.register_parameter(f"tensor{number}", nn.Parameter(torch.randn(shape, dtype=dtype) * DEVIATION))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Compute.apply(x, self, *self.parameters(recurse=False))  # type: ignore[no-untyped-call]
        return y


class Model(nn.Module):
    """The recorded layers one after the other, and one without parameters that takes the time of the loss."""

    def __init__(self, profile: Profile, dtype: torch.dtype, replay: Replay, rank: int) -> None:
        super().__init__()
        loss = ProfiledLayer(name="loss", forward_s=0.0, backward_s=profile.loss_s)
        gradient = GRADIENT * (1 + rank)
        self.layers = nn.Sequential(*(Layer(each, dtype, replay, gradient) for each in (*profile.layers, loss)))

    def forward(self, x: Tensor) -> Tensor:
        """Two logits for each sample. `x` requires a gradient, so that backward passes layers without parameters."""
        y: Tensor = self.layers(x.requires_grad_())
        return y


@dataclass(frozen=True)
class Samples:
    """Samples of two zeros with label 0; making a batch takes the recorded time."""

    size: int
    seconds: float
    replay: Replay
    name: str = "emulated"
    shape: Shape = (CLASSES,)
    classes: int = CLASSES
    augment: bool = False

    def __len__(self) -> int:
        return self.size

    def subset(self, chosen: Indices) -> Samples:
        return replace(self, size=len(chosen))

    def batch(self, indices: Indices, crops: Crops | None, dtype: torch.dtype) -> Batch:
        since = time.monotonic()
        made = torch.zeros(len(indices), CLASSES, dtype=dtype), torch.zeros(len(indices), dtype=torch.int64)
        self.replay.until(self.seconds, since)
        return made


class EmulatedOptimizer(Optimizer):
    """Plain SGD, which changes parameters by what was averaged, and the recorded time of the real optimizer.

    A shard takes its share of that time.
    """

    def __init__(self, profile: Profile, model: nn.Module, replay: Replay, *, lr: float, clip: float | None) -> None:
        plain = OptimizerSpec(lr=lr, momentum=0.0, weight_decay=0.0, clip=clip)
        super().__init__(plain, model, batch=1, total=1)
        self.profile, self.replay = profile, replay
        self.elements = sum(p.numel() for p in self.groups[0].parameters)
        self.shard_replay = Replay(replay.slower)  # another thread than the loop's updates shards

    def zero(self, keep: bool) -> None:
        since = time.monotonic()
        super().zero(keep)
        self.replay.until(self.profile.zero_s, since)

    def step(self) -> None:
        since = time.monotonic()
        super().step()
        self.replay.until(self.profile.optimizer_s, since)

    def step_shard(self, number: int, gradient: Tensor) -> None:
        since = time.monotonic()
        super().step_shard(number, gradient)
        share = self.groups[number].parameters[0].numel() / self.elements
        self.shard_replay.until(share * self.profile.optimizer_s, since)


class EmulatedWorkload:
    """What a rank trains if the spec requests emulated compute."""

    def __init__(self, spec: RunSpec, folder: RunFolder, rank: int) -> None:
        path = folder.own_file(spec, "compute")
        assert path is not None, spec.compute
        self.spec, self.profile, self.rank = spec, Profile.read(path), rank
        self.replay = Replay(spec.dilation or 1.0)

    def datasets(self) -> tuple[Samples, Samples]:
        """As many training samples as the requested data set has; nothing is tested."""
        size = self.spec.data.subset or dataset_info(self.spec.data.name).train or FALLBACK_SAMPLES
        samples = Samples(size, self.profile.data_s, self.replay)
        return samples, replace(samples, size=0)

    def model(self, dataset: Samples, dtype: torch.dtype) -> Model:
        return Model(self.profile, dtype, self.replay, self.rank)

    def optimizer(self, model: nn.Module, total: int) -> EmulatedOptimizer:
        rule = self.spec.optimizer
        return EmulatedOptimizer(self.profile, model, self.replay, lr=rule.lr, clip=rule.clip)
