"""Data sets: shapes, digests, and when a folder is complete."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from testbed.spec.datasets import (
    ARRAYS,
    CIFAR10,
    DATASETS,
    MARKER,
    MNIST,
    data_dir,
    dataset_info,
    is_complete,
    require_complete,
)
from testbed.spec.errors import SpecError, Unavailable


def write_zeros(name: str, root: Path) -> Path:
    """A folder of the right shapes; is_complete does not read contents."""
    folder = root / name
    folder.mkdir(parents=True)
    for array in ARRAYS:
        np.save(folder / f"{array}.npy", np.zeros(dataset_info(name).array_shape(array), np.uint8))
    (folder / MARKER).write_text(json.dumps({"digests": dict(dataset_info(name).digests)}))
    return folder


@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "mnist", replace(MNIST, train=6, test=3))


def test_every_entry_is_consistent() -> None:
    for name, info in DATASETS.items():
        assert info.name == name
        assert len(info.mean) == len(info.std) == (info.shape[0] if info.unit == "images" else 0)
        assert set(info.digests) == (set() if name in ("synthetic", "text") else set(ARRAYS))
        assert all(len(digest) == 64 for digest in info.digests.values())


def test_mnist_is_stored_28_wide_and_seen_32_wide() -> None:
    assert MNIST.shape == (1, 32, 32)
    assert MNIST.array_shape("train_images") == (60_000, 28, 28, 1)
    assert MNIST.array_shape("test_labels") == (10_000,)
    assert CIFAR10.array_shape("test_images") == (10_000, 32, 32, 3)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"'imagenet'.*cifar10, mnist, synthetic"):
        dataset_info("imagenet")


def test_data_dir_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_DATA", "/srv/data")
    assert data_dir() == Path("/srv/data")
    monkeypatch.setenv("TESTBED_DATA", "")
    assert data_dir() == Path("data")


def test_synthetic_is_always_complete(tmp_path: Path) -> None:
    assert is_complete("synthetic", tmp_path)


def test_nothing_there_is_not_complete(tmp_path: Path) -> None:
    assert not is_complete("cifar10", tmp_path)


@pytest.mark.usefixtures("small_mnist")
class TestComplete:
    def test_files_and_marker(self, tmp_path: Path) -> None:
        write_zeros("mnist", tmp_path)
        assert is_complete("mnist", tmp_path)

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"digests": {"train_images": "0"}}'])
    def test_a_wrong_marker(self, tmp_path: Path, content: str) -> None:
        (write_zeros("mnist", tmp_path) / MARKER).write_text(content)
        assert not is_complete("mnist", tmp_path)

    def test_a_file_cut_short(self, tmp_path: Path) -> None:
        path = write_zeros("mnist", tmp_path) / "train_images.npy"
        path.write_bytes(path.read_bytes()[:-1])
        assert not is_complete("mnist", tmp_path)

    @pytest.mark.parametrize("array", [np.zeros(5, np.uint8), np.zeros(6, np.int64), np.array([{}] * 6)])
    def test_a_wrong_shape_or_type(self, tmp_path: Path, array: np.ndarray) -> None:
        np.save(write_zeros("mnist", tmp_path) / "train_labels.npy", array)
        assert not is_complete("mnist", tmp_path)

    @pytest.mark.parametrize("content", [b"", b"not an array"])
    def test_no_array_at_all(self, tmp_path: Path, content: bytes) -> None:
        (write_zeros("mnist", tmp_path) / "test_labels.npy").write_bytes(content)
        assert not is_complete("mnist", tmp_path)


def test_a_data_set_that_is_not_there_is_refused_with_its_folder_and_the_way_out(tmp_path: Path) -> None:
    require_complete("synthetic", tmp_path)
    with pytest.raises(
        Unavailable, match=rf"^data 'mnist': not in {tmp_path}/mnist\. Get it with `testbed data get mnist`"
    ):
        require_complete("mnist", tmp_path)
