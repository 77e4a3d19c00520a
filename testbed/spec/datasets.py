"""The known data sets: shapes, digests, and their files on disk.

<data dir>/<name>/train_images.npy   uint8, N x H x W x C, memory-mappable
                  train_labels.npy   uint8, N
                  test_images.npy    test_labels.npy
                  done.json          written last: the digests of the four arrays
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from testbed.spec.errors import Unavailable, refuse
from testbed.spec.own_files import OwnFile, looks_like_code, own_code, own_text
from testbed.spec.words import setting, shown_path

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
MARKER = "done.json"
Shape = tuple[int, ...]  # of one sample: channels, height, width of an image; the tokens of a sequence
Unit = Literal["images", "sequences", "samples"]  # what a data set contains and a model takes; samples: either kind


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The fixed properties of a data set, known before it is fetched."""

    name: str
    shape: Shape  # as the model gets it
    classes: int  # of sequences: different tokens
    train: int | None  # number of images or sequences; None: depends on a user's file
    test: int | None
    unit: Unit = "images"
    mean: tuple[float, ...] = ()  # per channel, of pixels in 0..1
    std: tuple[float, ...] = ()
    augment: bool = False  # whether training crops and flips by default
    pad: int = 0  # zeros added on each side of a stored image to reach `shape`
    digests: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of each raw array; empty: not fetched
    own: OwnFile | None = None  # the user's file that it comes from

    @property
    def generated(self) -> bool:
        """True if the samples are generated or in a user's file, so that nothing is stored or fetched."""
        return not self.digests

    def array_shape(self, array: str) -> tuple[int, ...]:
        """Return the shape on disk of one of ARRAYS."""
        count = (self.train if array.startswith("train") else self.test) or 0
        channels, height, width = self.shape
        images = (count, height - 2 * self.pad, width - 2 * self.pad, channels)
        return images if array.endswith("images") else (count,)


CIFAR10 = DatasetInfo(
    name="cifar10",
    shape=(3, 32, 32),
    classes=10,
    train=50_000,
    test=10_000,
    mean=(0.49139968, 0.48215841, 0.44653091),
    std=(0.24703223, 0.24348513, 0.26158784),
    augment=True,
    digests={
        "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "train_labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    },
)

# Stored as 28 x 28, padded to LeNet-5's 32 x 32. The digests were taken from IDX files that have the published MD5.
MNIST = DatasetInfo(
    name="mnist",
    shape=(1, 32, 32),
    pad=2,
    classes=10,
    train=60_000,
    test=10_000,
    mean=(0.13066048,),
    std=(0.30810780,),
    digests={
        "train_images": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train_labels": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "test_images": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test_labels": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    },
)

# Same shape and counts as CIFAR-10, so that times are comparable if the real images cannot be fetched.
SYNTHETIC = DatasetInfo(
    name="synthetic",
    shape=(3, 32, 32),
    classes=10,
    train=50_000,
    test=10_000,
    mean=(0.5, 0.5, 0.5),
    std=(0.15, 0.15, 0.15),
)

# Generated text, one token a byte. GPT computes as long for one sequence as VGG-11 for ten images, so the test set is
# small.
TEXT = DatasetInfo(name="text", unit="sequences", shape=(64,), classes=256, train=50_000, test=500)

DATASETS: dict[str, DatasetInfo] = {info.name: info for info in (CIFAR10, MNIST, SYNTHETIC, TEXT)}


def dataset_info(name: str) -> DatasetInfo:
    """Return the data set of that name. Raises SpecError if there is none."""
    if name in DATASETS:
        return DATASETS[name]
    if text := own_text(name):
        return replace(TEXT, name=name, train=None, test=None, own=text)
    if code := own_code(name):
        return DatasetInfo(name=name, unit="samples", shape=(), classes=0, train=None, test=None, own=code)
    if looks_like_code(name):
        raise refuse("data", name, "a data set of your own is FILE.py:FUNCTION", "Write e.g. my_data.py:load.")
    way_out = f"Use one of {', '.join(DATASETS)}, text:FILE or FILE.py:FUNCTION."
    raise refuse("data", name, "is not a known data set", way_out)


def data_dir() -> Path:
    """Return the folder of all data sets: TESTBED_DATA, else ./data."""
    return Path(os.environ.get("TESTBED_DATA") or "data")


def array_path(name: str, root: Path, array: str) -> Path:
    """Return the path of one of ARRAYS."""
    return root / name / f"{array}.npy"


def has_arrays(name: str, root: Path) -> bool:
    """Return True if the four files exist with the right type and shape. Their contents are not read."""
    info = dataset_info(name)
    return all(_is_uint8_array(array_path(name, root, array), info.array_shape(array)) for array in ARRAYS)


def is_complete(name: str, root: Path) -> bool:
    """Return True if the marker has the right digests and the files the right shape. Their contents are not read."""
    info = dataset_info(name)
    return info.generated or (_digests_in_marker(root / name / MARKER) == dict(info.digests) and has_arrays(name, root))


def require_complete(name: str, root: Path) -> None:
    """Raise Unavailable if the data set is not complete under `root`."""
    if not is_complete(name, root):
        way_out = f"Get it with `testbed data get {name}`, or use {setting('data.name', 'synthetic')}."
        raise refuse("data", name, f"not in {shown_path((root / name).resolve())}", way_out, Unavailable)


def _is_uint8_array(path: Path, shape: tuple[int, ...]) -> bool:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # missing, truncated, or not a .npy file
        return False
    return isinstance(array, np.ndarray) and array.shape == shape and array.dtype == np.uint8


def _digests_in_marker(path: Path) -> object:
    try:
        return json.loads(path.read_text())["digests"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
