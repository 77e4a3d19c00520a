"""Watch: follow the ranks of one run by their record files and exit codes until all have ended."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any

from testbed.control.progress import Progress
from testbed.control.substrates.base import Process
from testbed.control.tail import Tail
from testbed.spec.errors import NetworkInvalid, RankFailed, ReplicasDiffer, TestbedError, UsageError
from testbed.spec.folder import RunFolder
from testbed.spec.run import START_DEADLINE

POLL = 0.1  # seconds between two looks
GRACE = 5.0  # seconds that the others get to end by themselves after one rank failed
STALL = 10  # deadlines without any rank's progress: every wait inside a rank ends after one


@dataclass
class RankState:
    """What is known of one rank from outside."""

    process: Process
    tail: Tail
    last_step: int = -1
    deadline: float = START_DEADLINE  # seconds that any one of its waits may take
    error: dict[str, Any] | None = None
    code: int | None = None

    def look(self, rank: int, progress: Progress) -> bool:
        """Read on; True when anything happened."""
        records = self.tail.read()
        for record in records:
            if record["kind"] == "start":
                self.deadline = record["deadline"]
            elif record["kind"] == "step":
                self.last_step = record["step"]
                progress.step(rank, record)
            elif record["kind"] == "error":
                self.error = record
        if self.code is None:
            self.code = self.process.poll()
        return bool(records) or self.code is not None


def follow(processes: list[Process], folder: RunFolder, progress: Progress) -> None:
    """Return when all ranks ended well; raise for the guilty one otherwise."""
    ranks = [RankState(process, Tail(folder.records(k))) for k, process in enumerate(processes)]
    moved = time.monotonic()
    while any(rank.code is None for rank in ranks):
        if any([rank.look(k, progress) for k, rank in enumerate(ranks) if rank.code is None]):
            moved = time.monotonic()
        if any(rank.code not in (None, 0) for rank in ranks):
            _let_others_end(ranks, progress)
            raise _blame(ranks, folder)
        stalled = STALL * max(rank.deadline for rank in ranks)
        if time.monotonic() - moved > stalled:
            slowest = min(range(len(ranks)), key=lambda k: ranks[k].last_step)
            waited = f"no rank moved for {stalled:g} s"
            raise RankFailed(f"rank {slowest} (node{slowest}) is behind, and {waited}. See {folder.log(slowest)}")
        time.sleep(POLL)


def _let_others_end(ranks: list[RankState], progress: Progress) -> None:
    """Their logs say what they saw of the failure; those that still wait are stopped with the substrate."""
    end = time.monotonic() + GRACE
    while time.monotonic() < end and any(rank.code is None for rank in ranks):
        for k, rank in enumerate(ranks):
            rank.look(k, progress)
        time.sleep(POLL)
    for k, rank in enumerate(ranks):
        rank.look(k, progress)


def _blame(ranks: list[RankState], folder: RunFolder) -> TestbedError:
    """The first cause: a rank that ended for another reason than losing a peer, if there is one."""
    failed = [k for k, rank in enumerate(ranks) if rank.code not in (None, 0)]
    silent = [k for k, rank in enumerate(ranks) if rank.code is None]
    if silent and all(ranks[k].code == RankFailed.exit_code for k in failed):
        frozen = min(silent, key=lambda k: ranks[k].last_step)
        since = f"since step {ranks[frozen].last_step + 1}"
        lost = ", ".join(f"rank {k}" for k in failed)
        return RankFailed(f"rank {frozen} (node{frozen}) is silent {since}; {lost} lost it. See {folder.log(frozen)}")
    guilty = min(failed, key=lambda k: (ranks[k].code == RankFailed.exit_code, k))
    state = ranks[guilty]
    known: list[type[TestbedError]] = [UsageError, ReplicasDiffer, NetworkInvalid]
    kind = next((e for e in known if e.exit_code == state.code), RankFailed)
    if kind is UsageError and state.error:
        return UsageError(state.error["message"])
    said = f": {state.error['message'].rstrip('.')}" if state.error else ""
    others = [k for k in failed if k != guilty]
    also = f" Then {', '.join(f'rank {k}' for k in others)} lost it." if others else ""
    who = f"rank {guilty} (node{guilty})"
    when = f"after step {state.last_step + 1}" if state.last_step >= 0 else "before its first step"
    return kind(f"{who} {_how_it_ended(state.code)} {when}{said}.{also} See {folder.log(guilty)}")


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"
