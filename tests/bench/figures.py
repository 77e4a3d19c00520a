"""A figure: what was measured, its spread, and the limit it must keep."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MEASURED = (  # a change here: every figure is another code's
    "testbed",
    "tests/bench",
    "tests/support/training.py",
    "tests/support/rank_pool.py",
    "tests/gloo/worker.py",
    "tests/hosts/nodes.py",
    "experiments/codecs*.toml",
    "requirements*.txt",
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    value: float
    low: float | None = None  # bounds that it must keep
    high: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool:
        return (self.low is None or self.value >= self.low) and (self.high is None or self.value <= self.high)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}

    def __str__(self) -> str:
        bounds = " and ".join(
            f"{sign} {bound:.4g}" for sign, bound in ((">=", self.low), ("<=", self.high)) if bound is not None
        )
        verdict = ("ok  " if self.met else "MISS") if bounds else "    "
        return f"{verdict}  {self.name}: {_short(self.value)} ({bounds or 'no limit'}); {self.detail}"


def _short(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"


def kept_limits(figures: Iterable[dict[str, Any]]) -> list[bool]:
    """Of each figure that has a limit, whether it keeps it; one that is only shown keeps none."""
    limited = (figure for figure in figures if figure["low"] is not None or figure["high"] is not None)
    return [figure["met"] for figure in limited]


def spread(values: Sequence[float], unit: str = "s") -> str:
    """'1.102 s (1.095-1.120, n=8)'."""
    return f"{statistics.median(values):.3f} {unit} ({min(values):.3f}-{max(values):.3f}, n={len(values)})"
