"""Statistics of step times: centre, mean, p95, n, a 95 % bootstrap interval of the centre; seconds as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
MAX_AT_ONCE = 10_000  # steps; a longer run is resampled one draw at a time, to save memory
SEED = 20240511  # fixed, so that the same folders always give the same report

Samples = Sequence[NDArray[np.float64]]  # one array per repeat


@dataclass(frozen=True)
class Stat:
    """`centre` is the median, or the mean for every:K. `low` and `high` are its 95 % interval."""

    centre: float
    mean: float
    p95: float
    n: int
    low: float
    high: float


def describe(samples: Samples, by_mean: bool = False) -> Stat:
    """Return the statistics of the pooled repeats. The interval allows for steps of one run being similar."""
    pooled = np.concatenate(list(samples))
    centre = np.mean if by_mean else np.median
    low, high = interval(resample(samples, by_mean))
    return Stat(
        float(centre(pooled)),
        float(pooled.mean()),
        float(np.quantile(pooled, 0.95)),
        len(pooled),
        float(low),
        float(high),
    )


def interval(draws: NDArray[np.float64]) -> tuple[float, float]:
    """Return the bounds of the middle 95 % of the draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def resample(samples: Samples, by_mean: bool = False, seed: int = SEED) -> NDArray[np.float64]:
    """Return bootstrap draws of the centre. With one run, draw its steps; with several, draw runs, then their steps."""
    random = np.random.default_rng(seed)
    centre: Callable[..., NDArray[np.float64]] = np.mean if by_mean else np.median
    if len(samples) == 1 and len(samples[0]) <= MAX_AT_ONCE:
        (only,) = samples
        return np.asarray(centre(only[random.integers(len(only), size=(RESAMPLES, len(only)))], axis=1))
    draws = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        runs = [samples[k] for k in random.integers(len(samples), size=len(samples))]
        draws[number] = centre(np.concatenate([run[random.integers(len(run), size=len(run))] for run in runs]))
    return draws


def ratio(over: Samples, under: Samples, by_mean: bool = False) -> tuple[float, float, float]:
    """Return centre(over) / centre(under), and the bounds of the ratio's 95 % interval."""
    centre = np.mean if by_mean else np.median
    draws = resample(over, by_mean) / resample(under, by_mean, SEED + 1)
    value = float(centre(np.concatenate(list(over))) / centre(np.concatenate(list(under))))
    return value, *interval(draws)


def seconds(value: float) -> str:
    """Return seconds as text: 1.306 -> '1.31 s', 0.0217 -> '21.7 ms'."""
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"
