"""Samples of gradients, parameters and batches, taken in this process by the events that a script would cause."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from testbed.attach.events import Collective
from testbed.attach.sampling import (
    MAX_IMAGES,
    MAX_OPTIMIZERS,
    MAX_VALUES,
    Sampling,
    digest,
    is_sampled,
    is_sum,
    loss_scale,
    positions,
)
from testbed.results.gradients import fit
from testbed.results.records import read

INPUTS = torch.arange(12.0).reshape(4, 3)


class Script:
    """A small model whose training is observed."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.sampling = Sampling(self.sent.append)
        torch.manual_seed(1)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sampling.optimizer_made(self.optimizer)

    def backward(self, scale: float = 1.0) -> None:
        loss = self.model(INPUTS).square().mean() * scale
        self.sampling.backward_began(loss)
        loss.backward()
        self.sampling.backward_ended([])

    def update(self) -> None:
        self.sampling.update_began(self.optimizer)
        self.optimizer.step()
        self.sampling.update_ended(self.optimizer)

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.sent if each["kind"] == kind]


def multiply_gradients(script: Script, factor: float) -> None:
    for parameter in script.model.parameters():
        assert parameter.grad is not None
        parameter.grad *= factor


def test_steps_are_sampled_ever_more_rarely() -> None:
    assert [number for number in range(40) if is_sampled(number)] == [0, 1, 3, 7, 15, 31]


def test_optimizers_that_are_not_sampled_are_reported_once_and_only_if_they_are_used() -> None:
    script = Script()
    optimizers = [torch.optim.SGD(nn.Linear(1, 1).parameters()) for _ in range(MAX_OPTIMIZERS + 1)]
    for each in optimizers:
        script.sampling.optimizer_made(each)
    script.update()
    assert script.records("unseen") == []
    for each in 2 * optimizers:
        script.sampling.update_began(each)
        script.sampling.update_ended(each)
    (unseen,) = script.records("unseen")
    assert f"more than {MAX_OPTIMIZERS} optimizers are not sampled" in unseen["error"]


def test_positions_cover_all_tensors_and_draw_from_no_generator() -> None:
    state, own = torch.get_rng_state(), random.getstate()
    sizes = [1, 10**7, 5, 0, 300_000]
    chosen = positions(sizes)
    assert chosen == positions(sizes)
    assert sum(map(len, chosen)) <= MAX_VALUES and chosen[3] == [] and chosen[0] == [0]
    assert all(0 <= place < size for places, size in zip(chosen, sizes, strict=True) for place in places)
    assert max(chosen[1]) > 9 * 10**6 and min(chosen[1]) < 10**6
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == own


def test_local_gradients_are_those_before_synchronisation() -> None:
    script = Script()
    script.backward()
    multiply_gradients(script, 4.0)
    script.update()
    (record,) = script.records("gradients")
    local, given = record["local"][0], record["given"][0]
    assert fit(given, local) == (pytest.approx(4.0), pytest.approx(0.0, abs=1e-6)) and record["passes"] == 1
    assert record["reduced"] == record["local"] and record["detail"]["unused"] == 0


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_passes_that_accumulate_are_summed_also_if_the_script_changes_gradients_between(factor: float) -> None:
    script = Script()
    script.backward()
    multiply_gradients(script, factor)
    script.backward()
    script.update()
    (record,) = script.records("gradients")
    assert record["passes"] == 2
    assert record["given"][0] == pytest.approx([(1 + factor) / 2 * value for value in record["local"][0]], rel=1e-5)


def test_gradients_that_were_set_to_zero_do_not_count() -> None:
    script = Script()
    script.backward()
    script.optimizer.zero_grad()
    script.backward(scale=0.5)
    script.update()
    (record,) = script.records("gradients")
    assert record["passes"] == 1 and record["local"] == record["given"]
    assert record["detail"]["loss_scale"] == pytest.approx(0.5)


def test_a_hook_of_the_script_runs_after_ours() -> None:
    script = Script()

    def synchronise(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 3.0

    for parameter in script.model.parameters():
        parameter.register_post_accumulate_grad_hook(synchronise)
    script.backward()
    script.update()
    (record,) = script.records("gradients")
    assert record["given"][0] == pytest.approx([3 * value for value in record["local"][0]])


def test_only_sampled_updates_have_hooks_and_records() -> None:
    script = Script()
    for _ in range(9):
        script.optimizer.zero_grad()
        script.backward()
        script.update()
    assert [record["step"] for record in script.records("gradients")] == [0, 1, 3, 7]
    hashes = [(record["moment"], record["step"]) for record in script.records("parameters")]
    assert hashes == [("start", 0), ("step", 0), ("step", 1), ("step", 3), ("step", 7)]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in script.model.parameters())
    assert script.sampling.take_seconds() > 0 and script.sampling.take_seconds() == 0


def test_a_parameter_that_backward_does_not_reach_is_unused() -> None:
    script = Script()
    script.model.bias.requires_grad_(True)
    loss = (INPUTS @ script.model.weight.T).sum()
    script.sampling.backward_began(loss)
    loss.backward()
    script.sampling.backward_ended([])
    script.update()
    (record,) = script.records("gradients")
    assert record["detail"]["unused"] == 1 and record["given"][1] == [] == record["local"][1]


def test_collectives_between_backward_and_update_are_named_by_what_they_carry() -> None:
    script = Script()
    script.backward()
    weight = script.model.weight
    assert weight.grad is not None
    for tensor in (weight.grad, weight.data, torch.zeros(1), torch.zeros(8)):
        size = tensor.numel() * 4
        script.sampling.collective_began(Collective("all_reduce", size, 0.0, "main.py:9", "sync", {}, (tensor,)))
    script.update()
    (record,) = script.records("gradients")
    assert [row[3] for row in record["detail"]["between"]] == ["gradients", "parameters", "other", "all"]


def test_parameters_are_hashed_again_after_a_collective_on_them() -> None:
    script = Script()
    for number in range(7):
        script.optimizer.zero_grad()
        script.backward()
        script.update()
        if number == 4:
            data = script.model.weight.data
            script.sampling.collective_began(Collective("all_reduce", 24, 0.0, "main.py:9", "other", {}, (data,)))
    assert [record["step"] for record in script.records("parameters")] == [0, 0, 1, 3, 4]


def test_a_hash_covers_every_byte() -> None:
    batch = torch.zeros(1000, 28, 28)
    before = digest(iter([batch]))
    batch[700, 13, 5] = 1e-30
    assert digest(iter([batch])) != before == digest(iter([torch.zeros(1000, 28, 28)]))
    assert digest(iter([batch.t() for batch in [torch.ones(2, 3)]])) == digest(iter([torch.ones(3, 2)]))


def test_the_images_of_a_batch_are_hashed_one_by_one_unless_they_are_many() -> None:
    script = Script()
    images = torch.arange(12.0).reshape(3, 2, 2)
    script.sampling.data_ended(None, (images, torch.tensor([0, 1, 2])))
    script.sampling.data_ended(None, (images.flip(0), torch.tensor([0, 1, 2])))
    first, second = (record["detail"]["samples"] for record in script.records("batch"))
    assert len(set(first)) == 3 and second == first[::-1]
    script = Script()
    script.sampling.data_ended(None, torch.zeros(MAX_IMAGES + 1, 1))
    (many,) = script.records("batch")
    assert "samples" not in many["detail"] and many["images"] == MAX_IMAGES + 1


def test_the_scale_of_a_loss_is_read_from_its_graph() -> None:
    loss = nn.Linear(3, 1)(INPUTS).sum()
    assert loss_scale(loss / 4) == pytest.approx(0.25) and loss_scale(2 * (loss / 4)) == pytest.approx(0.5)
    assert loss_scale(loss) == 1.0 and loss_scale(loss * nn.Linear(1, 1).bias) == 1.0


def test_a_loss_that_is_a_sum_is_known_from_its_graph() -> None:
    out, labels = nn.Linear(3, 4)(torch.ones(2, 3)), torch.tensor([0, 1])
    mean, total = (nn.functional.cross_entropy(out, labels, reduction=kind) for kind in ("mean", "sum"))
    assert is_sum(total) and is_sum(total / 4) and is_sum([2 * (mean + 0.1 * total)]) and is_sum((out * out).sum())
    assert not (is_sum(mean) or is_sum(mean / 4 + 0.1 * out.mean()) or is_sum(out) or is_sum(None))


class Sampler:
    epoch, shuffle = 3, True


def test_only_whole_passes_are_written_with_the_updates_in_them() -> None:
    script, sampler = Script(), Sampler()
    script.sampling.sampler_began(sampler)  # peeked
    script.sampling.sampler_began(sampler)
    script.backward()
    script.update()
    script.sampling.sampler_passed(sampler, [2, 0, 1])
    script.sampling.ends()
    (record,) = script.records("pass")
    assert (record["epoch"], record["length"], record["shuffled"]) == (3, 3, True)
    assert record["detail"]["updates"] == 1


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    script = Script()
    script.sampling.data_ended(None, [INPUTS, {"labels": torch.ones(4)}])
    script.backward()
    script.update()
    script.sampling.sampler_began(sampler := Sampler())
    script.sampling.sampler_passed(sampler, [0])
    script.sampling.ends()
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in script.sent))
    assert {type(record).__name__ for record in read(path)} == {"Batch", "Parameters", "Gradients", "Pass"}
