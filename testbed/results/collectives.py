"""The name of an observed collective in `Step.comm`: what theory needs to know of it, in a text that people read.

    all_reduce main.py:88                      by all ranks
    gather main.py:91, root 2                  rank 2 is the root; without the word it is rank 0
    broadcast train.py:7, root 4, ranks 4 5    by a group of its own

Standard library only: the observer writes these names inside a user's script (attach/).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NAME = re.compile(r"(\w+)(?: (.*?))??(?:, root (\d{1,4}))?(?:, ranks ([\d ]{1,1500}))?", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class Observed:
    """A collective as one rank saw it; ranks are numbers of the whole run."""

    operation: str  # all_reduce, gather, ...
    site: str = ""  # line of the script
    root: int = 0
    ranks: tuple[int, ...] = ()  # of its group; empty: all

    @classmethod
    def parse(cls, name: str) -> Observed:
        """Read a name; what is no such name is an operation of its own."""
        found = _NAME.fullmatch(name)
        if found is None:
            return cls(name)
        operation, site, root, ranks = found.groups()
        return cls(operation, site or "", int(root or 0), tuple(map(int, (ranks or "").split())))

    def __str__(self) -> str:
        words = f"{self.operation} {self.site}".strip()
        words += f", root {self.root}" if self.root else ""
        return words + (f", ranks {' '.join(map(str, self.ranks))}" if self.ranks else "")


def group_of(ranks: Sequence[int], world: int) -> tuple[int, ...]:
    """The ranks of a group as names have them: empty if it is all of them in their order."""
    return () if list(ranks) == list(range(world)) else tuple(ranks)
