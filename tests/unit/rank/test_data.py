"""Data sets, batches and partition: what a model gets, which rank gets which image, and that it is repeatable."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from testbed.rank import data
from testbed.rank.data import Batches, Dataset, Kind, Partition, open_dataset, open_datasets, test_batches
from testbed.spec.datasets import ARRAYS, DATASETS, MARKER, dataset_info
from testbed.spec.errors import SpecError, Unavailable

NOWHERE = Path("/nowhere")  # synthetic needs no folder


def small(count: int = 64, train: bool = True) -> Dataset:
    return open_dataset("synthetic", NOWHERE, train, subset=count)


def write(monkeypatch: pytest.MonkeyPatch, root: Path, name: str) -> None:
    """The files of a real data set, with 12 + 8 random images."""
    info = replace(dataset_info(name), train=12, test=8)
    monkeypatch.setitem(DATASETS, name, info)
    (root / name).mkdir()
    for array in ARRAYS:
        top = 256 if "images" in array else 10
        values = np.random.default_rng(1).integers(0, top, info.array_shape(array), np.uint8)
        np.save(root / name / f"{array}.npy", values)
    (root / name / MARKER).write_text(json.dumps({"digests": dict(info.digests)}))


# --- data sets ---------------------------------------------------------------------------------------------------


def test_synthetic_is_the_same_in_every_run_and_opens_at_once() -> None:
    started = time.process_time()
    train, test = open_dataset("synthetic", NOWHERE, True, seed=1), open_dataset("synthetic", NOWHERE, False)
    took = time.process_time() - started
    assert took < 0.4, f"two data sets opened in {took:.3f} s of CPU time, expected less than 0.2 s each"
    assert (len(train), len(test), train.shape) == (50_000, 10_000, (3, 32, 32))
    some = np.array([0, 4095, 4096, 49_999])
    np.testing.assert_array_equal(train.pick(some), open_dataset("synthetic", NOWHERE, True, seed=2).pick(some))
    assert not np.array_equal(train.pick(some[:1]), test.pick(some[:1]))


def test_synthetic_can_be_learnt_and_train_agrees_with_test() -> None:
    """Nearest class mean of 2000 training images finds the class of new ones."""
    train, test = small(2000), small(500, train=False)
    pixels, labels = train.pick(np.arange(2000)).reshape(2000, -1) / 255, train.labels
    means = np.stack([pixels[labels == c].mean(axis=0) for c in range(10)])
    unseen = test.pick(np.arange(500)).reshape(500, -1) / 255
    nearest = ((means**2).sum(axis=1) - 2 * unseen @ means.T).argmin(axis=1)
    assert (nearest == test.labels).mean() > 0.9


def test_synthetic_images_have_the_requested_shape() -> None:
    dataset = open_dataset("synthetic", NOWHERE, True, 8, shape=(1, 28, 30))
    images, _ = next(test_batches(dataset, 0, 1, split=False))
    assert images.shape == (8, 1, 28, 30)


def test_the_label_of_a_token_is_its_successor() -> None:
    dataset = open_dataset("text", NOWHERE, True, 8, shape=(12,))
    tokens, labels = dataset.batch(np.arange(8), None, torch.float64)
    assert tokens.shape == labels.shape == (8, 12) and tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_synthetic_text_can_be_learnt_and_train_agrees_with_test() -> None:
    """Every token has four successors, the same in training and test; the sequences differ."""
    found = []
    for train in (True, False):
        tokens, labels = open_dataset("text", NOWHERE, train).batch(np.arange(400), None, torch.float32)
        found.append(set(zip(tokens.flatten().tolist(), labels.flatten().tolist(), strict=True)))
    assert len(found[0] | found[1]) <= 4 * 256 and len(found[0] & found[1]) > 900
    one, other = (open_dataset("text", NOWHERE, train).batch(np.arange(9), None, torch.float32)[0] for train in (1, 0))
    assert not torch.equal(one, other)


def test_ranks_together_get_the_batch_of_one_rank_of_text_too() -> None:
    dataset = open_dataset("text", NOWHERE, True, 32)
    whole, _ = next(Batches(dataset, Partition(size=32, batch=8), 0, 1).epoch(0))
    parts = [next(Batches(dataset, Partition(size=32, batch=8), rank, 2).epoch(0))[0] for rank in range(2)]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), whole)


def test_the_sequences_of_a_file_follow_one_another_and_its_end_is_the_test_set(tmp_path: Path) -> None:
    text = bytes(range(200)) * 2
    (tmp_path / "book").write_bytes(text)
    train, test = (
        open_dataset("text:book", NOWHERE, part, shape=(8,), own=tmp_path / "book") for part in (True, False)
    )
    assert (len(train), len(test), train.classes) == (45, 4, 256)  # 49 sequences and one byte more
    for part, first in ((train, 0), (test, 45)):
        tokens, labels = part.batch(np.arange(len(part)), None, torch.float32)
        begin, end = 8 * first, 8 * (first + len(part))
        assert bytes(tokens.flatten().tolist()) == text[begin:end]
        assert bytes(labels.flatten().tolist()) == text[begin + 1 : end + 1]


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("short")
    with pytest.raises(SpecError, match=r"has 5 bytes, and 81 are needed for sequences of 8 tokens\. Use more"):
        open_dataset("text:book", NOWHERE, True, shape=(8,), own=tmp_path / "book")


OWN = """
import torch
from torch.utils.data import TensorDataset, random_split

class Listed(list):
    targets = [0, 6, 2]

def load():
    train = TensorDataset(torch.ones(6, 3).double(), torch.tensor([0, 1, 2, 3, 0, 1]))
    return train, TensorDataset(torch.zeros(2, 3), torch.zeros(2))

def pairs():
    return Listed([(torch.ones(2), k) for k in (0, 6, 2)]), [(torch.ones(2), 1)]

def unknown():
    return [(torch.ones(2), 1)] * 3, [(torch.ones(2), 1)]

def one():
    return [1, 2, 3]

def numbers():
    return [5, 6], [7]

def drawn():
    return random_split(TensorDataset(torch.arange(40.0), torch.arange(40)), [30, 10])

def split():
    train, test = drawn()
    return Listed(train), Listed(test)
"""


def own_data(
    folder: Path, function: str, subsets: tuple[int | None, int | None] = (None, None)
) -> tuple[Dataset, Dataset]:
    (folder / "abc-d.py").write_text(OWN)
    return open_datasets(f"d.py:{function}", NOWHERE, subsets, own=folder / "abc-d.py")


def test_a_users_data_set_has_the_type_of_the_run_and_as_many_classes_as_it_says(tmp_path: Path) -> None:
    train, test = own_data(tmp_path, "load")
    assert (len(train), train.shape, train.classes, len(test)) == (6, (3,), 4, 2)
    samples, labels = train.batch(np.array([1, 3]), None, torch.float32)
    assert samples.dtype == torch.float32 and labels.tolist() == [1, 3] and labels.dtype == torch.int64
    assert [each.classes for each in own_data(tmp_path, "pairs")] == [7, 7]


def test_no_sample_of_a_users_training_set_is_in_the_test_set_of_the_same_random_split(tmp_path: Path) -> None:
    """A second call of the function would draw another permutation from torch's generator."""
    train, test = (
        each.batch(np.arange(len(each)), None, torch.float32)[1] for each in own_data(tmp_path, "split", (20, 10))
    )
    assert (len(train), len(test)) == (20, 10) and not set(train.tolist()) & set(test.tolist())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("unknown", "its training set has neither `classes` nor `targets`, so that the number of classes is not known"),
        ("one", "one returned list, and a training and a test set are needed. Write `return train, test`."),
        ("numbers", "sample 0 is not a tensor and a class (d.py: TypeError: "),
    ],
)
def test_a_users_data_that_cannot_be_used_is_refused(tmp_path: Path, function: str, reason: str) -> None:
    with pytest.raises(SpecError) as refusal:
        own_data(tmp_path, function)
    assert str(refusal.value).startswith(f"data 'd.py:{function}': {reason}")


def test_images_are_resized_after_they_are_cropped() -> None:
    small = open_dataset("synthetic", NOWHERE, True, 48)
    large = open_dataset("synthetic", NOWHERE, True, 48, size=80)
    assert (small.shape, large.shape) == ((3, 32, 32), (3, 80, 80))
    batches = [next(Batches(each, Partition(size=48, batch=8), 0, 1, augment=True).epoch(0)) for each in (small, large)]
    (plain, labels), (resized, same) = batches
    assert resized.shape == (8, 3, 80, 80) and torch.equal(labels, same)
    back = torch.nn.functional.interpolate(resized, (32, 32), mode="bilinear", antialias=True)
    assert float((back - plain).abs().mean()) < 0.5 * float(plain.abs().mean())  # the same images, a little blurred
    assert torch.equal(data.resize(plain, 32), plain) and torch.equal(data.resize(plain, None), plain)


def test_synthetic_is_about_normal_after_normalising() -> None:
    images, _ = next(test_batches(small(), 0, 1, split=False))
    assert abs(float(images.mean())) < 0.05
    assert abs(float(images.std()) - 1) < 0.05


def test_a_subset_is_drawn_by_seed_without_repeats() -> None:
    full = open_dataset("synthetic", NOWHERE, False)
    one, again, other = (open_dataset("synthetic", NOWHERE, False, 100, seed) for seed in (1, 1, 2))
    assert len(one) == 100
    np.testing.assert_array_equal(one.rows, again.rows)
    assert not np.array_equal(one.rows, other.rows)
    assert len(open_dataset("synthetic", NOWHERE, False, len(full))) == len(full)


@pytest.mark.parametrize("subset", [0, 50_001])
def test_an_impossible_subset_is_refused(subset: int) -> None:
    with pytest.raises(SpecError, match=f"subset {subset}: must be 1 to 50000, the images of synthetic"):
        small(subset)


def test_a_data_set_that_was_not_fetched_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(
        Unavailable, match=r"not in .*cifar10. Get it with `testbed data get cifar10`, or use --data synthetic"
    ):
        open_dataset("cifar10", tmp_path, True)


def test_mnist_is_padded_to_32_with_black(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(monkeypatch, tmp_path, "mnist")
    dataset = open_dataset("mnist", tmp_path, True)
    picked = dataset.pick(np.arange(12))
    assert picked.shape == (12, 32, 32, 1)
    assert picked[:, :2].max() == picked[:, :, -2:].max() == 0
    np.testing.assert_array_equal(picked[:, 2:-2, 2:-2], np.load(tmp_path / "mnist" / "train_images.npy"))


# --- augmentation ------------------------------------------------------------------------------------------------


def test_each_augmented_image_is_one_of_the_possible_crops() -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), np.uint8)
    framed = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    found = set()
    for i, got in enumerate(data.crop_and_flip(images, data.draw(data.generator(0, 0), len(images)))):
        for top, left, step in np.ndindex(9, 9, 2):
            crop = framed[i, top : top + 32, left : left + 32].transpose(2, 0, 1)
            if np.array_equal(crop[:, :, :: -1 if step else 1], got):
                found.add((i, top, left, step))
    assert len(found) == 40
    assert {step for *_, step in found} == {0, 1}
    assert len({(top, left) for _, top, left, _ in found}) > 20


def test_normalise_is_torchvisions_arithmetic() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), np.uint8)
    mean, std = DATASETS["cifar10"].mean, DATASETS["cifar10"].std
    expected = torch.from_numpy(images).float() / 255
    for c in range(3):
        expected[:, c] = (expected[:, c] - mean[c]) / std[c]
    assert torch.equal(data.normalise(images, mean, std), expected)


# --- batches -----------------------------------------------------------------------------------------------------


def batches(rank: int = 0, on: bool | None = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batches:
    return Batches(small(), Partition(size=64, batch=16), rank, 2, on, seed, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("on", [True, False])
def test_a_batch_has_the_shape_and_type_that_a_model_needs(dtype: torch.dtype, on: bool) -> None:
    made = list(batches(on=on, dtype=dtype).epoch(0))
    assert len(made) == len(batches()) == 4
    for images, labels in made:
        assert images.shape == (8, 3, 32, 32)
        assert images.dtype == dtype
        assert images.is_contiguous()
        assert labels.dtype == torch.int64


def test_images_keep_their_labels() -> None:
    dataset, partition = small(), Partition(size=64, batch=16)
    for (images, labels), indices in zip(batches(on=False).epoch(3), partition.indices(0, 2, 3), strict=True):
        pixels = data.channels_first(dataset.pick(indices))
        assert torch.equal(images, data.normalise(pixels, dataset.mean, dataset.std))
        assert labels.tolist() == dataset.labels[indices].tolist()


def test_an_epoch_repeats_exactly_and_others_differ() -> None:
    """Also after other epochs: augmentation depends on (seed, epoch) and on nothing else."""
    made = batches()
    first = torch.cat([images for images, _ in made.epoch(1)])
    list(made.epoch(0))
    assert torch.equal(first, torch.cat([images for images, _ in made.epoch(1)]))
    for other in (batches(seed=1).epoch(1), batches(rank=1).epoch(1), batches().epoch(2)):
        assert not torch.equal(first, torch.cat([images for images, _ in other]))


def test_torchs_and_numpys_global_generators_are_not_used() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    list(batches().epoch(0))
    assert torch.equal(before, torch.get_rng_state())
    assert numpy_before == np.random.get_state()[1].tolist()  # type: ignore[index]


def test_by_default_only_cifar_is_augmented() -> None:
    assert {name for name, info in DATASETS.items() if info.augment} == {"cifar10"}
    assert not batches(on=None).augment
    assert batches(on=True).augment


@pytest.mark.parametrize("world", [1, 3, 4])
def test_split_test_batches_cover_every_image_once(world: int) -> None:
    dataset = small(50)
    shares = [list(test_batches(dataset, rank, world, split=True, batch=7)) for rank in range(world)]
    together = torch.cat([images for share in shares for images, _ in share])
    whole = torch.cat([images for images, _ in test_batches(dataset, 0, world, split=False)])
    assert torch.equal(together, whole)
    assert max(len(labels) for share in shares for _, labels in share) == 7


def test_a_batch_of_64_costs_less_than_3_percent_of_a_vgg_step() -> None:
    made = Batches(open_dataset("synthetic", NOWHERE, True), Partition(size=50_000, batch=256), 0, 4, augment=True)
    epoch = made.epoch(0)
    next(epoch)  # the first one makes the permutation
    started = time.process_time()
    for _ in range(40):
        next(epoch)
    each = (time.process_time() - started) / 40
    assert each < 0.03 * 1.1, f"{each * 1e3:.2f} ms of CPU time a batch of 64, bound 33 ms (VGG-11: 1.1 s a step)"


def test_augmented_images_are_the_same_on_any_number_of_ranks() -> None:
    partition, dataset = Partition(size=48, batch=24), open_dataset("synthetic", NOWHERE, True, subset=48)

    def epoch(rank: int, world: int) -> list[torch.Tensor]:
        return [images for images, _ in Batches(dataset, partition, rank, world, augment=True).epoch(3)]

    alone, shares = epoch(0, 1), [epoch(rank, 4) for rank in range(4)]
    for step, whole in enumerate(alone):
        for rank in range(4):
            assert torch.equal(shares[rank][step], whole[rank::4])


# --- partition --------------------------------------------------------------------------------------------------------


def seen(partition: Partition, world: int, epoch: int = 0) -> list[np.ndarray]:
    """The images of all ranks together, step by step, sorted."""
    ranks = [partition.indices(rank, world, epoch) for rank in range(world)]
    return [np.sort(np.concatenate(step)) for step in zip(*ranks, strict=True)]


@settings(max_examples=60, deadline=None)
@given(quarter=st.integers(1, 150), each=st.integers(1, 20), seed=st.integers(0, 2**31), epoch=st.integers(0, 50))
def test_step_k_is_the_same_set_of_images_for_1_2_and_4_ranks(quarter: int, each: int, seed: int, epoch: int) -> None:
    partition = Partition(size=4 * quarter, batch=4 * each, seed=seed)
    one, two, four = (seen(partition, world, epoch) for world in (1, 2, 4))
    assert len(one) == len(two) == len(four) == partition.steps(4)
    for steps in zip(one, two, four, strict=True):
        np.testing.assert_array_equal(steps[0], steps[1])
        np.testing.assert_array_equal(steps[0], steps[2])


def test_a_size_that_does_not_divide_changes_only_the_last_step() -> None:
    partition = Partition(size=101, batch=12)
    one, four = seen(partition, 1), seen(partition, 4)
    assert len(one) == len(four) == 9
    np.testing.assert_array_equal(np.concatenate(one[:-1]), np.concatenate(four[:-1]))
    assert set(one[-1]) < set(four[-1])  # DistributedSampler pads with the epoch's first images


@pytest.mark.parametrize(("size", "world", "epoch"), [(100, 4, 0), (101, 4, 3), (50_000, 4, 1), (7, 2, 2)])
def test_sampler_is_distributed_sampler(size: int, world: int, epoch: int) -> None:
    partition = Partition(size=size, batch=8 * world, seed=5)
    for rank in range(world):
        sampler = DistributedSampler(range(size), world, rank, shuffle=True, seed=5)  # type: ignore[arg-type, var-annotated]
        sampler.set_epoch(epoch)
        steps = partition.indices(rank, world, epoch)
        assert np.concatenate(steps).tolist() == list(sampler)
        assert {len(step) for step in steps[:-1]} <= {8}
        assert 1 <= len(steps[-1]) <= 8


def test_r0_has_196_steps_an_epoch_and_keeps_the_small_last_one() -> None:
    partition = Partition(size=50_000, batch=256)
    steps = partition.indices(3, 4, 0)
    assert partition.steps(1) == partition.steps(4) == len(steps) == 196
    assert len(steps[-1]) == 20


def test_sampler_has_a_new_order_in_every_epoch_and_for_every_seed() -> None:
    first = Partition(size=100, batch=100).indices(0, 1, 0)[0]
    assert not np.array_equal(first, Partition(size=100, batch=100).indices(0, 1, 1)[0])
    assert not np.array_equal(first, Partition(size=100, batch=100, seed=1).indices(0, 1, 0)[0])


def test_fixed_is_r3s_split_the_same_in_every_epoch() -> None:
    partition = Partition(size=100, batch=100, kind="fixed")
    for epoch in (0, 7):
        assert [partition.indices(rank, 4, epoch)[0].tolist() for rank in range(4)] == [
            list(range(25 * rank, 25 * rank + 25)) for rank in range(4)
        ]


def test_fixed_leaves_out_a_remainder_so_that_all_ranks_have_equally_many_steps() -> None:
    partition = Partition(size=103, batch=100, kind="fixed")
    assert [len(partition.indices(rank, 4, 0)) for rank in range(4)] == [1, 1, 1, 1]
    assert partition.steps(4) == 1


@pytest.mark.parametrize("kind", ["sampler", "fixed"])
def test_uneven_shares_cut_each_global_batch_and_drop_the_incomplete_one(kind: Kind) -> None:
    partition = Partition(size=107, batch=10, kind=kind, shares=(5, 3, 2), seed=3)
    ranks = [partition.indices(rank, 3, 1) for rank in range(3)]
    assert [{len(step) for step in steps} for steps in ranks] == [{5}, {3}, {2}]
    assert partition.steps(3) == len(ranks[0]) == 10
    everything = np.concatenate([np.concatenate(steps) for steps in ranks])
    assert len(set(everything.tolist())) == 100


def test_uneven_shares_see_the_global_batches_of_one_rank() -> None:
    uneven = seen(Partition(size=100, batch=10, shares=(7, 3), seed=3), 2, epoch=4)
    one = seen(Partition(size=100, batch=10, seed=3), 1, epoch=4)
    np.testing.assert_array_equal(uneven, one)


def test_fixed_uneven_shares_repeat_every_epoch_in_blocks() -> None:
    partition = Partition(size=20, batch=10, kind="fixed", shares=(7, 3))
    assert np.concatenate(partition.indices(1, 2, 5)).tolist() == list(range(14, 20))


def test_equal_shares_are_the_same_as_none() -> None:
    plain, shared = Partition(size=103, batch=8), Partition(size=103, batch=8, shares=(4, 4))
    assert [s.tolist() for s in plain.indices(1, 2, 0)] == [s.tolist() for s in shared.indices(1, 2, 0)]


def test_fewer_images_than_one_step_needs_are_refused() -> None:
    with pytest.raises(SpecError, match="subset 3: at least 4 images are needed for one step"):
        Partition(size=3, batch=4).steps(4)


@pytest.mark.parametrize("shares", [None, (5, 4), (6, 4)])
def test_values_that_runspec_refuses_fail_an_assertion(shares: tuple[int, ...] | None) -> None:
    with pytest.raises(AssertionError, match="for 3 ranks"):
        Partition(size=100, batch=10, shares=shares).indices(0, 3, 0)
