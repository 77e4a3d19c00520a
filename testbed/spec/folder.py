"""RunFolder: runs/<experiment>/<run>/ and the names of what lies in it."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path

from testbed.spec.errors import UsageError
from testbed.spec.run import RunSpec


def runs_dir() -> Path:
    """Where all runs go: TESTBED_RUNS, else ./runs."""
    return Path(os.environ.get("TESTBED_RUNS", "runs"))


EXPERIMENT = "experiment.json"  # beside the runs of a sweep: the question they answer


class RunFolder:
    """Paths inside one run's folder; the only place that spells them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = path / "spec.json"
        self.receipt = path / "receipt.json"
        self.summary = path / "summary.json"

    def records(self, rank: int) -> Path:
        return self.path / f"rank{rank}.jsonl"

    def log(self, rank: int) -> Path:
        return self.path / f"rank{rank}.log"

    def create(self, spec: RunSpec) -> None:
        """Make the folder with its spec.json; one that exists is never written over."""
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
        write_whole(self.spec, spec.to_json())

    def read_spec(self) -> RunSpec:
        try:
            return RunSpec.from_json(self.spec.read_text(encoding="utf-8"), str(self.spec))
        except OSError as error:
            raise UsageError(f"{self.spec} cannot be read ({error.strerror}). Is {self.path} a run folder?") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"{self.spec}: not JSON ({error.reason}). Write it with `testbed run`.") from None

    def set_aside(self) -> Path:
        """Move a folder that is to be replaced out of every reader's sight; nothing is deleted."""
        attic = self.path.parent / ".superseded"
        attic.mkdir(exist_ok=True)
        names = (attic / f"{self.path.name}~{number}" for number in itertools.count())
        target = next(name for name in names if not name.exists())
        shutil.move(self.path, target)
        return target


def write_whole(path: Path, text: str) -> None:
    """Write through a temporary name and rename: readers see the old file or the new one, never half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text if text.endswith("\n") else text + "\n")
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
