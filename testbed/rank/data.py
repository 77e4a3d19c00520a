"""Training and test samples as batches of tensors: data set, partition, augmentation, batches.

Stored images stay memory-mapped bytes until their batch is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, default_collate

from testbed.rank.own_code import call, describe_error
from testbed.spec.datasets import DatasetInfo, Shape, array_path, dataset_info, require_complete
from testbed.spec.errors import refuse

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]
Batch = tuple[torch.Tensor, torch.Tensor]

# --- data set ---------------------------------------------------------------------------------------------------------

POOL_SAMPLES = 4096  # distinct synthetic images or sequences; a larger data set repeats them
SYNTHETIC_SEED = 20_240_229  # not the seed of the run: all runs have the same synthetic data sets
PATTERN = (48, 80)  # grey values of a class's pattern: faint, so that learning takes some steps
NOISE = 128  # range of grey values of the noise that is added to a pattern
FINGERPRINT_SAMPLES = 64  # of a user's data set; reading one may mean to decode an image
FOLLOWERS = 4  # tokens that may follow a token of the synthetic text, equally likely


class Dataset(Protocol):
    """Samples with labels: the attributes and methods that the training loop uses."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Shape: ...  # of a sample in a batch
    @property
    def classes(self) -> int: ...
    @property
    def augment(self) -> bool: ...  # whether training crops and flips by default

    def __len__(self) -> int: ...
    def subset(self, chosen: Indices) -> Self: ...
    def batch(self, indices: Indices, crops: Crops | None, dtype: torch.dtype) -> Batch: ...


@dataclass(frozen=True)
class Images:
    """Image i is `images[rows[i]]` with class `labels[i]`."""

    name: str
    images: Bytes  # stored images, N x H x W x C
    rows: Indices  # a subset, or a repetition, of the stored images
    labels: Indices
    shape: Shape  # C, H, W of a batch
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int
    augment: bool
    size: int | None = None  # height and width that a batch is resized to; None: as stored and padded

    def __len__(self) -> int:
        return len(self.rows)

    def pick(self, indices: Indices) -> Bytes:
        """Return a copy of these images, padded, N x H x W x C."""
        return pad(self.images[self.rows[indices]], self.pad)

    def subset(self, chosen: Indices) -> Images:
        return replace(self, rows=self.rows[chosen], labels=self.labels[chosen])

    def batch(self, indices: Indices, crops: Crops | None, dtype: torch.dtype) -> Batch:
        """Return images N x C x H x W and labels N."""
        stored = self.pick(indices)
        images = channels_first(stored) if crops is None else crop_and_flip(stored, crops)
        pixels = normalise(images, self.mean, self.std, dtype)
        return resize(pixels, self.size), torch.from_numpy(self.labels[indices])


@dataclass(frozen=True)
class Text:
    """Sequence i is `sequences[rows[i]]`, one token longer than a sample: the label of a token is its successor."""

    name: str
    sequences: Bytes  # N x (T + 1)
    rows: Indices
    shape: Shape  # T
    classes: int
    augment: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def subset(self, chosen: Indices) -> Text:
        return replace(self, rows=self.rows[chosen])

    def batch(self, indices: Indices, crops: Crops | None, dtype: torch.dtype) -> Batch:
        """Return tokens N x T and labels N x T, both int64: the model's dtype does not apply to token numbers."""
        tokens = torch.from_numpy(self.sequences[self.rows[indices]].astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Indexed(Protocol):
    """A data set of torch's kind: sample i is `dataset[i]`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class OwnData:
    """A user's data set of torch's kind: sample i is `samples[rows[i]]`, a tensor and a class."""

    name: str
    samples: Indexed
    rows: Indices
    shape: Shape
    classes: int
    augment: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def subset(self, chosen: Indices) -> OwnData:
        return replace(self, rows=self.rows[chosen])

    def batch(self, indices: Indices, crops: Crops | None, dtype: torch.dtype) -> Batch:
        """Return samples and labels. Floating-point samples get the model's dtype; integer samples keep theirs."""
        found, labels = default_collate([self.samples[int(row)] for row in self.rows[indices]])
        return found.to(dtype) if found.is_floating_point() else found, labels.to(torch.int64)

    def fingerprint(self) -> str:
        """A hash of its size and of some labels. Samples are left out: a data set may change them at random."""
        rows = np.linspace(0, len(self) - 1, min(len(self), FINGERPRINT_SAMPLES)).astype(np.int64)
        labels = self.batch(rows, None, torch.float32)[1]
        about = (len(self.samples), self.shape, self.classes, labels.tolist())
        return hashlib.sha256(repr(about).encode()).hexdigest()


def open_datasets(
    name: str,
    root: Path,
    subsets: tuple[int | None, int | None] = (None, None),
    seed: int = 0,
    shape: Shape | None = None,
    size: int | None = None,
    own: Path | None = None,
) -> tuple[Dataset, Dataset]:
    """Return the training and the test set. See open_dataset; a user's function makes both, so it is called once."""
    info = dataset_info(name)
    if own is not None and info.unit == "samples":
        made = zip(_own_data(info, own), subsets, strict=True)
        train, test = (each if few is None else _subset(each, few, seed, info.unit) for each, few in made)
        return train, test
    train, test = (
        open_dataset(name, root, part, few, seed, shape, size, own)
        for part, few in zip((True, False), subsets, strict=True)
    )
    return train, test


def open_dataset(
    name: str,
    root: Path,
    train: bool,
    subset: int | None = None,
    seed: int = 0,
    shape: Shape | None = None,
    size: int | None = None,
    own: Path | None = None,
) -> Dataset:
    """Open a fetched data set, or generate a synthetic one in `shape`; draw `subset` of its samples with `seed`.

    Images are stored, cropped and flipped in their own size; then a batch is resized to `size` x `size`. `own` is the
    copy of the user's text that `name` refers to.
    """
    info = dataset_info(name)
    dataset: Dataset
    if own is not None:
        dataset = _text_of_file(info, own, train, shape or info.shape)
    elif info.unit == "sequences":
        dataset = _synthetic_text(info, train, shape or info.shape)
    else:
        images = _synthetic(info, train, shape or info.shape) if info.generated else _stored(info, root, train)
        dataset = images if size is None else replace(images, size=size, shape=(images.shape[0], size, size))
    return dataset if subset is None else _subset(dataset, subset, seed, info.unit)


def _stored(info: DatasetInfo, root: Path, train: bool) -> Images:
    require_complete(info.name, root)
    part = "train" if train else "test"
    # Viewed as a plain array, because indexing np.memmap is slower.
    images = np.load(array_path(info.name, root, f"{part}_images"), mmap_mode="r").view(np.ndarray)
    labels = np.load(array_path(info.name, root, f"{part}_labels")).astype(np.int64)
    return _images(info, images, np.arange(len(labels)), labels, info.shape)


def _synthetic(info: DatasetInfo, train: bool, shape: Shape) -> Images:
    """Return images: a coarse pattern for each class plus noise. Only the noise differs in training and test images."""
    channels, height, width = shape
    patterns = np.random.default_rng(SYNTHETIC_SEED).integers(*PATTERN, (info.classes, 4, 4, channels), np.uint8)
    up = patterns.repeat(-(-height // 4), axis=1).repeat(-(-width // 4), axis=2)[:, :height, :width]
    noise = np.random.default_rng(SYNTHETIC_SEED + (1 if train else 2))
    rows = np.arange((info.train if train else info.test) or 0) % POOL_SAMPLES
    images = noise.integers(
        0, 256, (POOL_SAMPLES, height, width, channels), np.uint8
    )  # drawing whole bytes is 7 times faster
    images //= 256 // NOISE
    images += up[np.arange(POOL_SAMPLES) % info.classes]
    return _images(info, images, rows, rows % info.classes, shape)


def _images(info: DatasetInfo, images: Bytes, rows: Indices, labels: Indices, shape: Shape) -> Images:
    channels = shape[0]  # the synthetic data set may have another number of channels than its entry
    mean, std = (info.mean * channels)[:channels], (info.std * channels)[:channels]
    return Images(info.name, images, rows, labels, shape, info.classes, mean, std, info.pad, info.augment)


def _synthetic_text(info: DatasetInfo, train: bool, shape: Shape) -> Text:
    """Return text of a Markov chain: each token has FOLLOWERS successors, so the lowest loss is log(FOLLOWERS)."""
    (length,) = shape
    followers = np.random.default_rng(SYNTHETIC_SEED).integers(0, info.classes, (info.classes, FOLLOWERS), np.uint8)
    rng = np.random.default_rng(SYNTHETIC_SEED + (1 if train else 2))
    sequences = np.empty((POOL_SAMPLES, length + 1), np.uint8)
    sequences[:, 0] = rng.integers(0, info.classes, POOL_SAMPLES)
    for place in range(length):
        sequences[:, place + 1] = followers[sequences[:, place], rng.integers(0, FOLLOWERS, POOL_SAMPLES)]
    rows = np.arange((info.train if train else info.test) or 0) % POOL_SAMPLES
    return Text(info.name, sequences, rows, shape, info.classes)


TEST_SHARE = 10  # the last tenth of a text is its test set
TEST_SEQUENCES = 500  # at most, because GPT computes as long for one sequence as VGG-11 for ten images


def _text_of_file(info: DatasetInfo, path: Path, train: bool, shape: Shape) -> Text:
    """Return the bytes of a file as consecutive sequences. The last sequences are the test set. Raises SpecError."""
    (length,) = shape
    text = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    count = (len(text) - 1) // length
    tests = min(count // TEST_SHARE, TEST_SEQUENCES)
    if not tests:
        rule = f"has {len(text)} bytes, and {TEST_SHARE * length + 1} are needed for sequences of {length} tokens"
        raise refuse("data", info.name, rule, "Use more text, or a smaller data.size.")
    starts = length * np.arange(count)[: count - tests] if train else length * np.arange(count)[count - tests :]
    windows = sliding_window_view(text, length + 1)  # a view: byte i begins sequence i
    return Text(info.name, windows, starts, shape, info.classes)


def _own_data(info: DatasetInfo, path: Path) -> tuple[OwnData, OwnData]:
    """Call the user's function, which returns a training and a test set. Raises SpecError if these cannot be used."""
    own, what = info.own, f"data {info.name!r}"
    assert own is not None, info
    made = call(path, own.function, (), what, own.path)
    if not isinstance(made, tuple | list) or len(made) != 2:
        rule = f"{own.function} returned {type(made).__name__}, and a training and a test set are needed"
        raise refuse("data", info.name, rule, "Write `return train, test`.")
    shapes = [_shape_of_samples(info, path, samples) for samples in made]
    classes = _count_classes(made[0])
    if classes is None:
        rule = "its training set has neither `classes` nor `targets`, so that the number of classes is not known"
        raise refuse("data", info.name, rule, "Set train.classes to a list of the classes.")
    train, test = (
        OwnData(info.name, samples, np.arange(len(samples)), shape, classes)
        for samples, shape in zip(made, shapes, strict=True)
    )
    return train, test


def _shape_of_samples(info: DatasetInfo, path: Path, samples: Any) -> Shape:
    """Return the shape of the first sample. Raises SpecError if it is not a tensor and a class."""
    assert info.own is not None, info
    try:
        _, (first, label) = len(samples), samples[0]
        torch.as_tensor(label).to(torch.int64)  # a class, or one for each token
        return tuple(default_collate([first]).shape[1:])
    except (Exception, SystemExit) as error:
        rule = f"sample 0 is not a tensor and a class ({describe_error(path, error, info.own.path)})"
        way_out = "Return data sets of torch's kind: dataset[i] is (tensor, class)."
        raise refuse("data", info.name, rule, way_out) from None


def _count_classes(samples: Any) -> int | None:
    """Return the number of classes from `classes`, else from the largest of `targets` or of the last of `tensors`.

    These are the attributes of torchvision's data sets and of TensorDataset. None if there are none of them.
    """
    if (named := getattr(samples, "classes", None)) is not None:
        return named if isinstance(named, int) else len(named)
    targets = getattr(samples, "targets", None)
    if targets is None and getattr(samples, "tensors", None):
        targets = samples.tensors[-1]
    return None if targets is None or not len(targets) else int(torch.as_tensor(targets).max()) + 1


def _subset(dataset: Dataset, subset: int, seed: int, unit: str) -> Dataset:
    """Draw `subset` samples: the same ones on every rank for the same seed. Raises SpecError if there are fewer."""
    if not 1 <= subset <= len(dataset):
        raise refuse("subset", subset, f"must be 1 to {len(dataset)}, the {unit} of {dataset.name}", "Use fewer.")
    return dataset.subset(np.sort(np.random.default_rng(seed).permutation(len(dataset))[:subset]))


# --- partition: which images a rank trains on in which step of an epoch ----------------------------------------------
#
# sampler   torch's DistributedSampler: one permutation per epoch; rank r gets images r, r + N, r + 2N, ... of it
# fixed     one contiguous block per rank, in the same order in every epoch
#
# With the sampler and equal shares, the global batch of step k is the same for every number of ranks: runs with 1, 2
# and 4 ranks train on the same batches.

Kind = Literal["sampler", "fixed"]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A data set of `size` images cut into global batches of `batch` images.

    `shares` is the number of images per step of each rank, for uneven nodes. If the shares differ, an incomplete last
    global batch is dropped. With equal shares, or None, the last batch is kept and is smaller.
    """

    size: int
    batch: int
    seed: int = 0
    kind: Kind = "sampler"
    shares: tuple[int, ...] | None = None

    def indices(self, rank: int, world: int, epoch: int) -> list[Indices]:
        """Return one array of image indices per step. All ranks have the same number of steps."""
        self._check(world)
        if self._uneven is not None:
            return self._uneven_steps(self._uneven, rank, epoch)
        each = self.batch // world
        mine = self._fixed(rank, world) if self.kind == "fixed" else self._sampled(rank, world, epoch)
        return [mine[start : start + each] for start in range(0, len(mine), each)]

    def rows(self, rank: int, world: int, count: int) -> Indices:
        """Return the rows in the global batch of the first `count` images of this rank's step."""
        if self._uneven is not None:
            return sum(self._uneven[:rank]) + np.arange(count)
        return rank + world * np.arange(count)

    def steps(self, world: int) -> int:
        """Return the steps per epoch."""
        self._check(world)
        if self._uneven is not None:
            return self.size // self.batch
        images = self.size // world * world if self.kind == "fixed" else self.size
        return -(-images // self.batch)

    @property
    def _uneven(self) -> tuple[int, ...] | None:
        return self.shares if self.shares is not None and len(set(self.shares)) > 1 else None

    def _check(self, world: int) -> None:
        """Raise SpecError if the data set is too small. RunSpec checks what does not depend on the number of images."""
        shares = self.shares or (self.batch // world,) * world
        assert len(shares) == world and sum(shares) == self.batch, f"{self} for {world} ranks"
        need = world if self._uneven is None else self.batch
        if self.size < need:
            raise refuse("subset", self.size, f"at least {need} images are needed for one step", "Use more images.")

    def _sampled(self, rank: int, world: int, epoch: int) -> Indices:
        """Return the rank's part of the sampler's permutation; its first images repeat, so that `world` divides it."""
        sampler = DistributedSampler(range(self.size), world, rank, shuffle=True, seed=self.seed)  # type: ignore[arg-type, var-annotated]
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        return np.fromiter(sampler, np.int64)

    def _fixed(self, rank: int, world: int) -> Indices:
        """Return the rank's block. All blocks have the same length, so that all ranks have the same number of steps.

        The images that remain are left out.
        """
        block = self.size // world
        return np.arange(rank * block, (rank + 1) * block)

    def _uneven_steps(self, shares: tuple[int, ...], rank: int, epoch: int) -> list[Indices]:
        """Return the indices of each step with unequal shares.

        `sampler`: a rank gets consecutive rows of each global batch. `fixed`: one block per rank, in the size of its
        share.
        """
        steps, before, own = self.size // self.batch, sum(shares[:rank]), shares[rank]
        if self.kind == "fixed":
            return list(np.arange(before * steps, (before + own) * steps).reshape(steps, own))
        batches = self._sampled(0, 1, epoch)[: steps * self.batch].reshape(steps, self.batch)
        return list(batches[:, before : before + own])


# --- augmentation: pad, crop, flip, channels first, normalise; whole batches at a time -------------------------------

MARGIN_PIXELS = 4  # black pixels around an image, which a random crop may include


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Return a random generator for one epoch. The model uses torch's global generator, which must not change here."""
    return np.random.default_rng((seed, epoch))


@dataclass(frozen=True)
class Crops:
    """The position of the crop of each image of a batch, and whether the image is mirrored."""

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    mirrored: NDArray[np.bool_]

    def rows(self, rows: NDArray[np.int64]) -> Crops:
        return Crops(self.top[rows], self.left[rows], self.mirrored[rows])


def draw(rng: np.random.Generator, count: int) -> Crops:
    """Draw the crops of a global batch. Every rank draws all of them, so they do not depend on the number of ranks."""
    top, left = rng.integers(0, 2 * MARGIN_PIXELS + 1, (2, count))
    return Crops(top, left, rng.random(count) < 0.5)


def pad(images: Bytes, margin: int) -> Bytes:
    """Add a black frame of `margin` pixels to N x H x W x C images."""
    if not margin:
        return images
    count, height, width, channels = images.shape
    framed = np.zeros((count, height + 2 * margin, width + 2 * margin, channels), np.uint8)
    framed[:, margin:-margin, margin:-margin] = images
    return framed


def channels_first(images: Bytes) -> Bytes:
    """Return N x H x W x C images as N x C x H x W, contiguous."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def crop_and_flip(images: Bytes, crops: Crops) -> Bytes:
    """Pad N x H x W x C images by MARGIN_PIXELS, crop and mirror them as `crops` says; return N x C x H x W."""
    count, height, width, _ = images.shape
    windows = sliding_window_view(
        pad(images, MARGIN_PIXELS), (height, width), axis=(1, 2)
    )  # N x 9 x 9 x C x H x W, a view
    cropped = np.ascontiguousarray(windows[np.arange(count), crops.top, crops.left])
    cropped[crops.mirrored] = cropped[crops.mirrored, ..., ::-1]
    return cropped


def normalise(
    images: Bytes, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return (pixel / 255 - mean) / std in the order of torchvision's transforms, so that results are identical."""
    pixels = torch.from_numpy(images).to(dtype).div_(255)
    centre, scale = (torch.tensor(values, dtype=dtype).view(-1, 1, 1) for values in (mean, std))
    return pixels.sub_(centre).div_(scale)


def resize(images: torch.Tensor, size: int | None) -> torch.Tensor:
    """Return N x C x H x W images as N x C x size x size, bilinear; unchanged if `size` is None or is their size."""
    if size is None or images.shape[-2:] == (size, size):
        return images
    return torch.nn.functional.interpolate(images, (size, size), mode="bilinear", antialias=True)


# --- batches --------------------------------------------------------------------------------------------------------


class Batches:
    """The training batches of this rank. `augment` None: the default of the data set."""

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
        """Return the steps per epoch, which are the same on every rank."""
        return self.partition.steps(self.world)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield samples and labels (int64) of each step. Every call with the same epoch yields the same batches."""
        rng = generator(self.seed, epoch)
        for indices in self.partition.indices(self.rank, self.world, epoch):
            rows = self.partition.rows(self.rank, self.world, len(indices))
            crops = draw(rng, self.partition.batch).rows(rows) if self.augment else None
            yield self.dataset.batch(indices, crops, self.dtype)


def test_batches(
    dataset: Dataset, rank: int, world: int, split: bool, batch: int = 250, dtype: torch.dtype = torch.float32
) -> Iterator[Batch]:
    """Yield all samples in order, or with `split` the contiguous share of this rank. Each sample is in one share."""
    first, end = (rank * len(dataset) // world, (rank + 1) * len(dataset) // world) if split else (0, len(dataset))
    for start in range(first, end, batch):
        yield dataset.batch(np.arange(start, min(start + batch, end)), None, dtype)


test_batches.__test__ = False  # type: ignore[attr-defined]  # pytest takes functions named test_* for tests
