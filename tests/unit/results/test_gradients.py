"""Samples of gradients, fitted to the mean over ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from testbed.results.gradients import Fit, Kind, gradient_fit, gradient_fits
from testbed.results.observations import Gradients

WORLD = 4
Values = list[float]


def locals_of(step: int, world: int = WORLD) -> list[Values]:
    draw = random.Random(step)
    return [[draw.gauss(0, 1) for _ in range(40)] for _ in range(world)]


def mean_of(local: list[Values]) -> Values:
    return [sum(values) / len(local) for values in zip(*local, strict=True)]


def fit_of(given: Callable[[int, list[Values]], Values], steps: tuple[int, ...] = (0, 1, 3), **more: object) -> Fit:
    records: dict[int, list[Gradients]] = {rank: [] for rank in range(WORLD)}
    for step in steps:
        local = locals_of(step)
        for rank in range(WORLD):
            sample = {"step": step, "passes": 1, "names": ["w"], "local": [local[rank]], "given": [given(rank, local)]}
            records[rank].append(Gradients(**(sample | more)))
    return gradient_fit(records)


def times(factor: float, values: Values) -> Values:
    return [factor * value for value in values]


@pytest.mark.parametrize(
    ("kind", "factor", "given"),
    [
        ("mean", 1.0, lambda rank, local: mean_of(local)),
        ("sum", 4.0, lambda rank, local: times(4, mean_of(local))),
        ("divided", 0.25, lambda rank, local: times(0.25, mean_of(local))),
        ("scaled", 0.1, lambda rank, local: times(0.1, mean_of(local))),
        ("local", None, lambda rank, local: local[rank]),
        ("partial", None, lambda rank, local: mean_of(local) if rank == 0 else local[rank]),
        ("other", None, lambda rank, local: local[0]),
        ("nearly", 1.0, lambda rank, local: [round(20 * value) / 20 for value in mean_of(local)]),
    ],
)
def test_what_the_optimizer_gets_has_a_name(kind: Kind, factor: float | None, given: Callable[..., Values]) -> None:
    found = fit_of(given)
    assert found.kind == kind and found.samples == 3
    if factor is not None:
        assert found.factor == pytest.approx(factor, rel=0.02)
    assert found.is_mean == (kind == "mean")


@pytest.mark.parametrize(("wrong", "kind"), [(1, "sum"), (3, "sum"), (None, "mean")])
def test_one_sample_that_is_not_the_mean_decides(wrong: int | None, kind: Kind) -> None:
    found = fit_of(
        lambda rank, local: times(4.0 if wrong is not None and local == locals_of(wrong) else 1.0, mean_of(local))
    )
    assert (found.kind, found.decided) == (kind, 3)
    if wrong is not None:
        assert (found.step, found.samples) == (wrong, 1)


def test_gradients_that_were_clipped_are_judged_before_that() -> None:
    local = locals_of(0)
    found = fit_of(lambda rank, _: times(0.01, local[rank]), steps=(0,), unclipped=[mean_of(local)])
    assert found.kind == "mean" and found.residual < 1e-12


def test_equal_local_gradients_decide_nothing_but_a_sum_of_them_does() -> None:
    def fits(factor: float) -> Fit:
        sample = {"step": 1, "passes": 1, "names": ["w"], "local": [[1.0, 2.0]], "given": [[factor, 2 * factor]]}
        return gradient_fit({rank: [Gradients(**sample)] for rank in range(WORLD)})

    assert fits(1.0).kind == "equal" and fits(4.0).kind == "sum"


@pytest.mark.parametrize("more", [{"local": [[]]}, {"detail": {"sharded": True}}, {"local": [[math.nan] * 40]}])
def test_what_was_not_seen_is_not_judged(more: dict[str, object]) -> None:
    assert fit_of(lambda rank, local: mean_of(local), **more).kind == "unseen"


def test_a_single_rank_has_no_fit() -> None:
    sample = Gradients(step=0, passes=1, names=["w"], local=[[1.0]], given=[[1.0]])
    assert gradient_fits({0: [sample]}) == [] and gradient_fit({0: [sample]}).kind == "unseen"


def test_only_updates_that_all_ranks_sampled_count() -> None:
    sample = {"passes": 1, "names": ["w"], "local": [[1.0]], "given": [[2.0]]}
    longer = [Gradients(step=step, **sample) for step in (0, 1)]
    assert [fit.step for fit in gradient_fits({0: longer, 1: longer[:1]})] == [0]
