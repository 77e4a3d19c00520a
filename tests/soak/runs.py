"""One run of the `testbed` command, and what it left behind on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
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
from testbed.spec.process_tree import end_descendants
from tests.support.provenance import ROOT

DEADLINE_S = 5.0  # the ranks' communication deadline in every case
BATCH = 12
SMALL = ["--model", "lenet5", "--data", "synthetic", "--batch", str(BATCH), "--set", "probe=false"]
SMALL += ["--set", f"deadline={DEADLINE_S:g}", "--set", "data.test_subset=100", "--set", "data.subset=1200"]
TIMEOUT_S = 180.0  # for a command that must end by itself
KILL_TIMEOUT_S = 10.0  # until a command that was killed is gone
TORCH_CACHE = "torchinductor_"  # made by torch when DDP is imported, one per user
SHAPING = ("tbf", "netem", "ingress", "htb")  # qdiscs that the testbed makes


@dataclass
class Run:
    """The result of one command."""

    code: int
    output: str
    ended: float  # monotonic
    pid: int
    folder: RunFolder
    status: str | None
    history: list[dict[str, Any]]
    shaped_before: frozenset[str]  # qdiscs on the machine's own interfaces before the command
    on_engine: bool

    def event(self, kind: str) -> dict[str, Any] | None:
        return next(iter(self.events(kind)), None)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.history if event["event"] == kind]

    def names(self, rank: int) -> bool:
        """Return True if the error message is about this rank."""
        return f"testbed: rank {rank} (node{rank})" in self.output

    def left(self) -> list[str]:
        """Return what still exists of this command: all that carries its mark, temporary files, locks, qdiscs."""
        found = [str(each) for each in owned_by(self.pid)]
        files = temporary(self.folder.path).iterdir()
        found += [str(path) for path in files if not path.name.startswith(TORCH_CACHE)]
        unfinished = self.folder.path.rglob(f".*{TEMPORARY}") if self.folder.path.exists() else ()
        found += map(str, (*unfinished, *self.folder.path.parent.glob(".*.lock")))
        on_engine = _owned_on_engine() if self.on_engine else []
        found += [name for name, owner in on_engine if owner.startswith(f"{self.pid}-")]
        return found + sorted(shaping() - self.shaped_before)

    def started(self) -> bool:
        """Return True if the first attempt began to train: a rank writes `start` when it has joined the group."""
        if not self.folder.spec.is_file():
            return False
        first = [self.folder.path / f"rank{rank}.attempt1.jsonl" for rank in range(self.folder.read_spec().world)]
        paths = [old if old.is_file() else self.folder.records(rank) for rank, old in enumerate(first)]
        return any(record.kind == "start" for path in paths if path.is_file() for record in read(path))

    def last_record(self, rank: int) -> str:
        """Return the kind of the last record that the rank wrote."""
        return next((record.kind for record in reversed(list(read(self.folder.records(rank))))), "nothing")

    def in_table(self) -> bool:
        """Return True if the report shows the run. A run that it leaves out must be listed with a reason."""
        if not self.folder.path.is_dir():
            return False
        found = load([self.folder.path])
        assert len(found.runs) + len(found.skipped) == 1, found
        return bool(found.runs)

    def resumed(self) -> int:
        """Return the step after which the last attempt resumed, from the summary's notes; 0 if none resumed."""
        notes = Summary.read(self.folder).notes if self.folder.summary.is_file() else []
        notes_of = (re.match(r"resumed after step (\d+):", note) for note in notes)
        return max((int(found[1]) for found in notes_of if found), default=0)

    def final_hash(self) -> str | None:
        """Return the hash of the parameters after the last step, or None if ranks differ or have none."""
        if not self.folder.spec.is_file():
            return None
        found = set()
        for rank in range(self.folder.read_spec().world):
            hashes = [record for record in read(self.folder.records(rank)) if record.kind == "hash"]
            found.add((hashes[-1].step, hashes[-1].parameters) if hashes else None)
        (only,) = found if len(found) == 1 else (None,)
        return only[1] if only and only[0] > 0 else None


class CommandHangs(Exception):
    """A command that did not end in time. It was killed."""


def run_testbed(*arguments: str, out: Path, timeout_s: float = TIMEOUT_S) -> Run:
    """Run `testbed run` to its end, with a separate folder for temporary files. Raises CommandHangs."""
    argv = [sys.executable, "-m", "testbed.control", "run", *arguments]
    argv += [] if "--resume" in arguments else ["--out", str(out)]
    temporary(out).mkdir(exist_ok=True)
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary(out)), SHARE: "1"}
    shaped_before = shaping()
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = output_of(process, timeout_s)
    ended, folder = time.monotonic(), RunFolder(out)
    status = json.loads(folder.summary.read_text())["status"] if folder.summary.is_file() else None
    lines = folder.faults.read_text().splitlines() if folder.faults.is_file() else []
    history, on_engine = list(map(json.loads, lines)), "compose" in arguments
    return Run(process.returncode, output, ended, process.pid, folder, status, history, shaped_before, on_engine)


def output_of(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Wait for a command and return what it printed.

    A command that takes longer is killed with all of its processes, and what it made is removed, so that the next case
    can start. Raises CommandHangs then.
    """
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired as error:
        process.send_signal(signal.SIGSTOP)  # so that it starts no rank again meanwhile
        end_descendants(process.pid)
        process.kill()
        process.wait(KILL_TIMEOUT_S)
        for each in owned_by(process.pid):
            each.remove()
        said = (error.output or b"").decode(errors="replace")[-1500:]
        raise CommandHangs(f"it did not end in {timeout_s:g} s and was killed. It printed: {said}") from None


def owned_by(pid: int) -> list[ownership.OwnedResource]:
    """Return what carries the mark of this process."""
    return [each for each in ownership.find(everything=True) if each.owner.startswith(f"{pid}-")]


def _owned_on_engine() -> list[tuple[str, str]]:
    """Return the containers and networks that a controller made, each with its owner, as `docker` lists them."""
    form = f'{{{{.Name}}}} {{{{.Label "{OWNER_LABEL}"}}}}'
    lists = (["ps", "--all", "--format", form.replace("Name", "Names")], ["network", "ls", "--format", form])
    argvs = [["docker", *words, "--filter", f"label={OWNER_LABEL}"] for words in lists]
    listed = [subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in argvs]
    return [(name, owner) for text in listed for name, owner in (line.split() for line in text.splitlines())]


def temporary(out: Path) -> Path:
    """Return the folder of a run's temporary files."""
    return out.parent / "temporary"


def shaping() -> frozenset[str]:
    """Return the qdiscs on this machine's own interfaces. Those of nodes vanish with their namespaces."""
    if shutil.which("tc") is None:
        return frozenset()
    lines = subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True, check=True).stdout.splitlines()
    return frozenset(line for line in lines if line.split()[1] in SHAPING)


def left_by_this_process() -> list[str]:
    """Return what this process left, including cases that run inside it: what carries its mark, scratch folders."""
    found = [str(each) for each in owned_by(os.getpid())]
    return found + sorted(map(str, Path(tempfile.gettempdir()).glob(f"{_scratch_prefix()}*")))


def _scratch_prefix() -> str:
    return f"soak-{os.getpid()}-"


def make_scratch() -> Path:
    """Create a folder for one case. All users may read it, because ranks in containers may be uid 65534."""
    made = Path(tempfile.mkdtemp(prefix=_scratch_prefix()))
    made.chmod(0o755)
    return made


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
