"""Grade submissions: run every part of a submission as a script on the nodes, collect evidence, judge the demands.

A submission is foreign code that may be hostile. It runs in containers, in a copy of its regular files, with limits.
A submission that fails loses points, and the next submission is graded. After Ctrl-C the results so far stay.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from testbed.control.grading.demands import judge
from testbed.control.grading.evidence import Node, Outside, PartEvidence
from testbed.control.grading.gradebook import Gradebook, Graded
from testbed.control.runs.progress import Progress
from testbed.control.runs.run import execute
from testbed.control.runs.select import SubstrateChoice, choose, node_plans
from testbed.control.substrates.base import NodeCounts, Process, Substrate
from testbed.results.folder import MAX_RECORDS_BYTES, RunFolder
from testbed.results.records import Record, read
from testbed.spec.errors import (
    ConnectionLost,
    Interrupted,
    RankFailed,
    ReplicasDiffer,
    TestbedError,
    UsageError,
    one_line,
    refuse,
)
from testbed.spec.experiment import spec_from_flags
from testbed.spec.file_tree import entries_below
from testbed.spec.grading import Assignment, Part
from testbed.spec.run import RunSpec
from testbed.spec.script import MAX_DEPTH

SANDBOXED = "compose"  # the substrate for submissions that are not trusted
MAX_FILES = 1000  # of a submission
MAX_BYTES = 64 << 20
MAX_OUTPUT_BYTES = 1 << 20  # of a rank's log
BUSY_LOAD_PER_CORE = 4.0  # a load that the ranks of a part alone do not reach
OTHER_LOAD_PER_CORE = 1.0  # with a larger load of other processes, a comparison of speed proves nothing


@dataclass(frozen=True)
class Setting:
    """What is the same for all submissions."""

    assignment: Assignment
    given: Path | None  # folder with files that replace a submission's own
    out: Path
    on: str
    path: str  # PATH of the scripts; empty: PATH of the nodes
    allow_concurrent: bool
    progress: Progress
    choices: dict[str, SubstrateChoice] = field(default_factory=dict)  # by part; each is checked once


def find_submissions(folder: Path) -> list[Path]:
    """Return the folders in `folder`, sorted by name, without symlinks and hidden folders. Raises UsageError."""
    if not folder.is_dir():
        raise refuse("submissions", str(folder), "is no folder", "Give a folder with one folder per submission.")
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    found = [path for path in found if not path.name.startswith(".")]
    if not found:
        rule = "contains no folder, and every submission must be a folder"
        raise refuse("submissions", str(folder), rule, "Give a folder with one folder per submission.")
    return found


def check_trust(on: str, trusted: bool) -> str:
    """Return the substrate to use. Raises UsageError for a substrate without a sandbox, unless `trusted` is true."""
    on = SANDBOXED if on == "auto" else on
    if on not in (SANDBOXED, "netns", "process"):
        raise refuse("--on", on, "cannot grade", "Use compose, or netns or process with --trusted.")
    if on != SANDBOXED and not trusted:
        rule = "is no sandbox: a submission could read your files"
        raise refuse("--on", on, rule, "Use --on compose, or add --trusted if you have read every submission.")
    return on


def grade_all(setting: Setting, submissions: Sequence[Path]) -> Gradebook:
    """Grade every submission. The results are written after each one, so that they are kept if an error is raised.

    Raises Interrupted and ConnectionLost, and before the first submission UsageError if this machine cannot run a part,
    e.g. because the image is missing.
    """
    for part in map(setting.assignment.complete, setting.assignment.parts):
        _choice(setting, part, _spec(setting, part, setting.out))
    book = Gradebook(setting.assignment.title, setting.out, setting.on, len(submissions))
    book.write()
    for number, submission in enumerate(submissions, start=1):
        setting.progress.headline(f"{submission.name} ({number} of {len(submissions)})")
        began = time.monotonic()
        try:
            graded = _grade(setting, submission, setting.out / _slug(submission.name, number))
        except (Interrupted, ConnectionLost) as error:
            error.folder = setting.out
            raise
        except (TestbedError, OSError) as error:  # an error of this machine, not of the submission
            graded = Graded(name=submission.name, problem=one_line(str(error)))
        graded = replace(graded, seconds=time.monotonic() - began)
        book.add(graded)
        setting.progress.headline(f"  {graded.headline()}")
    return book


def _slug(name: str, number: int) -> str:
    """Return a folder name for a submission with safe characters only; its own name may have any characters."""
    return f"{number:03d}-" + (re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:64].strip("_") or "submission")


def _grade(setting: Setting, submission: Path, folder: Path) -> Graded:
    staged = folder / "files"
    parts: dict[str, PartEvidence] = {}
    problem = _stage(submission, setting.given, staged)
    for short in setting.assignment.parts:
        part = setting.assignment.complete(short)
        if problem:
            parts[part.name] = PartEvidence(part=part, failure=problem)
        elif (staged / part.file).is_file():
            parts[part.name] = _run_part(setting, part, staged, folder / f"part-{part.name}")
        elif below := sorted(staged.glob(f"*/{part.file}")):
            rule = f"{part.file} is in the folder {below[0].parent.name}, and must be at the top of the submission"
            parts[part.name] = PartEvidence(part=part, failure=rule)
    return Graded(name=submission.name, verdicts=judge(setting.assignment, parts))


# Files of a submission


def _stage(submission: Path, given: Path | None, target: Path) -> str:
    """Copy the regular files, then the given files over them. Return why the submission is refused; else ""."""
    size = number = 0
    for source, name in _regular_files(submission):
        number, size = number + 1, size + source.stat().st_size
        if len(name.parts) > MAX_DEPTH + 1:
            return f"the submission has a file below more than {MAX_DEPTH} folders, which is the limit"
        if number > MAX_FILES or size > MAX_BYTES:
            return f"the submission has more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB, which is the limit"
        _copy(source, target / name)
    for source, name in _regular_files(given) if given else ():
        _remove_in_the_way(target, name)
        _copy(source, target / name)
    return ""


def _remove_in_the_way(target: Path, name: Path) -> None:
    """Remove a folder of the submission that has the path of a given file, and a file with that of a given folder."""
    if (target / name).is_dir():
        shutil.rmtree(target / name)
    for folder in name.parents:
        if (target / folder).is_file():
            (target / folder).unlink()


def _regular_files(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the regular files below a folder, and their paths relative to it. Symlinks are not followed."""
    for entry in entries_below(folder, leave_out=(".git",)):
        if entry.is_file(follow_symlinks=False):
            yield Path(entry.path), Path(entry.path).relative_to(folder)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target, follow_symlinks=False)


# One part


@dataclass
class CounterReader:
    """Reads the counters of every node before and after its rank runs, and the exit codes of the ranks."""

    before: list[NodeCounts] = field(default_factory=list)
    began: float = 0.0
    seen: Outside = field(default_factory=Outside)

    def begin(self, substrate: Substrate) -> None:
        self.before = [substrate.counts(node) for node in range(len(substrate.nodes))]
        self.began = time.monotonic()

    def end(self, substrate: Substrate, processes: Sequence[Process]) -> None:
        seconds = time.monotonic() - self.began
        after = [substrate.counts(node) for node in range(len(substrate.nodes))]
        codes = [process.poll() for process in processes]
        nodes = [_node(*each) for each in zip(codes, self.before, after, strict=True)]
        self.seen = Outside(seconds=seconds, nodes=nodes)


def _node(code: int | None, before: NodeCounts, after: NodeCounts) -> Node:
    def gained(name: str) -> int | None:
        first, last = getattr(before, name), getattr(after, name)
        return None if first is None or last is None else max(0, last - first)

    names = ("sent", "received", "unreachable", "refused")
    return Node(code=code, **{name: gained(name) for name in names})


def _run_part(setting: Setting, part: Part, files: Path, folder: Path) -> PartEvidence:
    spec = _spec(setting, part, files)
    choice = _choice(setting, part, spec)
    reader = CounterReader()
    failure = unreadable = late = ""
    try:
        summary = execute(spec, choice, RunFolder(folder), setting.progress, node_observer=reader)
        if summary.status != "ok":
            unreadable = f"the run is {summary.status}: {one_line(summary.reason)}"
    except (RankFailed, ReplicasDiffer) as error:
        if isinstance(error, ConnectionLost):
            raise
        failure = one_line(str(error))
        if reader.seen.seconds > setting.assignment.limits.seconds and (late := busy_words(os.getloadavg()[0])):
            failure, unreadable = "", f"{failure}; {late}"
    records: list[list[Record]] = []
    if not (failure or late):
        try:
            records = _read_records(folder, part.nodes or 1)
        except UsageError as error:
            unreadable = unreadable or one_line(str(error))
    return PartEvidence(
        part=part,
        failure=failure,
        outside=reader.seen,
        records=records,
        unreadable=unreadable,
        trusted=setting.on != SANDBOXED,
        busy=busy_words(os.getloadavg()[0] - (part.nodes or 1), OTHER_LOAD_PER_CORE),
    )


def busy_words(load: float, per_core: float = BUSY_LOAD_PER_CORE) -> str:
    """Return a sentence if other processes used the machine, so that a part may have been slow because of them."""
    cores = len(os.sched_getaffinity(0))
    if load < per_core * cores:
        return ""
    return f"the machine was busy (load {load:.0f} on {cores} cores). Grade it again when nothing else runs"


def _read_records(folder: Path, world: int) -> list[list[Record]]:
    """Return the records of all ranks. Raises UsageError for symlinks and large files, which a script may make."""
    run = RunFolder(folder)
    run.check_no_links()
    for rank in range(world):
        with suppress(FileNotFoundError):
            if (size := run.records(rank).stat().st_size) > MAX_RECORDS_BYTES:
                raise UsageError(f"rank {rank} wrote {size} bytes of records, and at most {MAX_RECORDS_BYTES} are read")
    return [list(read(run.records(rank))) for rank in range(world)]


def _spec(setting: Setting, part: Part, files: Path) -> RunSpec:
    script = {"argv": part.argv, "folder": str(files.resolve()), "path": setting.path, "output": MAX_OUTPUT_BYTES}
    script["limits"] = setting.assignment.limits
    flags = {
        "mode": "script",
        "script": script,
        "nodes": part.nodes,
        "steps": part.steps,
        "rate": part.rate if setting.on != "process" else None,
        "experiment": "grade",
        "name": f"part-{part.name}",
    }
    return spec_from_flags(flags, ["probe=false"])


def _choice(setting: Setting, part: Part, spec: RunSpec) -> SubstrateChoice:
    """Return the substrate of a part. The first call for a part checks that this machine can run it."""
    if part.name not in setting.choices:
        chosen = replace(choose(setting.on, spec), allow_concurrent=setting.allow_concurrent)
        chosen.type.check(node_plans(spec))
        setting.choices[part.name] = replace(chosen, checked=node_plans(spec))
    return setting.choices[part.name]
