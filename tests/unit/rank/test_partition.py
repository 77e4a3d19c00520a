"""Partition: who sees which image in which step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from testbed.rank.data import Kind, Partition
from testbed.spec.errors import SpecError


def seen(partition: Partition, world: int, epoch: int = 0) -> list[np.ndarray]:
    """The images of all ranks together, step by step, sorted."""
    ranks = [partition.indices(rank, world, epoch) for rank in range(world)]
    return [np.sort(np.concatenate(step)) for step in zip(*ranks, strict=True)]


@settings(max_examples=60, deadline=None)
@given(quarter=st.integers(1, 150), each=st.integers(1, 20), seed=st.integers(0, 2**31), epoch=st.integers(0, 50))
def test_step_k_is_the_same_set_of_images_for_1_2_and_4_ranks(quarter: int, each: int, seed: int, epoch: int) -> None:
    partition = Partition(size=4 * quarter, batch=4 * each, seed=seed)
    one, two, four = (seen(partition, world, epoch) for world in (1, 2, 4))
    assert len(one) == len(two) == len(four) == partition.steps(4)
    for steps in zip(one, two, four, strict=True):
        np.testing.assert_array_equal(steps[0], steps[1])
        np.testing.assert_array_equal(steps[0], steps[2])


def test_a_size_that_does_not_divide_changes_only_the_last_step() -> None:
    partition = Partition(size=101, batch=12)
    one, four = seen(partition, 1), seen(partition, 4)
    assert len(one) == len(four) == 9
    np.testing.assert_array_equal(np.concatenate(one[:-1]), np.concatenate(four[:-1]))
    assert set(one[-1]) < set(four[-1])  # DistributedSampler pads with the epoch's first images


@pytest.mark.parametrize(("size", "world", "epoch"), [(100, 4, 0), (101, 4, 3), (50_000, 4, 1), (7, 2, 2)])
def test_sampler_is_distributed_sampler(size: int, world: int, epoch: int) -> None:
    partition = Partition(size=size, batch=8 * world, seed=5)
    for rank in range(world):
        sampler = DistributedSampler(range(size), world, rank, shuffle=True, seed=5)  # type: ignore[arg-type, var-annotated]
        sampler.set_epoch(epoch)
        steps = partition.indices(rank, world, epoch)
        assert np.concatenate(steps).tolist() == list(sampler)
        assert {len(step) for step in steps[:-1]} <= {8}
        assert 1 <= len(steps[-1]) <= 8


def test_r0_has_196_steps_an_epoch_and_keeps_the_small_last_one() -> None:
    partition = Partition(size=50_000, batch=256)
    steps = partition.indices(3, 4, 0)
    assert partition.steps(1) == partition.steps(4) == len(steps) == 196
    assert len(steps[-1]) == 20


def test_sampler_shuffles_anew_every_epoch_and_for_every_seed() -> None:
    first = Partition(size=100, batch=100).indices(0, 1, 0)[0]
    assert not np.array_equal(first, Partition(size=100, batch=100).indices(0, 1, 1)[0])
    assert not np.array_equal(first, Partition(size=100, batch=100, seed=1).indices(0, 1, 0)[0])


def test_fixed_is_r3s_split_the_same_in_every_epoch() -> None:
    partition = Partition(size=100, batch=100, kind="fixed")
    for epoch in (0, 7):
        assert [partition.indices(rank, 4, epoch)[0].tolist() for rank in range(4)] == [
            list(range(25 * rank, 25 * rank + 25)) for rank in range(4)
        ]


def test_fixed_leaves_a_remainder_out_so_that_all_ranks_take_as_many_steps() -> None:
    partition = Partition(size=103, batch=100, kind="fixed")
    assert [len(partition.indices(rank, 4, 0)) for rank in range(4)] == [1, 1, 1, 1]
    assert partition.steps(4) == 1


@pytest.mark.parametrize("kind", ["sampler", "fixed"])
def test_uneven_shares_cut_each_global_batch_and_drop_the_incomplete_one(kind: Kind) -> None:
    partition = Partition(size=107, batch=10, kind=kind, shares=(5, 3, 2), seed=3)
    ranks = [partition.indices(rank, 3, 1) for rank in range(3)]
    assert [{len(step) for step in steps} for steps in ranks] == [{5}, {3}, {2}]
    assert partition.steps(3) == len(ranks[0]) == 10
    everything = np.concatenate([np.concatenate(steps) for steps in ranks])
    assert len(set(everything.tolist())) == 100


def test_uneven_shares_see_the_global_batches_of_one_rank() -> None:
    uneven = seen(Partition(size=100, batch=10, shares=(7, 3), seed=3), 2, epoch=4)
    one = seen(Partition(size=100, batch=10, seed=3), 1, epoch=4)
    np.testing.assert_array_equal(uneven, one)


def test_fixed_uneven_shares_repeat_every_epoch_in_blocks() -> None:
    partition = Partition(size=20, batch=10, kind="fixed", shares=(7, 3))
    assert np.concatenate(partition.indices(1, 2, 5)).tolist() == list(range(14, 20))


def test_equal_shares_are_the_same_as_none() -> None:
    plain, shared = Partition(size=103, batch=8), Partition(size=103, batch=8, shares=(4, 4))
    assert [s.tolist() for s in plain.indices(1, 2, 0)] == [s.tolist() for s in shared.indices(1, 2, 0)]


def test_fewer_images_than_one_step_needs_are_refused() -> None:
    with pytest.raises(SpecError, match="subset 3: at least 4 images are needed for one step"):
        Partition(size=3, batch=4).steps(4)


@pytest.mark.parametrize("shares", [None, (5, 4), (6, 4)])
def test_what_runspec_refuses_does_not_come_here(shares: tuple[int, ...] | None) -> None:
    with pytest.raises(AssertionError, match="for 3 ranks"):
        Partition(size=100, batch=10, shares=shares).indices(0, 3, 0)
