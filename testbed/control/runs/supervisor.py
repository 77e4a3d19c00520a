"""Supervise the ranks of one run: read their record files and exit codes until all have ended.

The supervisor has two sources per rank: its records (rankN.jsonl) and its exit code. When one rank fails, the others
get a few seconds to record the error that they saw; then the root cause is raised as an exception.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Protocol

from testbed.control.runs.progress import Progress
from testbed.control.substrates.base import Process
from testbed.results.conclude import reported_rank, root_cause
from testbed.results.folder import RunFolder, open_regular
from testbed.spec.errors import PeerLost, RankFailed, SpecError, one_line
from testbed.spec.run import START_DEADLINE_S


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How often the supervisor polls and how long it waits."""

    poll_s: float = 0.05
    grace_s: float = 5.0  # for the other ranks to end by themselves after one failed
    exit_grace_s: float = 1.0  # for a rank to end that the others have reported as lost
    start_grace_s: float = 1.0  # instead of grace_s if the failed rank had not joined: the others cannot detect its end
    stall_deadlines: float = 30.0  # a run fails after so many deadlines without progress; a rank fails after one


CHUNK_BYTES = 64 << 20  # more than the longest record, and than a rank writes between two polls
# What the supervisor uses of a record. A script that may write to its records can write anything there.
USED: dict[str, dict[str, type | UnionType]] = {
    "start": {"deadline": int | float},
    "step": {"step": int},
    "made": {"steps": int},
    "error": {"message": str, "failed_rank": int | None, "at": int | float | None},
    "where": {},
}


class Tail:
    """Reads the JSON lines that a growing file has gained since the last read."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        """`from_end`: skip what the file contains now. A new file under the same name is read from its beginning."""
        self.path = path
        self.offset = 0
        self.inode: int | None = None
        if from_end and path.is_file():
            self.inode, self.offset = path.stat().st_ino, path.stat().st_size

    def read(self) -> list[dict[str, Any]]:
        """Return the new JSON objects. Other lines are skipped; an incomplete last line is left for the next read.

        Raises SpecError if the file is a link or a pipe. At most CHUNK_BYTES are read at once.
        """
        with contextlib.suppress(FileNotFoundError), os.fdopen(open_regular(self.path), "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self.inode:
                self.inode, self.offset = inode, 0
            file.seek(self.offset)
            chunk = file.read(CHUNK_BYTES)
            complete = chunk[: chunk.rfind(b"\n") + 1]
            self.offset += len(complete) if complete or len(chunk) < CHUNK_BYTES else len(chunk)  # no record is so long
            return [value for value in map(_parse, complete.splitlines()) if value is not None]
        return []


def _parse(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None


def _is_usable(record: dict[str, Any]) -> bool:
    """True if the record has what the supervisor uses of its kind."""
    used = USED.get(str(record.get("kind")))
    return used is None or all(isinstance(record.get(name), wanted) for name, wanted in used.items())


@dataclass(frozen=True, kw_only=True)
class ScriptRules:
    """What differs for a user's own script, whose ranks have no watchdog."""

    deadline_s: float  # without a step, after which it is ended
    start_s: float  # the same before its first step: imports, data
    one_clock: bool  # True if the times in the ranks' records can be compared


@dataclass
class RankState:
    """The state of one rank, from its records and its exit code."""

    process: Process
    tail: Tail
    node: str = ""  # the name of its node
    started: float | None = None  # monotonic time at which its start record was read
    last_step: int = -1
    deadline: float = START_DEADLINE_S  # seconds that any one of its waits may take
    where: dict[str, Any] | None = None  # of a script that makes no step: the line it is in
    error: dict[str, Any] | None = None
    code: int | None = None
    ended: float | None = None  # monotonic time

    @property
    def ended_by_itself(self) -> bool:
        """True if it failed, and not because it lost another rank."""
        return self.code not in (None, 0, PeerLost.exit_code)

    def ended_at(self, script: ScriptRules) -> float:
        """When the script ended on this rank; infinite if it runs."""
        recorded = (self.error or {}).get("at") if script.one_clock else None
        return recorded if recorded is not None else float("inf") if self.ended is None else self.ended

    def poll(self, rank: int, progress: Progress) -> bool:
        """Read new records and the exit code. Return True if the rank has got further or has ended.

        Raises RankFailed if its records cannot be read.
        """
        try:
            records = list(filter(_is_usable, self.tail.read()))
        except SpecError as error:
            raise RankFailed(f"rank {rank} ({self.node}): its records cannot be read: {error}") from None
        for record in records:
            kind = record.get("kind")
            if kind == "start":
                self.deadline = record["deadline"]
                self.started = time.monotonic()
            elif kind == "step":
                self.last_step, self.where = record["step"], None
                progress.step(rank, record)
            elif kind == "made":
                self.last_step, self.where = record["steps"] - 1, None
            elif kind == "error":
                self.error = record
            elif kind == "where":
                self.where = record
        if self.code is None:
            self.code = self.process.poll()
            self.ended = None if self.code is None else time.monotonic()
        return any(record.get("kind") != "where" for record in records) or self.code is not None


class RankObserver(Protocol):
    """Receives the state of all ranks at every poll; the fault injector is one."""

    def poll(self, ranks: Sequence[RankState]) -> None: ...


def supervise(
    processes: list[Process],
    folder: RunFolder,
    progress: Progress,
    observer: RankObserver | None = None,
    tails: Sequence[Tail] | None = None,
    nodes: Sequence[str] = (),
    timing: Timing = Timing(),  # noqa: B008  (frozen)
    script: ScriptRules | None = None,
) -> None:
    """Return when all ranks ended with code 0; else raise the root cause.

    `tails`: readers of the record files that skip what was in them before the ranks started. `nodes`: node names.
    """
    tails = tails or [Tail(folder.records(k)) for k in range(len(processes))]
    names = nodes or [f"node{k}" for k in range(len(processes))]
    ranks = [RankState(*each) for each in zip(processes, tails, names, strict=True)]
    try:
        _poll_until_end(ranks, folder, progress, observer, timing, script)
    finally:
        if observer:
            observer.poll(ranks)  # once more, with the final exit codes


def _poll_until_end(
    ranks: list[RankState],
    folder: RunFolder,
    progress: Progress,
    observer: RankObserver | None,
    timing: Timing,
    script: ScriptRules | None,
) -> None:
    last_change = time.monotonic()
    while True:
        if any([rank.poll(k, progress) for k, rank in enumerate(ranks) if rank.code is None]):
            last_change = time.monotonic()
        if observer:
            observer.poll(ranks)
        if any(rank.code not in (None, 0) for rank in ranks):
            _wait_for_others(ranks, progress, timing)
            raise root_cause(
                [rank.code for rank in ranks],
                [rank.error for rank in ranks],
                last_steps=[rank.last_step for rank in ranks],
                nodes=[rank.node for rank in ranks],
                folder=folder,
                ended_at=[rank.ended_at(script) for rank in ranks] if script else (),
            )
        if all(rank.code == 0 for rank in ranks):
            return
        stall_s = timing.stall_deadlines * max(rank.deadline for rank in ranks)
        if script:
            stall_s = script.deadline_s if any(rank.last_step >= 0 for rank in ranks) else script.start_s
        if time.monotonic() - last_change > stall_s:
            raise _stalled(ranks, folder, stall_s, script)
        time.sleep(timing.poll_s)


def _stalled(ranks: list[RankState], folder: RunFolder, stall_s: float, script: ScriptRules | None) -> RankFailed:
    """The error of a run in which no rank makes progress: it names the rank that is behind."""
    running = [k for k, rank in enumerate(ranks) if rank.code is None]
    slowest = min(running, key=lambda k: (ranks[k].last_step, (ranks[k].where or {}).get("waits", True)))
    name = f"rank {slowest} ({ranks[slowest].node})"
    if script is None:
        return RankFailed(f"{name} is behind, and no rank made progress for {stall_s:g} s. See {folder.log(slowest)}")
    done = ranks[slowest].last_step + 1
    steps = f"{done} step{'s' * (done != 1)}"
    behind = f"{name} is behind, after {steps}" if done else f"{name} has made no step"
    site = (ranks[slowest].where or {}).get("site")
    behind += f", at {one_line(str(site))}" if site else ""
    way_out = "If the script needs longer, give --deadline SECONDS"
    return RankFailed(f"{behind}: no rank made a step for {stall_s:g} s. {way_out}. See {folder.log(slowest)}")


def _wait_for_others(ranks: list[RankState], progress: Progress, timing: Timing) -> None:
    """Wait until the other ranks have recorded the failure and ended; less long for a rank that they report as lost.

    A rank that ended before its first record may not have connected to the others, which then wait for it.
    """
    joined = all(rank.started is not None for rank in ranks if rank.ended_by_itself)
    end = time.monotonic() + (timing.grace_s if joined else timing.start_grace_s)
    while time.monotonic() < end:
        for k, rank in enumerate(ranks):
            rank.poll(k, progress)
        running = {k for k, rank in enumerate(ranks) if rank.code is None}
        if not running:
            return
        if running <= {reported_rank(rank.code, rank.error) for rank in ranks}:
            end = min(end, max(rank.ended or 0 for rank in ranks) + timing.exit_grace_s)
        time.sleep(timing.poll_s)
