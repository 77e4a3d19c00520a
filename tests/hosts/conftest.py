"""Four hosts for the whole session; the first command line deploys to them and runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from testbed.spec.datasets import ARRAYS, MARKER, dataset_info
from tests.hosts.nodes import Nodes


@dataclass
class Cluster:
    """The hosts, and the result of the first command line on them."""

    nodes: Nodes
    first: subprocess.CompletedProcess[str]


def make_mnist(root: Path) -> None:
    """Arrays of MNIST's shapes, which is all that a rank checks: tests download nothing."""
    info = dataset_info("mnist")
    (root / "mnist").mkdir(parents=True)
    for array in ARRAYS:
        shape = info.array_shape(array)
        values = np.arange(int(np.prod(shape)), dtype=np.uint32) % (10 if "labels" in array else 251)
        np.save(root / "mnist" / f"{array}.npy", values.astype(np.uint8).reshape(shape))
    (root / "mnist" / MARKER).write_text(json.dumps({"name": "mnist", "digests": dict(info.digests)}))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, image: str) -> Iterator[Cluster]:
    nodes = Nodes(tmp_path_factory.mktemp("hosts"))
    try:
        nodes.up()
        make_mnist(nodes.folder / "data")
        quick = ["--model", "lenet5", "--data", "mnist", "--steps", "6", "--set", "data.test_subset=200"]
        first = nodes.fab("doctor", "deploy", "run", "--mode", "ring", *quick, timeout=800)
        yield Cluster(nodes, first)
    finally:
        nodes.down()


@pytest.fixture
def nodes(cluster: Cluster) -> Nodes:
    assert cluster.first.returncode == 0, cluster.first.stdout + cluster.first.stderr
    return cluster.nodes
