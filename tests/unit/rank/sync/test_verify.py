"""Is it the mean? Differences, hints, and which elements are sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from testbed.rank.group import Group
from testbed.rank.sync.algorithms import OwnMethod
from testbed.rank.sync.verify import PLACES, SampledMethod, differs, sample_places
from testbed.spec.errors import SpecError
from testbed.spec.mode import SyncMode

EXPECTED = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
OWN = torch.tensor([7.0, 5.0, 6.0, 8.0], dtype=torch.float64)
MOST = 1e-6


@pytest.mark.parametrize(
    ("found", "wrong", "first", "hint"),
    [
        (EXPECTED * 3, 4, 0, "3 times the mean: the sum was not divided by N"),
        (EXPECTED / 3, 4, 0, "1/3 of the mean: it was divided by N twice"),
        (OWN, 4, 0, "this rank's own numbers: nothing was averaged there"),
        (torch.cat([EXPECTED[:2], OWN[2:]]), 2, 2, "this rank's own numbers: nothing was averaged there"),
        (EXPECTED * 0, 4, 0, "zero"),
        (EXPECTED + torch.tensor([0, torch.nan, 0, torch.inf]), 2, 1, "some are not finite"),
        (EXPECTED + torch.tensor([0, 0, 0, 0.1]), 1, 3, ""),
    ],
)
def test_a_difference_is_described(found: torch.Tensor, wrong: int, first: int, hint: str) -> None:
    answer = differs(found, EXPECTED, OWN, MOST, 3)
    assert (answer["wrong"], answer["number"], answer["hint"], answer["of"]) == (wrong, first, hint, 4)
    assert answer["expected"] == float(EXPECTED[first])


def test_rounding_is_no_difference() -> None:
    assert differs(EXPECTED * (1 + 1e-7), EXPECTED, OWN, MOST, 3) == {}


@pytest.mark.parametrize("length", [1, 2, 15, 16, 1000, 9_231_114])
@pytest.mark.parametrize("n", [2, 3, 4, 256])
def test_a_sampled_method_looks_at_both_ends_and_where_shards_meet(length: int, n: int) -> None:
    places = sample_places(length, n)
    assert places == sorted(set(places)) and places[0] == 0 and places[-1] == length - 1
    if length >= 1000:
        assert len(places) >= PLACES and {length // n - 1, length // n} <= set(places)


def sampled(factor: float) -> tuple[SampledMethod, Group]:
    """A method that multiplies by `factor`, in a group of one rank, whose mean is the number itself."""

    def mean_(buffer: torch.Tensor, group: Group) -> None:
        buffer.mul_(factor)

    return SampledMethod(SyncMode("mine"), OwnMethod(Path("mine.py"), mean_)), Group(0, 1, dist.HashStore(), 1.0)


def test_a_sampled_method_accepts_the_mean_and_looks_only_once() -> None:
    mine, group = sampled(1.0)
    mine(torch.arange(100.0), group)
    mine.verify(group)
    sent = dict(group.payload)
    mine(torch.arange(100.0), group)
    mine.verify(group)
    assert group.payload == sent


def test_a_sampled_method_refuses_what_is_not_the_mean() -> None:
    mine, group = sampled(1.5)
    mine(torch.arange(100.0), group)
    with pytest.raises(SpecError, match=r"mode 'mine': wrong on all ranks: requested the mean of 1 ranks of gradients"):
        mine.verify(group)


def test_a_loss_that_diverged_is_no_fault_of_the_method() -> None:
    mine, group = sampled(1.0)
    mine(torch.full((100,), torch.inf), group)
    mine(torch.full((100,), torch.nan), group)
    mine.verify(group)
