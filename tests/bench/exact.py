"""Every exact mode trains the model of the flat ring: LeNet-5 in float64, with all that an optimizer does.

`make test` trains a sample of the modes, this part all of them; only the order of additions may differ.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from testbed.spec.mode import ALGORITHMS, legal_modes
from tests.bench.figures import Figure
from tests.support.rank_pool import RankPool
from tests.support.training import Finished, lenet, train

PLAIN = "ring"  # which is ring/flat
LIMIT = 1e-9  # relative
SMALL = 1e-3  # a parameter nearer to zero is held against this: what sums lose does not shrink with them
EVERYTHING: dict[str, Any] = {
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
    """Every built-in mode whose ranks all apply the mean of all gradients, of which nothing was left out."""
    legal = [mode for mode in legal_modes(bucket) if mode.algorithm in ALGORITHMS]
    return [str(mode) for mode in legal if mode.distributed and mode.synchronous]


def differences(ours: Finished, plain: Finished) -> dict[str, float]:
    """The largest of the losses, and of each parameter; relative."""
    mine, theirs = ours.arrays(), plain.arrays()
    found = {name: _relative(mine[name], values, SMALL) for name, values in theirs.items()}
    return {"losses": _relative(np.array(ours.summary.losses), np.array(plain.summary.losses)), **found}


def _relative(got: np.ndarray, wanted: np.ndarray, small: float = 0.0) -> float:
    return float(np.max(np.abs(got - wanted) / (np.abs(wanted) + small)))


def worst(found: dict[str, float]) -> tuple[str, float]:
    """Its name, and how large it is; nothing is worse than what is no number."""
    return max(found.items(), key=lambda item: (math.isnan(item[1]), item[1]))


def measure() -> Iterator[Figure]:
    found = _all_differences()
    mode, value = worst(found)
    ranks, steps = lenet().nodes, EVERYTHING["steps"]
    yield Figure(
        name=f"{len(found)} exact modes against {PLAIN}/flat: worst relative difference of losses and parameters",
        value=value,
        high=LIMIT,
        detail=f"{mode}; LeNet-5 in float64, {ranks} processes, {steps} steps, replicas bit-identical",
    )


def _all_differences() -> dict[str, float]:
    """By mode. A run whose replicas differ ends with an error."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        pool = RankPool(lenet().nodes, Path(name))
        try:
            plain = _train(pool, PLAIN)
            for mode in exact_modes():
                where, found[mode] = worst(differences(_train(pool, mode), plain))
                print(f"    {mode}: {found[mode]:.1e} ({where})", flush=True)
        finally:
            pool.close()
    return found


def _train(pool: RankPool, mode: str) -> Finished:
    folder = Path(tempfile.mkdtemp(dir=pool.folder))
    return train(pool, lenet(mode=mode, **EVERYTHING), folder)
