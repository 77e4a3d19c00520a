"""Faults on purpose: inject what the spec asks when its moment comes, end it again, and keep the history.

faults.jsonl has one line per event, times on the monotonic clock of this machine:
injected  a fault, with the step that its rank had done      over   a fault that lasts only a while has ended
saw       what a rank said when it ended because of others   ended  a rank's exit code
again     all ranks start once more; who has not ended by then was stopped
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from testbed.control.runs.supervisor import RankState
from testbed.control.substrates.base import FaultTarget, Process
from testbed.spec.fault import LASTING, Fault


class Injector:
    """Looks at the ranks as often as the watch does. Each fault happens once, whatever is retried."""

    def __init__(self, faults: Sequence[Fault], substrate: FaultTarget, history: Path) -> None:
        self._waiting = list(faults)
        self._keeps_history = bool(faults)
        self._lasting: list[tuple[float, Fault]] = []  # when to end what
        self._substrate = substrate
        self._history = history
        self._processes: list[Process] = []
        self._told: set[int] = set()

    @property
    def waiting(self) -> Sequence[Fault]:
        """Those whose moment has not come."""
        return tuple(self._waiting)

    def attach(self, processes: Sequence[Process]) -> None:
        """The ranks of one attempt."""
        self._processes = list(processes)
        self._told = set()

    def look(self, ranks: Sequence[RankState]) -> None:
        """Do what is due; write down who ended how."""
        now = time.monotonic()
        for fault in [fault for fault in self._waiting if _due(fault, ranks, now)]:
            self._waiting.remove(fault)
            self._inject(fault, ranks)
        for entry in [entry for entry in self._lasting if now >= entry[0]]:
            self._lasting.remove(entry)
            self._undo(entry[1])
        for rank, state in enumerate(ranks):
            if state.code is not None and rank not in self._told:
                self._told.add(rank)
                self._write_end(rank, state)

    def mend(self) -> None:
        """End everything that still lasts: the next attempt starts on whole nodes."""
        for _, fault in self._lasting:
            self._undo(fault)
        self._lasting = []
        self._write("again")

    def _inject(self, fault: Fault, ranks: Sequence[RankState]) -> None:
        assert fault.rank is not None
        begun = time.monotonic()
        self._actions()[fault.kind](fault)
        if fault.kind in (*LASTING, "oom"):  # the limit outlives the rank that met it
            end = float("inf") if fault.lasts is None else time.monotonic() + fault.lasts
            self._lasting.append((end, fault))
        self._write("injected", fault=str(fault), rank=fault.rank, step=ranks[fault.rank].last_step + 1, begun=begun)

    def _actions(self) -> dict[str, Callable[[Fault], None]]:
        place = self._substrate

        def node(fault: Fault) -> int:
            assert fault.rank is not None
            return fault.rank

        return {
            "kill": lambda fault: place.kill(node(fault)),
            "exit": lambda fault: self._processes[node(fault)].signal(signal.SIGTERM),
            "pause": lambda fault: place.pause(node(fault)),
            "cut": lambda fault: place.cut(node(fault)),
            "rate": lambda fault: place.set_rate(node(fault), fault.rate),
            "slow": lambda fault: place.set_cpus(node(fault), fault.cpus),
            "oom": self._starve,
            "disk-full": lambda fault: self._processes[node(fault)].forbid_writing(),
        }

    def _starve(self, fault: Fault) -> None:
        """A memory limit, and the word to run into it: a rank that trains steadily would never reach it."""
        assert fault.rank is not None
        self._substrate.limit_memory(fault.rank)
        self._processes[fault.rank].signal(signal.SIGUSR1)

    def _undo(self, fault: Fault) -> None:
        assert fault.rank is not None
        undo: dict[str, Callable[[int], None]] = {
            "pause": self._substrate.resume,
            "cut": self._substrate.join,
            "rate": lambda node: self._substrate.set_rate(node, None),
            "slow": lambda node: self._substrate.set_cpus(node, None),
            "oom": self._substrate.unlimit_memory,
        }
        undo[fault.kind](fault.rank)
        self._write("over", fault=str(fault), rank=fault.rank)

    def _write_end(self, rank: int, state: RankState) -> None:
        if state.error and state.code:
            told = {key: state.error.get(key) for key in ("failed_rank", "message")}
            own = state.error.get("at") if self._substrate.one_clock else None
            self._write("saw", at=own or state.ended, rank=rank, code=state.code, **told)
        self._write("ended", at=state.ended, rank=rank, code=state.code)

    def _write(self, event: str, **facts: Any) -> None:
        if not self._keeps_history:
            return
        facts.setdefault("at", time.monotonic())
        # A disk that is full must not hide how the run ended: this is called last, too.
        with suppress(OSError), self._history.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"event": event, **facts}) + "\n")


def _due(fault: Fault, ranks: Sequence[RankState], now: float) -> bool:
    assert fault.rank is not None
    state = ranks[fault.rank]
    if state.code is not None or state.started is None:
        return False
    if fault.after is not None:
        return now >= state.started + fault.after
    return fault.step is not None and state.last_step + 1 >= fault.step
