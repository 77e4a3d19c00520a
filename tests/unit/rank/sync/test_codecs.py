"""Codecs on one rank: what they keep, lose and draw at random."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from testbed.rank.group import Group, single_rank_group
from testbed.rank.sync.codecs import BufferInfo, Coder, largest, make_coder
from testbed.spec.mode import SyncMode

SHAPES = [torch.Size(shape) for shape in ([30, 4, 5], [30], [8, 8], [2, 3], [], [0])]
LENGTH = sum(shape.numel() for shape in SHAPES)


def coder(word: str, seed: int = 0, shapes: list[torch.Size] | None = None) -> Coder:
    mode = SyncMode.parse(f"direct/{word}")
    return make_coder(mode, divided, BufferInfo(0, shapes or SHAPES, torch.float32, single_rank_group(), seed))


def divided(buffer: Tensor, group: Group) -> None:
    """A mean over one rank."""
    buffer.div_(group.size)


def gradient(step: int = 0, length: int = LENGTH) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(step))


WORDS = ["fp16", "bf16", "int8", "topk:0.1", "powersgd:2"]


@pytest.mark.parametrize("word", WORDS)
def test_no_codec_draws_from_the_global_generator(word: str) -> None:
    before = torch.get_rng_state()
    coder(word)(gradient(), single_rank_group())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("word", "share"), [("fp16", 1 / 2), ("bf16", 1 / 2), ("int8", 1 / 4), ("topk:0.1", 1 / 5)])
def test_size_is_the_number_of_bytes_that_travel(word: str, share: float) -> None:
    assert coder(word).size == pytest.approx(share * 4 * LENGTH, abs=8)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_inf_and_nan_in_a_gradient_stay_visible(word: str, bad: float) -> None:
    """A codec must not hide that training diverges."""
    buffer = gradient()
    buffer[3] = bad
    coder(word)(buffer, single_rank_group())
    assert not buffer.isfinite().all()


@pytest.mark.parametrize("word", WORDS)
def test_zero_stays_zero_and_the_next_gradient_is_coded(word: str) -> None:
    code, zero, later = coder(word), torch.zeros(LENGTH), gradient()
    code(zero, single_rank_group())
    assert not zero.any()
    code(later, single_rank_group())
    assert later.isfinite().all() and later.any()


def test_int8_rounds_to_one_of_two_neighbours_and_is_right_on_average() -> None:
    code, true = coder("int8"), gradient()
    step = float(true.abs().max()) / 127
    found = []
    for _ in range(400):
        buffer = true.clone()
        code(buffer, single_rank_group())
        assert (buffer - true).abs().max() <= step * 1.001
        found.append(buffer)
    # The mean of 400 draws whose deviation is half a step at most.
    assert (torch.stack(found).mean(0) - true).abs().max() < 5 * step / 2 / 20


def test_int8_does_not_overflow_at_127() -> None:
    code = coder("int8", shapes=[torch.Size([1000])])
    for _ in range(50):
        buffer = torch.cat([torch.full((500,), 3.0), torch.full((500,), -3.0)])
        code(buffer, single_rank_group())
        assert torch.equal(buffer.sign(), torch.cat([torch.ones(500), -torch.ones(500)]))


def test_topk_sends_the_largest_and_keeps_the_rest() -> None:
    code, true = coder("topk:0.1"), gradient()
    buffer = true.clone()
    code(buffer, single_rank_group())
    sent = buffer.nonzero().squeeze()
    assert len(sent) == math.ceil(0.1 * LENGTH)
    assert true[sent].abs().min() >= true[buffer == 0].abs().max()
    assert torch.equal(buffer + code.state["residual"], true)


@pytest.mark.parametrize("kind", ["normal", "tied", "sorted", "nan", "all nan"])
def test_largest_is_right_when_a_sample_excludes_most_values(kind: str) -> None:
    values = gradient(5, 200_000).abs()
    if kind == "tied":
        values = values.round()
    if kind == "sorted":
        values = values.sort().values
    if "nan" in kind:
        values[7 if kind == "nan" else slice(None)] = math.nan
    found = largest(values, 20_000)
    assert len(found.unique()) == 20_000
    wanted = torch.topk(values, 20_000).values
    torch.testing.assert_close(values[found].sort(descending=True).values, wanted, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("word", ["topk:0.1", "powersgd:2"])
def test_what_is_left_out_is_added_to_later_steps(word: str) -> None:
    """After any number of steps: applied + residual = sum of the gradients."""
    code = coder(word)
    given, applied = torch.zeros(LENGTH), torch.zeros(LENGTH)
    for step in range(20):
        buffer = gradient(step)
        given += buffer
        code(buffer, single_rank_group())
        applied += buffer
    torch.testing.assert_close(applied + code.state["residual"], given, atol=1e-4, rtol=0)
    assert code.state["residual"].abs().max() > 0.1


def test_powersgd_is_exact_for_a_matrix_of_its_rank() -> None:
    code = coder("powersgd:2", shapes=[torch.Size([40, 5, 6])])
    matrix = gradient(1, 80).view(40, 2) @ gradient(2, 60).view(2, 30)
    buffer = matrix.reshape(-1).clone()
    code(buffer, single_rank_group())
    torch.testing.assert_close(buffer, matrix.reshape(-1), atol=1e-4, rtol=1e-4)
    assert code.size == 4 * 2 * (40 + 30)


def test_powersgd_converges_to_the_best_product() -> None:
    """The same matrix in every step, with the residual cleared, is the power method."""
    code, matrix = coder("powersgd:1", shapes=[torch.Size([30, 20])]), gradient(1, 600)
    best = torch.linalg.svdvals(matrix.view(30, 20))[1:].square().sum().sqrt()
    for _ in range(60):
        buffer = matrix.clone()
        code.state["residual"].zero_()
        code(buffer, single_rank_group())
    assert (matrix - buffer).norm() == pytest.approx(float(best), rel=1e-3)


def test_powersgd_sends_vectors_uncompressed() -> None:
    code, buffer = coder("powersgd:2"), gradient()
    true = buffer.clone()
    code(buffer, single_rank_group())
    assert torch.equal(buffer[600:630], true[600:630])


def test_int8_draws_differ_from_step_to_step_and_from_seed_to_seed() -> None:
    def draw(code: Coder) -> Tensor:
        buffer = gradient()
        code(buffer, single_rank_group())
        return buffer

    one, same, other = coder("int8", seed=1), coder("int8", seed=1), coder("int8", seed=2)
    first = draw(one)
    assert torch.equal(draw(same), first)
    assert not torch.equal(draw(one), first)
    assert not torch.equal(draw(other), first)
