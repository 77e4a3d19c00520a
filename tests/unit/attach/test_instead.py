"""`--instead MODE`: fits to the mean."""

from __future__ import annotations

import pytest
import torch

from testbed.attach.instead import fit_to_mean, sample


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOCAL = rows([1.0, 2.0, 3.0], [3.0, 0.0, -1.0])


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_a_multiple_of_the_mean_is_fitted_with_its_factor(factor: float) -> None:
    mean = LOCAL.mean(0)
    found, residual = fit_to_mean(LOCAL, torch.stack([factor * mean, factor * mean]))
    assert found == pytest.approx(factor) and residual < 1e-12


def test_own_gradients_leave_a_residual() -> None:
    assert fit_to_mean(LOCAL, LOCAL)[1] > 0.5


def test_one_wrong_rank_of_many_is_found() -> None:
    mean = LOCAL.mean(0)
    assert fit_to_mean(LOCAL, torch.stack([mean, 2 * mean]))[0] == pytest.approx(2)


def test_gradients_that_are_zero_fit_nothing() -> None:
    zero = torch.zeros(2, 3, dtype=torch.float64)
    assert fit_to_mean(zero, zero) == (0.0, float("inf"))


def test_samples_are_few_and_at_equal_distances() -> None:
    assert len(sample(torch.arange(10_000.0))) <= 64 and len(sample(torch.arange(5.0))) == 5
