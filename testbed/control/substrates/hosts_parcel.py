"""What is sent to hosts, packed once for all of them: the image and the data sets, compressed, in the user's cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from testbed.control.content import content_hash
from testbed.control.substrates.engine import IMAGE, image_content
from testbed.spec.datasets import ARRAYS, MARKER, array_path, data_dir
from testbed.spec.errors import TestbedError, Unavailable

BLOCK = 8 << 20  # bytes that are compressed as one piece
LEVEL = 1  # of gzip: a link of 1 Gbit is not the limit then, and every engine unpacks it
GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class Parcel:
    """A compressed file, and how much room its content takes where it is unpacked."""

    path: Path
    unpacked: int  # bytes


def cache_dir() -> Path:
    """Where packed parcels stay for the next host."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "testbed"


def forget() -> None:
    """Remove all packed parcels."""
    for path in cache_dir().glob("*.gz") if cache_dir().is_dir() else []:
        path.unlink(missing_ok=True)


def pack_image() -> Parcel:
    """The image of the code as it is now; an older one is refused with the fix."""
    image_content()
    path = cache_dir() / f"image-{content_hash()}.tar.gz"
    size = int(_output(["docker", "image", "inspect", "--format", "{{.Size}}", IMAGE]))
    if not path.exists():
        with _fresh(path, "image-*.gz") as out:
            _save(out)
    return Parcel(path, size)


def _output(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout


def _save(out: BinaryIO) -> None:
    with subprocess.Popen(["docker", "save", IMAGE], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as saving:
        assert saving.stdout is not None and saving.stderr is not None
        try:
            compress(saving.stdout, out)
        except BaseException:
            saving.kill()
            raise
        said = saving.stderr.read().decode(errors="replace").strip()
    if saving.returncode:
        raise Unavailable(f"image {IMAGE}: cannot be packed ({said}). Is there room in {cache_dir()}?")


def compress(source: IO[bytes], out: BinaryIO) -> None:
    """gzip on all cores: pieces are compressed apart and written in order, which together is one gzip file."""
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        waiting: deque[Future[bytes]] = deque()
        while block := source.read(BLOCK):
            waiting.append(pool.submit(_member, block))
            if len(waiting) > 2 * cores:
                out.write(waiting.popleft().result())
        for piece in waiting:
            out.write(piece.result())


def _member(block: bytes) -> bytes:
    packer = zlib.compressobj(LEVEL, wbits=GZIP)
    return packer.compress(block) + packer.flush()


def digests(name: str) -> dict[str, str]:
    """SHA-256 of every file of a data set, by its name."""
    paths = [*(array_path(name, data_dir(), array) for array in ARRAYS), data_dir() / name / MARKER]
    return {path.name: _digest(path) for path in paths}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pack_data(name: str, known: dict[str, str]) -> Parcel:
    """A data set as a tar file of flat names; `known` are its digests."""
    key = hashlib.sha256(repr(sorted(known.items())).encode()).hexdigest()[:16]
    path, folder = cache_dir() / f"data-{name}-{key}.tar.gz", data_dir() / name
    if not path.exists():
        with _fresh(path, f"data-{name}-*.gz") as out:
            _tar(folder, sorted(known), out)
    return Parcel(path, sum((folder / each).stat().st_size for each in known))


def _tar(folder: Path, names: list[str], out: BinaryIO) -> None:
    """Raises what went wrong while writing: a file that shrank or vanished must not leave half an archive."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as pipe, tarfile.open(fileobj=pipe, mode="w|") as archive:
            for name in names:
                archive.add(folder / name, arcname=name, filter=_plain)

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        with os.fdopen(reading, "rb") as pipe:
            compress(pipe, out)
        try:
            written.result()
        except (OSError, tarfile.TarError) as error:
            fix = f"Is it whole? `testbed data verify {folder.name}`"
            raise TestbedError(f"{folder}: cannot be packed ({error}). {fix}") from None


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Nobody's file, readable by all: it is unpacked for a user whom we do not know."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o644
    return info


@contextmanager
def _fresh(path: Path, older: str) -> Iterator[BinaryIO]:
    """A file that appears whole under its name, and replaces those of its kind."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".packing-")
    except OSError as error:
        raise Unavailable(f"{path.parent}: cannot be written ({error.strerror}). Set XDG_CACHE_HOME.") from None
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
        for old in path.parent.glob(older):
            old.unlink(missing_ok=True)
        Path(name).replace(path)
    except OSError as error:
        raise TestbedError(f"{path}: cannot be written ({error.strerror}). Make room, or set XDG_CACHE_HOME.") from None
    finally:
        Path(name).unlink(missing_ok=True)
