"""Makes the files that torchvision's classes expect from the arrays of a data set.

<data dir>/cifar10/torchvision/cifar-10-batches-py/data_batch_1 ...    for torchvision.datasets.CIFAR10
<data dir>/mnist/torchvision/MNIST/raw/train-images-idx3-ubyte ...     for torchvision.datasets.MNIST

These classes take the folder `torchvision` as `root`. The IDX files of MNIST are identical to the published files. The
files of CIFAR-10 have the published images and labels in the published order. The published names of the images are
not known here, so the files do not have the MD5 that torchvision checks (attach/vision.py).
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from testbed.data.fetch import CIFAR_PARTS, MNIST_FILES, verify
from testbed.spec.datasets import ARRAYS, array_path, is_complete

Bytes = NDArray[np.uint8]
LAYOUT = "torchvision"  # the folder beside the arrays
FOLDERS = {"cifar10": "cifar-10-batches-py", "mnist": "MNIST/raw"}  # the folder that a class expects in its `root`
CIFAR_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_PER_FILE = 10_000


def make_layout(name: str, root: Path, target: Path | None = None) -> Path:
    """Return the folder that torchvision's class takes as `root`. Make the folder if there is none.

    The folder is beside the arrays. If it cannot be written there, `target` is another path for it. The arrays are read
    and hashed first. Raises Unavailable if an array is wrong, OSError if the folder cannot be written.
    """
    beside = root / name / LAYOUT
    for made in filter(None, (beside, target)):
        if (made / FOLDERS[name]).is_dir():
            return made
    verify(name, root)
    arrays = {array: np.load(array_path(name, root, array), mmap_mode="r", allow_pickle=False) for array in ARRAYS}
    final = target or beside
    with tempfile.TemporaryDirectory(prefix=f".{LAYOUT}.", dir=final.parent) as scratch:
        staged = Path(scratch) / "new"  # a subfolder, because the scratch folder has mode 0700
        folder = staged / FOLDERS[name]
        folder.mkdir(parents=True)
        WRITERS[name](folder, arrays)
        if not final.exists():  # another process may have made it meanwhile
            staged.rename(final)
    return final


def layouts(root: Path, scratch: Path | None = None) -> dict[str, Path]:
    """Return the layout folder of every data set that is complete under `root`. Missing ones are made.

    They are made in `scratch` if it is given.
    """
    made = {}
    for name in FOLDERS:
        if is_complete(name, root):
            made[name] = make_layout(name, root, scratch / name if scratch else None)
    return made


def _write_mnist(folder: Path, arrays: Mapping[str, Bytes]) -> None:
    """Write IDX: two zeros, type 8 (unsigned byte), number of dimensions, sizes as 4 bytes big-endian, values."""
    for file, array in zip(MNIST_FILES, ARRAYS, strict=True):
        values = arrays[array].reshape(arrays[array].shape[:3])
        head = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
        (folder / file).write_bytes(head + values.tobytes())


def _write_cifar(folder: Path, arrays: Mapping[str, Bytes]) -> None:
    images = np.concatenate([arrays["train_images"], arrays["test_images"]])
    labels = np.concatenate([arrays["train_labels"], arrays["test_labels"]])
    for number, part in enumerate(CIFAR_PARTS):
        own = slice(number * CIFAR_PER_FILE, (number + 1) * CIFAR_PER_FILE)
        test = part == "test_batch"
        content = {
            "batch_label": _text("testing batch 1 of 1" if test else f"training batch {number + 1} of 5"),
            "labels": _list(_number(int(label)) for label in labels[own]),
            "data": _array(images[own].transpose(0, 3, 1, 2).reshape(-1, 3072)),
            "filenames": _list(_text(f"{'test' if test else 'train'}_{k:05d}.png") for k in range(own.start, own.stop)),
        }
        (folder / part).write_bytes(_pickle(content))
    names = _list(map(_text, CIFAR_NAMES))
    meta = {"num_cases_per_batch": _number(CIFAR_PER_FILE), "label_names": names, "num_vis": _number(3072)}
    (folder / "batches.meta").write_bytes(_pickle(meta))


WRITERS: dict[str, Callable[[Path, Mapping[str, Bytes]], None]] = {"cifar10": _write_cifar, "mnist": _write_mnist}

# The published files are pickles of Python 2. Readers decode their strings with encoding="latin1" or "bytes", and every
# version of numpy accepts the name of numpy's module in them. Python 3 cannot write such pickles, so their opcodes are
# written here. The module pickletools documents the opcodes.


def _pickle(content: Mapping[str, bytes]) -> bytes:
    pairs = b"".join(_text(key) + value for key, value in content.items())
    return b"\x80\x02}(" + pairs + b"u."


def _text(text: str) -> bytes:
    return b"U" + bytes((len(text),)) + text.encode("ascii")


def _number(value: int) -> bytes:
    return b"K" + bytes((value,)) if value < 256 else b"J" + struct.pack("<i", value)


def _list(values: Iterable[bytes]) -> bytes:
    return b"](" + b"".join(values) + b"e"


def _array(values: Bytes) -> bytes:
    """Return the pickle of an array of bytes. Its state is (1, shape, dtype, False, content), as numpy defines it."""
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"(" + b"".join(map(_number, values.shape)) + b"t"
    raw = values.tobytes()
    return empty + b"(K\x01" + shape + kind + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
