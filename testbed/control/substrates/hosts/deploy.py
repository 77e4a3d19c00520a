"""`fab deploy`: send the image and the data to every host that lacks them, in parallel.

Each archive is made once, when the first host needs it. It is compressed and kept in the user's cache. An error of one
host does not stop the transfer to other hosts.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, BinaryIO, Protocol

from testbed.control.substrates import engine
from testbed.control.substrates.clone import content_hash
from testbed.control.substrates.docker_cli import IMAGE, prune_images_argv
from testbed.control.substrates.hosts.node import (
    QUERY_TIMEOUT_S,
    Account,
    account,
    engine_version,
    free_bytes,
    free_engine_bytes,
    image_content,
)
from testbed.control.substrates.hosts.ssh import Host, Outcome, run_on_all
from testbed.control.substrates.layer import cache_dir
from testbed.results.folder import open_whole
from testbed.spec.datasets import ARRAYS, DATASETS, MARKER, array_path, data_dir, dataset_info, require_complete
from testbed.spec.disk import is_full, os_failure
from testbed.spec.errors import CommandFailed, HostFailed, TestbedError, Unavailable

BLOCK_BYTES = 8 << 20  # compressed as one gzip member
GZIP_LEVEL = 1  # fast enough for a link of 1 Gbit/s
GZIP_WBITS = 16 + zlib.MAX_WBITS  # with this value zlib writes a gzip header
TRANSFER_TIMEOUT_S = 3600.0  # for one host to receive and unpack an archive
SPACE_FACTOR = 1.3  # free bytes needed per unpacked byte: an engine unpacks before it renames


class TransferProgress(Protocol):
    """Receives the progress of the transfers, to show it on a terminal or in a log."""

    def message(self, text: str) -> None: ...
    def begin(self, host: str, what: str, size: int) -> Callable[[int], None]: ...
    def end(self, host: str, what: str) -> None: ...


@dataclass
class Delivery:
    """What one host received. `image` and the values of `data` are "sent" or "there already"."""

    host: str
    image: str = ""
    data: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    error: TestbedError | None = None


def deploy(outcomes: Sequence[Outcome[Host]], data: Sequence[str], progress: TransferProgress) -> list[Delivery]:
    """Send image and data to all connected hosts. Return a row per host, with its error if the host failed."""
    check_data(data)
    archives = Archives(progress)
    rows = {outcome.host.name: Delivery(outcome.host.name, error=outcome.error) for outcome in outcomes}

    def deliver(host: Host) -> None:
        row, begun = rows[host.name], time.monotonic()
        try:
            row.image = _send_image(host, archives, progress)
            for name in data:
                row.data[name] = _send_data(host, name, archives, progress)
        except TestbedError as error:
            row.error = error
        row.seconds = time.monotonic() - begun

    for outcome in run_on_all([outcome.host for outcome in outcomes if outcome.error is None], deliver):
        rows[outcome.host.name].error = rows[outcome.host.name].error or outcome.error
    return list(rows.values())


def check_data(names: Sequence[str]) -> None:
    """Raise Unavailable if a data set is not complete here."""
    for name in names:
        require_complete(name, data_dir())


def sendable(name: str) -> list[str]:
    """Return the data sets that have to be sent for a name: none if its samples are generated."""
    return [] if name in DATASETS and dataset_info(name).generated else [name]


def _send_image(host: Host, archives: Archives, progress: TransferProgress) -> str:
    engine_version(host)
    wanted = content_hash()
    if image_content(host) == wanted:
        return "there already"
    archive = archives.image()
    _check_space(host, free_engine_bytes(host), archive, "the image")
    _send(host, "image", archive, ["docker", "load", "--quiet"], progress)
    if engine.image_name() != IMAGE:  # hosts use one name for the image, and IMAGE may set another name here
        host.run(["docker", "tag", engine.image_name(), IMAGE], QUERY_TIMEOUT_S)
        host.run(["docker", "rmi", engine.image_name()], QUERY_TIMEOUT_S)
    if image_content(host) != wanted:
        raise HostFailed(f"{host}: the image was sent, but the engine does not show it. Run fab deploy again")
    host.run(prune_images_argv(), QUERY_TIMEOUT_S)
    return "sent"


def _send_data(host: Host, name: str, archives: Archives, progress: TransferProgress) -> str:
    """Send a data set unless the host has it; return "sent" or "there already". Raises HostFailed.

    It is unpacked into a second folder, verified there and then renamed, so that a data set on a host is never partial.
    """
    user = account(host)
    target, staged = user.data / name, user.data / f".{name}.partial"
    wanted = archives.digests(name)
    if _remote_digests(host, user, name, wanted) == wanted:
        return "there already"
    archive = archives.data(name)
    host.run(["rm", "-rf", str(staged)], QUERY_TIMEOUT_S)
    host.run(["mkdir", "-p", str(staged)], QUERY_TIMEOUT_S)
    _check_space(host, free_bytes(host, str(staged)), archive, name)
    _send(host, name, archive, ["tar", "-xzf", "-", "-C", str(staged)], progress)
    if _remote_digests(host, user, f".{name}.partial", wanted) != wanted:
        host.run(["rm", "-rf", str(staged)], QUERY_TIMEOUT_S)
        raise HostFailed(f"{host}: data {name} arrived with wrong checksums and was deleted. Run fab deploy again")
    host.run(["rm", "-rf", str(target)], QUERY_TIMEOUT_S)
    host.run(["mv", str(staged), str(target)], QUERY_TIMEOUT_S)
    return "sent"


def _remote_digests(host: Host, user: Account, folder: str, wanted: dict[str, str]) -> dict[str, str]:
    """Return the SHA-256 of the files on the host, by name; empty if a file is missing."""
    paths = [str(user.data / folder / name) for name in sorted(wanted)]
    try:
        text = host.run(["sha256sum", "--", *paths], TRANSFER_TIMEOUT_S)
    except CommandFailed:
        return {}
    pairs = [line.split(maxsplit=1) for line in text.splitlines()]
    return {path.rpartition("/")[2]: digest for digest, path in pairs}


def _check_space(host: Host, free: int, archive: Archive, what: str) -> None:
    needed = round(archive.unpacked_bytes * SPACE_FACTOR)
    if free < needed:
        room = f"{free / 1e9:.1f} GB are free, {what} needs {needed / 1e9:.1f}"
        raise HostFailed(f"{host}: disk full: {room}. Make room there, e.g. docker system prune")


def _send(host: Host, what: str, archive: Archive, argv: Sequence[str], progress: TransferProgress) -> None:
    advance = progress.begin(host.name, what, archive.path.stat().st_size)
    try:
        with archive.path.open("rb") as source:
            host.send(argv, source, TRANSFER_TIMEOUT_S, advance)
    except CommandFailed as error:
        full = "no space left" in error.output.lower()
        fix = "disk full. Make room there, e.g. docker system prune" if full else f"{error.output[:200]}. Deploy again"
        raise HostFailed(f"{host}: {what} was not accepted: {fix}") from None
    finally:
        progress.end(host.name, what)


# Archives


@dataclass(frozen=True)
class Archive:
    """The path of a compressed file, and the size of its content."""

    path: Path
    unpacked_bytes: int


class Archives:
    """Makes each archive when the first host needs it; the other hosts use the same file."""

    def __init__(self, progress: TransferProgress) -> None:
        self._progress = progress
        self._lock = Lock()
        self._made: dict[str, Archive] = {}
        self._digests: dict[str, dict[str, str]] = {}

    def image(self) -> Archive:
        return self._make_once("image", pack_image)

    def data(self, name: str) -> Archive:
        return self._make_once(name, lambda: pack_data(name, self.digests(name)))

    def digests(self, name: str) -> dict[str, str]:
        """Return the SHA-256 of every file of a data set, by name."""
        if name not in self._digests:
            paths = [*(array_path(name, data_dir(), array) for array in ARRAYS), data_dir() / name / MARKER]
            self._digests[name] = {path.name: _digest(path) for path in paths}
        return self._digests[name]

    def _make_once(self, what: str, pack: Callable[[], Archive]) -> Archive:
        with self._lock:
            if what not in self._made:
                self._progress.message(f"packing {what} (once for all hosts)")
                self._made[what] = pack()
            return self._made[what]


def remove_archives() -> None:
    """Remove all archives from the cache."""
    for path in cache_dir().glob("*.gz") if cache_dir().is_dir() else []:
        path.unlink(missing_ok=True)


def pack_image() -> Archive:
    """Pack the image and return the archive. Raises Unavailable if the image was made from other code than this."""
    size = int(engine.inspect_image()["Size"])
    # The archive contains the image's name, so an archive for another name is another file.
    name = hashlib.sha256(engine.image_name().encode()).hexdigest()[:8]
    path = cache_dir() / f"image-{content_hash()}-{name}.tar.gz"
    if not path.exists():
        with _open_archive(path, "image-*.gz") as out:
            _save_image(out)
    return Archive(path, size)


def _save_image(out: BinaryIO) -> None:
    argv = ["docker", "save", engine.image_name()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as saving:
        assert saving.stdout is not None and saving.stderr is not None
        try:
            compress(saving.stdout, out)
        except BaseException:
            saving.kill()
            raise
        reason = saving.stderr.read().decode(errors="replace").strip()
    if saving.returncode:
        raise Unavailable(f"image {IMAGE}: cannot be packed ({reason}). Make room in {cache_dir()}.")


def pack_data(name: str, digests: dict[str, str]) -> Archive:
    """Pack a data set as a tar file without folders, and return the archive. The keys of `digests` are its files."""
    key = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]
    path, folder = cache_dir() / f"data-{name}-{key}.tar.gz", data_dir() / name
    if not path.exists():
        with _open_archive(path, f"data-{name}-*.gz") as out:
            _tar(folder, sorted(digests), out)
    return Archive(path, sum((folder / file).stat().st_size for file in digests))


def _tar(folder: Path, names: list[str], out: BinaryIO) -> None:
    """Write the files to `out`. Raises TestbedError if a file cannot be read, so that no partial archive is kept."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as pipe, tarfile.open(fileobj=pipe, mode="w|") as archive:
            for name in names:
                archive.add(folder / name, arcname=name, filter=_anonymous)

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        with os.fdopen(reading, "rb") as pipe:
            compress(pipe, out)
        try:
            written.result()
        except (OSError, tarfile.TarError) as error:
            fix = f"Check the data set: `testbed data verify {folder.name}`"
            raise TestbedError(f"{folder}: cannot be packed ({error}). {fix}") from None


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the entry without an owner and readable for all, because the user on the host has another uid."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o644
    return info


def compress(source: IO[bytes], out: BinaryIO) -> None:
    """Write `source` to `out` as gzip, on all cores. Blocks are compressed in parallel and written in order.

    Each block is a gzip member; a gzip file may have several.
    """
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        waiting: deque[Future[bytes]] = deque()
        while block := source.read(BLOCK_BYTES):
            waiting.append(pool.submit(_gzip_member, block))
            if len(waiting) > 2 * cores:
                out.write(waiting.popleft().result())
        for member in waiting:
            out.write(member.result())


def _gzip_member(block: bytes) -> bytes:
    packer = zlib.compressobj(GZIP_LEVEL, wbits=GZIP_WBITS)
    return packer.compress(block) + packer.flush()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _open_archive(path: Path, older: str) -> Iterator[BinaryIO]:
    """Open an archive of the cache for writing. It gets its name when it is complete.

    Then other archives that match `older` are removed. Raises Unavailable if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_whole(path) as out:
            yield out
        for old in set(path.parent.glob(older)) - {path}:
            old.unlink(missing_ok=True)
    except OSError as error:
        if is_full(error):
            raise os_failure(error, path) from None
        raise Unavailable(f"{path}: cannot be written ({error.strerror}). Set XDG_CACHE_HOME.") from None
