"""Whole training runs with the real loop on a pool of ranks, for tests and benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from testbed.results.conclude import Summary, summarise
from testbed.results.folder import RunFolder
from testbed.results.records import read
from testbed.spec.experiment import merge
from testbed.spec.run import RunSpec
from tests.support.rank_pool import RankPool

LENET: dict[str, Any] = {
    "model": "lenet5",
    "data": {"name": "synthetic", "subset": 640, "test_subset": 40},
    "batch": 24,
    "nodes": 4,
    "steps": 20,
    "seed": 7,
    "dtype": "float64",
    "optimizer": {"lr": 0.1},  # high, so that differences show: the loss falls from 2.3 to about 0.5
}


class TrainedRun:
    """What a run produced: its summary, and the records, parameters and buffers of every rank."""

    def __init__(self, spec: RunSpec, folder: Path, answers: list[dict[str, Any]]) -> None:
        self.summary: Summary = summarise(RunFolder(folder), spec, status="ok")
        self.records = [
            [vars(record) for record in read(RunFolder(folder).records(rank))] for rank in range(spec.world)
        ]
        self.hashes = [answer["hash"] for answer in answers if "hash" in answer]
        self.refusals = [answer["refused"] for answer in answers if "refused" in answer]
        self._arrays = [answer["arrays"] for answer in answers]

    def arrays(self, rank: int = 0) -> dict[str, np.ndarray]:
        with np.load(self._arrays[rank]) as arrays:
            return dict(arrays)

    def remove_arrays(self) -> None:
        """Delete the files of parameters and buffers, which for a large model are many megabytes a rank."""
        for path in self._arrays:
            Path(path).unlink(missing_ok=True)

    def of_kind(self, kind: str) -> list[list[dict[str, Any]]]:
        return [[record for record in records if record["kind"] == kind] for records in self.records]


def lenet(**changes: Any) -> RunSpec:
    """Return the spec of LeNet-5 on four ranks, with these changes."""
    return RunSpec.load(merge(LENET, changes), "case")


def train(pool: RankPool, spec: RunSpec, folder: Path, **case: Any) -> TrainedRun:
    """Train on the first ranks of the pool; records go to the folder. `case`: see `train` in tests/gloo/worker.py."""
    folder.mkdir(exist_ok=True)
    answers = pool.run("train", spec=spec.model_dump(mode="json", by_alias=True), run=str(folder), **case)
    return TrainedRun(spec, folder, answers)
