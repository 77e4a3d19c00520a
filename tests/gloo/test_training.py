"""Whole training runs: every synchronous mode trains the same model, and every other mode differs as documented."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed.results.folder import RunFolder
from testbed.spec.run import RunSpec
from tests.bench.exact import FULL_OPTIMIZER, MAX_DIFFERENCE, REFERENCE, differences, exact_modes, worst
from tests.support import training
from tests.support.rank_pool import RankPool
from tests.support.training import TrainedRun, lenet

pytestmark = pytest.mark.gloo

SYNCHRONOUS = [
    "gather",
    "gather/flat",
    "allreduce",
    "allreduce/bucket:64KiB",
    "ring",
    "ring/param",
    "ring/bucket:64KiB",
    "ring-reduce",
    "tree",
    "halving",
    "server",
    "server/param",
    "direct",
    "ddp",
    "ddp/bucket:64KiB",
    "ring/bucket:64KiB/overlap",
    "allreduce/param/overlap",
    "ring/bucket:64KiB/pipeline",
    "ring/pipeline",
]
CLOSE = {"float32": 1e-4, "float64": 1e-9}  # relative: only the order of additions differs


Train = Callable[..., TrainedRun]


@pytest.fixture(scope="module")
def train(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train(mode="ring")` trains LeNet-5 on four real ranks with these changes; equal calls train once."""

    @functools.cache
    def cached(text: str) -> TrainedRun:
        spec = RunSpec.from_json(text, "case")
        return training.train(ranks(spec.nodes), spec, tmp_path_factory.mktemp("run"))

    return lambda **changes: cached(lenet(**changes).to_json())


def assert_same_parameters(one: TrainedRun, other: TrainedRun, tolerance: float = 1e-9) -> None:
    mine, theirs = one.arrays(), other.arrays()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        np.testing.assert_allclose(value, theirs[name], rtol=tolerance, atol=tolerance, err_msg=name)


# --- models of the user's own ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train_file(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train_file(model="mine.py:make", mode="ring")` trains a model of a file on three ranks; equal calls once."""
    keys = {"batch": 24, "nodes": 3, "steps": 20, "dtype": "float64", "optimizer": {"lr": 0.05}, "seed": 3}

    @functools.cache
    def cached(text: str) -> TrainedRun:
        spec = RunSpec.load(json.loads(text), "case").with_files()
        folder = tmp_path_factory.mktemp("own") / "run"
        RunFolder(folder).create(spec)
        return training.train(ranks(spec.nodes), spec, folder)

    return lambda **changes: cached(json.dumps(keys | changes))


@pytest.fixture(scope="module")
def train_own(train_file: Train, repository: Path) -> Train:
    """`train_own(mode="ring")` trains the model and the data of examples/own_model.py: attention, tied and frozen."""
    file = repository / "examples" / "own_model.py"
    return lambda mode: train_file(model=f"{file}:make", data={"name": f"{file}:load"}, mode=mode)


@pytest.mark.parametrize("mode", [*SYNCHRONOUS, "ring/bucket:1KiB/pipeline"])
def test_a_users_model_with_attention_and_tied_weights_is_trained_as_by_one_node(train_own: Train, mode: str) -> None:
    one, many = train_own(mode="single"), train_own(mode=mode)
    assert len(set(many.hashes)) == 1 and many.summary.replicas_agree is True
    np.testing.assert_allclose(many.summary.losses, one.summary.losses, rtol=CLOSE["float64"])
    assert_same_parameters(many, one)
    assert statistics.fmean(many.summary.losses[-5:]) < 0.9 * many.summary.losses[0], "nothing was learnt"


DRAWN = """
import os
import random

import numpy as np
import torch
from torch.utils.data import TensorDataset, random_split


def load(start=0):
    order = np.random.permutation(300).tolist()
    random.shuffle(order)
    order = torch.tensor(order)
    samples = torch.sin(torch.outer(order + 1.0, torch.arange(12.0) + start))
    train, test = random_split(TensorDataset(samples, (order + start) % 5), [240, 60])
    train.classes = 5
    return train, test


def other():
    return load(int(os.environ["RANK"]))
"""


@pytest.fixture(scope="module")
def train_drawn(train_file: Train, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train_drawn("load", mode="ring")` trains on data whose order is drawn without a seed of their own."""
    file = tmp_path_factory.mktemp("drawn") / "drawn.py"
    file.write_text(DRAWN)
    model = f"{repository / 'examples' / 'own_model.py'}:make"
    return lambda function, mode: train_file(model=model, data={"name": f"{file}:{function}"}, steps=6, mode=mode)


def test_data_in_an_order_that_is_drawn_is_the_same_on_all_ranks(train_drawn: Train) -> None:
    """By the generators of torch, numpy and Python, which the run's seed sets."""
    one, many = train_drawn("load", mode="single"), train_drawn("load", mode="ring")
    np.testing.assert_allclose(many.summary.losses, one.summary.losses, rtol=CLOSE["float64"])
    assert_same_parameters(many, one)


def test_data_that_differ_between_ranks_are_refused(train_drawn: Train) -> None:
    refusals = train_drawn("other", mode="ring").refusals
    assert len(refusals) == 3
    assert all("has other labels, or another order of them, on rank 1, 2 than on rank 0" in text for text in refusals)


CHANNELS_LAST = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 5, 3, stride=4), nn.Conv2d(5, 7, 3)
        self.head = nn.Linear(7 * 6 * 6, classes)

    def forward(self, x):
        for layer in (self.first, self.second):
            for kept in (layer.weight, layer.weight.grad):
                assert kept is None or kept.is_contiguous(memory_format=torch.channels_last), kept.stride()
            x = torch.tanh(layer(x))
        return self.head(x.flatten(1))


def make(classes, channels):
    return Net(classes, channels).to(memory_format=torch.channels_last)
"""


@pytest.fixture(scope="module")
def train_channels_last(train_file: Train, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Its forward fails if weights or their gradients are not in channels_last order."""
    file = tmp_path_factory.mktemp("channels_last") / "net.py"
    file.write_text(CHANNELS_LAST)
    data = {"name": "synthetic", "subset": 240, "test_subset": 24}
    return lambda mode: train_file(model=f"{file}:make", data=data, steps=6, mode=mode)


@pytest.mark.parametrize("mode", ["ring", "server", "ddp", "ring/bucket:1KiB/overlap", "ring/bucket:1KiB/pipeline"])
def test_a_model_in_channels_last_order_stays_so_and_is_trained_as_by_one_node(
    train_channels_last: Train, mode: str
) -> None:
    one, many = train_channels_last(mode="single"), train_channels_last(mode=mode)
    assert len(set(many.hashes)) == 1
    np.testing.assert_allclose(many.summary.losses, one.summary.losses, rtol=CLOSE["float64"])
    assert_same_parameters(many, one)


MIXED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.base = nn.Linear(channels, 8).to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(8, classes)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(1.0, 5.0)))

    def forward(self, x):
        x = self.base(x.to(torch.bfloat16)).to(x.dtype)
        turned = torch.view_as_complex(x.unflatten(1, (4, 2)).contiguous()) * self.turns
        return self.head(torch.view_as_real(turned).flatten(1))


def make(classes, channels):
    return Net(classes, channels)
"""


@pytest.fixture(scope="module")
def train_mixed(train_file: Train, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Its first parameters are frozen and bfloat16, and a constant is complex."""
    file = tmp_path_factory.mktemp("mixed") / "net.py"
    file.write_text(MIXED)
    data = {"name": f"{repository / 'examples' / 'own_model.py'}:load", "subset": 240, "test_subset": 24}
    return lambda mode: train_file(model=f"{file}:make", data=data, steps=6, mode=mode)


@pytest.mark.parametrize("mode", ["ring", "server", "ddp", "ring/bucket:1KiB/overlap", "ring/bucket:1KiB/pipeline"])
def test_a_model_with_a_frozen_base_of_another_type_is_trained_as_by_one_node(train_mixed: Train, mode: str) -> None:
    one, many = train_mixed(mode="single"), train_mixed(mode=mode)
    assert len(set(many.hashes)) == 1
    np.testing.assert_allclose(many.summary.losses, one.summary.losses, rtol=CLOSE["float64"])
    assert_same_parameters(many, one)


# --- transformers ---------------------------------------------------------------------------------------------------

FEW = {"nodes": 3, "batch": 6, "steps": 3, "warmup": 0, "optimizer": {"lr": 0.02}}
TRANSFORMERS: dict[str, dict[str, Any]] = {  # sequences of 8 tokens, and 4 patches: weights are as many as ever
    "gpt": FEW | {"data": {"name": "text", "size": 8, "subset": 60, "test_subset": 6}},
    "vit_tiny": FEW | {"data": {"size": 8, "subset": 60, "test_subset": 6}},
}


@pytest.mark.parametrize("mode", ["ring", "ddp", "ring/bucket:1MiB/overlap", "ring/pipeline"])
@pytest.mark.parametrize("model", TRANSFORMERS)
def test_a_transformer_is_trained_as_by_one_node(train: Train, model: str, mode: str) -> None:
    """The weights of gpt's first and last layer are tied; attention of vit_tiny reads a layer that is never called."""
    one, many = (train(model=model, mode=each, **TRANSFORMERS[model]) for each in ("single", mode))
    assert len(many.summary.losses) == 3 and len(set(many.hashes)) == 1 and many.summary.replicas_agree is True
    np.testing.assert_allclose(many.summary.losses, one.summary.losses, rtol=CLOSE["float64"])
    begin, end = (each["parameters"] for each in many.of_kind("hash")[0])
    assert begin != end, "nothing was updated"
    assert_same_parameters(many, one)
    many.remove_arrays()


# --- all synchronous modes train one model -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", SYNCHRONOUS)
def test_a_synchronous_mode_has_the_loss_curve_of_one_node(train: Train, mode: str, dtype: str) -> None:
    one, many = train(mode="single", dtype=dtype), train(mode=mode, dtype=dtype)
    assert len(many.summary.losses) == 20
    np.testing.assert_allclose(many.summary.losses, one.summary.losses, rtol=CLOSE[dtype])
    assert statistics.fmean(many.summary.losses[-5:]) < 0.5 * many.summary.losses[0], "nothing was learnt"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", SYNCHRONOUS)
def test_a_synchronous_mode_ends_with_equal_hashes_on_all_ranks(train: Train, mode: str, dtype: str) -> None:
    run = train(mode=mode, dtype=dtype)
    assert len(run.hashes) == 4
    assert len(set(run.hashes)) == 1
    assert run.summary.replicas_agree is True
    for hashes in run.of_kind("hash"):
        assert [(h["step"], h["agree"]) for h in hashes] == [(0, True), (20, True)]


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("mode", ["ring", "halving", "ddp"])
def test_the_number_of_ranks_does_not_change_the_model(train: Train, mode: str, nodes: int) -> None:
    assert_same_parameters(train(mode=mode, nodes=nodes), train(mode="single"))


PIPELINES = ["ring/bucket:64KiB/pipeline"]
SCHEDULED = ["ring/bucket:64KiB/overlap", "ring/bucket:64KiB/pipeline"]
# Those that update or overlap in another way; the rest differ in the order of sums alone. `make bench ARGS=exact`
# trains all modes, for 200 steps; here only the one that updates in a place of its own is trained so long.
EXACT = ["allreduce", "server", "ddp", *PIPELINES, "allreduce/bucket:64KiB/overlap", "ring/param/overlap"]


@pytest.mark.parametrize(("mode", "steps"), [(mode, 200 if mode == PIPELINES[0] else 60) for mode in EXACT])
def test_all_steps_are_the_flat_rings_with_all_that_an_optimizer_does(train: Train, mode: str, steps: int) -> None:
    ours, plain = (train(mode=each, **{**FULL_OPTIMIZER, "steps": steps}) for each in (mode, REFERENCE))
    assert len(set(ours.hashes)) == 1 and len(ours.summary.losses) == steps
    name, difference = worst(differences(ours, plain))
    assert difference <= MAX_DIFFERENCE, name


def test_the_sample_is_of_all_exact_modes() -> None:
    assert set(EXACT) < set(exact_modes()) and REFERENCE in exact_modes()


def test_nan_is_the_largest_difference() -> None:
    assert worst({"a": 1.0, "b": float("nan"), "c": 2.0})[0] == "b"
    assert worst({"a": 1.0, "c": 2.0}) == ("c", 2.0)


@pytest.mark.parametrize("mode", ["ring/bucket:64KiB/pipeline", "allreduce/bucket:64KiB/overlap", "ddp", "ring"])
def test_what_is_busy_is_exposed_or_hidden(train: Train, mode: str) -> None:
    """An inequality, not an equation: how well they add up depends on how busy the machine is."""
    for steps in train(mode=mode).of_kind("step"):
        for step in steps[2:]:
            assert 0 < step["busy"] <= step["blocked"] + step["hidden"] + 1e-5
            assert step["hidden"] <= step["busy"] + 1e-5
            assert step["busy"] <= step["total"]
            for _, offset, seconds, size in step["comm"]:
                assert 0 <= offset <= offset + seconds <= step["total"] + 1e-5
                assert size > 0


@pytest.mark.parametrize("mode", ["ring/bucket:64KiB/pipeline", "ddp", "ring"])
def test_recording_does_not_change_the_training(train: Train, mode: str) -> None:
    assert train(mode=mode, spans=False).hashes == train(mode=mode).hashes


def test_payload_by_kind_is_what_theory_says(train: Train) -> None:
    steps, size = 20, train(mode="ring").summary.gradient_bytes
    assert size is not None
    half = steps * 3 / 4 * size
    kinds = {mode: [end["payload"] for (end,) in train(mode=mode).of_kind("end")] for mode in (*PIPELINES, "ring")}
    for payload in kinds["ring"]:
        assert payload["gradients"] == pytest.approx(2 * half, rel=1e-3)
    for mode in PIPELINES:
        for payload in kinds[mode]:
            assert payload["gradients"] == pytest.approx(half, rel=1e-2)
            assert payload["parameters"] == pytest.approx(half, rel=1e-2)


@pytest.mark.parametrize("mode", ["ring", *PIPELINES])
def test_the_kernel_counts_what_was_sent_from_the_first_step_to_the_end(train: Train, mode: str) -> None:
    """Without what was sent before the first step, with what was in flight at the end of the last."""
    for (end,) in train(mode=mode).of_kind("end"):
        assert end["sent"] - end["before"] == pytest.approx(sum(end["payload"].values()), rel=0.03)


def test_another_seed_trains_another_model(train: Train) -> None:
    assert train(mode="ring", seed=8).hashes[0] != train(mode="ring").hashes[0]


def test_ring_and_allreduce_agree_on_r3s_experiment(train: Train) -> None:
    """100 images, a fixed block of 25 for each of 4 ranks, epoch after epoch."""
    r3 = {
        "data": {"name": "synthetic", "subset": 100, "partition": "fixed", "test_subset": 40},
        "batch": 100,
        "steps": None,
        "epochs": 8,
        "evaluate": "every-rank",
        "optimizer": {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0},
    }
    ring, allreduce = train(mode="ring", **r3), train(mode="allreduce", **r3)
    assert len(ring.summary.losses) == 8
    np.testing.assert_allclose(ring.summary.losses, allreduce.summary.losses, rtol=1e-9)
    for tests in ring.of_kind("eval"):
        assert [test["epoch"] for test in tests] == list(range(8))
        assert all(0 <= test["train_accuracy"] <= 1 for test in tests)


def test_testing_split_over_ranks_counts_every_image_once(train: Train) -> None:
    split, alone = train(mode="ring"), train(mode="single")
    found = {(e["correct"], e["images"]) for evals in split.of_kind("eval") for e in evals}
    assert found == {(e["correct"], e["images"]) for e in alone.of_kind("eval")[0]}
    assert split.summary.test_loss == pytest.approx(alone.summary.test_loss, rel=1e-9)


# --- the same global batch, cut differently ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ring", "server", "ddp", "single", *SCHEDULED])
def test_accumulating_two_halves_is_the_whole_batch(train: Train, mode: str) -> None:
    halves = train(mode=mode, accumulate=2)
    assert_same_parameters(halves, train(mode=mode))
    np.testing.assert_allclose(halves.summary.losses, train(mode=mode).summary.losses, rtol=1e-9)


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("mode", ["ring", "ddp"])
def test_accumulating_sends_no_more_than_the_whole_batch(train: Train, mode: str, accumulate: int) -> None:
    parts, whole = train(mode=mode, accumulate=accumulate).summary, train(mode=mode).summary
    assert parts.sent_per_step == pytest.approx(whole.sent_per_step, rel=0.02)
    assert parts.received_per_step == pytest.approx(whole.received_per_step, rel=0.02)


@pytest.mark.parametrize("mode", SCHEDULED)
def test_accumulating_launches_every_buffer_once(train: Train, mode: str) -> None:
    halves, whole = train(mode=mode, accumulate=2).of_kind("end"), train(mode=mode).of_kind("end")
    for (mine,), (theirs,) in zip(halves, whole, strict=True):
        assert mine["payload"]["gradients"] == theirs["payload"]["gradients"] > 0
        assert mine["payload"].get("parameters") == theirs["payload"].get("parameters")


@pytest.mark.parametrize("mode", ["ring", "gather", "server", "ddp", *SCHEDULED])
def test_uneven_shares_of_the_same_batch_train_the_same_model(train: Train, mode: str) -> None:
    uneven = train(mode=mode, data={"shares": [3, 5, 6, 10]})
    assert [{step["images"] for step in steps} for steps in uneven.of_kind("step")] == [{3}, {5}, {6}, {10}]
    assert_same_parameters(uneven, train(mode="single"))
    np.testing.assert_allclose(uneven.summary.losses, train(mode="single").summary.losses, rtol=1e-9)
    assert len(set(uneven.hashes)) == 1


@pytest.mark.parametrize("mode", ["ring", *SCHEDULED])
def test_uneven_shares_can_be_accumulated_too(train: Train, mode: str) -> None:
    uneven = train(mode=mode, accumulate=2, data={"shares": [2, 4, 6, 12]})
    assert_same_parameters(uneven, train(mode="single"))


# --- every:K, and R3's mistake -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "gradients", "parameters"),
    [("ring/every:3", 0, 7), ("ring/every:3@10", 10, 4), ("ring/every:20", 0, 1), ("ring/every:1000", 0, 1)],
)
def test_every_k_averages_as_often_as_it_says(train: Train, mode: str, gradients: int, parameters: int) -> None:
    """In 20 steps, by what was sent; the last, incomplete round is averaged, too."""
    for (end,), (plain,) in zip(train(mode=mode).of_kind("end"), train(mode="ring").of_kind("end"), strict=True):
        sent, twenty = end["payload"], plain["payload"]["gradients"]
        assert 20 * sent.get("gradients", 0) == gradients * twenty
        assert 20 * sent["parameters"] == parameters * twenty > 0


def test_every_three_differs_between_ranks_and_agrees_at_the_end(train: Train) -> None:
    run = train(mode="ring/every:3")  # 20 steps: the last round has only two
    assert len(set(run.hashes)) == 1
    assert run.summary.replicas_agree is True
    assert run.hashes[0] != train(mode="ring").hashes[0]


def test_every_three_is_tested_only_at_the_end_of_its_epochs(train: Train) -> None:
    """Two epochs of four steps: at the end of the first the replicas differ, so they are not tested."""
    two = {"data": {"subset": 96}, "steps": None, "epochs": 2}
    run = train(mode="ring/every:3", **two)
    assert len(run.summary.losses) == 8
    assert [[(e["step"], e["epoch"]) for e in evals] for evals in run.of_kind("eval")] == [[(8, 1)]] * 4
    assert [[h["step"] for h in hashes] for hashes in run.of_kind("hash")] == [[0, 8]] * 4
    assert len(set(run.hashes)) == 1 and run.summary.replicas_agree is True
    plain = train(mode="ring", **two)  # a mode without drift is tested after each
    assert [[e["step"] for e in evals] for evals in plain.of_kind("eval")] == [[4, 8]] * 4


def test_every_one_is_the_plain_mode(train: Train) -> None:
    assert train(mode="ring/every:1").hashes == train(mode="ring").hashes


def test_every_three_from_step_ten_is_the_plain_mode_up_to_there(train: Train) -> None:
    late, plain = train(mode="ring/every:3@10").summary.losses, train(mode="ring").summary.losses
    assert late[:11] == plain[:11]  # step 10 still computes its loss on common parameters
    assert late[11:] != plain[11:]


def test_after_the_step_replicas_drift_apart_and_that_is_no_error(train: Train) -> None:
    run = train(mode="ring", placement="after-step")
    assert len(set(run.hashes)) == 4
    assert run.summary.replicas_agree is False
    assert [hashes[-1]["agree"] for hashes in run.of_kind("hash")] == [False] * 4


def test_after_the_step_every_rank_trains_alone(train: Train) -> None:
    """So averaging once at the very end (every:1000) is the mean of what the mistake leaves on the ranks."""
    alone, averaged = train(mode="ring", placement="after-step"), train(mode="ring/every:1000")
    for name, value in averaged.arrays().items():
        mean = np.mean([alone.arrays(rank)[name] for rank in range(4)], axis=0)
        np.testing.assert_allclose(value, mean, rtol=1e-12, atol=1e-14, err_msg=name)


# --- resized images ----------------------------------------------------------------------------------------------


def test_a_model_for_larger_images_trains_and_is_tested_on_resized_ones(train: Train) -> None:
    resized = {"model": "squeezenet1_1", "data": {"size": 40, "test_subset": 4}, "batch": 4, "steps": 2, "warmup": 0}
    run = train(mode="ring", nodes=2, **resized)
    assert len(run.summary.losses) == 2 and len(set(run.hashes)) == 1
    assert [test["images"] for tests in run.of_kind("eval") for test in tests] == [4, 4]


# --- optimizers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ring", "server", *SCHEDULED])
@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_an_optimizer_with_state_agrees_across_ranks_and_with_one_node(train: Train, name: str, mode: str) -> None:
    chosen = {"optimizer": {"name": name, "lr": 0.001}, "nodes": 2}
    run = train(mode=mode, **chosen)
    assert len(set(run.hashes)) == 1
    np.testing.assert_allclose(run.summary.losses, train(mode="single", **chosen).summary.losses, rtol=1e-6)


def test_clipping_and_a_schedule_act_on_the_mean_gradient(train: Train) -> None:
    chosen = {"optimizer": {"clip": 0.5, "schedule": "cosine", "warmup": 3, "base_batch": 12}}
    assert_same_parameters(train(mode="ring", **chosen), train(mode="single", **chosen))
    assert train(mode="ring", **chosen).hashes[0] != train(mode="ring").hashes[0]


# --- BatchNorm, as R1 found it -----------------------------------------------------------------------------------

VGG: dict[str, Any] = {
    "model": "vgg11",
    "dtype": "float32",
    "nodes": 2,
    "batch": 8,
    "steps": 2,
    "warmup": 0,
    "evaluate": "every-rank",
    "data": {"name": "synthetic", "subset": 64, "test_subset": 50},
}


def final_losses(run: TrainedRun) -> list[float]:
    return [evals[-1]["loss"] for evals in run.of_kind("eval")]


@pytest.mark.parametrize("how", ["broadcast", "average", "untracked"])
def test_with_common_statistics_all_ranks_test_alike(train: Train, how: str) -> None:
    run = train(mode="allreduce/flat", batchnorm=how, **VGG)
    assert len(set(final_losses(run))) == 1
    assert len(set(run.summary.per_rank_accuracy)) == 1
    assert len(set(run.hashes)) == 1


def test_with_local_statistics_ranks_of_one_model_test_differently(train: Train) -> None:
    run = train(mode="allreduce/flat", batchnorm="local", **VGG)
    assert len(set(final_losses(run))) == 2
    assert len(set(run.hashes)) == 1  # the parameters are the same all the same


def test_broadcast_tests_with_rank_0s_statistics_and_average_with_the_mean(train: Train) -> None:
    runs = {how: train(mode="allreduce/flat", batchnorm=how, **VGG) for how in ("local", "broadcast", "average")}
    arrays = {how: [run.arrays(rank) for rank in range(2)] for how, run in runs.items()}
    buffers = [name for name in arrays["local"][0] if "running" in name]
    assert len(buffers) == 2 * 8
    for name, rank in itertools.product(buffers, range(2)):
        local = [arrays["local"][k][name] for k in range(2)]
        assert not np.array_equal(*local), name
        np.testing.assert_array_equal(arrays["broadcast"][rank][name], local[0])
        np.testing.assert_allclose(arrays["average"][rank][name], np.mean(local, axis=0), rtol=1e-5, atol=1e-7)


def test_ddp_and_our_modes_treat_statistics_alike(train: Train) -> None:
    ddp, ours = (train(mode=mode, batchnorm="broadcast", **VGG) for mode in ("ddp", "allreduce/flat"))
    assert final_losses(ddp)[0] == final_losses(ddp)[1] == pytest.approx(final_losses(ours)[0], rel=1e-4)
