"""Race: which of several candidates is the fastest, from a few noisy times of each, and how sure that is.

Times of one candidate vary by a factor, so logarithms are compared. All candidates are taken to vary alike, and before
anything is known by SPREAD: two runs that happen to agree must not look like certainty. The fastest are repeated in
any case (`due`): on a machine that is busy with other things, a single run says little.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field

TOLERANCE = 0.02  # two candidates this close are as good as each other
SURE = 0.95  # of the leader: that no other is faster by more than the tolerance
OUT = 0.01  # a candidate whose chance is less than this gets no more runs
SPREAD, WEIGHT = 0.03, 4  # what is assumed of the spread of runs, and how many runs that assumption is worth
DRAWS = 4000


@dataclass
class Race:
    """Seconds of every run of every candidate, by name."""

    times: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def centre(self, name: str) -> float:
        return math.exp(self._log(name))

    def leader(self) -> str:
        return min(self.times, key=self._log)

    def due(self) -> list[str]:
        """Who must run again, whatever the chances say, so that the spread is measured and not assumed.

        Successive halving: the faster half runs twice, the fastest quarter three times.
        """
        ordered = sorted(self.times, key=self._log)
        halves = {max(3, len(ordered) // 2): 2, max(2, len(ordered) // 4): 3}
        wanted = {name: runs for first, runs in halves.items() for name in ordered[:first]}
        return [name for name, runs in wanted.items() if len(self.times[name]) < runs]

    def repeated(self) -> bool:
        """False while the spread is only assumed."""
        return any(len(times) > 1 for times in self.times.values())

    def interval(self, name: str) -> tuple[float, float]:
        """95 % bounds of a candidate's time."""
        width = _quantile(self._freedom()) * self._spread() / math.sqrt(len(self.times[name]))
        return self.centre(name) * math.exp(-width), self.centre(name) * math.exp(width)

    def chances(self) -> dict[str, float]:
        """The chance of each to be the one to take: the fastest, and not merely by the tolerance before the leader.

        What is left is the leader's: how sure it is. Drawn with a seed of its own: same times, same chances.
        """
        draw, freedom, leader = random.Random(0), self._freedom(), self.leader()
        names = list(self.times)
        widths = [self._spread() / math.sqrt(len(self.times[name])) for name in names]
        won = dict.fromkeys(names, 0)
        for _ in range(DRAWS):
            stretch = math.sqrt(freedom / (2 * draw.gammavariate(freedom / 2, 1)))  # the spread is not known exactly
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
        """Standard deviation of one run's logarithm, pooled over all candidates and the assumption."""
        squares = sum((math.log(t) - self._log(name)) ** 2 for name, times in self.times.items() for t in times)
        return math.sqrt((WEIGHT * SPREAD**2 + squares) / self._freedom())


def _quantile(freedom: int) -> float:
    """Student's 97.5 % quantile, by its expansion around the normal's; within 2 % from 4 degrees of freedom on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
