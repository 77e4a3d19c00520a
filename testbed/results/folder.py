"""A run's folder, runs/<experiment>/<run>/: the names of the files in it, and safe reading and writing of files.

All code that reads or writes a run uses RunFolder. A folder may come from another user, and ranks may write to it.
So its files are read without following symlinks, and up to a largest size.
"""

from __future__ import annotations

import errno
import fnmatch
import itertools
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from testbed.spec.disk import is_full, os_failure
from testbed.spec.errors import SpecError, UsageError, refuse
from testbed.spec.file_tree import entries_below
from testbed.spec.own_files import METHODS, copy_of, digest_of
from testbed.spec.run import RunSpec
from testbed.spec.words import Place, current_place, name_of, shown_path

EXPERIMENT = "experiment.json"  # in the folder of a sweep: the experiment that its runs belong to
TEMPORARY = ".tmp"  # suffix of a file that is still being written

MAX_DEPTH = 3  # levels of folders below the given one in which runs are searched
MAX_SPEC_BYTES = 1 << 20
MAX_SUBSTRATE_BYTES = 64
MAX_RECORDS_BYTES = 128 << 20  # limit for one rank's records over all attempts; no rank writes a larger file
MAX_FAULTS_BYTES = 16 << 20  # faults.jsonl; a controller writes some dozen lines
MAX_JSON_BYTES = 16 << 20  # any other file; the receipt of 64 nodes has about 10^6 bytes


def runs_dir() -> Path:
    """Return the folder of all runs: TESTBED_RUNS, else ./runs."""
    return Path(os.environ.get("TESTBED_RUNS", "runs"))


def fresh_folder(parent: Path, name: str) -> Path:
    """Return the unused path parent/<name>-<time>, with a number at the end if needed. Nothing is created."""
    base = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (base.with_name(f"{base.name}-{number}") for number in range(2, 1000))
    return base if not base.exists() else next(path for path in numbered if not path.exists())


class RunFolder:
    """Paths inside one run's folder. No other module contains these names.

    The exceptions are slurm.json and hosts.json, by which two substrates find their own runs again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = path / "spec.json"
        self.substrate = path / "substrate.txt"
        self.receipt = path / "receipt.json"
        self.summary = path / "summary.json"
        self.faults = path / "faults.jsonl"
        self.checkpoints = path / "checkpoints"
        self.own_files = path / "files"  # copies of the user's own files, which the spec names
        self.methods = self.own_files / METHODS  # where the ranks find the user's own method
        self.layers = path / "profile.json"  # how long each layer computes, if the run recorded it (results/profile.py)

    def records(self, rank: int) -> Path:
        return self.path / f"rank{rank}.jsonl"

    def log(self, rank: int) -> Path:
        return self.path / f"rank{rank}.log"

    def files(self, rank: int) -> Path:
        """Return the folder with the files that a user's script wrote to its working copy."""
        return self.path / f"rank{rank}.files"

    def trace(self, rank: int) -> Path:
        """Return the path of the trace of torch.profiler, which a profiled run has."""
        return self.path / f"rank{rank}.trace.json"

    def profile(self, rank: int) -> Path:
        """Return the path of the shares of the profiled time: compute, communication, overlap, other."""
        return self.path / f"rank{rank}.profile.json"

    def attempts(self, rank: int) -> dict[int, Path]:
        """Return the records of earlier attempts by number, oldest first."""
        name = re.compile(rf"rank{rank}\.attempt([1-9]\d{{0,8}})\.jsonl", re.ASCII)
        found = ((name.fullmatch(path.name), path) for path in self.path.glob(f"rank{rank}.attempt*.jsonl"))
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def processes(self, rank: int) -> list[Path]:
        """Return the records of the further processes of a user's script that trained on this node, in their order."""
        name = re.compile(rf"rank{rank}\.process([1-9]\d{{0,2}})\.jsonl", re.ASCII)
        found = ((name.fullmatch(path.name), path) for path in self.path.glob(f"rank{rank}.process*.jsonl"))
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]

    def copy(self, number: int) -> RunFolder:
        """Return the folder of a copy of a single node's job, which ran beside it (control/substrates/copies.py)."""
        return RunFolder(self.path / f"copy{number}")

    def copies(self) -> list[RunFolder]:
        """Return the folders of all copies."""
        numbers = itertools.takewhile(lambda number: self.copy(number).path.is_dir(), itertools.count(1))
        return [self.copy(number) for number in numbers]

    def create(self, spec: RunSpec, substrate: str = "") -> None:
        """Make the folder with spec.json, the name of the substrate, and copies of the user's own files.

        Raises UsageError if the folder exists or cannot be made.
        """
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            rule = "exists, and a run never overwrites another"
            raise UsageError(f"run folder {shown_path(self.path)} {rule}. Give another {name_of('out')}.") from None
        except OSError as error:
            if is_full(error):
                raise os_failure(error, self.path) from None
            rule = f"cannot be made ({error.strerror})"
            way_out = f"Set TESTBED_RUNS or {name_of('out')}"
            if current_place() in (Place.COMPOSE, Place.LAUNCHER):
                way_out = f"Change the owner or the mode of {shown_path(runs_dir())}"
            raise UsageError(f"run folder {shown_path(self.path)} {rule}. {way_out}.") from None
        try:
            if substrate:
                write_whole(self.substrate, substrate)
            self._copy_own_files(spec)
            write_whole(self.spec, spec.to_json())
        except (OSError, UsageError) as error:
            with suppress(OSError):  # the folder is removed, so that the same --out can be used again
                self.substrate.unlink(missing_ok=True)
                shutil.rmtree(self.own_files, ignore_errors=True)
                self.path.rmdir()
            raise (error if isinstance(error, UsageError) else os_failure(error, self.spec)) from None

    def _copy_own_files(self, spec: RunSpec) -> None:
        for _, own in spec.own_files.values():
            content = own.place.read_bytes()
            if (digest := digest_of(content)) != spec.files.get(own.path):
                raise UsageError(f"{own.place}: was changed while the run started. Start it again.")
            copy = own.copied_to(self.own_files, digest)
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_whole(copy, content)

    def own_file(self, spec: RunSpec, key: str) -> Path | None:
        """Return the copy of the user's file that a key of the spec refers to; None if it refers to none.

        Raises SpecError if the copy is not the recorded file.
        """
        if key not in spec.own_files:
            return None
        _, own = spec.own_files[key]
        return copy_of(self.own_files, own, spec.files.get(own.path, ""))

    def reopen(self) -> None:
        """Remove the summary of a run that is resumed. The run gets a new one when it ends."""
        self.summary.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove incomplete files of killed processes. Call this only when no process writes to the folder."""
        for entry in entries_below(self.path, leave_out=("rank*.files",)):  # what a script wrote stays
            if fnmatch.fnmatch(entry.name, f".*{TEMPORARY}") and not entry.is_dir(follow_symlinks=False):
                Path(entry.path).unlink(missing_ok=True)

    def set_records_aside(self, rank: int) -> Path | None:
        """Rename the records of the last attempt, e.g. to rank0.attempt1.jsonl; return the path, None without records.

        Records of further processes are removed.
        """
        if not self.records(rank).is_file():
            return None
        number = max(self.attempts(rank), default=0) + 1
        for further in self.processes(rank):
            further.unlink()
        return self.records(rank).replace(self.path / f"rank{rank}.attempt{number}.jsonl")

    def set_aside(self) -> Path:
        """Move the whole folder to .superseded/ in its parent, which no command reads, and return the new path."""
        superseded = self.path.parent / ".superseded"
        superseded.mkdir(exist_ok=True)
        names = (superseded / f"{self.path.name}~{number}" for number in itertools.count())
        target = next(name for name in names if not name.exists())
        shutil.move(self.path, target)
        return target

    def read_spec(self) -> RunSpec:
        """Read spec.json. Raises UsageError if this is no run folder, or if another version wrote the file."""
        if not self.spec.exists():
            way_out = "Give a folder that `testbed run` or `testbed sweep` wrote."
            raise UsageError(f"{self.path}: has no {self.spec.name}, so it is no run folder. {way_out}")
        try:
            return RunSpec.from_json(read_bounded(self.spec, MAX_SPEC_BYTES).decode(), str(self.spec))
        except UnicodeDecodeError as error:
            raise UsageError(f"{self.spec}: not JSON ({error.reason}). Write it with `testbed run`.") from None

    def read_substrate(self) -> str:
        """Return the name of the substrate on which the run began; "" if the file is missing."""
        if not os.path.lexists(self.substrate):
            return ""
        return read_bounded(self.substrate, MAX_SUBSTRATE_BYTES).decode(errors="replace").strip()

    def check_no_links(self, allow_top: bool = False) -> None:
        """Raise SpecError if the folder contains a symlink, pipe or device: a reader of a symlink leaves the folder.

        `allow_top`: the folder itself, or a folder above it, may be a symlink, because the user made it.
        """
        top = self.path.resolve() if allow_top else self.path
        below = (each for each in entries_below(top) if not _is_plain(each))
        usable = not top.is_symlink() and (top.is_file() or top.is_dir())
        strange = next((each.path for each in below), "") if usable else str(top)
        if strange:
            raise refuse("run folder", strange, "is a symlink or not a regular file", "Remove it.")


def _is_plain(entry: os.DirEntry[str]) -> bool:
    """Return True for a regular file and for a folder."""
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)


def process_records(records: Path, number: int) -> Path:
    """Return the path of the records of a further process, e.g. rank0.process1.jsonl beside rank0.jsonl."""
    return records.with_name(f"{records.stem}.process{number}.jsonl")


def find_runs(path: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the run folders at or below a path, sorted by name, numbers inside names as numbers.

    A folder with records but without spec.json is damaged; it is yielded too. Hidden folders are not searched, because
    they contain runs that a sweep has replaced. Raises SpecError if `path` is no folder.
    """
    if not path.is_dir():
        raise SpecError(f"{path}: no such folder. Give run folders, or a folder of runs such as runs/quick.")
    folder = RunFolder(path)
    if folder.spec.exists() or folder.records(0).exists():
        yield path
    elif depth:
        for inner in sorted(path.iterdir(), key=lambda each: natural(each.name)):
            if inner.is_dir() and not inner.name.startswith("."):
                yield from find_runs(inner, depth - 1)


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key by which `n10` comes after `n2`."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdecimal() and len(part) < 19 else (1, 0, part) for part in parts]


def write_whole(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Write a file with `open_whole`; text gets a newline at its end."""
    if isinstance(content, str):
        content = (content if content.endswith("\n") else content + "\n").encode()
    with open_whole(path, durable) as out:
        out.write(content)


@contextmanager
def open_whole(path: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file and rename it at the end, so that readers see either the whole old or the whole new file.

    `durable`: sync the file and its folder to disk as well, so that the file survives a crash of the machine.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            if durable:
                out.flush()
                os.fsync(out.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
        if durable:
            _sync_folder(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor. Raises SpecError for a symlink, pipe or device, and OSError.

    The check is needed because a rank, or a user's script in a container, can write anything under this name.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # ENXIO: a pipe without a reader, or a socket
            raise
        reason = "is a symlink" if error.errno == errno.ELOOP else "is not a regular file"
        raise SpecError(f"{path}: {reason}, and only regular files are read. Move it away.") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise SpecError(f"{path}: is not a regular file, and only regular files are read. Move it away.")
    return handle


def open_append(path: Path) -> BinaryIO:
    """Open a regular file to append to; make it if it is missing. Raises SpecError for a symlink, pipe or device."""
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file. Raises SpecError if it is missing, a symlink, or larger than `max_bytes`."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                rule = f"{size} bytes, and at most {max_bytes} are read"
                raise SpecError(f"{path}: {rule}. Write a smaller file.")
            return file.read(max_bytes)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}). Give the path of a regular file.") from None


def read_json(path: Path) -> Any:
    """Parse a JSON file of at most MAX_JSON_BYTES. Raises ValueError or RecursionError for damage, else SpecError."""
    return json.loads(read_bounded(path, MAX_JSON_BYTES))


def finite(value: Any) -> Any:
    """Return the value with None in place of nan and infinity, which JSON cannot express."""
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_size(paths: Iterable[Path], max_bytes: int) -> None:
    """Raise SpecError if these files, which are read line by line, have more than `max_bytes` in total."""
    sizes = {path.name: path.stat().st_size for path in paths}
    if sum(sizes.values()) > max_bytes:
        rule = f"{sum(sizes.values())} bytes in total, and at most {max_bytes} are read"
        raise SpecError(f"{', '.join(sizes)}: {rule}. Run it again.")
