"""What a script's synchronisation does to its gradients: samples of all ranks, fitted to their mean.

The mean of all ranks' local gradients is calculated in float64. The gradients that each optimizer gets are fitted to
it: given = factor x mean + rest. The residual is the length of the rest divided by the length of the fitted part. If
the script clips gradients, the samples from before clipping are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from testbed.results.observations import Gradients
from testbed.results.records import Record

EXACT = 1e-3  # gradients are the mean up to this residual and this deviation of the factor; rounding is below 1e-5
COARSE = 0.05  # the same limit for a lossy codec, e.g. a hook that sends 16 or 8 bits

Kind = Literal["mean", "nearly", "sum", "divided", "scaled", "local", "partial", "other", "zero", "equal", "unseen"]
IN_WORDS: dict[str, str] = {
    "mean": "the plain mean over all ranks",
    "nearly": "the mean over all ranks with a small error, such as that of a lossy codec",
    "sum": "the sum over all ranks, not their mean",
    "divided": "the mean over all ranks, divided by their number once more",
    "scaled": "the mean over all ranks times a constant",
    "local": "each rank's own gradients: nothing synchronised them",
    "partial": "the mean on some ranks, the rank's own gradients on others",
    "other": "no multiple of the mean over all ranks",
    "zero": "all zero",
    "equal": "equal on all ranks before any synchronisation, so that synchronising would not change them",
    "unseen": "not seen",
}


@dataclass(frozen=True)
class Fit:
    """The fit of one sample, or the one that stands for several samples."""

    factor: float  # of the mean, as defined above; median over ranks
    residual: float  # largest over ranks
    kind: Kind
    step: int = 0
    optimizer: int = 0
    ranks: tuple[float, ...] = ()  # the residual to the mean, by rank
    own: tuple[float, ...] = ()  # the residual to the rank's own local gradients, by rank
    samples: int = 1  # of this kind
    decided: int = 1  # samples of all kinds that show what the optimizer gets

    @property
    def is_mean(self) -> bool:
        """True if the optimizers got the plain mean."""
        return self.kind == "mean"

    @property
    def words(self) -> str:
        return IN_WORDS[self.kind]


def gradient_fit(records_by_rank: Mapping[int, Sequence[Record]]) -> Fit:
    """Return what a script's optimizers get: the mean only if each sample that shows it is the mean.

    If all are the mean, this is the worst of them, else the first that is not.
    """
    fits = gradient_fits(records_by_rank)
    decided = [fit for fit in fits if fit.kind not in ("zero", "equal", "unseen")] or fits
    if not decided:
        return Fit(math.nan, math.nan, "unseen", samples=0)
    wrong = next((fit for fit in decided if not fit.is_mean), None)
    found = wrong or max(decided, key=lambda fit: (fit.residual, fit.step))
    same = sum(fit.kind == found.kind for fit in decided)
    return replace(found, samples=same, decided=len(decided))


def gradient_fits(records_by_rank: Mapping[int, Sequence[Record]]) -> list[Fit]:
    """Return one fit for each update that all ranks sampled; none for a single rank."""
    ranks = sorted(records_by_rank)
    sampled = [_by_update(records_by_rank[rank]) for rank in ranks]
    if len(ranks) < 2:
        return []
    common = set.intersection(*(set(each) for each in sampled))
    return [fit_sample([each[key] for each in sampled]) for key in sorted(common, key=lambda key: (key[1], key[0]))]


def _by_update(records: Iterable[Record]) -> dict[tuple[int, int], Gradients]:
    found = (record for record in records if isinstance(record, Gradients))
    return {(optimizer_of(record), record.step): record for record in found}


def optimizer_of(record: Gradients) -> int:
    """Return the number of the optimizer, in the order in which the script made its optimizers."""
    number = record.detail.get("optimizer", 0)
    return number if isinstance(number, int) else 0


def fit_sample(samples: Sequence[Gradients]) -> Fit:
    """Return the fit of one update. `samples`: one of each rank, in rank order."""
    step, optimizer = samples[0].step, optimizer_of(samples[0])
    unseen = Fit(math.nan, math.nan, "unseen", step, optimizer)
    pairs = [_flat(sample) for sample in samples]
    if any(pair is None for pair in pairs) or any(sample.names != samples[0].names for sample in samples):
        return unseen
    local = [pair[0] for pair in pairs if pair]
    given = [pair[1] for pair in pairs if pair]
    if len({len(values) for values in (*local, *given)}) != 1 or not local[0]:
        return unseen
    if not all(math.isfinite(value) for values in (*local, *given) for value in values):
        return unseen
    world = len(samples)
    mean = [math.fsum(values) / world for values in zip(*local, strict=True)]
    fits = [fit(values, mean) for values in given]
    own = [fit(values, base) for values, base in zip(given, local, strict=True)]
    factors = sorted(factor for factor, _ in fits)
    factor, residuals = factors[world // 2], tuple(residual for _, residual in fits)
    kind = _kind(local, given, fits, own)
    return Fit(factor, max(residuals), kind, step, optimizer, residuals, tuple(each[1] for each in own))


def fit(values: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the factor of `base` in `values` by least squares, and the residual."""
    square = math.fsum(b * b for b in base)
    if square == 0.0:
        return (1.0, 0.0) if not any(values) else (math.inf, math.inf)
    factor = math.fsum(a * b for a, b in zip(values, base, strict=True)) / square
    rest = math.sqrt(math.fsum((a - factor * b) ** 2 for a, b in zip(values, base, strict=True)))
    return factor, rest / (abs(factor) * math.sqrt(square)) if factor else (0.0 if not rest else math.inf)


def _flat(sample: Gradients) -> tuple[list[float], list[float]] | None:
    """Return local and given values of all tensors in one list each; None if they cannot be compared."""
    given = sample.unclipped or sample.given
    if sample.detail.get("sharded") or len(given) != len(sample.local) or not any(sample.local):
        return None
    local: list[float] = []
    got: list[float] = []
    for ours, theirs in zip(sample.local, given, strict=True):
        if len(ours) != len(theirs):
            return None
        local += ours
        got += theirs
    return local, got


def _kind(
    local: list[list[float]],
    given: list[list[float]],
    fits: list[tuple[float, float]],
    own: list[tuple[float, float]],
) -> Kind:
    world = len(local)
    if not any(value for values in (*local, *given) for value in values):
        return "zero"
    if all(values == local[0] for values in local) and all(values == local[0] for values in given):
        return "equal"
    on_mean = [residual <= EXACT for _, residual in fits]
    alone = [near(factor, 1.0) and residual <= EXACT for factor, residual in own]
    if all(on_mean):
        return _by_factor([factor for factor, _ in fits], world)
    if all(alone):
        return "local"
    if all(a or b for a, b in zip(on_mean, alone, strict=True)) and any(on_mean):
        return "partial"
    return "nearly" if all(near(factor, 1.0, COARSE) and rest <= COARSE for factor, rest in fits) else "other"


def _by_factor(factors: Sequence[float], world: int) -> Kind:
    kinds: tuple[tuple[Kind, float], ...] = (("mean", 1.0), ("sum", float(world)), ("divided", 1.0 / world))
    for kind, expected in kinds:
        if all(near(factor, expected) for factor in factors):
            return kind
    return "scaled" if all(near(factor, factors[0]) for factor in factors) else "other"


def near(value: float, expected: float, tolerance: float = EXACT) -> bool:
    """Return True if a factor is the expected one within a relative tolerance."""
    return abs(value - expected) <= tolerance * abs(expected)
