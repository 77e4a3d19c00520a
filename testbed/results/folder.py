"""RunFolder: runs/<experiment>/<run>/ and the names of what lies in it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from testbed.spec.errors import SpecError, UsageError, os_failure, refuse
from testbed.spec.run import RunSpec

MAX_SPEC = 1 << 20  # bytes of a spec.json
MAX_PLACE = 64  # bytes of a place.txt
TEMPORARY = ".tmp"  # how the name of a file ends that is not whole yet


def runs_dir() -> Path:
    """Where all runs go: TESTBED_RUNS, else ./runs."""
    return Path(os.environ.get("TESTBED_RUNS", "runs"))


EXPERIMENT = "experiment.json"  # beside the runs of a sweep: the question they answer


class RunFolder:
    """Paths inside one run's folder; the only place that spells them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = path / "spec.json"
        self.place = path / "place.txt"
        self.receipt = path / "receipt.json"
        self.summary = path / "summary.json"
        self.faults = path / "faults.jsonl"
        self.checkpoints = path / "checkpoints"

    def records(self, rank: int) -> Path:
        return self.path / f"rank{rank}.jsonl"

    def log(self, rank: int) -> Path:
        return self.path / f"rank{rank}.log"

    def trace(self, rank: int) -> Path:
        """torch.profiler's own, where it was asked for."""
        return self.path / f"rank{rank}.trace.json"

    def shares(self, rank: int) -> Path:
        """How the profiled time divides up."""
        return self.path / f"rank{rank}.profile.json"

    def attempts(self, rank: int) -> dict[int, Path]:
        """What a rank recorded in earlier attempts, by number, oldest first."""
        name = re.compile(rf"rank{rank}\.attempt([1-9]\d{{0,8}})\.jsonl", re.ASCII)
        found = ((name.fullmatch(path.name), path) for path in self.path.glob(f"rank{rank}.attempt*.jsonl"))
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def set_records_aside(self, rank: int) -> Path | None:
        """Move what a rank recorded in an earlier attempt to rank0.attempt1.jsonl; None where there is nothing."""
        if not self.records(rank).is_file():
            return None
        number = max(self.attempts(rank), default=0) + 1
        return self.records(rank).replace(self.path / f"rank{rank}.attempt{number}.jsonl")

    def create(self, spec: RunSpec, place: str = "") -> None:
        """Make the folder with its spec.json and where it is run; one that exists is never written over."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise UsageError(
                f"run folder {self.path} exists, and a run never overwrites another. Give another --out."
            ) from None
        except OSError as error:
            raise UsageError(
                f"run folder {self.path} cannot be made ({error.strerror}). Set TESTBED_RUNS or --out."
            ) from None
        try:
            if place:
                write_whole(self.place, place)
            write_whole(self.spec, spec.to_json())
        except OSError as error:
            with suppress(OSError):  # so that the next try finds no half of a run
                self.place.unlink(missing_ok=True)
                self.path.rmdir()
            raise os_failure(error, self.spec) from None

    def reopen(self) -> None:
        """Go on with a run that is not finished; from here on it has no summary until it has a new one."""
        self.summary.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what a killed writer left unfinished; nobody may be writing."""
        for half in self.path.rglob(f".*{TEMPORARY}"):
            half.unlink(missing_ok=True)

    def read_spec(self) -> RunSpec:
        if not self.spec.exists():
            raise UsageError(f"{self.spec} cannot be read (it is not there). Is {self.path} a run folder?")
        try:
            return RunSpec.from_json(read_bounded(self.spec, MAX_SPEC).decode(), str(self.spec))
        except UnicodeDecodeError as error:
            raise UsageError(f"{self.spec}: not JSON ({error.reason}). Write it with `testbed run`.") from None

    def read_place(self) -> str:
        """Where the run began; "" in folders that do not say, as those of old."""
        there = os.path.lexists(self.place)
        return read_bounded(self.place, MAX_PLACE).decode(errors="replace").strip() if there else ""

    def check_foreign(self) -> None:
        """A folder that may come from somebody else: everything in it must lie in it, so no links."""
        for path in [self.path, *self.path.rglob("*")]:
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise refuse("run folder", str(path), "is a link or no plain file", "Remove it.")

    def set_aside(self) -> Path:
        """Move a folder that is to be replaced out of every reader's sight; nothing is deleted."""
        attic = self.path.parent / ".superseded"
        attic.mkdir(exist_ok=True)
        names = (attic / f"{self.path.name}~{number}" for number in itertools.count())
        target = next(name for name in names if not name.exists())
        shutil.move(self.path, target)
        return target


def write_whole(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Write through a temporary name and rename: readers see the old file or the new one, never half of it.

    `durable`: it also survives the machine's sudden end.
    """
    if isinstance(content, str):
        content = (content if content.endswith("\n") else content + "\n").encode()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
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


def read_bounded(path: Path, most: int) -> bytes:
    """The bytes of a plain file; one that is a link, no file, missing or larger than `most` is refused."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SpecError(f"{path}: is no plain file, and only those are read. Remove it.")
            if status.st_size > most:
                raise SpecError(f"{path}: {status.st_size} bytes, and at most {most} are read. Write a smaller file.")
            return file.read(most)
    except OSError as error:
        reason = "is a link" if error.errno == errno.ELOOP else str(error.strerror)
        raise SpecError(f"{path}: cannot be read ({reason}). Give the path of a plain file.") from None


# Foreign: what is read of a run folder that may come from a stranger: plain files inside it, none of them endless.

MAX_RECORDS = 128 << 20  # bytes of one rank's records, all attempts together; a rank of ours writes no more
MAX_FAULTS = 16 << 20  # of faults.jsonl; a controller writes some dozen lines
MAX_SMALL = 16 << 20  # of any other file; the receipt of 64 nodes has about one million


def check_inside(folder: RunFolder) -> None:
    """No link, pipe or device in it. The folder itself, or one above it, may be a link: that one the user made."""
    RunFolder(folder.path.resolve()).check_foreign()


def check_size(paths: Iterable[Path], most: int) -> None:
    """Files that are read line by line, and kept: not more than `most` bytes together."""
    sizes = {path.name: path.stat().st_size for path in paths}
    if sum(sizes.values()) > most:
        raise SpecError(f"{', '.join(sizes)} has {sum(sizes.values())} bytes, and at most {most} are read")


def read_json(path: Path) -> Any:
    """A small file, whole."""
    return json.loads(read_bounded(path, MAX_SMALL))
