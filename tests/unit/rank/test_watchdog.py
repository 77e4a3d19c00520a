"""Which rank is dead, silent or behind: several heartbeats in one process, over real connections."""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from testbed.rank import watchdog
from testbed.rank.recorder import Recorder
from testbed.rank.watchdog import STOPPED, Heartbeat, Watchdog
from testbed.results.records import Error, read
from testbed.spec.errors import Interrupted, PeerLost, RankFailed, ReplicasDiffer, SpecError, TestbedError

DEADLINE = 30.0  # seconds; an earlier detection has another reason than this deadline


@pytest.fixture
def ring() -> Iterator[Callable[..., list[Heartbeat]]]:
    """`ring(3)` is three ranks that send heartbeats."""
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
        beat.leave()
        beat.close()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def die(beat: Heartbeat) -> None:
    """Like SIGKILL: the connections end without a message."""
    for peer in beat._peers:
        with contextlib.suppress(OSError):
            peer.channel.sock.shutdown(socket.SHUT_RDWR)


def freeze(beat: Heartbeat) -> None:
    """Like SIGSTOP: the connections stay open; nothing is sent or read."""
    beat._send_heartbeat = lambda: None  # type: ignore[method-assign]
    beat._judge = lambda now: None  # type: ignore[method-assign]
    beat._receive = lambda peer: time.sleep(0.01)  # type: ignore[method-assign, assignment, return-value]


@contextlib.contextmanager
def frozen(beat: Heartbeat) -> Iterator[None]:
    """Like SIGSTOP and SIGCONT: messages that arrive meanwhile are read afterwards."""
    stands, goes_on, beats = threading.Event(), threading.Event(), beat._send_heartbeat

    def stand() -> None:
        stands.set()
        goes_on.wait(30)
        beats()

    beat._send_heartbeat = stand  # type: ignore[method-assign]
    assert stands.wait(10)
    beat._send_heartbeat = beats  # type: ignore[method-assign]
    try:
        yield
    finally:
        goes_on.set()


def failed_ranks(beats: list[Heartbeat]) -> list[int | None]:
    until(lambda: all(beat.verdict for beat in beats))
    return [beat.verdict.failed_rank for beat in beats if beat.verdict]


def test_a_dead_rank_is_seen_at_once_by_all(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, _, two = ring(3)
    begun = time.monotonic()
    for peer in zero._peers:
        if peer.rank == 1:
            with contextlib.suppress(OSError):
                peer.channel.sock.shutdown(socket.SHUT_RD)
    assert failed_ranks([zero, two]) == [1, 1]
    assert time.monotonic() - begun < 5
    assert "rank 1 (node1) is gone" in str(two.verdict)


def test_when_rank_0_dies_the_others_name_it(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    freeze(zero)
    die(zero)
    assert failed_ranks([one, two]) == [0, 0]


def test_a_frozen_rank_is_named_after_the_deadline_and_not_before(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3, deadline=2.0)
    begun = time.monotonic()
    freeze(one)
    assert failed_ranks([zero, two]) == [1, 1]
    assert 1.0 < time.monotonic() - begun < 30
    assert "is silent for" in str(zero.verdict)


def test_rank_0_that_receives_nothing_from_all_others_is_cut_off(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3, deadline=1.5)
    freeze(one)
    freeze(two)
    assert failed_ranks([zero]) == [0]
    assert "cut off" in str(zero.verdict)


def test_a_single_rank_that_reports_rank_0_as_lost_was_cut_off(ring: Callable[..., list[Heartbeat]]) -> None:
    """The link is cut for about the deadline, so that the report arrives when it is back."""
    zero, one, two = ring(3)
    two.report_lost(PeerLost("rank 0 (node0) is silent for 5.0 s: frozen or cut off (reported by rank 2)", 0))
    assert failed_ranks([zero, one]) == [2, 2]
    assert "rank 2 (node2) was cut off" in str(one.verdict)


@pytest.mark.parametrize("rank", [0, 2])
def test_what_one_rank_refuses_all_refuse_with_the_same_sentence(
    ring: Callable[..., list[Heartbeat]], rank: int
) -> None:
    beats = ring(3)
    sentence = "model 'x': unknown. " + "Use y. " * 1000  # too long for one message: it is cut
    beats[rank].leave("SpecError", refused=sentence)
    others = [beat for beat in beats if beat.rank != rank]
    until(lambda: all(beat.verdict for beat in others))
    for beat in others:
        assert type(beat.verdict) is SpecError
        assert sentence.startswith(str(beat.verdict)) and len(str(beat.verdict)) > 1000


@pytest.mark.parametrize("trying", [True, False])
def test_ranks_that_wait_for_each_other_in_a_users_method_blame_the_method(
    ring: Callable[..., list[Heartbeat]], trying: bool
) -> None:
    beats = ring(3)
    for beat in beats:
        beat.own_method, beat.trying = "mean_ of methods/mine.py", trying
        beat.at(4, "sync")
    until(lambda: beats[0].steps == {1: 4, 2: 4})
    beats[1].identify_lost()
    until(lambda: all(beat.verdict for beat in beats))
    for beat in beats:
        assert str(beat.verdict).startswith("deadlock in mean_ of methods/mine.py: all ranks run, but a rank waits for")
        assert type(beat.verdict) is (SpecError if trying else PeerLost)
        assert ("or one exchange takes longer than the deadline of 30 s" in str(beat.verdict)) is not trying


def test_when_most_ranks_report_rank_0_as_lost_it_accepts(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, *others = ring(4)
    with frozen(zero):
        for beat in others[:2]:
            beat.report_lost(PeerLost(f"rank 0 (node0) is silent (reported by rank {beat.rank})", 0))
    assert failed_ranks([zero, others[2]]) == [0, 0]


def test_of_two_ranks_rank_0_accepts_the_report_of_the_other(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one = ring(2)
    one.report_lost(PeerLost("rank 0 (node0) is silent (reported by rank 1)", 0))
    assert failed_ranks([zero]) == [0]


def test_a_verdict_of_the_main_thread_is_told_before_the_rank_leaves(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    lost = PeerLost("rank 3 (node3) did not connect", 3)
    assert zero.report_lost(lost) is lost
    die(zero)
    assert failed_ranks([one, two]) == [3, 3]


def test_after_its_own_freeze_a_rank_still_notices_silence_in_time(ring: Callable[..., list[Heartbeat]]) -> None:
    """The other rank is named after the deadline, not later by the length of the freeze."""
    zero, one, two = ring(3)
    with frozen(zero):
        time.sleep(5.0)
    zero.deadline = 1.5
    freeze(two)
    begun = time.monotonic()
    assert failed_ranks([zero, one]) == [2, 2]
    assert time.monotonic() - begun < 1.5 + 4.5


def test_a_rank_that_fails_says_why(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    two.leave("OSError: no space left")
    assert failed_ranks([zero, one]) == [2, 2]
    assert "rank 2 (node2) failed: OSError: no space left" in str(one.verdict)


def test_leaving_after_the_end_is_no_failure(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    two.leave()
    one.leave()
    time.sleep(3 * watchdog.PERIOD_S)
    assert zero.verdict is None


def test_after_a_failed_wait_a_stopped_rank_is_named(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    one.leave(STOPPED)
    time.sleep(2 * watchdog.PERIOD_S)
    assert zero.verdict is None and two.verdict is None
    lost = two.identify_lost()
    assert lost is not None and lost.failed_rank == 1


def test_after_a_failed_wait_the_rank_that_is_behind_is_named(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    zero.at(7, "sync")
    one.at(7, "compute")
    two.at(7, "sync")
    time.sleep(3 * watchdog.PERIOD_S)
    lost = two.identify_lost()
    assert isinstance(lost, PeerLost) and lost.failed_rank == 1 and "still in step 8" in str(lost)


def test_connections_without_the_token_are_ignored_and_limited(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one = ring(2)
    port, rng = zero._listener.getsockname()[1], random.Random(7)
    with contextlib.ExitStack() as stay:
        for number in range(150):
            connection = stay.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            words = (b'{"hello": 1, "token": "guess"}\n', b'{"verdict": 1, "why": "me"}\n', b"[" * 5000, b"")
            with contextlib.suppress(OSError):
                connection.sendall(words[number % 4] + rng.randbytes(number))
        time.sleep(3 * watchdog.PERIOD_S)
        assert zero.verdict is None and one.verdict is None
        assert sum(peer.rank is None for peer in zero._peers) <= watchdog.MAX_UNIDENTIFIED
    until(lambda: all(peer.rank is not None for peer in zero._peers))
    one.leave("a real failure")
    assert failed_ranks([zero]) == [1]


def test_many_connections_with_invalid_text_do_not_stop_the_heartbeat(ring: Callable[..., list[Heartbeat]]) -> None:
    """More connections than the limit, all at once, some with invalid text."""
    zero, one = ring(2)
    assert zero._listener is not None
    address, limit = zero._listener.getsockname(), watchdog.MAX_UNIDENTIFIED
    unidentified = [socket.create_connection(address) for _ in range(2 * limit)]
    for number, connection in enumerate(unidentified):
        with contextlib.suppress(OSError):
            connection.sendall(b'{"hello": 1, "token": "\\ud800"}\n' if number % 2 else b"\xff\n")
    time.sleep(4 * watchdog.PERIOD_S)
    for connection in unidentified:
        connection.close()
    assert zero._thread.is_alive() and one._thread.is_alive()
    assert zero.verdict is None and one.verdict is None


def test_a_connection_to_rank_0_is_kept_alive_by_the_kernel(ring: Callable[..., list[Heartbeat]]) -> None:
    _, one = ring(2)
    sock = one._peers[0].channel.sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == watchdog.KEEPALIVE_S


# --- the end of a run without a controller -------------------------------------------------------------------------


def test_a_rank_that_is_done_waits_until_rank_0_has_closed(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one = ring(2)
    one.leave()
    zero.leave()
    begun = time.monotonic()
    one.wait_until_closed(0.4)
    assert time.monotonic() - begun >= 0.4  # rank 0 is done too, but has not ended
    threading.Timer(0.3, zero.close).start()
    one.wait_until_closed(30)
    assert time.monotonic() - begun < 10


def test_rank_0_collects_the_reports_of_the_ranks_that_are_left(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    die(two)
    assert failed_ranks([zero, one]) == [2, 2]
    one.send_report(Error(code=6, message="rank 2 (node2) is gone" + "!" * 5000, failed_rank=2, at=0.0))
    begun = time.monotonic()
    reports = zero.collect_reports(60.0)
    assert list(reports) == [1] and time.monotonic() - begun < 30  # it does not wait for the dead rank
    assert (reports[1]["code"], reports[1]["failed_rank"]) == (6, 2)
    assert len(reports[1]["message"]) <= watchdog.MAX_REASON_CHARS


def test_rank_0_waits_for_the_report_of_a_rank_that_said_why_it_fails(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one = ring(2)
    one.leave("OSError: no space")
    assert failed_ranks([zero]) == [1]
    late = Error(code=1, message="OSError: no space", at=0.0)
    threading.Timer(0.4, one.send_report, (late,)).start()
    assert zero.collect_reports(5.0)[1]["code"] == TestbedError.exit_code


def test_a_refused_request_ends_all_ranks_with_the_same_sentence(ring: Callable[..., list[Heartbeat]]) -> None:
    zero, one, two = ring(3)
    zero.report_lost(SpecError("batch 48 on rank 2, 24 on rank 0"))
    until(lambda: all(beat.verdict for beat in (one, two)))
    assert [(type(beat.verdict), str(beat.verdict)) for beat in (zero, one, two)] == [
        (SpecError, "batch 48 on rank 2, 24 on rank 0")
    ] * 3


def test_a_rank_that_does_not_train_may_connect_and_leave() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=30))
    zero, idle = (Heartbeat(rank, 1, store, 0.5, lambda lost: None, max_ranks=2) for rank in (0, 1))
    try:
        zero.start(10)
        idle.start(10)
        until(lambda: any(peer.rank == 1 for peer in zero._peers))
        time.sleep(1.0)  # longer than the deadline: an idle rank sends nothing
        idle.close()
        until(lambda: not zero._peers)
        assert zero.verdict is None and zero._thread.is_alive()
    finally:
        zero.leave()
        zero.close()


# --- one exit ------------------------------------------------------------------------------------------------------


def exit_of(guard: Watchdog, error: Exception) -> int:
    with pytest.raises(SystemExit) as end:
        guard.exit_once(error)
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Watchdog, list[int]]]:
    """The watchdog of rank 1, and the exit codes that it would have ended the process with."""
    codes: list[int] = []
    guard = Watchdog(1, terminate=codes.append)
    with Recorder(tmp_path / "rank1.jsonl") as guard.recorder:
        yield guard, codes


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in watchdog.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


FAILURES = {
    "ours": (ReplicasDiffer("hashes differ"), 4, "hashes differ"),
    "a lost peer": (PeerLost("rank 2 (node2) is gone", 2), 6, "rank 2 (node2) is gone"),
    "gloo": (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), 6, "rank 1 lost a peer: "),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), 7, ": No space left on device (file system /"),
    "a bug": (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize(("error", "code", "words"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_recorded_and_ends_the_process_with_its_code(
    tmp_path: Path, guarded: tuple[Watchdog, list[int]], error: Exception, code: int, words: str
) -> None:
    guard, codes = guarded
    assert exit_of(guard, error) == code and codes == [code]
    record = vars(next(read(tmp_path / "rank1.jsonl")))
    assert (record["kind"], record["code"]) == ("error", code) and words in record["message"]
    assert record["failed_rank"] == (2 if isinstance(error, PeerLost) else None)


def test_only_the_first_failure_counts(tmp_path: Path, guarded: tuple[Watchdog, list[int]]) -> None:
    guard, codes = guarded
    exit_of(guard, ReplicasDiffer("first"))
    second = threading.Thread(target=guard.exit_once, args=(RankFailed("second"),), daemon=True)
    second.start()
    second.join(0.3)
    assert second.is_alive() and codes == [ReplicasDiffer.exit_code]  # it waits for the end of the process
    assert len(list(read(tmp_path / "rank1.jsonl"))) == 1


def test_an_error_that_another_rank_caused_becomes_the_verdict_that_names_it(
    tmp_path: Path, guarded: tuple[Watchdog, list[int]], ring: Callable[..., list[Heartbeat]]
) -> None:
    guard, codes = guarded
    _, guard.heartbeat, two = ring(3)
    two.leave(STOPPED)
    exit_of(guard, RuntimeError("gloo: timed out"))
    record = vars(next(read(tmp_path / "rank1.jsonl")))
    assert (
        codes == [PeerLost.exit_code]
        and record["failed_rank"] == 2
        and "rank 2 (node2) was stopped" in record["message"]
    )


def test_the_others_learn_why_a_rank_fails(
    guarded: tuple[Watchdog, list[int]], ring: Callable[..., list[Heartbeat]]
) -> None:
    guard, _ = guarded
    zero, guard.heartbeat = ring(2)
    exit_of(guard, MemoryError("no more"))
    assert failed_ranks([zero]) == [1] and "rank 1 (node1) failed: MemoryError: no more" in str(zero.verdict)


@pytest.mark.parametrize(("training", "grace"), [(False, "START_SIGNAL_GRACE_S"), (True, "SIGNAL_GRACE_S")])
def test_a_signal_that_the_main_thread_does_not_see_ends_the_rank(training: bool, grace: str) -> None:
    """The main thread is in a C call that does not return to Python, as inside Gloo.

    Before training the rank has another grace than in it; the one that does not apply would exceed the test's timeout.
    """
    program = f"""
import ctypes, os, signal, threading
from testbed.rank import watchdog
watchdog.SIGNAL_GRACE_S = watchdog.START_SIGNAL_GRACE_S = 3600.0
watchdog.{grace} = 0.2
watchdog.raise_interrupted()
guard = watchdog.Watchdog(0)
guard.training = guard.training or {training}
watchdog.start_signal_watchdog(guard)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == Interrupted.exit_code, done.stderr
