"""Watch: follow the ranks of one run by their record files and exit codes until all have ended, and say who failed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from testbed.control.cli.progress import Progress
from testbed.control.substrates.base import Process
from testbed.results.folder import RunFolder
from testbed.spec.errors import NetworkInvalid, PeerLost, RankFailed, ReplicasDiffer, TestbedError, UsageError
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
_NODE = re.compile(r"rank (\d{1,4}) \(node\1\)", re.ASCII)
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
    def guilty(self) -> int | None:
        """Whom this rank says it lost."""
        return self.error.get("guilty") if self.error and self.code == PeerLost.exit_code else None


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
    """Return when all ranks ended well; raise for the guilty one otherwise. `tails`: of records read before."""
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
            raise _blame(ranks, folder)
        stalled = STALL * max(rank.deadline for rank in ranks)
        if time.monotonic() - moved > stalled:
            slowest = min(range(len(ranks)), key=lambda k: ranks[k].last_step)
            waited = f"no rank moved for {stalled:g} s"
            raise RankFailed(f"{_who(slowest, ranks)} is behind, and {waited}. See {folder.log(slowest)}")
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
        if running <= {rank.guilty for rank in ranks}:
            end = min(end, max(rank.ended or 0 for rank in ranks) + LAST_WORDS)
        time.sleep(POLL)


def _blame(ranks: list[RankState], folder: RunFolder) -> TestbedError:
    """The first cause: a rank that ended for a reason of its own; else the one that most of the others lost."""
    named = Counter(rank.guilty for rank in ranks if rank.guilty is not None)
    own = [k for k, rank in enumerate(ranks) if rank.code not in (None, 0, PeerLost.exit_code)]
    if own:
        return _of_its_own(max(own, key=lambda k: (named[k], -k)), ranks, folder)
    silent = [k for k, rank in enumerate(ranks) if rank.code is None]
    if [rank.guilty for rank in ranks] == [1, 0]:  # a cable has two ends, and no third rank saw which one it was
        since, logs = f"since step {min(rank.last_step for rank in ranks) + 1}", f"{folder.log(0)} and {folder.log(1)}"
        return RankFailed(f"{_who(0, ranks)} and {_who(1, ranks)} lost each other {since}. See {logs}")
    if named:
        most = max(named.values())
        guilty = min((k for k in named if named[k] == most), key=lambda k: (k not in silent, ranks[k].last_step, k))
        return _lost(guilty, ranks, folder)
    if silent:
        return _lost(min(silent, key=lambda k: ranks[k].last_step), ranks, folder)
    return _of_its_own(next(k for k, rank in enumerate(ranks) if rank.code), ranks, folder)


def _lost(guilty: int, ranks: list[RankState], folder: RunFolder) -> RankFailed:
    """A rank that did not end, or ended only because it could not reach the others."""
    state = ranks[guilty]
    how = "is silent" if state.code is None else "was cut off"
    since = f"since step {state.last_step + 1}"
    seen = next((f" ({rank.error['message']})" for rank in ranks if rank.error and rank.guilty == guilty), "")
    seen = _by_name(seen, ranks)
    lost = _names(k for k, rank in enumerate(ranks) if k != guilty and rank.code == PeerLost.exit_code)
    return RankFailed(f"{_who(guilty, ranks)} {how} {since}; {lost} lost it{seen}. See {folder.log(guilty)}")


def _of_its_own(guilty: int, ranks: list[RankState], folder: RunFolder) -> TestbedError:
    state = ranks[guilty]
    known: list[type[TestbedError]] = [UsageError, ReplicasDiffer, NetworkInvalid]
    kind = next((e for e in known if e.exit_code == state.code), RankFailed)
    if kind is UsageError and state.error:
        return UsageError(state.error["message"])
    words = state.error or next((rank.error for rank in ranks if rank.guilty == guilty and rank.error), None)
    said = f": {words['message'].rstrip('.')}" if words and (state.error or (state.code or 0) > 0) else ""
    said, who = _by_name(said, ranks), _who(guilty, ranks)
    when = f"after step {state.last_step + 1}" if state.last_step >= 0 else "before its first step"
    others = _others(guilty, ranks)
    return kind(f"{who} {_how_it_ended(state.code)} {when}{said}.{others} See {folder.log(guilty)}")


def _others(guilty: int, ranks: list[RankState]) -> str:
    """Who lost it, and who ended for a reason of its own."""
    rest = [(k, rank) for k, rank in enumerate(ranks) if k != guilty and rank.code not in (None, 0)]
    lost = [k for k, rank in rest if rank.code == PeerLost.exit_code]
    alike = [f"rank {k} {_how_it_ended(rank.code)}" for k, rank in rest if rank.code != PeerLost.exit_code]
    return (f" Then {_names(lost)} lost it." if lost else "") + (f" Also {', '.join(alike)}." if alike else "")


def _who(rank: int, ranks: list[RankState]) -> str:
    return f"rank {rank} ({ranks[rank].node})"


def _by_name(message: str, ranks: list[RankState]) -> str:
    """A rank's own words: it knows the others by number, the user by what the inventory calls them."""
    return _NODE.sub(lambda found: _who(int(found[1]), ranks) if int(found[1]) < len(ranks) else found[0], message)


def _names(ranks: Any) -> str:
    return ", ".join(f"rank {k}" for k in ranks) or "the others"


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"
