"""Every exact mode trains the same model as the flat ring: LeNet-5 in float64, with every feature of the optimizer.

`make test` trains a sample of the modes, this part all of them. Only the order of additions may differ.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from testbed.spec.mode import ALGORITHMS, SyncMode, legal_modes
from tests.bench.figures import Figure
from tests.support.rank_pool import RankPool
from tests.support.training import TrainedRun, lenet, train

REFERENCE = "ring"  # short for ring/flat
MAX_DIFFERENCE = 1e-9  # relative
SMALL = 1e-3  # added to the denominator for parameters, because rounding errors do not shrink with a parameter
FULL_OPTIMIZER: dict[str, Any] = {
    "steps": 200,
    "optimizer": {
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "schedule": "cosine",
        "warmup": 10,
        "clip": 1.0,
    },
}


def exact_modes(bucket: str = "64KiB") -> list[str]:
    """Return every built-in mode whose ranks all apply the exact mean of all gradients."""
    legal = [mode for mode in legal_modes(bucket) if mode.algorithm in ALGORITHMS]
    return [str(mode) for mode in legal if mode.distributed and mode.synchronous]


def differences(run: TrainedRun, reference: TrainedRun) -> dict[str, float]:
    """Return the largest relative difference of the losses and of each parameter."""
    actual, expected = run.arrays(), reference.arrays()
    found = {name: _relative(actual[name], values, SMALL) for name, values in expected.items()}
    return {"losses": _relative(np.array(run.summary.losses), np.array(reference.summary.losses)), **found}


def _relative(actual: np.ndarray, expected: np.ndarray, small: float = 0.0) -> float:
    return float(np.max(np.abs(actual - expected) / (np.abs(expected) + small)))


def worst(found: dict[str, float]) -> tuple[str, float]:
    """Return the name and value of the largest difference; NaN counts as larger than any number."""
    return max(found.items(), key=lambda item: (math.isnan(item[1]), item[1]))


def measure() -> Iterator[Figure]:
    found = _all_differences()
    mode, value = worst(found)
    ranks, steps = lenet().nodes, FULL_OPTIMIZER["steps"]
    yield Figure(
        name=f"{len(found)} exact modes against {REFERENCE}/flat: worst relative difference of losses and parameters",
        value=value,
        high=MAX_DIFFERENCE,
        detail=f"{mode}; LeNet-5 in float64, {ranks} processes, {steps} steps, replicas bit-identical",
    )


def _all_differences() -> dict[str, float]:
    """Return the worst difference of each mode. A run whose replicas differ fails."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        pool = RankPool(lenet().nodes, Path(name))
        try:
            reference = _train(pool, REFERENCE)
            for mode in exact_modes():
                where, found[mode] = worst(differences(_train(pool, mode), reference))
                print(f"    {mode}: {found[mode]:.1e} ({where})", flush=True)
        finally:
            pool.close()
    return found


def _train(pool: RankPool, mode: str) -> TrainedRun:
    folder = Path(tempfile.mkdtemp(dir=pool.folder))
    racks = {"topology": {"racks": [[0], [1, 2, 3]]}} if SyncMode.parse(mode).row.follows_racks else {}
    return train(pool, lenet(mode=mode, **FULL_OPTIMIZER, **racks), folder)
