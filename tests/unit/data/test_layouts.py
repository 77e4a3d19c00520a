"""Data sets in torchvision's layout: the files that its classes read."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from testbed.data import layouts as module
from testbed.data.fetch import CIFAR_PARTS, MNIST_FILES
from testbed.data.layouts import FOLDERS, layouts, make_layout
from testbed.spec import datasets
from testbed.spec.datasets import ARRAYS, MARKER, DatasetInfo, dataset_info
from testbed.spec.errors import Unavailable


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with two complete data sets of few images."""
    monkeypatch.setattr(module, "CIFAR_PER_FILE", 10)
    for name, train in (("cifar10", 50), ("mnist", 30)):
        info = dataset_info(name).__class__(**{**vars(dataset_info(name)), "train": train, "test": 10})
        random = np.random.default_rng(0)
        (tmp_path / name).mkdir()
        digests = {}
        for array in ARRAYS:
            values = random.integers(0, 10 if "labels" in array else 256, info.array_shape(array), dtype=np.uint8)
            np.save(tmp_path / name / f"{array}.npy", values)
            digests[array] = hashlib.sha256(values.tobytes()).hexdigest()
        made = DatasetInfo(**{**vars(info), "digests": digests})
        monkeypatch.setitem(datasets.DATASETS, name, made)
        (tmp_path / name / MARKER).write_text(json.dumps({"digests": digests}))
    return tmp_path


@pytest.mark.parametrize(("encoding", "key"), [("latin1", str), ("bytes", str.encode)])
def test_cifar_files_are_pickles_of_python_2(small: Path, encoding: str, key: type) -> None:
    folder = make_layout("cifar10", small) / FOLDERS["cifar10"]
    images, labels = np.load(small / "cifar10/train_images.npy"), np.load(small / "cifar10/train_labels.npy")
    assert sorted(path.name for path in folder.iterdir()) == sorted([*CIFAR_PARTS, "batches.meta"])
    parts = [pickle.loads((folder / part).read_bytes(), encoding=encoding) for part in CIFAR_PARTS]
    read = np.concatenate([part[key("data")] for part in parts[:5]])
    assert read.shape == (50, 3072)
    assert np.array_equal(read.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), images)
    assert [label for part in parts[:5] for label in part[key("labels")]] == labels.tolist()
    assert len(parts[5][key("filenames")]) == 10 and parts[5][key("batch_label")] == key("testing batch 1 of 1")
    meta = pickle.loads((folder / "batches.meta").read_bytes(), encoding=encoding)
    assert meta[key("label_names")][9] == key("truck") and meta[key("num_vis")] == 3072


def test_mnist_files_are_idx(small: Path) -> None:
    folder = make_layout("mnist", small) / FOLDERS["mnist"]
    for file, array in zip(MNIST_FILES, ARRAYS, strict=True):
        values, data = np.load(small / f"mnist/{array}.npy"), (folder / file).read_bytes()
        dims = 3 if "images" in array else 1
        assert data[:4] == bytes((0, 0, 8, dims)) and int.from_bytes(data[4:8], "big") == len(values)
        assert data[4 + 4 * dims :] == values.tobytes()


def test_a_layout_is_made_once_and_readable_for_all(small: Path) -> None:
    made = layouts(small)
    before = {name: path.stat().st_ino for name, path in made.items()}
    assert {name: path.stat().st_ino for name, path in layouts(small, small / "unused").items()} == before
    assert made == {name: small / name / "torchvision" for name in ("cifar10", "mnist")}
    for folder, _, _ in os.walk(made["mnist"]):
        assert Path(folder).stat().st_mode & 0o005 == 0o005
    assert not list(small.rglob(".torchvision.*"))


def test_where_the_data_folder_cannot_be_written_the_layout_is_made_elsewhere(small: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert layouts(small, scratch)["mnist"] == scratch / "mnist"
    assert not (small / "mnist" / "torchvision").exists()


def test_wrong_arrays_give_no_layout(small: Path) -> None:
    labels = np.load(small / "mnist/test_labels.npy")
    np.save(small / "mnist/test_labels.npy", 9 - labels)
    with pytest.raises(Unavailable, match="wrong SHA-256 of test_labels"):
        make_layout("mnist", small)
    assert not (small / "mnist" / "torchvision").exists()


def test_without_data_sets_there_is_no_layout(tmp_path: Path) -> None:
    assert layouts(tmp_path) == {}
