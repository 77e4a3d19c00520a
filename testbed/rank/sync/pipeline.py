"""Pipeline: reduce under backward, update one's own part, gather under the next forward.

Same mathematics and same bytes as an all-reduce, but the second half of the communication hides behind the next
forward, and each rank's optimizer works on 1/N of the parameters. All parameters live in one flat buffer, last layer
first; it is cut into pieces of the bucket's size, wherever that falls. A layer's forward waits for its own pieces only.

    loop       forward (waits for pieces) | backward: a hook copies each gradient and sends full pieces
    reducer    adds what comes in, updates this rank's part of the piece, sends that
    gatherer   passes on what comes in; tells the loop that a piece is complete

Receives are posted a whole step ahead, because Gloo sends nothing before the other side has asked for it. That is
safe: nobody sends step t+1's parts of a piece before step t's have reached everybody.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from testbed.rank.group import Group
from testbed.rank.sync.base import NoSync, Update
from testbed.rank.sync.chunks import flat_parameters, trained
from testbed.rank.sync.pieces import Flight, Piece, Stage, cut_pieces
from testbed.rank.sync.readiness import Readiness
from testbed.rank.sync.rounds import ROUNDS, Round
from testbed.rank.timeline import Timeline
from testbed.spec.errors import RankFailed
from testbed.spec.mode import SyncMode


class Pipeline(NoSync):
    """The loop's side and the work of both threads; the threads themselves are Stages."""

    def __init__(self, mode: SyncMode, group: Group, timeline: Timeline) -> None:
        super().__init__(mode, group, timeline)
        self.rounds = ROUNDS[mode.algorithm](group.rank, group.size)
        self.reducer = Stage("reduce", self._reduce_one_round, self._fail)
        self.gatherer = Stage("gather", self._gather_one_round, self._fail)
        self.failure: Exception | None = None
        self.reduced: list[Flight] = []  # of this step, not updated yet
        self.updated = 0  # pieces of this step

    def attach(self, model: Module, update: Update) -> Module:
        parameters = list(reversed(trained(model)))
        values = flat_parameters([parameters])[0]
        self.gradients = torch.zeros_like(values)
        self.pieces = cut_pieces(parameters, self.gradients, values, self.mode.bucket or 0, self.rounds, self.group)
        update.own([piece.values[self.group.rank] for piece in self.pieces])
        self.views = dict(zip(parameters, self.gradients.split([p.numel() for p in parameters]), strict=True))
        self.readiness = Readiness([piece.members for piece in self.pieces], self._launch)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take_gradient)
        self.forward = ForwardWaits(model, self.pieces, self._wait_for)
        return super().attach(model, update)

    def zero(self) -> None:
        """A step begins: say which parts we expect. Gradients need no clearing: they are taken away when complete."""
        self.readiness.start()
        self.flights = [Flight(piece) for piece in self.pieces]
        for flight in self.flights:
            piece = flight.piece
            for number, round_ in enumerate(self.rounds.reduce):
                flight.reducing.append(self._receive(round_, piece.scratch[number], piece.tag(0, number)))
            for number, round_ in enumerate(self.rounds.gather):
                places = [piece.values[hop.part] for hop in round_.receives]
                flight.gathering.append(self._receive(round_, places, piece.tag(1, number)))

    def accumulating(self) -> AbstractContextManager[object]:
        return self.readiness.pause()

    def step(self) -> None:
        """Nothing to wait for: what is on its way is needed by the next forward, layer by layer."""
        for parameter in self.readiness.absent():
            self.views[parameter].zero_()  # it got no gradient: the last step's must not count twice
        self.readiness.finish()
        self.forward.learn()

    def settle(self) -> None:
        self._wait_for(self.pieces)

    def close(self) -> None:
        self.settle()
        self.reducer.stop()
        self.gatherer.stop()
        for piece in self.pieces:
            self.group.wait(*piece.leaving)

    def _take_gradient(self, parameter: Parameter) -> None:
        """Copy a complete gradient to where it leaves from. (Hook of backward.)"""
        if self.readiness.paused or parameter.grad is None:
            return
        self.views[parameter].copy_(parameter.grad.reshape(-1))
        parameter.grad = None
        self.readiness.ready(parameter)

    def _launch(self, number: int) -> None:
        """All gradients of this piece are there."""
        flight = self.flights[number]
        self._wait_for([flight.piece])  # long true, unless a layer took no part in forward
        flight.piece.complete.clear()
        flight.token = self.timeline.depart(f"bucket {number} reduce", flight.piece.size)
        self._send(flight, flight.piece.gradients, self.rounds.reduce, half=0)
        self.reducer.put(flight)

    def _reduce_one_round(self, flight: Flight) -> bool:
        """Add what one round brings; True when this rank's part is the sum over all ranks. (Reducer.)"""
        piece, done = flight.piece, flight.done
        self.group.wait(*flight.reducing[done])
        for hop, landed in zip(self.rounds.reduce[done].receives, piece.scratch[done], strict=True):
            piece.gradients[hop.part].add_(landed)
        flight.done += 1
        if flight.done < len(self.rounds.reduce):
            self._send(flight, piece.gradients, self.rounds.reduce, half=0)
            return False
        piece.gradients[self.group.rank].div_(self.group.size)
        self.timeline.arrive(flight.token)
        self.reduced.append(flight)
        self._update()
        return True

    def _update(self) -> None:
        """Step on this rank's part of what is reduced; clipping needs the norm of all of it first. (Reducer.)"""
        if self.update.clips:
            if len(self.reduced) < len(self.pieces):
                return
            self._clip()
        for flight in self.reduced:
            self.update.step_part(flight.piece.number, flight.piece.gradients[self.group.rank])
            flight.done = 0
            flight.token = self.timeline.depart(f"bucket {flight.piece.number} gather", flight.piece.size)
            self._send(flight, flight.piece.values, self.rounds.gather, half=1)
            self.gatherer.put(flight)
        self.updated += len(self.reduced)
        self.reduced.clear()
        if self.updated == len(self.pieces):
            self.update.advance()
            self.updated = 0

    def _clip(self) -> None:
        """A rank has the norm of its own parts; the whole norm is the root of the sum of all squares. (Reducer.)"""
        own = [flight.piece.gradients[self.group.rank] for flight in self.reduced]
        square = torch.stack([part.square().sum() for part in own]).sum()
        coefficient = self.update.clip_coefficient(float(self.group.total(square)) ** 0.5)
        for part in own:
            part.mul_(coefficient)

    def _gather_one_round(self, flight: Flight) -> bool:
        """Pass on what one round brings; True when all parts of the piece are here. (Gatherer.)"""
        self.group.wait(*flight.gathering[flight.done])
        flight.done += 1
        if flight.done < len(self.rounds.gather):
            self._send(flight, flight.piece.values, self.rounds.gather, half=1)
            return False
        self.timeline.arrive(flight.token)
        flight.piece.complete.set()
        self.group.wait(*flight.piece.leaving)  # of the step before: long over, only to be let go
        flight.piece.leaving = flight.sends
        return True

    def _send(self, flight: Flight, parts: list[Tensor], rounds: tuple[Round, ...], half: int) -> None:
        tag, kind = flight.piece.tag(half, flight.done), ("gradients", "parameters")[half]
        for hop in rounds[flight.done].sends:
            flight.sends.append(self.group.send(parts[hop.part], hop.peer, tag, kind))

    def _receive(self, round_: Round, places: list[Tensor], tag: int) -> list[Any]:
        hops = zip(round_.receives, places, strict=True)
        return [self.group.receive(place, hop.peer, tag) for hop, place in hops]

    def _wait_for(self, pieces: list[Piece]) -> None:
        """Block the loop until these pieces are complete."""
        missing = [piece for piece in pieces if not piece.complete.is_set()]
        if missing:
            with self.timeline.blocked():
                for piece in missing:
                    if not piece.complete.wait(self.group.deadline.total_seconds()):
                        raise RankFailed(f"bucket {piece.number} timed out: a peer is silent")
        if self.failure is not None:
            raise self.failure

    def _fail(self, error: Exception) -> None:
        """A thread cannot go on: wake the loop, which raises its error."""
        self.failure = error
        for piece in self.pieces:
            piece.complete.set()


class ForwardWaits:
    """Each layer waits for its own pieces before its forward.

    A parameter whose layer is never called (another layer reads it) is waited for when the model's forward begins:
    the first forward, which has nothing to wait for, shows which layers are called.
    """

    def __init__(self, model: Module, pieces: list[Piece], wait: Any) -> None:
        self.model, self.wait = model, wait
        self.pieces_of = {
            module: [piece for piece in pieces if any(piece.holds(p) for p in module.parameters(recurse=False))]
            for module in model.modules()
        }
        self.called: set[Module] = set()
        self.learned = False
        for module in self.pieces_of:
            module.register_forward_pre_hook(self._before)

    def _before(self, module: Module, inputs: Any) -> None:
        if not self.learned:
            self.called.add(module)
        self.wait(self.pieces_of[module])

    def learn(self) -> None:
        """The first forward is over."""
        if self.learned:
            return
        self.learned = True
        never = [module for module in self.pieces_of if module not in self.called]
        self.pieces_of[self.model] = [
            *self.pieces_of[self.model],
            *(piece for module in never for piece in self.pieces_of[module]),
        ]
