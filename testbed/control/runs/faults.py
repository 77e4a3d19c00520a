"""Inject the faults of a spec when they are due, revert them, and write the history of the run.

faults.jsonl has one line per event; times are on the monotonic clock of this machine:
injected  a fault, with the number of steps that its rank had done
over      a fault with a duration was reverted
saw       the error that a rank recorded when it ended because of another rank
ended     the exit code of a rank
again     all ranks start once more; ranks that had not ended by then were stopped
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
from testbed.results.folder import open_append
from testbed.spec.errors import CommandFailed, SpecError
from testbed.spec.fault import FAULT_KINDS, Fault


class Injector:
    """A RankObserver that injects faults. Each fault is injected once, even if the ranks are restarted.

    Faults of one node may overlap. A paused node takes no command: its other faults wait until it is resumed. Of
    several faults of one kind the last one holds, and the node is as planned when the last of them is over.
    """

    def __init__(self, faults: Sequence[Fault], substrate: FaultTarget, history: Path) -> None:
        self._waiting = list(faults)
        self._keeps_history = bool(faults)
        self._active: list[tuple[float, Fault]] = []  # faults to revert, and when
        self._substrate = substrate
        self._history = history
        self._processes: list[Process] = []
        self._ended: set[int] = set()  # ranks whose end is in the history

    @property
    def waiting(self) -> Sequence[Fault]:
        """Faults that are not due yet."""
        return tuple(self._waiting)

    @property
    def active(self) -> bool:
        """True if a fault that lasts is not reverted yet."""
        return bool(self._active)

    def attach(self, processes: Sequence[Process]) -> None:
        """Use the ranks of a new attempt."""
        self._processes = list(processes)
        self._ended = set()

    def poll(self, ranks: Sequence[RankState]) -> None:
        """Inject and revert what is due; write the end of each rank to the history once."""
        now = time.monotonic()
        for entry in [entry for entry in self._active if now >= entry[0]]:
            self._active.remove(entry)
            self._revert(entry[1])
        for fault in [fault for fault in self._waiting if _is_due(fault, ranks, now)]:
            if fault.kind == "pause" or not self._in_force("pause", fault.rank):
                self._inject(fault, ranks)
        for rank, state in enumerate(ranks):
            if state.code is not None and rank not in self._ended:
                self._ended.add(rank)
                self._write_end(rank, state)

    def revert_all(self) -> None:
        """Revert every active fault, so that the next attempt starts on intact nodes."""
        while self._active:
            self._revert(self._active.pop()[1])
        self._write("again")

    def _inject(self, fault: Fault, ranks: Sequence[RankState]) -> None:
        assert fault.rank is not None
        begun = time.monotonic()
        if fault.kind != "pause" or not self._in_force("pause", fault.rank):
            try:
                self._actions(fault.rank)[fault.kind](fault)
            except CommandFailed:
                if self._processes[fault.rank].poll() is None:
                    raise
                return  # the rank has ended meanwhile: the fault stays due for the next attempt
        self._waiting.remove(fault)
        if FAULT_KINDS[fault.kind].lasting or FAULT_KINDS[fault.kind].stays:
            end = float("inf") if fault.lasts is None else time.monotonic() + fault.lasts
            self._active.append((end, fault))
        self._write("injected", fault=str(fault), rank=fault.rank, step=ranks[fault.rank].last_step + 1, begun=begun)

    def _actions(self, rank: int) -> dict[str, Callable[[Fault], None]]:
        """Return for each kind of fault the function that injects it on this rank."""
        substrate, process = self._substrate, self._processes[rank]

        def exhaust_memory(fault: Fault) -> None:
            substrate.limit_memory(rank)
            process.signal(signal.SIGUSR1)  # the rank then allocates memory until it reaches the limit

        return {
            "kill": lambda fault: substrate.kill(rank),
            "exit": lambda fault: process.signal(signal.SIGTERM),
            "pause": lambda fault: substrate.pause(rank),
            "cut": lambda fault: substrate.cut(rank),
            "rate": lambda fault: substrate.set_rate(rank, fault.rate),
            "slow": lambda fault: substrate.set_cpus(rank, fault.cpus),
            "oom": exhaust_memory,
            "disk-full": lambda fault: process.forbid_writing(),
        }

    def _in_force(self, kind: str, rank: int | None) -> list[Fault]:
        """The active faults of this kind and node, in the order in which they were injected."""
        return [fault for _, fault in self._active if fault.kind == kind and fault.rank == rank]

    def _revert(self, fault: Fault) -> None:
        """Restore the node, or what the last of its other faults of this kind requests."""
        assert fault.rank is not None
        others = self._in_force(fault.kind, fault.rank)
        rate, cpus = (others[-1].rate, others[-1].cpus) if others else (None, None)
        actions: dict[str, Callable[[int], None]] = {
            "pause": self._substrate.resume,
            "cut": self._substrate.reconnect,
            "rate": lambda node: self._substrate.set_rate(node, rate),
            "slow": lambda node: self._substrate.set_cpus(node, cpus),
            "oom": self._substrate.unlimit_memory,
        }
        if not others or fault.kind in ("rate", "slow"):
            actions[fault.kind](fault.rank)
        self._write("over", fault=str(fault), rank=fault.rank)

    def _write_end(self, rank: int, state: RankState) -> None:
        if state.error and state.code:
            recorded = {key: state.error.get(key) for key in ("failed_rank", "message")}
            own_time = state.error.get("at") if self._substrate.one_clock else None  # clocks of other machines differ
            self._write("saw", at=own_time or state.ended, rank=rank, code=state.code, **recorded)
        self._write("ended", at=state.ended, rank=rank, code=state.code)

    def _write(self, event: str, **values: Any) -> None:
        if not self._keeps_history:
            return
        values.setdefault("at", time.monotonic())
        # On a full disk, or where a script put a link, the history is lost; the cause of the run's end is still raised.
        with suppress(OSError, SpecError), open_append(self._history) as out:
            out.write((json.dumps({"event": event, **values}) + "\n").encode())


def _is_due(fault: Fault, ranks: Sequence[RankState], now: float) -> bool:
    """True if the fault's rank has trained for so many steps or seconds. A rank that has ended gets no fault."""
    assert fault.rank is not None
    state = ranks[fault.rank]
    if state.code is not None or state.started is None:
        return False
    if fault.after is not None:
        return now >= state.started + fault.after
    return fault.step is not None and state.last_step + 1 >= fault.step
