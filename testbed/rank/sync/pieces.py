"""Pieces of the flat buffers, and their flight through one step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from testbed.rank.group import Group, Work
from testbed.rank.sync.chunks import split
from testbed.rank.sync.rounds import Rounds
from testbed.spec.errors import refuse
from testbed.spec.units import format_size

MOST_ROUNDS = 512  # of either half; a tag has its number inside
MOST_PIECES = 256
SMALL = (8, 4, 2)  # the last pieces have this fraction of the usual size


@dataclass(eq=False)
class Piece:
    """A stretch of the flat buffers that travels as one; `gradients` and `values` are its N parts."""

    number: int
    size: int  # bytes
    gradients: list[Tensor]
    values: list[Tensor]
    scratch: list[list[Tensor]]  # per round of reduce: where parts land before they are added
    members: list[Parameter]  # whose gradients it needs, wholly or in part
    complete: threading.Event = field(default_factory=threading.Event)  # everybody's parts of the last step are here
    launched: queue.SimpleQueue[Flight | None] = field(default_factory=queue.SimpleQueue)  # None: there is no more

    def __post_init__(self) -> None:
        self.complete.set()
        self._ids = {id(p) for p in self.members}

    def holds(self, parameter: Parameter) -> bool:
        return id(parameter) in self._ids

    def tag(self, half: int, round_number: int) -> int:
        """One tag per piece, half and round, the same on both ends."""
        return (2 * self.number + half) * MOST_ROUNDS + round_number


@dataclass(eq=False)
class Flight:
    """One piece in one step: the works it waits for, per round."""

    piece: Piece
    reducing: list[list[Work]] = field(default_factory=list)
    gathering: list[list[Work]] = field(default_factory=list)


def cut_pieces(
    parameters: Sequence[Parameter], gradients: Tensor, values: Tensor, limit: int, rounds: Rounds, group: Group
) -> list[Piece]:
    """Pieces of at most `limit` bytes of two flat buffers that hold the parameters in this order."""
    ends = list(accumulate(p.numel() for p in parameters))
    cuts = bounds(len(values), max(1, limit // values.element_size()))
    if len(cuts) - 1 > MOST_PIECES:
        rule = f"would cut this model into {len(cuts) - 1} pieces, and each has a thread; at most {MOST_PIECES} work"
        enough = values.nbytes // (MOST_PIECES - len(SMALL)) // 2**10 + 1  # the small ones come on top
        raise refuse("bucket", format_size(limit), rule, f"Use bucket:{enough}KiB.")
    pieces = []
    for number, (a, b) in enumerate(pairwise(cuts)):
        parts = split(gradients[a:b], group.size)
        scratch = [[torch.empty_like(parts[hop.part]) for hop in round_.receives] for round_ in rounds.reduce]
        members = [p for p, end in zip(parameters, ends, strict=True) if a < end and end - p.numel() < b]
        size = values[a:b].nbytes
        pieces.append(Piece(number, size, parts, split(values[a:b], group.size), scratch, members))
    return pieces


def bounds(total: int, most: int) -> list[int]:
    """Where to cut: pieces of `most` elements, and ever smaller ones at the end.

    The end of the buffer is the first layer. Its gradient comes last and its values are needed first, so nothing hides
    the time that its piece takes.
    """
    sizes: list[int] = []
    rest = total
    for share in SMALL:
        sizes.append(min(rest, max(1, most // share)))
        rest -= sizes[-1]
    while rest:
        sizes.append(min(rest, most))
        rest -= sizes[-1]
    return [0, *accumulate(size for size in reversed(sizes) if size)]
