"""A figure: what was measured, its spread, and the limit it must keep."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


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
        bounds = bounds or "no limit"
        return f"{'ok  ' if self.met else 'MISS'}  {self.name}: {self.value:.3f} ({bounds}); {self.detail}"


def spread(values: Sequence[float], unit: str = "s") -> str:
    """'1.102 s (1.095-1.120, n=8)'."""
    return f"{statistics.median(values):.3f} {unit} ({min(values):.3f}-{max(values):.3f}, n={len(values)})"
