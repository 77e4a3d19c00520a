"""Parts of the schedules: where parts travel, how buffers are cut, what may leave, and what leaves first."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from testbed.rank.group import Nothing, alone
from testbed.rank.sync.algorithms import plan_for
from testbed.rank.sync.buckets import Readiness
from testbed.rank.sync.pipeline import (
    MOST_PIECES,
    TCP_NOTSENT_LOWAT,
    UNSENT,
    WINDOW,
    Sender,
    bounds,
    cut_pieces,
)
from testbed.spec.errors import SpecError
from testbed.spec.units import parse_size


@pytest.mark.parametrize(("total", "most"), [(1000, 100), (1000, 1), (7, 100), (1, 8), (175, 100), (188, 100)])
def test_pieces_cover_everything_and_the_last_ones_are_small(total: int, most: int) -> None:
    cuts = bounds(total, most)
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    assert (cuts[0], cuts[-1]) == (0, total)
    assert min(sizes) > 0
    assert max(sizes) <= most
    if total >= most:
        assert sizes[-1] <= max(1, most // 8)


def test_a_piece_knows_the_parameters_it_holds_wholly_or_in_part() -> None:
    parameters = [Parameter(torch.zeros(size)) for size in (6, 1, 5)]
    flat = torch.zeros(12)
    pieces = cut_pieces(parameters, flat, flat.clone(), limit=4 * 4, rounds=plan_for("ring", 0, 1), group=alone())
    cuts = bounds(12, 4)
    for piece, a, b in zip(pieces, cuts, cuts[1:], strict=False):
        expected = [
            p for p, (begin, end) in zip(parameters, [(0, 6), (6, 7), (7, 12)], strict=True) if a < end and begin < b
        ]
        assert [id(p) for p in piece.members] == [id(p) for p in expected]


def test_buffers_leave_in_their_order_however_gradients_come() -> None:
    a, b, c, unused = (Parameter(torch.zeros(1)) for _ in range(4))
    launched: list[int] = []
    readiness = Readiness([[a], [b, c], [c], [unused]], launched.append)
    readiness.ready(c)
    readiness.ready(b)
    assert launched == []
    readiness.ready(a)
    assert launched == [0, 1, 2]
    assert readiness.absent() == [unused]
    readiness.finish()
    assert launched == [0, 1, 2, 3]
    readiness.start()
    with readiness.pause():
        readiness.ready(a)
    assert launched == [0, 1, 2, 3]


def test_the_sender_lets_urgent_parts_overtake() -> None:
    gate, order = threading.Event(), []

    class Held(Nothing):
        def wait(self, timeout: object) -> bool:
            return gate.wait(5)

    def send(name: str) -> Held:
        order.append(name)
        return Held()

    sender = Sender(alone(), fail=lambda error: order.append(repr(error)))
    sender.put((1, 0), WINDOW, lambda: send("first"))
    while not order:
        time.sleep(0.001)  # until it has left, and fills the window
    for urgency, name in (((1, 0), "values of layer 9"), ((1, -9), "values of layer 0"), ((0, 5), "gradients")):
        sender.put(urgency, WINDOW, lambda name=name: send(name))
    gate.set()
    sender.stop()
    assert order == ["first", "gradients", "values of layer 0", "values of layer 9"], "chosen when there is room"


def test_a_sender_keeps_the_kernels_queue_short_and_leaves_it_as_it_was() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        before = len(list(Path("/proc/self/fd").iterdir()))
        sender = Sender(alone(), fail=lambda error: None)
        assert ours.getsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT) == UNSENT
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        sender.stop()
        assert ours.getsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT) == 0, "DDP after it would not be DDP's own"


def test_a_sender_that_fails_says_so() -> None:
    told: list[str] = []

    def broken() -> Nothing:
        raise RuntimeError("peer is gone")

    sender = Sender(alone(), fail=lambda error: told.append(str(error)))
    sender.put((0,), 1, broken)
    sender.stop()
    assert told == ["peer is gone"]


@pytest.mark.parametrize(("length", "limit"), [(100_000, 1024), (9_231_114, 142 << 10)], ids=["small", "vgg11"])
def test_more_pieces_than_threads_are_refused_with_a_size_that_works(length: int, limit: int) -> None:
    parameters, flat, rounds = [Parameter(torch.zeros(length))], torch.zeros(length), plan_for("ring", 0, 1)
    with pytest.raises(SpecError, match=r"would cut this model into (39\d|257) pieces.*Use bucket:\d+KiB") as refused:
        cut_pieces(parameters, flat, flat.clone(), limit, rounds, alone())
    size = parse_size(str(refused.value).rpartition("bucket:")[2].rstrip("."))
    assert len(cut_pieces(parameters, flat, flat.clone(), size, rounds, alone())) <= MOST_PIECES
