"""Training and test images as batches of tensors. Images stay memory-mapped bytes until their batch is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from testbed.rank import augment as transforms
from testbed.rank.augment import Crops
from testbed.rank.partition import Partition
from testbed.spec.datasets import DatasetInfo, Shape, array_path, dataset_info, is_complete
from testbed.spec.errors import Unavailable, refuse

Batch = tuple[torch.Tensor, torch.Tensor]

POOL = 4096  # distinct synthetic images; a larger set repeats them, so that it starts at once and stays at 13 MB
SYNTHETIC_SEED = 20_240_229  # not the run's seed: every run sees the same synthetic data set
PATTERN = (48, 80)  # grey values of a class's pattern: faint, so that it takes some steps to learn
NOISE = 128  # grey values added to it


@dataclass(frozen=True)
class Dataset:
    """Image i is `images[rows[i]]` with class `labels[i]`."""

    name: str
    images: NDArray[np.uint8]  # stored images, N x H x W x C
    rows: NDArray[np.int64]  # a subset, or a repetition, of the stored images
    labels: NDArray[np.int64]
    shape: Shape  # C, H, W after padding
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int
    augment: bool  # whether training crops and flips unless told otherwise

    def __len__(self) -> int:
        return len(self.rows)

    def pick(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """A copy of these images, padded, N x H x W x C."""
        return transforms.pad(self.images[self.rows[indices]], self.pad)


def open_dataset(
    name: str, root: Path, train: bool, subset: int | None = None, seed: int = 0, shape: Shape | None = None
) -> Dataset:
    """Open a fetched data set, or make the synthetic one (in `shape`); `subset` images are drawn with `seed`."""
    info = dataset_info(name)
    dataset = _synthetic(info, train, shape or info.shape) if info.generated else _stored(info, root, train)
    return dataset if subset is None else _subset(dataset, subset, seed)


def _stored(info: DatasetInfo, root: Path, train: bool) -> Dataset:
    if not is_complete(info.name, root):
        raise Unavailable(f"data set {info.name}: not in {root / info.name}. Fetch it first, or use --data synthetic.")
    part = "train" if train else "test"
    # A plain array over the mapped file: np.memmap's own indexing is slower.
    images = np.load(array_path(info.name, root, f"{part}_images"), mmap_mode="r").view(np.ndarray)
    labels = np.load(array_path(info.name, root, f"{part}_labels")).astype(np.int64)
    return _dataset(info, images, np.arange(len(labels)), labels, info.shape)


def _synthetic(info: DatasetInfo, train: bool, shape: Shape) -> Dataset:
    """A coarse pattern for each class under noise; train and test share patterns, not noise."""
    channels, height, width = shape
    patterns = np.random.default_rng(SYNTHETIC_SEED).integers(*PATTERN, (info.classes, 4, 4, channels), np.uint8)
    up = patterns.repeat(-(-height // 4), axis=1).repeat(-(-width // 4), axis=2)[:, :height, :width]
    noise = np.random.default_rng(SYNTHETIC_SEED + (1 if train else 2))
    rows = np.arange(info.train if train else info.test) % POOL
    images = noise.integers(0, 256, (POOL, height, width, channels), np.uint8)  # whole bytes are 7 times faster to draw
    images //= 256 // NOISE
    images += up[np.arange(POOL) % info.classes]
    return _dataset(info, images, rows, rows % info.classes, shape)


def _dataset(
    info: DatasetInfo, images: NDArray[np.uint8], rows: NDArray[np.int64], labels: NDArray[np.int64], shape: Shape
) -> Dataset:
    channels = shape[0]  # the synthetic set may have fewer or more of them than its entry says
    mean, std = (info.mean * channels)[:channels], (info.std * channels)[:channels]
    return Dataset(info.name, images, rows, labels, shape, info.classes, mean, std, info.pad, info.augment)


def _subset(dataset: Dataset, subset: int, seed: int) -> Dataset:
    """The same images for the same seed, on every rank."""
    if not 1 <= subset <= len(dataset):
        raise refuse("subset", subset, f"{dataset.name} has 1 to {len(dataset)} images to take", "Ask for fewer.")
    chosen = np.sort(np.random.default_rng(seed).permutation(len(dataset))[:subset])
    return replace(dataset, rows=dataset.rows[chosen], labels=dataset.labels[chosen])


class Batches:
    """This rank's training batches; `augment` None means as is usual for the data set."""

    def __init__(
        self,
        dataset: Dataset,
        partition: Partition,
        rank: int,
        world: int,
        augment: bool | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dataset = dataset
        self.partition = partition
        self.rank = rank
        self.world = world
        self.augment = dataset.augment if augment is None else augment
        self.seed = seed
        self.dtype = dtype

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return self.partition.steps(self.world)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Images N x C x H x W and labels (int64), step by step; every call repeats the same epoch exactly."""
        rng = transforms.generator(self.seed, epoch)
        for indices in self.partition.indices(self.rank, self.world, epoch):
            rows = self.partition.rows(self.rank, self.world, len(indices))
            crops = transforms.draw(rng, self.partition.batch).rows(rows) if self.augment else None
            yield _batch(self.dataset, indices, crops, self.dtype)


def test_batches(
    dataset: Dataset, rank: int, world: int, split: bool, batch: int = 250, dtype: torch.dtype = torch.float32
) -> Iterator[Batch]:
    """All images in order, or (`split`) this rank's contiguous share; the shares cover each image once."""
    first, end = (rank * len(dataset) // world, (rank + 1) * len(dataset) // world) if split else (0, len(dataset))
    for start in range(first, end, batch):
        yield _batch(dataset, np.arange(start, min(start + batch, end)), None, dtype)


def _batch(dataset: Dataset, indices: NDArray[np.int64], crops: Crops | None, dtype: torch.dtype) -> Batch:
    stored = dataset.pick(indices)
    images = transforms.channels_first(stored) if crops is None else transforms.crop_and_flip(stored, crops)
    return transforms.normalise(images, dataset.mean, dataset.std, dtype), torch.from_numpy(dataset.labels[indices])


test_batches.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever its name suggests to pytest
