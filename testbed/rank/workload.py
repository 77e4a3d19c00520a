"""What a rank trains: data sets, model and optimizer, as the spec names them, or those that replay a profile."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from testbed.rank.data import Dataset, open_dataset
from testbed.rank.emulated import EmulatedWorkload
from testbed.rank.models import build_model, build_own_model
from testbed.rank.optim import Optimizer
from testbed.results.folder import RunFolder
from testbed.spec.datasets import data_dir
from testbed.spec.run import RunSpec


class Workload(Protocol):
    """What the training loop needs. The weights come from torch's generator, which the training loop seeds."""

    def dataset(self, *, train: bool) -> Dataset: ...
    def model(self, dataset: Any, dtype: torch.dtype) -> nn.Module: ...
    def optimizer(self, model: nn.Module, total: int) -> Optimizer: ...  # total: steps of the run


def open_workload(spec: RunSpec, folder: RunFolder, rank: int) -> Workload:
    """Return the workload of a run. `folder` has copies of the user's own files. Raises SpecError if one is damaged."""
    return EmulatedWorkload(spec, folder, rank) if spec.emulated else NamedWorkload(spec, folder)


class NamedWorkload:
    """The data set, the model and the optimizer that the spec names."""

    def __init__(self, spec: RunSpec, folder: RunFolder) -> None:
        self.spec, self.folder = spec, folder

    def dataset(self, *, train: bool) -> Dataset:
        data = self.spec.data
        return open_dataset(
            data.name,
            data_dir(),
            train=train,
            subset=data.subset if train else data.test_subset,
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
