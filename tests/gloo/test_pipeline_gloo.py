"""The pipeline on real ranks: waits longer than the deadline, parameters that are not in every step."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.gloo.test_algorithms import Pools, assert_stepped_by_the_mean, case_of, mean_gradient, parameters

pytestmark = pytest.mark.gloo

PIPELINE = "ring/bucket:100B/pipeline"


def test_clipping_waits_for_a_backward_longer_than_the_deadline(ranks: Pools) -> None:
    """The first buckets wait for the norm of the whole gradient until backward has made the last one."""
    case = case_of(PIPELINE, dtype="float64", clip=0.5, deadline=2.0, slow=2.6)
    answers = ranks(2).run("mean", **case)
    mean = mean_gradient(case, 2, step=0)
    norm = sum(float(np.square(part).sum()) for part in mean) ** 0.5
    assert norm > 0.5, "nothing is clipped"
    for answer in answers:
        for got, part in zip(parameters(answer), mean, strict=True):
            np.testing.assert_allclose(got, -part * 0.5 / (norm + 1e-6), rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("mode", [PIPELINE, "ring/bucket:100B/overlap", "ring/param/overlap", "ring"])
def test_a_parameter_unused_in_every_other_step_counts_as_zero_then(ranks: Pools, mode: str, size: int) -> None:
    """Its gradient of the step before is still in the same buffer."""
    assert_stepped_by_the_mean(ranks(size), case_of(mode, dtype="float64", steps=5, resting=[0, 3, 6]))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_every_number_of_ranks_ends_with_equal_parameters(
    ranks: Pools, size: int, dtype: str, clip: float | None
) -> None:
    """Buckets of 100 bytes: uneven shards, and in the last buckets fewer numbers than ranks, so empty shards."""
    case = case_of(PIPELINE, dtype=dtype, steps=4, clip=clip)
    answers = ranks(size).run("mean", **case)
    assert len({answer["hash"] for answer in answers}) == 1
    if clip is None:
        assert_stepped_by_the_mean(ranks(size), case)


@pytest.mark.parametrize("size", [2, 3])
def test_a_pipeline_has_one_thread_of_class_sched_batch_and_leaves_nothing(ranks: Pools, size: int) -> None:
    for answer in ranks(size).run("threads", **case_of(PIPELINE)):
        assert answer["classes"] == [os.SCHED_BATCH] and answer["left"] == 0 and answer["files"] == 0
