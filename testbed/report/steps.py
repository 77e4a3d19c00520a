"""Steps: one rank's steps as columns, and the one arithmetic that splits a step.

step    = compute + exposed + rest           a check: exposed is what the rank summed up, the others use its intervals
busy    = exposed + hidden                   seconds in which at least one buffer was on its way
compute = data + forward + backward + update, less the stalls that lie inside the first three
rest    = the loop's own book-keeping, and work inside `sync` that is neither update nor a stall
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testbed.spec.errors import SpecError
from testbed.spec.records import CONTINUED

Column = NDArray[np.float64]
Interval = tuple[float, float]  # offset from the step's begin, seconds
COMPUTING = ("data", "forward", "backward")
WAY_BACK = (" gather", " down")  # how the name of a buffer ends whose way there has a name of its own
NUMBERS = ("step", "epoch", "at", "data", "forward", "backward", "sync", "update", "total", "blocked", "busy", "hidden")
OPTIONAL = ("cpu", "attempt")  # unknown to older runs


@dataclass(frozen=True)
class Comm:
    """One buffer's way through the network, as one rank saw it."""

    name: str
    offset: float
    seconds: float
    size: int  # bytes of the buffer on this rank

    @property
    def continued(self) -> bool:
        """The rest of a flight that the end of the step before cut in two."""
        return self.name.endswith(CONTINUED)

    @property
    def buffer(self) -> str:
        """The name without the mark of a rest."""
        return self.name.removesuffix(CONTINUED)

    @property
    def outward(self) -> bool:
        """True once for every buffer of a synchronisation: neither a rest nor the way back."""
        return not self.name.endswith((CONTINUED, *WAY_BACK))


@dataclass(frozen=True)
class Steps:
    """Columns of equal length, one entry per step."""

    step: Column
    epoch: Column
    at: Column
    data: Column
    forward: Column
    backward: Column
    sync: Column
    update: Column
    total: Column
    blocked: Column
    busy: Column
    hidden: Column
    loss: Column
    images: Column
    sent: Column  # bytes since the start of the attempt or before, nan where nothing counts them
    received: Column
    cpu: Column  # seconds of the loop's own thread, nan where nobody recorded them
    attempt: Column  # the earlier one that did the step, nan where it was the last
    phases: list[list[tuple[str, float, float]]]
    comm: list[list[Comm]]
    stalls: list[list[Interval]]

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]], where: str) -> Steps:
        """From the lines of rankN.jsonl; times that no clock can show are refused."""
        columns = {key: _column(records, key) for key in (*NUMBERS, "loss", "images", "sent", "received", *OPTIONAL)}
        for key in NUMBERS:
            if not (np.isfinite(columns[key]).all() and (columns[key] >= 0).all()):
                raise SpecError(f"{where}: {key} has a value that is negative or no number. The file is damaged")
        if len(records) > 1 and not (np.diff(columns["step"]) == 1).all():
            raise SpecError(f"{where}: steps are missing or out of order. The file is damaged")
        return cls(
            **columns,
            phases=[[(str(n), float(o), float(s)) for n, o, s in r.get("phases") or []] for r in records],
            comm=[[Comm(str(n), float(o), float(s), int(b)) for n, o, s, b in r.get("comm") or []] for r in records],
            stalls=[[(float(o), float(s)) for o, s in r.get("stalls") or []] for r in records],
        )

    @property
    def last(self) -> int:
        """The number of the last step, -1 without any."""
        return int(self.step[-1]) if len(self.step) else -1

    def between(self, first: int, last: int) -> Steps:
        """Only the steps first..last, both included."""
        chosen = [k for k, number in enumerate(self.step) if first <= number <= last]
        cut = slice(chosen[0], chosen[-1] + 1) if chosen else slice(0, 0)
        return replace(self, **{field.name: getattr(self, field.name)[cut] for field in fields(self)})

    @property
    def blocked_in_sync(self) -> Column:
        """Seconds of the sync phase in which the loop was blocked."""
        return self._blocked_in(("sync",))

    def _blocked_in(self, names: Sequence[str]) -> Column:
        pairs = zip(self.phases, self.stalls, strict=True)
        return np.array([_blocked_in(phases, stalls, names) for phases, stalls in pairs], dtype=np.float64)

    @property
    def compute(self) -> Column:
        return self.data + self.forward + self.backward + self.update - self._blocked_in(COMPUTING)

    @property
    def rest(self) -> Column:
        between = self.total - (self.data + self.forward + self.backward + self.sync)
        return between + (self.sync - self.update - self.blocked_in_sync)


def _blocked_in(phases: list[tuple[str, float, float]], stalls: list[Interval], names: Sequence[str]) -> float:
    spans = [(begin, begin + seconds) for name, begin, seconds in phases if name in names]
    return sum(
        max(0.0, min(end, offset + seconds) - max(begin, offset)) for begin, end in spans for offset, seconds in stalls
    )


def _column(records: Sequence[dict[str, Any]], key: str) -> Column:
    """One key of every record; null becomes nan, and so does one of OPTIONAL that is not there."""
    values = (record.get(key) if key in OPTIONAL else record[key] for record in records)
    return np.array([_number(value) for value in values], dtype=np.float64)


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
