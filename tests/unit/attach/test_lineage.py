"""Lineage: which tensors are made from gradients."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from testbed.attach.lineage import Lineage


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))]
    for each in made:
        each.grad = torch.ones_like(each)
    return made


def followed(parameters: list[nn.Parameter]) -> Lineage:
    lineage = Lineage(2, nullcontext)
    lineage.open([p.grad for p in parameters if p.grad is not None], parameters)
    return lineage


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def test_copies_flat_buffers_and_means_of_gradients_are_found(parameters: list[nn.Parameter]) -> None:
    lineage = followed(parameters)
    flat = torch.cat([each.reshape(-1) for each in gradients(parameters)])
    like = torch.zeros_like(gradients(parameters)[0])
    mean = torch.stack([gradients(parameters)[0], like]).mean(0)
    view = gradients(parameters)[1][1:]
    found = [lineage.is_from_gradients([each]) for each in (flat, like, mean, view)]
    lineage.close()
    assert found == [True] * 4


def test_norms_and_tensors_of_other_origin_are_not(parameters: list[nn.Parameter]) -> None:
    lineage = followed(parameters)
    norm = torch.linalg.vector_norm(gradients(parameters)[0])
    loss = torch.tensor([1.0, 2.0]).sum()
    found = [lineage.is_from_gradients([each]) for each in (norm, loss)]
    lineage.close()
    assert found == [False] * 2


def test_reads_are_noted_with_the_operation_and_zeroing_is_not(parameters: list[nn.Parameter]) -> None:
    lineage = followed(parameters)
    gradients(parameters)[0].zero_()
    parameters[0].detach()
    assert lineage.touched == []
    torch.linalg.vector_norm(gradients(parameters)[1])
    lineage.close()
    assert len(lineage.touched) == 1 and lineage.touched[0].startswith("linalg_vector_norm at ")


def test_nothing_is_followed_after_close(parameters: list[nn.Parameter]) -> None:
    lineage = followed(parameters)
    lineage.close()
    copy = gradients(parameters)[0].clone()
    assert not lineage.is_from_gradients([copy, *gradients(parameters)]) and lineage.touched == []
