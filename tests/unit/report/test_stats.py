"""Statistics of samples whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from testbed.report.stats import describe, ratio

RANDOM = np.random.default_rng(5)


def test_statistics_of_a_known_sample() -> None:
    stat = describe([np.array([1.0, 2.0, 3.0, 4.0, 100.0])])
    assert (stat.centre, stat.mean, stat.n) == (3.0, 22.0, 5)
    assert stat.p95 == pytest.approx(np.quantile([1, 2, 3, 4, 100], 0.95))


def test_by_mean_the_centre_is_the_mean() -> None:
    assert describe([np.array([1.0, 1.0, 1.0, 9.0])], by_mean=True).centre == 3.0


def test_the_interval_contains_the_true_median_about_95_times_in_100() -> None:
    held = 0
    for _ in range(200):
        stat = describe([RANDOM.normal(10.0, 1.0, size=60)])
        held += stat.low <= 10.0 <= stat.high
    assert 180 <= held <= 199, f"{held} of 200 intervals hold the true median"


def test_the_same_folders_always_give_the_same_interval() -> None:
    sample = [RANDOM.normal(size=30)]
    assert describe(sample) == describe(sample)


def test_differences_between_runs_widen_the_interval() -> None:
    """Two runs of steady steps, 1.0 and 1.2 s: the pooled steps alone would give an interval of no width."""
    runs = [np.full(50, 1.0), np.full(50, 1.2)]
    stat = describe(runs)
    assert (stat.low, stat.high) == (1.0, 1.2)


def test_the_interval_of_a_ratio_covers_both_samples() -> None:
    a, b = RANDOM.normal(2.0, 0.05, size=100), RANDOM.normal(1.0, 0.05, size=100)
    value, low, high = ratio([a], [b])
    assert value == pytest.approx(2.0, rel=0.05) and low < 2.0 < high and high - low < 0.2


def test_a_very_long_run_is_resampled() -> None:
    stat = describe([RANDOM.normal(1.0, 0.1, size=20_000)])
    assert stat.low < stat.centre < stat.high
