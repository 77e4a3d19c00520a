"""Whole training runs by the real loop on a pool of ranks, and what comes out of them: for tests and for the bench."""

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
    "optimizer": {"lr": 0.1},  # steep, so that a difference would show: the loss falls from 2.3 to about 0.5
}


class Finished:
    """One run's outcome: its summary, every rank's records, every rank's parameters and buffers."""

    def __init__(self, spec: RunSpec, folder: Path, answers: list[dict[str, Any]]) -> None:
        self.summary: Summary = summarise(RunFolder(folder), spec, status="ok")
        self.records = [
            [vars(record) for record in read(RunFolder(folder).records(rank))] for rank in range(spec.world)
        ]
        self.hashes = [answer["hash"] for answer in answers if "hash" in answer]
        self._arrays = [answer["arrays"] for answer in answers]

    def arrays(self, rank: int = 0) -> dict[str, np.ndarray]:
        with np.load(self._arrays[rank]) as arrays:
            return dict(arrays)

    def of_kind(self, kind: str) -> list[list[dict[str, Any]]]:
        return [[record for record in records if record["kind"] == kind] for records in self.records]


def lenet(**changes: Any) -> RunSpec:
    """LeNet-5 on four ranks, with changes laid over it."""
    return RunSpec.load(merge(LENET, changes), "case")


def train(pool: RankPool, spec: RunSpec, folder: Path) -> Finished:
    """Do the run on as many of the pool's ranks as it has; records go to the folder."""
    answers = pool.run("train", spec=spec.model_dump(mode="json", by_alias=True), run=str(folder))
    return Finished(spec, folder, answers)
