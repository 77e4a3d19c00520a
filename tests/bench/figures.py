"""A figure: a measured value, its spread and its limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MEASURED = (  # paths that the figures depend on: a figure belongs to the last commit that changed one of them
    "testbed",
    "tests/bench",
    "tests/support/training.py",
    "tests/support/rank_pool.py",
    "tests/support/observed.py",
    "tests/support/quiet.py",
    "tests/gloo/worker.py",
    "tests/hosts/nodes.py",
    "experiments/codecs*.toml",
    "requirements*.txt",
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    value: float
    low: float | None = None  # limits, both inclusive; None: no limit on this side
    high: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool:
        return (self.low is None or self.value >= self.low) and (self.high is None or self.value <= self.high)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}

    def __str__(self) -> str:
        limits = " and ".join(
            f"{sign} {limit:.4g}" for sign, limit in ((">=", self.low), ("<=", self.high)) if limit is not None
        )
        verdict = ("ok  " if self.met else "MISS") if limits else "    "
        value = f"{self.value:.1e}" if 0 < abs(self.value) < 1e-3 else f"{self.value:.3f}"
        return f"{verdict}  {self.name}: {value} ({limits or 'no limit'}); {self.detail}"


def limits_met(figures: Iterable[dict[str, Any]]) -> list[bool]:
    """For each figure that has a limit, whether it meets it. Figures without a limit are left out."""
    limited = (figure for figure in figures if figure["low"] is not None or figure["high"] is not None)
    return [figure["met"] for figure in limited]


def spread(values: Sequence[float], unit: str = "s") -> str:
    """Median, range and count: '1.102 s (1.095-1.120, n=8)'."""
    return f"{statistics.median(values):.3f} {unit} ({min(values):.3f}-{max(values):.3f}, n={len(values)})"
