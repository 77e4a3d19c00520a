"""One run of the `testbed` command under a fault, and what it left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.control.machine import ownership
from testbed.control.runs.locks import SHARE
from testbed.control.substrates.docker_cli import OWNER_LABEL
from testbed.report.load import load
from testbed.results.conclude import Summary
from testbed.results.folder import TEMPORARY, RunFolder
from testbed.results.records import read
from tests.support.provenance import ROOT

DEADLINE = 5.0  # seconds, of every soak
BATCH = 12
SMALL = ["--model", "lenet5", "--data", "synthetic", "--batch", str(BATCH), "--set", "probe=false"]
SMALL += ["--set", f"deadline={DEADLINE:g}", "--set", "data.test_subset=100", "--set", "data.subset=1200"]
PATIENCE = 180.0  # seconds for a command that must end by itself
NOT_OURS = "torchinductor_"  # torch's cache, one for each user, made when DDP is imported
SHAPING = ("tbf", "netem", "ingress", "htb")  # qdiscs that we make


@dataclass
class Run:
    """What one command did."""

    code: int
    said: str
    ended: float  # monotonic
    pid: int
    folder: RunFolder
    status: str | None
    history: list[dict[str, Any]]
    shaped: frozenset[str]  # what was shaped on the machine's own links before
    contained: bool  # on an engine

    def event(self, kind: str) -> dict[str, Any] | None:
        return next((event for event in self.history if event["event"] == kind), None)

    def names(self, rank: int) -> bool:
        """The first sentence is about this rank."""
        return f"testbed: rank {rank} (node{rank})" in self.said

    def left(self) -> list[str]:
        """Everything of this command's that is still there: what bears its mark, temporary files, locks, shaping."""
        mine = re.compile(rf"{self.pid}-.+")
        found = [str(each) for each in ownership.find(everything=True) if mine.fullmatch(each.owner)]
        files = temporary(self.folder.path).iterdir()
        found += [str(path) for path in files if not path.name.startswith(NOT_OURS)]
        halves = self.folder.path.rglob(f".*{TEMPORARY}") if self.folder.path.exists() else ()
        found += map(str, (*halves, *self.folder.path.parent.glob(".*.lock")))
        found += [name for name, who in _on_engine() if mine.fullmatch(who)] if self.contained else []
        return found + sorted(shaping() - self.shaped)

    def started(self) -> bool:
        """The first attempt came to its training: a rank says so when it has met all the others."""
        if not self.folder.spec.is_file():
            return False
        first = [self.folder.path / f"rank{rank}.attempt1.jsonl" for rank in range(self.folder.read_spec().world)]
        paths = [old if old.is_file() else self.folder.records(rank) for rank, old in enumerate(first)]
        return any(record.kind == "start" for path in paths if path.is_file() for record in read(path))

    def doing(self, rank: int) -> str:
        """The kind of the last record that the rank wrote."""
        return next((record.kind for record in reversed(list(read(self.folder.records(rank))))), "nothing")

    def tabled(self) -> bool:
        """Whether the report shows it. One that is not shown must be named with the reason."""
        if not self.folder.path.is_dir():
            return False
        found = load([self.folder.path])
        assert len(found.runs) + len(found.skipped) == 1, found
        return bool(found.runs)

    def resumed(self) -> int:
        """The step after which the last attempt went on, as the summary notes; 0: it began anew, or was alone."""
        notes = Summary.read(self.folder).notes if self.folder.summary.is_file() else []
        told = (re.match(r"resumed after step (\d+):", note) for note in notes)
        return max((int(found[1]) for found in told if found), default=0)

    def final_hash(self) -> str | None:
        """Of the parameters after the last step, where all ranks agree."""
        if not self.folder.spec.is_file():
            return None
        found = set()
        for rank in range(self.folder.read_spec().world):
            hashes = [record for record in read(self.folder.records(rank)) if record.kind == "hash"]
            found.add((hashes[-1].step, hashes[-1].parameters) if hashes else None)
        (only,) = found if len(found) == 1 else (None,)
        return only[1] if only and only[0] > 0 else None


def testbed(*arguments: str, out: Path, patience: float = PATIENCE) -> Run:
    """`testbed run` to its end, with a folder of its own for temporary files."""
    argv = [sys.executable, "-m", "testbed.control", "run", *arguments]
    argv += [] if "--resume" in arguments else ["--out", str(out)]
    temporary(out).mkdir(exist_ok=True)
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary(out)), SHARE: "1"}
    shaped = shaping()
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, _ = process.communicate(timeout=patience)
    ended, folder = time.monotonic(), RunFolder(out)
    status = json.loads(folder.summary.read_text())["status"] if folder.summary.is_file() else None
    lines = folder.faults.read_text().splitlines() if folder.faults.is_file() else []
    history, contained = list(map(json.loads, lines)), "compose" in arguments
    return Run(process.returncode, said, ended, process.pid, folder, status, history, shaped, contained)


def _on_engine() -> list[tuple[str, str]]:
    """Containers and networks that a controller made, with their owner, as the engine's own command lists them."""
    form = f'{{{{.Name}}}} {{{{.Label "{OWNER_LABEL}"}}}}'
    lists = (["ps", "--all", "--format", form.replace("Name", "Names")], ["network", "ls", "--format", form])
    argvs = [["docker", *words, "--filter", f"label={OWNER_LABEL}"] for words in lists]
    said = [subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in argvs]
    return [(name, who) for text in said for name, who in (line.split() for line in text.splitlines())]


def temporary(out: Path) -> Path:
    """Where a run's temporary files go."""
    return out.parent / "temporary"


def shaping() -> frozenset[str]:
    """What is shaped on this machine's own links; that of nodes goes with their namespaces."""
    if shutil.which("tc") is None:
        return frozenset()
    lines = subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True, check=True).stdout.splitlines()
    return frozenset(line for line in lines if line.split()[1] in SHAPING)


def own() -> list[str]:
    """What this process left, cases that run inside it included: things with its mark, folders for cases."""
    mine = re.compile(rf"{os.getpid()}-.+")
    found = [str(each) for each in ownership.find(everything=True) if mine.fullmatch(each.owner)]
    return found + sorted(map(str, Path(tempfile.gettempdir()).glob(f"{_scratch()}*")))


def _scratch() -> str:
    return f"soak-{os.getpid()}-"


def scratch() -> Path:
    """A folder for one run, to be removed with `drop`; open to all, as a rank in a container may be nobody."""
    made = Path(tempfile.mkdtemp(prefix=_scratch()))
    made.chmod(0o755)
    return made


def drop(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
