"""Intervals of time, as the rank records them and the report overlaps them."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]  # begin, end


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered by at least one interval."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
