"""Watch: follow the ranks of one run by their record files and exit codes until all have ended, and say who failed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from testbed.control.cli.progress import Progress
from testbed.control.substrates.base import Process
from testbed.results.conclude import root_cause
from testbed.results.folder import RunFolder
from testbed.spec.errors import PeerLost, RankFailed, TestbedError
from testbed.spec.run import START_DEADLINE

# Tail: the JSON lines that a growing file has gained since the last look.


class Tail:
    """Reads on from where it stopped; a line without its end waits for it."""

    def __init__(self, path: Path, anew: bool = False) -> None:
        """`anew`: what is there already is of no interest; a file that takes its place is."""
        self.path = path
        self.offset = 0
        self.inode: int | None = None
        if anew and path.is_file():
            self.inode, self.offset = path.stat().st_ino, path.stat().st_size

    def read(self) -> list[dict[str, Any]]:
        """New objects; lines that are no JSON objects are someone else's."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self.inode:
                self.inode, self.offset = inode, 0
            file.seek(self.offset)
            whole = file.read()
            whole = whole[: whole.rfind(b"\n") + 1]
            self.offset += len(whole)
            return [value for value in map(_parse, whole.splitlines()) if value is not None]
        return []


def _parse(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None


POLL = 0.05  # seconds between two looks
GRACE = 5.0  # seconds that the others get to end by themselves after one rank failed
LAST_WORDS = 1.0  # seconds for one that the others gave up already
STALL = 30  # deadlines without any rank's progress: ranks themselves give up long before


@dataclass
class RankState:
    """What is known of one rank from outside."""

    process: Process
    tail: Tail
    node: str = ""  # its name, as the user calls it
    started: float | None = None  # monotonic time at which it was seen to train
    last_step: int = -1
    deadline: float = START_DEADLINE  # seconds that any one of its waits may take
    error: dict[str, Any] | None = None
    code: int | None = None
    ended: float | None = None  # monotonic time

    def look(self, rank: int, progress: Progress) -> bool:
        """Read on; True when anything happened."""
        records = self.tail.read()
        for record in records:
            if record["kind"] == "start":
                self.deadline = record["deadline"]
                self.started = time.monotonic()
            elif record["kind"] == "step":
                self.last_step = record["step"]
                progress.step(rank, record)
            elif record["kind"] == "error":
                self.error = record
        if self.code is None:
            self.code = self.process.poll()
            self.ended = None if self.code is None else time.monotonic()
        return bool(records) or self.code is not None

    @property
    def failed_rank(self) -> int | None:
        """Whom this rank says it lost."""
        return self.error.get("failed_rank") if self.error and self.code == PeerLost.exit_code else None


class Companion(Protocol):
    """Somebody who looks at the ranks as often as the watch does: what injects faults."""

    def look(self, ranks: Sequence[RankState]) -> None: ...


def follow(
    processes: list[Process],
    folder: RunFolder,
    progress: Progress,
    companion: Companion | None = None,
    tails: Sequence[Tail] | None = None,
    nodes: Sequence[str] = (),
) -> None:
    """Return when all ranks ended well; raise for the failed_rank one otherwise. `tails`: of records read before."""
    tails = tails or [Tail(folder.records(k)) for k in range(len(processes))]
    names = nodes or [f"node{k}" for k in range(len(processes))]
    ranks = [RankState(*each) for each in zip(processes, tails, names, strict=True)]
    try:
        _follow(ranks, folder, progress, companion)
    finally:
        if companion:
            companion.look(ranks)  # the end, too


def _follow(ranks: list[RankState], folder: RunFolder, progress: Progress, companion: Companion | None) -> None:
    moved = time.monotonic()
    while any(rank.code is None for rank in ranks):
        if any([rank.look(k, progress) for k, rank in enumerate(ranks) if rank.code is None]):
            moved = time.monotonic()
        if companion:
            companion.look(ranks)
        if any(rank.code not in (None, 0) for rank in ranks):
            _let_others_end(ranks, progress)
            raise _root_cause(ranks, folder)
        stalled = STALL * max(rank.deadline for rank in ranks)
        if time.monotonic() - moved > stalled:
            slowest = min(range(len(ranks)), key=lambda k: ranks[k].last_step)
            waited = f"no rank moved for {stalled:g} s"
            raise RankFailed(
                f"rank {slowest} ({ranks[slowest].node}) is behind, and {waited}. See {folder.log(slowest)}"
            )
        time.sleep(POLL)


def _let_others_end(ranks: list[RankState], progress: Progress) -> None:
    """They say what they saw of the failure; whoever they name as frozen is not waited for any longer than that."""
    end = time.monotonic() + GRACE
    while time.monotonic() < end:
        for k, rank in enumerate(ranks):
            rank.look(k, progress)
        running = {k for k, rank in enumerate(ranks) if rank.code is None}
        if not running:
            return
        if running <= {rank.failed_rank for rank in ranks}:
            end = min(end, max(rank.ended or 0 for rank in ranks) + LAST_WORDS)
        time.sleep(POLL)


def _root_cause(ranks: list[RankState], folder: RunFolder) -> TestbedError:
    return root_cause(
        [rank.code for rank in ranks],
        [rank.error for rank in ranks],
        last_steps=[rank.last_step for rank in ranks],
        nodes=[rank.node for rank in ranks],
        folder=folder,
    )
