"""Training and test images as batches of tensors. Images stay memory-mapped bytes until their batch is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from testbed.spec.datasets import DatasetInfo, Shape, array_path, dataset_info, require_complete
from testbed.spec.errors import refuse

# From stored bytes to what a model eats: pad, crop, flip, channels first, normalise. Whole batches at a time.

Bytes = NDArray[np.uint8]

MARGIN = 4  # pixels of black around an image that a random crop may reach into


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Its own stream for each epoch; torch's global generator belongs to the experiment."""
    return np.random.default_rng((seed, epoch))


@dataclass(frozen=True)
class Crops:
    """Where each image of a batch is cut out, and whether it is mirrored."""

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    mirrored: NDArray[np.bool_]

    def rows(self, rows: NDArray[np.int64]) -> Crops:
        return Crops(self.top[rows], self.left[rows], self.mirrored[rows])


def draw(rng: np.random.Generator, count: int) -> Crops:
    """For a global batch: every rank draws all of it and takes its rows, so the number of ranks changes no image."""
    top, left = rng.integers(0, 2 * MARGIN + 1, (2, count))
    return Crops(top, left, rng.random(count) < 0.5)


def pad(images: Bytes, margin: int) -> Bytes:
    """N x H x W x C with a black frame of `margin` pixels."""
    if not margin:
        return images
    count, height, width, channels = images.shape
    framed = np.zeros((count, height + 2 * margin, width + 2 * margin, channels), np.uint8)
    framed[:, margin:-margin, margin:-margin] = images
    return framed


def channels_first(images: Bytes) -> Bytes:
    """N x H x W x C to N x C x H x W, contiguous."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def crop_and_flip(images: Bytes, crops: Crops) -> Bytes:
    """Random crop out of a frame of 4 and a mirror image for every other one; N x H x W x C to N x C x H x W."""
    count, height, width, _ = images.shape
    windows = sliding_window_view(pad(images, MARGIN), (height, width), axis=(1, 2))  # N x 9 x 9 x C x H x W, a view
    cropped = np.ascontiguousarray(windows[np.arange(count), crops.top, crops.left])
    cropped[crops.mirrored] = cropped[crops.mirrored, ..., ::-1]
    return cropped


def normalise(
    images: Bytes, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(pixel / 255 - mean) / std, in the order of torchvision's transforms, so that the bits are the same."""
    pixels = torch.from_numpy(images).to(dtype).div_(255)
    centre, scale = (torch.tensor(values, dtype=dtype).view(-1, 1, 1) for values in (mean, std))
    return pixels.sub_(centre).div_(scale)


# Which images a rank sees in which step of an epoch.
#
# sampler   torch's DistributedSampler: one permutation an epoch, dealt out to the ranks like cards
# fixed     one contiguous block a rank, in the same order every epoch
#
# With equal shares, step k of all ranks together is the same set of images for every number of ranks (sampler), so runs
# with 1, 2 and 4 ranks train on the same global batches.

Indices = NDArray[np.int64]
Kind = Literal["sampler", "fixed"]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A data set of `size` images cut into global batches of `batch` images.

    `shares`, images per step of each rank, are for uneven nodes; then an incomplete last global batch is dropped.
    Equal shares are the same as none: the last batch is kept, smaller.
    """

    size: int
    batch: int
    seed: int = 0
    kind: Kind = "sampler"
    shares: tuple[int, ...] | None = None

    def indices(self, rank: int, world: int, epoch: int) -> list[Indices]:
        """One array of image indices per step; the same number of steps on every rank."""
        self._check(world)
        if self._uneven is not None:
            return self._uneven_steps(self._uneven, rank, epoch)
        each = self.batch // world
        mine = self._fixed(rank, world) if self.kind == "fixed" else self._sampled(rank, world, epoch)
        return [mine[start : start + each] for start in range(0, len(mine), each)]

    def rows(self, rank: int, world: int, count: int) -> Indices:
        """Which rows of the global batch the first `count` images of this rank's step are."""
        if self._uneven is not None:
            return sum(self._uneven[:rank]) + np.arange(count)
        return rank + world * np.arange(count)

    def steps(self, world: int) -> int:
        """Steps per epoch."""
        self._check(world)
        if self._uneven is not None:
            return self.size // self.batch
        images = self.size // world * world if self.kind == "fixed" else self.size
        return -(-images // self.batch)

    @property
    def _uneven(self) -> tuple[int, ...] | None:
        return self.shares if self.shares is not None and len(set(self.shares)) > 1 else None

    def _check(self, world: int) -> None:
        """Batch and shares have passed RunSpec; only here is known how many images there are."""
        shares = self.shares or (self.batch // world,) * world
        assert len(shares) == world and sum(shares) == self.batch, f"{self} for {world} ranks"
        need = world if self._uneven is None else self.batch
        if self.size < need:
            raise refuse("subset", self.size, f"at least {need} images are needed for one step", "Use more images.")

    def _sampled(self, rank: int, world: int, epoch: int) -> Indices:
        """A permutation from the sampler's own generator; padded with its first images to divide by `world`."""
        sampler = DistributedSampler(range(self.size), world, rank, shuffle=True, seed=self.seed)  # type: ignore[arg-type, var-annotated]
        sampler.set_epoch(epoch)  # without it every epoch would repeat the first one's order
        return np.fromiter(sampler, np.int64)

    def _fixed(self, rank: int, world: int) -> Indices:
        """Blocks of equal length, or ranks would disagree on the number of steps; a remainder is left out."""
        block = self.size // world
        return np.arange(rank * block, (rank + 1) * block)

    def _uneven_steps(self, shares: tuple[int, ...], rank: int, epoch: int) -> list[Indices]:
        """Sampler: consecutive pieces of each global batch. Fixed: one block a rank, as long as its share."""
        steps, before, own = self.size // self.batch, sum(shares[:rank]), shares[rank]
        if self.kind == "fixed":
            return list(np.arange(before * steps, (before + own) * steps).reshape(steps, own))
        batches = self._sampled(0, 1, epoch)[: steps * self.batch].reshape(steps, self.batch)
        return list(batches[:, before : before + own])


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
        return pad(self.images[self.rows[indices]], self.pad)


def open_dataset(
    name: str, root: Path, train: bool, subset: int | None = None, seed: int = 0, shape: Shape | None = None
) -> Dataset:
    """Open a fetched data set, or make the synthetic one (in `shape`); `subset` images are drawn with `seed`."""
    info = dataset_info(name)
    dataset = _synthetic(info, train, shape or info.shape) if info.generated else _stored(info, root, train)
    return dataset if subset is None else _subset(dataset, subset, seed)


def _stored(info: DatasetInfo, root: Path, train: bool) -> Dataset:
    require_complete(info.name, root)
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
        rng = generator(self.seed, epoch)
        for indices in self.partition.indices(self.rank, self.world, epoch):
            rows = self.partition.rows(self.rank, self.world, len(indices))
            crops = draw(rng, self.partition.batch).rows(rows) if self.augment else None
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
    images = channels_first(stored) if crops is None else crop_and_flip(stored, crops)
    return normalise(images, dataset.mean, dataset.std, dtype), torch.from_numpy(dataset.labels[indices])


test_batches.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever its name suggests to pytest
