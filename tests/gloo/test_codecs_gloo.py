"""Every codec in every mode that takes it: all ranks end with the same bits, and the error is bounded or kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from testbed.spec.mode import SyncMode, codecs_of, legal_modes
from tests.gloo.test_algorithms import case_of, mean_gradient, parameters
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.gloo

MODES = [f"{mode}/{codec}" for mode in legal_modes(bucket="100B") for codec in codecs_of(mode)]
SOME = ["ring/fp16", "allreduce/flat/bf16", "direct/int8", "direct/topk:0.1", "direct/bucket:100B/overlap/int8"]
SOME += ["ring/powersgd:1", "ring/param/overlap/powersgd:2", "ddp/bf16", "ddp/bucket:100B/powersgd:1"]
SHAPES = [[7, 3], [1], [2], [13, 1, 3], [3], [5, 4], [61], [30, 20]]  # torch's PowerSGD takes no scalars
STEPS = 3
Pools = Callable[[int], RankPool]


def coded(mode: str, **values: Any) -> dict[str, Any]:
    return case_of(mode, **{"shapes": SHAPES, "steps": STEPS, "kept": not mode.startswith("ddp"), **values})


def error(case: dict[str, Any], answer: dict[str, Any], size: int) -> list[np.ndarray]:
    """What was applied, less the sum of the true means."""
    steps = [mean_gradient(case, size, step) for step in range(case["steps"])]
    wanted = [-np.sum(parts, axis=0) for parts in zip(*steps, strict=True)]
    return [got - want for got, want in zip(parameters(answer), wanted, strict=True)]


def flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays])


def assert_only_the_codec_erred(pool: RankPool, case: dict[str, Any]) -> None:
    answers = pool.run("mean", **case)
    assert len({answer["hash"] for answer in answers}) == 1, "ranks hold different bits"
    mode = SyncMode.parse(case["mode"])
    lost = flat(error(case, answers[0], pool.size))
    largest = max(np.abs(flat(mean_gradient(case | {"unused": []}, 1, step))).max() for step in range(case["steps"]))
    most = {
        "fp16": 2e-3,
        "bf16": 16e-3,
        "int8": 2 / 127 * 1.6,
    }  # share of the largest value per step: it is rounded twice (int8), or N times
    if mode.codec in most:
        assert np.abs(lost).max() <= most[mode.codec] * largest * case["steps"]
        assert np.abs(lost).max() > 0, "nothing was coded"
    elif mode.algorithm != "ddp":  # what was not applied is in the residuals
        kept = [{k: np.array(v) for k, v in answer["kept"].items() if "residual" in k} for answer in answers]
        waiting = [np.mean([each[name] for each in kept], axis=0) for name in kept[0]]
        np.testing.assert_allclose(np.sort(np.abs(flat(waiting))), np.sort(np.abs(lost)), atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_codec_leaves_the_same_bits_on_all_ranks_within_its_error(ranks: Pools, mode: str) -> None:
    assert_only_the_codec_erred(ranks(3), coded(mode))


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("mode", SOME)
def test_a_codec_works_with_other_numbers_of_ranks(ranks: Pools, mode: str, size: int) -> None:
    assert_only_the_codec_erred(ranks(size), coded(mode))


@pytest.mark.parametrize("mode", [mode for mode in SOME if not mode.startswith("ddp")])
@pytest.mark.parametrize("values", [{"dtype": "float64"}, {"shapes": [[1]], "transposed": [], "unused": []}], ids=str)
def test_float64_and_tiny_buffers_are_coded(ranks: Pools, mode: str, values: dict[str, Any]) -> None:
    answers = ranks(3).run("mean", **coded(mode, **values))
    assert len({answer["hash"] for answer in answers}) == 1


@pytest.mark.parametrize("mode", ["direct/topk:1", "direct/bucket:100B/overlap/topk:1", "ring/powersgd:20"])
def test_a_codec_that_leaves_nothing_out_is_exact(ranks: Pools, mode: str) -> None:
    case = coded(mode)
    lost = flat(error(case, ranks(3).run("mean", **case)[0], 3))
    np.testing.assert_allclose(lost, 0, atol=3e-6)


HANDOVERS = [(mode, 2) for mode in SOME if not mode.startswith("ddp")]  # before which step
HANDOVERS += [("ddp/powersgd:1", 4), ("ddp/bucket:100B/powersgd:1", 4)]  # whose first two steps keep nothing


@pytest.mark.parametrize(("mode", "handover"), HANDOVERS)
def test_a_mode_resumed_from_its_state_ends_with_the_same_bits(ranks: Pools, mode: str, handover: int) -> None:
    case = coded(mode, steps=handover + 3)
    straight = ranks(2).run("mean", **case)
    resumed = ranks(2).run("mean", **case, handover=handover)
    assert resumed[0]["hash"] == straight[0]["hash"]


def test_int8_depends_on_the_seed(ranks: Pools) -> None:
    hashes = [ranks(2).run("mean", **coded("direct/int8", seed=seed))[0]["hash"] for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


LARGE = {"shapes": [[300, 200]], "transposed": [], "unused": [], "steps": 4}  # 240 kB


@pytest.mark.parametrize(
    ("mode", "ratio"),
    [
        ("ring/fp16", 0.5),
        ("allreduce/flat/bf16", 0.5),
        ("direct/int8", 0.25),
        ("direct/topk:0.01", 0.04),
        ("ring/powersgd:2", 2 * 500 / 60_000),
        ("ddp/fp16", 0.5),
        ("ddp/bf16", 0.5),
    ],
)
def test_payload_and_timeline_count_what_is_sent(ranks: Pools, mode: str, ratio: float) -> None:
    (answer, *_) = ranks(4).run("mean", **coded(mode, **LARGE, kept=False))
    whole = 4 * 300 * 200
    assert answer["payload"]["gradients"] / LARGE["steps"] == pytest.approx(1.5 * whole * ratio, rel=0.02)
    size = whole * ratio / (2 if "topk" in mode else 1)  # topk sends its payload N-1 times, a ring 2(N-1)/N times
    assert sum(answer["sizes"]) == pytest.approx(size, rel=0.02)


def test_bytes_of_torchs_powersgd_are_counted(ranks: Pools) -> None:
    (answer, *_) = ranks(4).run("mean", **coded("ddp/powersgd:2", **LARGE, kept=False))
    assert answer["sizes"] == [4 * 2 * 500]
    assert answer["payload"]["gradients"] == 2 * 1.5 * 240_000 + 2 * 1.5 * 4 * 2 * 500
