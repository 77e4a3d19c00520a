"""Pipeline: reduce under backward, update one's own part, gather under the next forward.

Same mathematics and same bytes as an all-reduce, but the second half of the communication hides behind the next
forward, and each rank's optimizer works on 1/N of the parameters. All parameters live in one flat buffer, last layer
first; it is cut into pieces of the bucket's size, wherever that falls. A layer's forward waits for its own pieces only.

    loop      forward (waits for pieces) | backward: a hook copies each gradient and launches full pieces
    a piece   its own thread adds what comes in, updates this rank's part, passes on, says when it is complete
    sender    hands parts to the wire: what the next forward needs first goes first, gradients before values

Receives are posted a whole step ahead, because Gloo sends nothing before the other side has asked for it. That is
safe: nobody sends step t+1's parts of a piece before step t's have reached everybody.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from testbed.net.tcp import tcp_sockets
from testbed.rank.group import Group, Work
from testbed.rank.recorder import Timeline
from testbed.rank.sync.algorithms import Plan, RankRound, plan_for
from testbed.rank.sync.buckets import Readiness, flat_parameters, split, trained
from testbed.rank.sync.synchronizer import NoSync, Update
from testbed.spec.errors import RankFailed, refuse
from testbed.spec.mode import SyncMode
from testbed.spec.units import format_size

# Patience: threads that move bytes wait until the one that computes has had its turn.
#
# By default Linux wakes them for every packet or two and they interrupt who computes: four ranks on two cores change
# threads ten thousand times a step. A batch thread (SCHED_BATCH) interrupts nobody: when its turn comes, it finds more.

GLOO = "gloo_tcp_loop"  # what Gloo calls the thread that reads and writes its sockets


def be_patient(thread: int = 0, patient: bool = True) -> None:
    """This thread, or another of ours by its number. Where the machine refuses, it stays as it was."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH if patient else os.SCHED_OTHER, os.sched_param(0))


def gloo_threads() -> Iterator[int]:
    """Their numbers."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            if (task / "comm").read_text().strip() == GLOO:
                yield int(task.name)


def make_gloo_patient(patient: bool = True) -> None:
    """Gloo started its thread when the ranks met, and other modes use it, too: undo it at the end."""
    for thread in gloo_threads():
        be_patient(thread, patient)


# Pieces of the flat buffers, and their flight through one step.

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
    parameters: Sequence[Parameter], gradients: Tensor, values: Tensor, limit: int, rounds: Plan, group: Group
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
        scratch = [[torch.empty_like(parts[hop.shard]) for hop in round_.receives] for round_ in rounds.reduce]
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


# Sender: one thread through which all of a rank's parts leave, the most urgent first.
#
# What was handed over leaves in that order, so whatever is queued below this thread stands before what is urgent,
# at every hop. Hence both queues are kept short: Gloo's by handing it little at a time, the kernel's by a limit on
# what its sockets may hold unsent. The kernel's own choice is a tenth of a second's worth at 400 Mbit, and a ring has
# 2(N-1) hops.

WINDOW = 512 << 10  # bytes handed to Gloo and not yet taken by the kernel: enough to keep the wire busy
UNSENT = 128 << 10  # bytes that the kernel takes before they can leave
TCP_NOTSENT_LOWAT = 25  # Linux; Python has no name for it
Urgency = tuple[int, ...]  # the smaller leaves first


class Sender:
    """Keeps what waits in order, and hands it over bit by bit."""

    def __init__(self, group: Group, fail: Callable[[Exception], None]) -> None:
        self._group, self._fail = group, fail
        self._waiting: list[tuple[Urgency, int, int, Callable[[], Work]]] = []
        self._numbers = itertools.count()  # equally urgent ones leave in the order they came
        self._changed = threading.Condition()
        self._stopped = False
        limit_unsent(UNSENT)
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def put(self, urgency: Urgency, size: int, send: Callable[[], Work]) -> None:
        """`send` is called when its turn has come."""
        with self._changed:
            heapq.heappush(self._waiting, (urgency, next(self._numbers), size, send))
            self._changed.notify()

    def stop(self) -> None:
        """Send what is left, then end."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        limit_unsent(0)  # the kernel's own choice again: another mode may use these sockets after us

    def _run(self) -> None:
        be_patient()
        leaving: deque[tuple[int, Work]] = deque()
        outstanding = 0
        try:
            while (size := self._most_urgent()) is not None:
                if leaving and outstanding + size > WINDOW:
                    freed, work = leaving.popleft()
                    self._group.wait(work)
                    outstanding -= freed  # and look again: something more urgent may have come
                else:
                    leaving.append(self._take())
                    outstanding += leaving[-1][0]
            self._group.wait(*(work for _, work in leaving))
        except Exception as error:  # whatever it is, the loop must not wait for ever
            self._fail(error)

    def _most_urgent(self) -> int | None:
        """Its size, once there is one; None: there will be no more."""
        with self._changed:
            while not self._waiting and not self._stopped:
                self._changed.wait()
            return self._waiting[0][2] if self._waiting else None

    def _take(self) -> tuple[int, Work]:
        """Hand over what is most urgent now, which may be another than was looked at."""
        with self._changed:
            _, _, size, send = heapq.heappop(self._waiting)
        return size, send()


def limit_unsent(size: int) -> None:
    """Of this process's TCP sockets, in bytes; Gloo made its own when the ranks met, and hands none out."""
    for sock in tcp_sockets():
        with contextlib.suppress(OSError):  # one that was closed meanwhile
            sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, size)


class Pipeline(NoSync):
    """The loop's side, and the flight of a piece through one step."""

    def __init__(self, mode: SyncMode, group: Group, timeline: Timeline) -> None:
        super().__init__(mode, group, timeline)
        self.rounds = plan_for(mode.algorithm, group.rank, group.size)
        self.failure: Exception | None = None  # the first of any thread's
        self.clipping: Clipping | None = None

    def attach(self, model: Module, update: Update) -> Module:
        parameters = list(reversed(trained(model)))
        values = flat_parameters([parameters])[0]
        self.gradients = torch.zeros_like(values)
        self.pieces = cut_pieces(parameters, self.gradients, values, self.mode.bucket or 0, self.rounds, self.group)
        update.own_shards([piece.values[self.group.rank] for piece in self.pieces])
        self.views = dict(zip(parameters, self.gradients.split([p.numel() for p in parameters]), strict=True))
        self.readiness = Readiness([piece.members for piece in self.pieces], self._launch)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take_gradient)
        self.forward = ForwardWaits(model, self.pieces, self._wait_for)
        self.clipping = Clipping(self.group, update, len(self.pieces)) if update.clips else None
        make_gloo_patient()
        self.sender = Sender(self.group, self._fail)
        self.threads = [threading.Thread(target=self._serve, args=(p,), daemon=True) for p in self.pieces]
        for thread in self.threads:
            thread.start()
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
                places = [piece.values[hop.shard] for hop in round_.receives]
                flight.gathering.append(self._receive(round_, places, piece.tag(1, number)))

    def accumulating(self) -> AbstractContextManager[object]:
        return self.readiness.pause()

    def step(self) -> None:
        """Nothing to wait for: what is on its way is needed by the next forward, layer by layer."""
        absent = self.readiness.absent()
        self._wait_for([piece for piece in self.pieces if any(piece.holds(p) for p in absent)])
        for parameter in absent:  # in none of the step's passes, or not in the last
            if parameter.grad is None:
                self.views[parameter].zero_()  # the last step's must not count twice
            else:
                self._copy_gradient(parameter)
        self.readiness.finish()
        self.forward.learn()

    def flush(self) -> None:
        self._wait_for(self.pieces)

    def close(self) -> None:
        self.flush()
        for piece in self.pieces:
            piece.launched.put(None)
        for thread in self.threads:
            thread.join()
        self.sender.stop()
        make_gloo_patient(False)
        self._raise_failure()

    def _take_gradient(self, parameter: Parameter) -> None:
        """Copy a complete gradient to where it leaves from. (Hook of backward.)"""
        if not self.readiness.paused:
            self._copy_gradient(parameter)
            self.readiness.ready(parameter)

    def _copy_gradient(self, parameter: Parameter) -> None:
        assert parameter.grad is not None
        self.views[parameter].copy_(parameter.grad.reshape(-1))
        parameter.grad = None

    def _launch(self, number: int) -> None:
        """All gradients of this piece are there. (Hook of backward.)"""
        flight = self.flights[number]
        self._wait_for([flight.piece])  # long true, unless a layer took no part in forward
        flight.piece.complete.clear()
        self._raise_failure()  # one that came before the line above will wake nobody again
        flight.piece.launched.put(flight)

    def _serve(self, piece: Piece) -> None:
        """The thread of a piece."""
        be_patient()
        try:
            while (flight := piece.launched.get()) is not None:
                self._reduce(flight)
                self._update(piece)
                self._gather(flight)
                piece.complete.set()
        except threading.BrokenBarrierError:
            return  # of clipping: another thread failed, and that one says why
        except Exception as error:  # whatever it is, the loop must not wait for ever
            self._fail(error)

    def _reduce(self, flight: Flight) -> None:
        """This rank's part becomes the mean over all ranks."""
        piece = flight.piece
        with self.timeline.comm(f"bucket {piece.number} reduce", piece.size):
            for number, round_ in enumerate(self.rounds.reduce):
                self._send(round_, piece.gradients, piece.tag(0, number), (-piece.number, 0), "gradients")
                self.group.wait(*flight.reducing[number])
                for hop, landed in zip(round_.receives, piece.scratch[number], strict=True):
                    piece.gradients[hop.shard].add_(landed)
        piece.gradients[self.group.rank].div_(self.group.size)

    def _update(self, piece: Piece) -> None:
        gradient = piece.gradients[self.group.rank]
        if self.clipping is not None:
            gradient.mul_(self.clipping.coefficient(piece.number, gradient))
        self.update.step_shard(piece.number, gradient)

    def _gather(self, flight: Flight) -> None:
        """Everybody gets every owner's part; what forward needs first is sent first."""
        piece = flight.piece
        with self.timeline.comm(f"bucket {piece.number} gather", piece.size):
            for number, round_ in enumerate(self.rounds.gather):
                self._send(round_, piece.values, piece.tag(1, number), (-piece.number, 1), "parameters")
                self.group.wait(*flight.gathering[number])

    def _send(self, round_: RankRound, parts: list[Tensor], tag: int, urgency: tuple[int, int], kind: str) -> None:
        for hop in round_.sends:
            part = parts[hop.shard]
            self.sender.put(urgency, part.nbytes, partial(self.group.send, part, hop.peer, tag, kind))

    def _receive(self, round_: RankRound, places: list[Tensor], tag: int) -> list[Any]:
        hops = zip(round_.receives, places, strict=True)
        return [self.group.receive(place, hop.peer, tag) for hop, place in hops]

    def _wait_for(self, pieces: list[Piece]) -> None:
        """Block the loop until these pieces are complete."""
        missing = [piece for piece in pieces if not piece.complete.is_set()]
        if missing:
            with self.timeline.blocked():
                for piece in missing:
                    if not piece.complete.wait(self.group.deadline.total_seconds()):
                        self._raise_failure()
                        raise RankFailed(f"bucket {piece.number} timed out: a peer is silent")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _fail(self, error: Exception) -> None:
        """A thread cannot go on: wake the loop, which raises the first error; what it caused elsewhere is no news."""
        self.failure = self.failure or error
        for piece in self.pieces:
            piece.complete.set()
        if self.clipping is not None:
            self.clipping.abort()  # last: it waits while the norm is on its way


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


class Clipping:
    """The norm of the whole gradient, from parts: each rank sums the squares of its own, all ranks add those sums.

    So nothing is updated before everything is reduced: clipping costs the pipeline half of its overlap.
    """

    def __init__(self, group: Group, update: Update, pieces: int) -> None:
        self.group, self.update = group, update
        self.squares = [torch.zeros(())] * pieces  # by piece: threads come in any order, sums are made in one
        self.barrier = threading.Barrier(pieces, action=self._total)

    def coefficient(self, piece: int, gradient: Tensor) -> float:
        """What this step's gradient is multiplied by; blocks until every piece has asked. (Threads of pieces.)

        Without a deadline: most of it is this rank's own backward, which may take as long as it likes. What comes over
        the wire has its own deadlines, and a thread that misses one lets all the others go.
        """
        self.squares[piece] = gradient.square().sum()
        self.barrier.wait()
        return self.found

    def abort(self) -> None:
        """A piece will never ask."""
        self.barrier.abort()

    def _total(self) -> None:
        square = self.group.total(torch.stack(self.squares).sum())
        self.found = self.update.clip_coefficient(float(square) ** 0.5)
