"""Pieces of the flat buffers, their flights through one step, and the threads that advance them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from testbed.rank.group import Group, Work
from testbed.rank.sync.chunks import split
from testbed.rank.sync.rounds import Rounds

MOST_ROUNDS = 512  # of either half; a tag has its number inside


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
    leaving: list[Work] = field(default_factory=list)  # sends of the last step

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
    sends: list[Work] = field(default_factory=list)
    done: int = 0  # rounds of the present half
    token: int = -1  # of the timeline


def cut_pieces(
    parameters: Sequence[Parameter], gradients: Tensor, values: Tensor, limit: int, rounds: Rounds, group: Group
) -> list[Piece]:
    """Pieces of at most `limit` bytes of two flat buffers that hold the parameters in this order."""
    elements = max(1, limit // values.element_size())
    bounds = [*range(0, len(values), elements), len(values)]
    ends = list(accumulate(p.numel() for p in parameters))
    pieces = []
    for number, (a, b) in enumerate(pairwise(bounds)):
        parts = split(gradients[a:b], group.size)
        scratch = [[torch.empty_like(parts[hop.part]) for hop in round_.receives] for round_ in rounds.reduce]
        members = [p for p, end in zip(parameters, ends, strict=True) if a < end and end - p.numel() < b]
        size = values[a:b].nbytes
        pieces.append(Piece(number, size, parts, split(values[a:b], group.size), scratch, members))
    return pieces


class Stage:
    """A thread that advances flights round by round: several at a time, so that the wire has always one to carry."""

    def __init__(self, name: str, advance: Callable[[Flight], bool], fail: Callable[[Exception], None]) -> None:
        self._advance, self._fail = advance, fail
        self._queue: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, flight: Flight) -> None:
        self._queue.put(flight)

    def stop(self) -> None:
        """After the last flight has landed."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        active: list[Flight] = []
        try:
            while True:
                if not active or not self._queue.empty():
                    flight = self._queue.get()
                    if flight is None:
                        return
                    active.append(flight)
                active = [flight for flight in active if not self._advance(flight)]
        except Exception as error:  # whatever it is, the loop must not wait for ever
            self._fail(error)
