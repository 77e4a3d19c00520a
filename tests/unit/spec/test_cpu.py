"""CPU shares become a quota per period, and cores of a node's own."""

from __future__ import annotations

import pytest

from testbed.spec.cpu import divide_cores, quota_and_period
from testbed.spec.errors import SpecError


@pytest.mark.parametrize(("cpus", "expected"), [(0.4, (4000, 10_000)), (2, (20_000, 10_000)), (0.05, (1000, 20_000))])
def test_the_period_is_10_ms_unless_the_quota_gets_too_small(cpus: float, expected: tuple[int, int]) -> None:
    assert quota_and_period(cpus) == expected


def test_no_share_means_no_quota() -> None:
    assert quota_and_period(None) == (-1, 10_000)


@pytest.mark.parametrize("cpus", [0, -1, float("nan"), float("inf")])
def test_a_share_that_is_no_positive_number_is_refused(cpus: float) -> None:
    with pytest.raises(SpecError, match=r"node\.cpus"):
        quota_and_period(cpus)


def test_nodes_take_turns_on_the_cores_that_there_are() -> None:
    assert divide_cores(1, [0.4] * 4, [0, 5]) == [{0}, {5}, {0}, {5}]
    assert divide_cores(2, [None] * 2, [0, 1, 2, 3]) == [{0, 1}, {2, 3}]


def test_cores_that_cannot_be_divided_evenly_are_left_to_the_kernel() -> None:
    assert divide_cores(1, [0.4] * 4, range(3)) == [None] * 4
    assert divide_cores(1, [1.5] * 4, range(2)) == [None] * 4
