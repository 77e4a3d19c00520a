"""Every algorithm x granularity x schedule leaves all ranks the mean of all gradients, with the same bits on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from testbed.results import theory
from testbed.spec.mode import SyncMode
from tests.bench.exact import exact_modes
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.gloo

SIZES = [2, 3, 4, 5]
MODES = exact_modes(bucket="100B")
# Nothing here divides by 2, 3, 4 and 5 at once; some tensors have fewer elements than there are ranks.
SHAPES = [[7, 3], [1], [2], [13, 1, 3], [], [5, 4], [61]]
TRANSPOSED = [0, 5]
UNUSED = [2]
TOLERANCE = {"float32": 1e-6, "float64": 1e-14}  # of sums of up to five numbers around 1

Pools = Callable[[int], RankPool]


def case_of(mode: str, **values: Any) -> dict[str, Any]:
    unused = [] if SyncMode.parse(mode).algorithm == "ddp" else UNUSED
    defaults = {"shapes": SHAPES, "dtype": "float32", "transposed": TRANSPOSED, "unused": unused, "steps": 1}
    return {"mode": mode, **defaults, **values}


def gradient(case: dict[str, Any], rank: int, step: int) -> list[np.ndarray]:
    """What tests/gloo/worker.py draws, in float64; zero where a parameter gets none."""
    random = np.random.default_rng((rank, step))
    drawn = [random.standard_normal(shape).astype(case["dtype"]).astype(np.float64) for shape in case["shapes"]]
    absent = [*case["unused"], *(case.get("resting", []) if step % 2 else [])]
    return [g * 0 if k in absent else g for k, g in enumerate(drawn)]


def mean_gradient(case: dict[str, Any], size: int, step: int) -> list[np.ndarray]:
    everyone = [gradient(case, rank, step) for rank in range(size)]
    return [np.mean(parts, axis=0) for parts in zip(*everyone, strict=True)]


def parameters(answer: dict[str, Any]) -> list[np.ndarray]:
    with np.load(answer["arrays"]) as arrays:
        return [arrays[f"values.{k}"] for k in range(len(arrays) - 1)]


def assert_stepped_by_the_mean(pool: RankPool, case: dict[str, Any]) -> list[dict[str, Any]]:
    answers = pool.run("mean", **case)
    assert len({answer["hash"] for answer in answers}) == 1, "ranks hold different bits"
    steps = [mean_gradient(case, pool.size, step) for step in range(case["steps"])]
    expected = [-np.sum(parts, axis=0) for parts in zip(*steps, strict=True)]
    for answer in answers:
        assert answer["frozen"] == [1.0, 1.0, 1.0]
        for got, want in zip(parameters(answer), expected, strict=True):
            assert got.dtype == case["dtype"]
            np.testing.assert_allclose(got, want, rtol=0, atol=case["steps"] * TOLERANCE[case["dtype"]])
    return answers


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_one_step_is_the_float64_mean_of_all_gradients(ranks: Pools, mode: str, size: int) -> None:
    assert_stepped_by_the_mean(ranks(size), case_of(mode))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_three_steps_in_float64_are_the_mean_of_all_gradients(ranks: Pools, mode: str, size: int) -> None:
    assert_stepped_by_the_mean(ranks(size), case_of(mode, dtype="float64", steps=3))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["ring", "ring-reduce", "tree", "halving", "gather", "allreduce", "server"])
def test_a_buffer_smaller_than_the_number_of_ranks_has_empty_shards(ranks: Pools, mode: str, size: int) -> None:
    assert_stepped_by_the_mean(ranks(size), case_of(f"{mode}/flat", shapes=[[1]], transposed=[], unused=[]))


RACKS = [
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0], [1, 2, 3]],
    [[3, 1], [2], [0]],
    [[0], [1], [2], [3]],
    [[0, 1, 2], [3, 4]],
    [[4], [0, 2], [1, 3]],
    [[0, 1, 2], [3, 4, 5]],
    [[0, 3], [1, 4], [5, 2]],
    [[0, 1]],
    [[0], [1]],
    [[0], [2, 1]],
]


@pytest.mark.parametrize("shapes", [SHAPES, [[1]], [[0], [4], [2, 0]], [[70_001]]], ids=str)
@pytest.mark.parametrize("racks", RACKS, ids=str)
def test_hierarchical_is_the_float64_mean_in_any_racks(
    ranks: Pools, racks: list[list[int]], shapes: list[list[int]]
) -> None:
    rest: dict[str, Any] = {} if shapes == SHAPES else {"transposed": [], "unused": []}
    size = sum(map(len, racks))
    for dtype in TOLERANCE:
        case = case_of("hierarchical", shapes=shapes, dtype=dtype, steps=2, racks=racks, **rest)
        assert_stepped_by_the_mean(ranks(size), case)


def test_hierarchical_sends_what_its_rounds_say(ranks: Pools) -> None:
    racks = ((0,), (1, 2, 3))
    case = case_of("hierarchical", shapes=[[6000]], transposed=[], unused=[], racks=racks)
    sent = [answer["payload"]["gradients"] for answer in assert_stepped_by_the_mean(ranks(4), case)]
    shares = [theory.sent_share(SyncMode.parse("hierarchical"), 4, rank, racks) for rank in range(4)]
    assert sent == [round(24_000 * (share or 0)) for share in shares]


@pytest.mark.parametrize(("mode", "size"), [*(("ring", size) for size in SIZES), ("halving", 3), ("tree", 3)])
def test_a_buffer_of_many_segments_is_averaged(ranks: Pools, mode: str, size: int) -> None:
    from testbed.rank.sync.algorithms import SEGMENT_BYTES

    shapes = [[4_200_001], [3]]
    assert 4 * shapes[0][0] // size > 1.5 * SEGMENT_BYTES  # so the ring's shards travel in several segments
    assert_stepped_by_the_mean(ranks(size), case_of(mode, shapes=shapes, transposed=[], unused=[]))


@pytest.mark.parametrize("shapes", [[[0], [4], [2, 0]], [[4], [0], [70]]], ids=str)
@pytest.mark.parametrize(
    "mode",
    [
        *("ring", "ring/param", "allreduce", "tree/param", "halving/param", "server"),
        *("ring/bucket:100B/pipeline", "ring/bucket:100B/overlap"),
    ],
)
def test_a_parameter_without_elements_is_accepted(ranks: Pools, mode: str, shapes: list[list[int]]) -> None:
    """First, last, and in the middle, where a bucket of a pipeline lists it."""
    assert_stepped_by_the_mean(ranks(3), case_of(mode, shapes=shapes, steps=2, transposed=[], unused=[]))


AVERAGED = {  # in 7 steps: how often gradients, and how often parameters; the last, incomplete round counts, too
    "ring/every:3": (0, 3),
    "allreduce/param/every:3": (0, 3),
    "tree/bucket:100B/every:3@2": (2, 2),
}


@pytest.mark.parametrize("mode", AVERAGED)
def test_averaging_parameters_gives_the_mean_of_all_local_steps(ranks: Pools, mode: str) -> None:
    """With plain SGD the result does not depend on how often parameters are averaged, so the bytes are compared too."""
    answers = assert_stepped_by_the_mean(ranks(3), case_of(mode, dtype="float64", steps=7))
    once = ranks(3).run("mean", **case_of(mode.partition("/every")[0], dtype="float64"))
    for answer, plain in zip(answers, once, strict=True):
        each, payload = plain["payload"]["gradients"], answer["payload"]
        assert each > 0
        assert (payload.get("gradients", 0), payload["parameters"]) == tuple(times * each for times in AVERAGED[mode])
