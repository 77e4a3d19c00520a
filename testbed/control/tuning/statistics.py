"""Race: find the fastest of several candidates from a few noisy times of each, and how probable that result is.

Times of one candidate vary by a factor, so logarithms are compared. All candidates are assumed to have the same
standard deviation. Its estimate includes the assumed value SPREAD: otherwise two equal times would give a deviation of
0, and the result would count as certain. The fastest candidates always run again (`due`), because on a busy machine one
run is not enough.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field

TOLERANCE = 0.02  # candidates that differ by less are equally good
REQUIRED_CERTAINTY = 0.95  # required probability that no candidate is faster than the leader by more than the tolerance
MIN_PROBABILITY = 0.01  # a candidate with a smaller probability to be the fastest gets no more runs
SPREAD, WEIGHT = 0.03, 4  # assumed standard deviation of a run's logarithm, and its weight in runs
DRAWS = 4000  # of the Monte Carlo estimate


@dataclass
class Race:
    """Seconds of every run of every candidate, by name."""

    times: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def centre(self, name: str) -> float:
        """Return the geometric mean of a candidate's times."""
        return math.exp(self._log(name))

    def leader(self) -> str:
        """Return the candidate with the smallest mean."""
        return min(self.times, key=self._log)

    def due(self) -> list[str]:
        """Return the candidates that must run again so that the spread is measured, not assumed.

        Successive halving: the faster half runs twice, the fastest quarter three times.
        """
        ordered = sorted(self.times, key=self._log)
        halves = {max(3, len(ordered) // 2): 2, max(2, len(ordered) // 4): 3}
        wanted = {name: runs for first, runs in halves.items() for name in ordered[:first]}
        return [name for name, runs in wanted.items() if len(self.times[name]) < runs]

    def repeated(self) -> bool:
        """True if any candidate ran more than once; until then the spread is assumed."""
        return any(len(times) > 1 for times in self.times.values())

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % confidence interval of a candidate's time."""
        width = _quantile(self._freedom()) * self._spread() / math.sqrt(len(self.times[name]))
        return self.centre(name) * math.exp(-width), self.centre(name) * math.exp(width)

    def probability_best(self) -> dict[str, float]:
        """Return for each candidate the probability that it is the fastest.

        Only a candidate that is faster than the leader by more than the tolerance counts; the leader has the rest. The
        random generator has a fixed seed: same times, same result.
        """
        draw, freedom, leader = random.Random(0), self._freedom(), self.leader()
        names = list(self.times)
        widths = [self._spread() / math.sqrt(len(self.times[name])) for name in names]
        won = dict.fromkeys(names, 0)
        for _ in range(DRAWS):
            stretch = math.sqrt(freedom / (2 * draw.gammavariate(freedom / 2, 1)))  # the spread itself is uncertain
            logs = [draw.gauss(self._log(n), stretch * w) for n, w in zip(names, widths, strict=True)]
            first = min(range(len(names)), key=logs.__getitem__)
            close = logs[names.index(leader)] - logs[first] <= math.log1p(TOLERANCE)
            won[leader if close else names[first]] += 1
        return {name: count / DRAWS for name, count in won.items()}

    def _log(self, name: str) -> float:
        return statistics.fmean(math.log(t) for t in self.times[name])

    def _freedom(self) -> int:
        return WEIGHT + sum(len(times) - 1 for times in self.times.values())

    def _spread(self) -> float:
        """Standard deviation of one run's logarithm, pooled over all candidates and the assumed SPREAD."""
        squares = sum((math.log(t) - self._log(name)) ** 2 for name, times in self.times.items() for t in times)
        return math.sqrt((WEIGHT * SPREAD**2 + squares) / self._freedom())


def _quantile(freedom: int) -> float:
    """Return Student's 97.5 % quantile, by its expansion around the normal's; within 2 % from 4 degrees of freedom."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
