"""The pipeline on real ranks: waits longer than the deadline, parameters that are not in every step."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.gloo.test_algorithms import Pools, assert_stepped_by_the_mean, case_of, mean_gradient, parameters

pytestmark = pytest.mark.gloo

PIPELINES = ["ring/bucket:100B/pipeline", "direct/bucket:100B/pipeline"]


@pytest.mark.parametrize("mode", PIPELINES[:1])
def test_clipping_waits_for_a_backward_longer_than_the_deadline(ranks: Pools, mode: str) -> None:
    """The first buckets wait for the norm of the whole gradient until backward has made the last one."""
    case = case_of(mode, dtype="float64", clip=0.5, deadline=2.0, slow=2.6)
    answers = ranks(2).run("mean", **case)
    mean = mean_gradient(case, 2, step=0)
    norm = sum(float(np.square(part).sum()) for part in mean) ** 0.5
    assert norm > 0.5, "nothing is clipped"
    for answer in answers:
        for got, part in zip(parameters(answer), mean, strict=True):
            np.testing.assert_allclose(got, -part * 0.5 / (norm + 1e-6), rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("mode", [*PIPELINES, "ring/bucket:100B/overlap", "ring/param/overlap", "ring"])
def test_a_parameter_unused_in_every_other_step_counts_as_zero_then(ranks: Pools, mode: str, size: int) -> None:
    """Its gradient of the step before is still in the same buffer."""
    assert_stepped_by_the_mean(ranks(size), case_of(mode, dtype="float64", steps=5, resting=[0, 3, 6]))


@pytest.mark.parametrize(("mode", "attached"), [(PIPELINES[0], os.SCHED_BATCH), ("ring", os.SCHED_OTHER)])
def test_gloos_thread_has_sched_batch_while_a_pipeline_is_attached(ranks: Pools, mode: str, attached: int) -> None:
    """The thread is found by its name; this test fails if a later torch changes the name."""
    for answer in ranks(2).run("sched_classes", **case_of(mode)):
        assert answer["classes"] == [[os.SCHED_OTHER], [attached], [os.SCHED_OTHER]]
