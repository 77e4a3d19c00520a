"""torchvision's real classes in a script: they find the testbed's data sets and download nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from testbed.attach.vision import cifar_digests
from testbed.data import layouts
from testbed.results.observations import Setup
from testbed.results.records import read
from testbed.spec.datasets import ARRAYS
from tests.hosts.conftest import make_mnist
from tests.support.command import COMMAND

pytestmark = pytest.mark.gloo
ROOT = Path(__file__).parents[2]
CIFAR = """
import json, sys
import torch
from testbed.attach.vision import Vision
offered, changed = json.loads(sys.argv[1]), []
Vision(offered, changed, lambda seam, error: sys.exit(f"{seam}: {error}")).install()
from torchvision import datasets
try:
    train = datasets.CIFAR10(root=sys.argv[2], download=sys.argv[3] == "download")
    test = datasets.CIFAR10(sys.argv[2], train=False)
    print(json.dumps([len(train), len(test), train.classes[0], changed[-1]]))
except RuntimeError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with few images of CIFAR-10's shape."""
    monkeypatch.setattr(layouts, "CIFAR_PER_FILE", 2)
    folder = tmp_path / "ours" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    shapes = {
        "train_images": (10, 32, 32, 3),
        "train_labels": (10,),
        "test_images": (2, 32, 32, 3),
        "test_labels": (2,),
    }
    layouts.WRITERS["cifar10"](folder, {a: random.integers(0, 10, shapes[a], dtype=np.uint8) for a in ARRAYS})
    return tmp_path / "ours"


def use(root: Path, digests: dict[str, str], where: str, download: bool = True) -> object:
    offered = json.dumps({"cifar10": {"root": str(root), "digests": digests}})
    argv = [sys.executable, "-c", CIFAR, offered, where, "download" if download else "no"]
    done = subprocess.run(argv, cwd=root.parent, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.parametrize("where", ["new/data", "a-file/data"])
def test_cifar_10_is_linked_wherever_the_script_looks(cifar: Path, where: str) -> None:
    (cifar.parent / "a-file").touch()  # no folder can be made below it
    found = use(cifar, cifar_digests(str(cifar / "cifar-10-batches-py")), where)
    assert isinstance(found, list) and found[:3] == [10, 2, "airplane"]
    assert "CIFAR-10 was not downloaded" in found[3] and "SHA-256" in found[3]
    assert (cifar.parent / "new").exists() == (where == "new/data")


def test_cifar_10_with_other_images_is_refused_by_torchvision(cifar: Path) -> None:
    digests = cifar_digests(str(cifar / "cifar-10-batches-py")) | {"test_labels": "0"}
    assert "not found or corrupted" in str(use(cifar, digests, str(cifar), download=False))


@pytest.mark.parametrize("root", ["./data", "../data"])
def test_an_unchanged_script_finds_mnist(tmp_path: Path, root: str) -> None:
    data = tmp_path / "store"
    make_mnist(data)
    folder = data / "mnist" / layouts.LAYOUT / layouts.FOLDERS["mnist"]
    folder.mkdir(parents=True)  # as if made before: the images of this test are not the real ones
    arrays = {array: np.load(data / "mnist" / f"{array}.npy") for array in ARRAYS}
    layouts.WRITERS["mnist"](folder, arrays)
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(ROOT / "tests/scripts/torchvision_data.py", work)
    flags = ["exec", "--nodes", "2", "--on", "process", "--share", "--set", "probe=false", "--out", "r", "--json"]
    argv = [*COMMAND, *flags, "--", "python", "torchvision_data.py", "MNIST", root]
    env = os.environ | {"TESTBED_DATA": str(data)}
    done = subprocess.run(argv, cwd=work, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    total = int(arrays["train_images"][:100].sum(dtype=np.int64))
    assert f"60000 images, 10000 for testing, sum {total}" in (work / "r/rank0.log").read_text()
    for rank in range(2):
        setup = next(each for each in read(work / f"r/rank{rank}.jsonl") if isinstance(each, Setup))
        assert any("MNIST was not downloaded" in sentence for sentence in setup.changed)
    assert not (work / "data").exists(), "links are made in the working copies only"
