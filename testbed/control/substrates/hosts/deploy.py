"""Deploy: the image and the data to every host that lacks them, in parallel; a host that fails stops no other."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import tempfile
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

from testbed.control.substrates.content import content_hash
from testbed.control.substrates.engine import IMAGE, image_content
from testbed.control.substrates.hosts.group import Outcome, each
from testbed.control.substrates.hosts.node import (
    SOON,
    Account,
    account,
    content_on_host,
    engine,
    free_at,
    free_bytes,
)
from testbed.control.substrates.hosts.ssh import Host
from testbed.spec.datasets import ARRAYS, DATASETS, MARKER, array_path, data_dir, dataset_info, is_complete
from testbed.spec.errors import CommandFailed, HostFailed, TestbedError, Unavailable

# What is sent to hosts, packed once for all of them: the image and the data sets, compressed, in the user's cache.

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


TRANSFER = 3600.0  # seconds for one host to take and unpack a parcel
ROOM = 1.3  # free bytes wanted per byte of the unpacked image: the engine unpacks before it renames


class Bars(Protocol):
    """What a person sees of the transfers."""

    def say(self, text: str) -> None: ...
    def begin(self, host: str, what: str, size: int) -> Callable[[int], None]: ...
    def end(self, host: str, what: str) -> None: ...


@dataclass
class Delivery:
    """What one host got; `image` and `data` are one word each."""

    host: str
    image: str = ""
    data: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    error: TestbedError | None = None


class Packing:
    """Each parcel is packed when the first host needs it, once for all."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._lock = Lock()
        self._parcels: dict[str, Parcel] = {}
        self._digests: dict[str, dict[str, str]] = {}

    def image(self) -> Parcel:
        return self._once("image", pack_image)

    def data(self, name: str) -> Parcel:
        return self._once(name, lambda: pack_data(name, self.digests(name)))

    def digests(self, name: str) -> dict[str, str]:
        if name not in self._digests:
            self._digests[name] = digests(name)
        return self._digests[name]

    def _once(self, what: str, pack: Callable[[], Parcel]) -> Parcel:
        with self._lock:
            if what not in self._parcels:
                self._bars.say(f"packing {what} (once for all hosts)")
                self._parcels[what] = pack()
            return self._parcels[what]


def deploy(outcomes: Sequence[Outcome[Host]], data: Sequence[str], bars: Bars) -> list[Delivery]:
    """To all hosts that answered; what went wrong is in each host's row."""
    check_data(data)
    packing = Packing(bars)
    rows = {outcome.host.name: Delivery(outcome.host.name, error=outcome.error) for outcome in outcomes}

    def deliver(host: Host) -> None:
        row, begun = rows[host.name], time.monotonic()
        try:
            row.image = _bring_image(host, packing, bars)
            for name in data:
                row.data[name] = _bring_data(host, name, packing, bars)
        except TestbedError as error:
            row.error = error
        row.seconds = time.monotonic() - begun

    for outcome in each([outcome.host for outcome in outcomes if outcome.error is None], deliver):
        rows[outcome.host.name].error = rows[outcome.host.name].error or outcome.error
    return list(rows.values())


def check_data(names: Sequence[str]) -> None:
    """What is to be sent must be here."""
    for name in names:
        dataset_info(name)
        if not is_complete(name, data_dir()):
            fix = f"Get it with `testbed data get {name}`, or use --data synthetic."
            raise Unavailable(f"data {name!r}: not in {(data_dir() / name).resolve()}. {fix}")


def sendable(name: str) -> list[str]:
    """A data set's name as a list of what must travel for it."""
    return [] if name in DATASETS and dataset_info(name).generated else [name]


def _bring_image(host: Host, packing: Packing, bars: Bars) -> str:
    engine(host)
    wanted = content_hash()
    if content_on_host(host) == wanted:
        return "there already"
    parcel = packing.image()
    _check_room(host, free_bytes(host), round(parcel.unpacked * ROOM), "the image")
    _send(host, "image", parcel, ["docker", "load", "--quiet"], bars)
    if content_on_host(host) != wanted:
        raise HostFailed(f"{host}: the image came through, but the engine does not show it. Run fab deploy again")
    _forget_older(host)
    return "sent"


def _forget_older(host: Host) -> None:
    """What the new image replaced, and only ours; one that is in use stays."""
    host.run(["docker", "image", "prune", "--force", "--filter", "label=testbed.content"], SOON)


def _check_room(host: Host, free: int, needed: int, what: str) -> None:
    if free < needed:
        room = f"{free / 1e9:.1f} GB are free, {what} needs {needed / 1e9:.1f}"
        raise HostFailed(f"{host}: disk full: {room}. Make room there, e.g. docker system prune")


def _send(host: Host, what: str, parcel: Parcel, argv: Sequence[str], bars: Bars) -> None:
    advance = bars.begin(host.name, what, parcel.path.stat().st_size)
    try:
        with parcel.path.open("rb") as source:
            host.send(argv, source, TRANSFER, advance)
    except CommandFailed as error:
        full = "no space left" in error.said.lower()
        fix = "disk full. Make room there, e.g. docker system prune" if full else f"{error.said[:200]}. Run it again"
        raise HostFailed(f"{host}: {what} was not taken: {fix}") from None
    finally:
        bars.end(host.name, what)


def _bring_data(host: Host, name: str, packing: Packing, bars: Bars) -> str:
    """Into a folder beside, verified there, then renamed: a data set is there whole or not at all."""
    who = account(host)
    target, staged = who.data / name, who.data / f".{name}.partial"
    wanted = packing.digests(name)
    if _digests_there(host, who, name, wanted) == wanted:
        return "there already"
    parcel = packing.data(name)
    host.run(["rm", "-rf", str(staged)], SOON)
    host.run(["mkdir", "-p", str(staged)], SOON)
    _check_room(host, free_at(host, str(staged)), round(parcel.unpacked * ROOM), name)
    _send(host, name, parcel, ["tar", "-xzf", "-", "-C", str(staged)], bars)
    if _digests_there(host, who, f".{name}.partial", wanted) != wanted:
        host.run(["rm", "-rf", str(staged)], SOON)
        raise HostFailed(f"{host}: data {name} came with wrong checksums and was thrown away. Run fab deploy again")
    host.run(["rm", "-rf", str(target)], SOON)
    host.run(["mv", str(staged), str(target)], SOON)
    return "sent"


def _digests_there(host: Host, who: Account, name: str, wanted: dict[str, str]) -> dict[str, str]:
    """SHA-256 of the files on the host, by name; files that are missing are left out."""
    paths = [str(who.data / name / each) for each in sorted(wanted)]
    try:
        text = host.run(["sha256sum", "--", *paths], TRANSFER)
    except CommandFailed:
        return {}
    pairs = [line.split(maxsplit=1) for line in text.splitlines()]
    return {path.rpartition("/")[2]: digest for digest, path in pairs}
