"""Who is dead, silent or behind: several heartbeats in one process, over real connections."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from testbed.rank import watchdog
from testbed.rank.watchdog import STOPPED, Heartbeat
from testbed.spec.errors import PeerLost

DEADLINE = 30.0  # seconds; what is seen earlier is seen for another reason


@pytest.fixture
def ring() -> Iterator[Callable[..., list[Heartbeat]]]:
    """`ring(3)` is three ranks that beat; `.lost` of each is what it ended with."""
    made: list[Heartbeat] = []

    def make(size: int, deadline: float = DEADLINE) -> list[Heartbeat]:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=30))
        for rank in range(size):
            beat = Heartbeat(rank, size, store, deadline, lambda lost: None)
            beat.start(10)
            made.append(beat)
        hub = made[0]
        until(lambda: sum(peer.rank is not None for peer in hub._peers) == size - 1)
        return made

    yield make
    for beat in reversed(made):
        beat.close()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def die(beat: Heartbeat) -> None:
    """As SIGKILL does: the connections end, nothing is said."""
    for peer in beat._peers:
        with contextlib.suppress(OSError):
            peer.connection.shutdown(socket.SHUT_RDWR)


def freeze(beat: Heartbeat) -> None:
    """As SIGSTOP does: the connections stay, nothing is said or heard."""
    beat._beat = lambda: None  # type: ignore[method-assign]
    beat._judge = lambda now: None  # type: ignore[method-assign]
    beat._hear = lambda peer: time.sleep(0.01)  # type: ignore[method-assign, assignment, return-value]


@contextlib.contextmanager
def frozen(beat: Heartbeat) -> Iterator[None]:
    """As SIGSTOP and SIGCONT do: what comes meanwhile is heard afterwards."""
    stands, goes_on, beats = threading.Event(), threading.Event(), beat._beat

    def stand() -> None:
        stands.set()
        goes_on.wait(30)
        beats()

    beat._beat = stand  # type: ignore[method-assign]
    assert stands.wait(10)
    beat._beat = beats  # type: ignore[method-assign]
    try:
        yield
    finally:
        goes_on.set()


def guilty(beats: list[Heartbeat]) -> list[int | None]:
    until(lambda: all(beat.verdict for beat in beats))
    return [beat.verdict.failed_rank for beat in beats if beat.verdict]


def test_a_dead_rank_is_seen_at_once_by_all(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, _, two = ring(3)
    begun = time.monotonic()
    for peer in zero._peers:
        if peer.rank == 1:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RD)
    assert guilty([zero, two]) == [1, 1]
    assert time.monotonic() - begun < 5
    assert "rank 1 (node1) is gone" in str(two.verdict)


def test_when_rank_0_dies_the_others_name_it(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    freeze(zero)
    die(zero)
    assert guilty([one, two]) == [0, 0]


def test_a_frozen_rank_is_named_after_the_deadline_and_not_before(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3, deadline=2.0)
    begun = time.monotonic()
    freeze(one)
    assert guilty([zero, two]) == [1, 1]
    assert 1.0 < time.monotonic() - begun < 6
    assert "is silent for" in str(zero.verdict)


def test_rank_0_that_hears_nobody_is_cut_off_itself(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3, deadline=1.5)
    freeze(one)
    freeze(two)
    assert guilty([zero]) == [0]
    assert "cut off" in str(zero.verdict)


def test_who_gives_up_rank_0_alone_was_cut_off_itself(ring: Callable[..., list[Heartbeat]]) -> None:
    """A cut of about the deadline: the message arrives when the link is back."""
    zero, one, two = ring(3)
    two.accuse(PeerLost("rank 0 (node0) is silent for 5.0 s: frozen or cut off (seen by rank 2)", 0))
    assert guilty([zero, one]) == [2, 2]
    assert "rank 2 (node2) was cut off" in str(one.verdict)


def test_when_most_give_up_rank_0_it_believes_them(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, *others = ring(4)
    with frozen(zero):
        for beat in others[:2]:
            beat.accuse(PeerLost(f"rank 0 (node0) is silent (seen by rank {beat.rank})", 0))
    assert guilty([zero, others[2]]) == [0, 0]


def test_of_two_ranks_rank_0_believes_the_other(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one = ring(2)
    one.accuse(PeerLost("rank 0 (node0) is silent (seen by rank 1)", 0))
    assert guilty([zero]) == [0]


def test_a_verdict_of_the_main_thread_is_told_before_the_rank_leaves(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    lost = PeerLost("rank 3 (node3) did not come", 3)
    assert zero.accuse(lost) is lost
    die(zero)
    assert guilty([one, two]) == [3, 3]


def test_a_freeze_of_its_own_gives_nobody_credit(ring: Callable[..., list[Heartbeat]]) -> None:
    """Freeze, thaw, silence: the silence is seen after the deadline, and not so much later as the freeze was long."""
    zero, one, two = ring(3)
    with frozen(zero):
        time.sleep(3.0)
    zero.deadline = 1.5
    freeze(two)
    begun = time.monotonic()
    assert guilty([zero, one]) == [2, 2]
    assert time.monotonic() - begun < 3.5


def test_a_rank_that_fails_says_why(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    two.close("OSError: no space left")
    assert guilty([zero, one]) == [2, 2]
    assert "rank 2 (node2) failed: OSError: no space left" in str(one.verdict)


def test_leaving_in_good_order_is_no_fault(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    two.close()
    one.close()
    time.sleep(3 * watchdog.PERIOD)
    assert zero.verdict is None


def test_a_complaint_names_who_was_stopped(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    one.close(STOPPED)
    time.sleep(2 * watchdog.PERIOD)
    assert zero.verdict is None and two.verdict is None
    lost = two.ask()
    assert lost is not None and lost.failed_rank == 1


def test_a_complaint_names_the_one_that_is_behind(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    zero.at(7, "sync")
    one.at(7, "compute")
    two.at(7, "sync")
    time.sleep(3 * watchdog.PERIOD)
    lost = two.ask()
    assert isinstance(lost, PeerLost) and lost.failed_rank == 1 and "still in step 8" in str(lost)


def test_strangers_are_heard_by_nobody(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one = ring(2)
    port, rng = zero._listener.getsockname()[1], random.Random(7)
    with contextlib.ExitStack() as stay:
        for number in range(150):
            stranger = stay.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            words = (b'{"hello": 1, "token": "guess"}\n', b'{"verdict": 1, "why": "me"}\n', b"[" * 5000, b"")
            with contextlib.suppress(OSError):
                stranger.sendall(words[number % 4] + rng.randbytes(number))
        time.sleep(3 * watchdog.PERIOD)
        assert zero.verdict is None and one.verdict is None
        assert sum(peer.rank is None for peer in zero._peers) <= watchdog.MAX_STRANGERS
    until(lambda: all(peer.rank is not None for peer in zero._peers))
    one.close("a real failure")
    assert guilty([zero]) == [1]


def test_strangers_do_not_stop_it(ring: Callable[..., list[Heartbeat]]) -> None:
    """More of them than are let in, all at once, some with text that is no text."""
    zero, one = ring(2)
    assert zero._listener is not None
    strangers = [socket.create_connection(zero._listener.getsockname()) for _ in range(2 * watchdog.MAX_STRANGERS)]
    for number, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):
            stranger.sendall(b'{"hello": 1, "token": "\\ud800"}\n' if number % 2 else b"\xff\n")
    time.sleep(4 * watchdog.PERIOD)
    for stranger in strangers:
        stranger.close()
    assert zero._thread.is_alive() and one._thread.is_alive()
    assert zero.verdict is None and one.verdict is None
