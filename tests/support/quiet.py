"""How busy this machine is, and a wait until other work on it is little."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

SAMPLE_S = 0.5
QUIET_SHARE = 0.25  # of all processors' time that other work may take beside a test that measures
DEADLINE_S = 20.0  # of one wait
BUDGET_S = 120.0  # of all waits of a process: the machine may stay busy


def busy_shares(sample_s: float) -> Iterator[float]:
    """The share of all processors that was in use or stolen by the host, in one sample after the other."""
    before = _ticks()
    while True:
        time.sleep(sample_s)
        now = _ticks()
        idle, every = (b - a for a, b in zip(before, now, strict=True))
        yield 1 - idle / every if every else 0.0
        before = now


def _ticks() -> tuple[int, int]:
    """Idle ticks and all ticks of all processors, from /proc/stat; waiting for a disk is idle."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


class QuietMachine:
    """Waits before tests that measure. The first sample of each wait is not charged to the budget."""

    def __init__(self, shares: Callable[[float], Iterator[float]] = busy_shares, budget_s: float = BUDGET_S) -> None:
        self._shares, self._left_s = shares, budget_s

    def wait(self) -> float | None:
        """Return the share in use in the last sample: less than QUIET_SHARE, or the deadline or the budget is reached.

        None without a sample if the budget was spent before.
        """
        deadline_s, spent_s = min(DEADLINE_S, self._left_s), 0.0
        if deadline_s <= 0:
            return None
        shares = self._shares(SAMPLE_S)
        while (share := next(shares)) >= QUIET_SHARE and spent_s < deadline_s:
            spent_s += SAMPLE_S
        self._left_s -= spent_s
        return share
