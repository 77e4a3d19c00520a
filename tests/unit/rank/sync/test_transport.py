"""The transport: what is sent first, who may connect, and how connections end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from testbed.net.channel import MAX_UNIDENTIFIED
from testbed.rank.counters import SocketCounter
from testbed.rank.group import Group
from testbed.rank.sync import transport
from testbed.rank.sync.transport import (
    HEADER,
    HEADER_MAGIC,
    HELLO,
    HELLO_MAGIC,
    Segment,
    Transport,
    Urgency,
    connect_ring,
)
from testbed.rank.watchdog import is_lost_peer
from testbed.spec.errors import TestbedError

DEADLINE_S = 30.0


class End:
    """One rank's transport. Bodies are received one after the other; `said` are all that have come, in order."""

    def __init__(self, rank: int, store: dist.Store, size: int = 2, deadline_s: float = DEADLINE_S) -> None:
        self.said: list[tuple[Segment, bytes]] = []
        self.errors: list[Exception] = []
        self.expects = True
        self.changed = threading.Condition()
        group = Group(rank, size, store, deadline_s)
        self.transport = Transport(group, self._place, self._received, lambda: self.expects, self._fail)

    def _place(self, segment: Segment) -> memoryview | None:
        if segment.kind == 9:
            return None
        self.body = memoryview(bytearray(min(segment.size, 4 << 20)))
        return self.body

    def _received(self, segment: Segment) -> None:
        with self.changed:
            self.said.append((segment, bytes(self.body)))
            self.changed.notify()

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.errors.append(error)
            self.changed.notify()

    def send(self, *messages: tuple[Urgency, Segment, bytes]) -> None:
        """Queue all in one task, so that the most urgent of them is chosen."""

        def task() -> None:
            for urgency, segment, body in messages:
                self.transport.send(urgency, segment, memoryview(body))

        self.transport.post((0,), task)

    def close(self) -> None:
        """Close as a pipeline does; after an error at once."""
        with contextlib.suppress(ValueError, OSError):  # a test has closed it
            self.transport.abort() if self.errors else self.transport.close()

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE_S), (self.said, self.errors)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture
def ends(pool: ThreadPoolExecutor) -> Iterator[list[End]]:
    """Two ranks, connected."""
    store = dist.HashStore()
    made = list(pool.map(lambda rank: End(rank, store), range(2)))
    yield made
    for each in made:
        each.expects = False
    list(pool.map(lambda end: end.close(), made))


def message(number: int, size: int = 8, urgency: Urgency = (0,)) -> tuple[Urgency, Segment, bytes]:
    return urgency, Segment(0, number, 0, size), bytes([number % 256]) * size


def test_segments_arrive_whole_whatever_their_size(ends: list[End]) -> None:
    sizes = [0, 1, 15, 16, 17, 0, 0, 200_000, 3, 4_000_000, 0, 1]
    ends[0].send(*(message(number, size) for number, size in enumerate(sizes)))
    ends[1].wait(lambda: len(ends[1].said) == len(sizes))
    assert ends[1].said == [message(number, size)[1:] for number, size in enumerate(sizes)]
    assert not ends[0].said and not ends[0].errors


def test_a_header_that_arrives_byte_by_byte_is_read_whole(ends: list[End], monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, sender, calls = ends[1].transport, ends[0].transport._outward, list[None]()
    receive = receiver._receive
    monkeypatch.setattr(receiver, "_receive", lambda: receive() or calls.append(None))
    assert sender is not None
    said = [message(7, 3)[1:], message(8, 0)[1:], message(9, 200_000)[1:]]
    for segment, body in said[:2]:
        header = HEADER.pack(HEADER_MAGIC, segment.kind, segment.shard, segment.bucket, segment.size)
        for each in [*(header[k : k + 1] for k in range(len(header))), body]:
            before = len(calls)
            sender.sendall(each)
            while each and len(calls) == before:
                time.sleep(0.0005)
    assert len(calls) >= 2 * HEADER.size
    ends[0].send(message(9, 200_000))
    ends[1].wait(lambda: len(ends[1].said) == 3)
    assert ends[1].said == said and not ends[1].errors


def test_the_most_urgent_segment_is_sent_first_and_equal_ones_in_order(ends: list[End]) -> None:
    ends[0].send(
        message(1, urgency=(0, 1)), message(2, urgency=(0, 1)), message(3, urgency=(0, 0)), message(4, 8, (-1, 1))
    )
    ends[1].wait(lambda: len(ends[1].said) == 4)
    assert [segment.bucket for segment, _ in ends[1].said] == [4, 3, 1, 2]


def test_the_most_urgent_task_is_called_first(ends: list[End]) -> None:
    called, begun, go = [], threading.Event(), threading.Event()
    ends[0].transport.post((9,), lambda: begun.set() or (go.wait(5) and None))
    begun.wait(5)
    for urgency in (3, 1, 2):
        ends[0].transport.post((urgency,), lambda urgency=urgency: called.append(urgency))  # type: ignore[misc]
    go.set()
    ends[0].send(message(1))
    ends[1].wait(lambda: ends[1].said)
    while len(called) < 3:
        time.sleep(0.001)
    assert called == [1, 2, 3]


def test_an_idle_transport_uses_no_processor_time(ends: list[End]) -> None:
    ends[0].send(message(1, 200_000))
    ends[1].wait(lambda: ends[1].said)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_what_closed_connections_have_sent_is_still_counted(pool: ThreadPoolExecutor) -> None:
    counter, store = SocketCounter(), dist.HashStore()
    before = counter.read()
    made = list(pool.map(lambda rank: End(rank, store), range(2)))
    made[0].send(message(1, 1_000_000))
    made[1].wait(lambda: made[1].said)
    for each in made:
        each.expects = False
    list(pool.map(lambda end: end.transport.close(), made))
    after = counter.read()
    for one, other in zip(before, after, strict=True):
        assert one is not None and other is not None and 1_000_000 < other - one < 1_010_000
    assert not any(end.errors for end in made)


@pytest.mark.parametrize("reset", [False, True])
def test_a_neighbour_that_ends_is_a_lost_connection(ends: list[End], reset: bool) -> None:
    gone = ends[0].transport
    if reset:
        for each in (gone._inward, gone._outward):
            assert each is not None
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    gone.abort()
    ends[1].wait(lambda: ends[1].errors)
    (error,) = ends[1].errors
    assert isinstance(error, RuntimeError) and is_lost_peer(error) and "with rank 0 (node0)" in str(error)


def test_a_neighbour_that_has_finished_is_no_failure_until_something_is_sent(pool: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    made = list(pool.map(lambda rank: End(rank, store), range(2)))
    for each in made:
        each.expects = False
    closing = pool.submit(made[0].transport.close)
    while not made[1].transport._left_ended:
        time.sleep(0.001)
    assert not made[1].errors
    made[1].send(message(1))
    made[1].wait(lambda: made[1].errors)
    made[1].transport.close()
    closing.result(DEADLINE_S)


def test_a_neighbour_that_closes_late_is_not_waited_for(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    made = list(pool.map(lambda rank: End(rank, store), range(2)))
    for each in made:
        each.expects = False
    with monkeypatch.context() as patch:
        patch.setattr(transport, "LINGER_S", 0.1)
        made[0].transport.close()
    assert made[0].transport._thread.is_alive() and not made[0].errors
    made[1].transport.close()
    made[0].transport.close()
    assert not made[0].transport._thread.is_alive() and not made[0].errors and not made[1].errors


def test_a_right_neighbour_that_ends_is_no_failure_until_something_is_sent(pool: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    made = list(pool.map(lambda rank: End(rank, store, size=3), range(3)))
    for each in made:
        each.expects = False
    made[1].transport.abort()
    while not made[0].transport._right_ended:
        time.sleep(0.001)
    assert not made[0].errors
    made[0].send(message(1))
    made[0].wait(lambda: made[0].errors)
    assert "with rank 1 (node1)" in str(made[0].errors[0])
    for each in (made[0], made[2]):
        each.transport.abort()


def test_neighbours_of_a_failed_thread_learn_of_it_at_once(pool: ThreadPoolExecutor) -> None:
    """Its rank may compute for minutes before it closes."""
    store = dist.HashStore()
    made = list(pool.map(lambda rank: End(rank, store, size=3), range(3)))
    made[1].transport.post((0,), lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    for each in made:
        each.wait(lambda each=each: each.errors)  # type: ignore[misc]
    assert isinstance(made[1].errors[0], ZeroDivisionError)
    assert all(is_lost_peer(made[rank].errors[0]) for rank in (0, 2))  # type: ignore[arg-type]
    for each in made:
        each.transport.abort()


@pytest.mark.parametrize(
    ("bytes_", "reason"),
    [
        (b"x" * HEADER.size, "which is no header of a segment"),
        (HEADER.pack(HEADER_MAGIC, 0, 0, 0, 2**63), "and 4194304 bytes were expected"),
        (HEADER.pack(HEADER_MAGIC, 9, 0, 0, 8), "which this mode does not have"),
    ],
)
def test_what_is_no_segment_is_refused(ends: list[End], bytes_: bytes, reason: str) -> None:
    """The rank's error is this sentence: an error that said "connection" would be taken for a lost rank."""
    assert ends[0].transport._outward is not None
    ends[0].transport._outward.send(bytes_)
    ends[1].wait(lambda: ends[1].errors)
    (error,) = ends[1].errors
    assert type(error) is TestbedError and not ends[1].said
    assert re.fullmatch(
        rf"rank 0 \(node0\) sent .*, {reason}\. Run the same version and spec on all ranks\.", str(error)
    )


# --- who may connect -------------------------------------------------------------------------------------------------


def begin(
    pool: ThreadPoolExecutor, store: dist.Store, deadline_s: float = DEADLINE_S
) -> tuple[Future[Any], dict[str, Any]]:
    """Rank 0 of two connects; where it listens. Rank 1 is the test itself."""
    result = pool.submit(connect_ring, Group(0, 2, store, deadline_s))
    store.wait(["ring/0/1"])
    return result, json.loads(store.get("ring/0/1"))


def close(*pairs: tuple[socket.socket, socket.socket]) -> None:
    for pair in pairs:
        for each in pair:
            each.close()


def test_garbage_at_the_listener_does_not_keep_a_neighbour_out(pool: ThreadPoolExecutor) -> None:
    """More silent connections than may be pending, half a hello, a wrong magic, a wrong token, a wrong rank."""
    store = dist.HashStore()
    first, where = begin(pool, store)
    token = where["token"].encode()
    said = [HELLO.pack(HELLO_MAGIC, 1, b"0" * 32), HELLO.pack(HELLO_MAGIC, 0, token), HELLO.pack(b"ABCD", 1, token)]
    with contextlib.ExitStack() as strangers:
        for number in range(2 * MAX_UNIDENTIFIED):
            stranger = strangers.enter_context(socket.create_connection((where["address"], where["port"])))
            with contextlib.suppress(OSError):  # it was closed to make room
                stranger.sendall([b"", *said, b"GET / HTTP/1.0\r\n\r\n", os.urandom(5000), said[0][:7]][number % 7])
        second = pool.submit(connect_ring, Group(1, 2, store, DEADLINE_S))
        (inward, outward), (their_inward, their_outward) = first.result(DEADLINE_S), second.result(DEADLINE_S)
    assert inward.getpeername() == their_outward.getsockname()
    assert outward.getsockname() == their_inward.getpeername()
    close((inward, outward), (their_inward, their_outward))


def test_nothing_listens_once_the_neighbours_are_connected(pool: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    first, where = begin(pool, store)
    second = pool.submit(connect_ring, Group(1, 2, store, DEADLINE_S))
    close(first.result(DEADLINE_S), second.result(DEADLINE_S))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((where["address"], where["port"]))


def test_a_wrong_token_is_never_accepted(pool: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    first, where = begin(pool, store, deadline_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        right = {"address": "127.0.0.1", "port": server.getsockname()[1], "token": "0" * 32}
        store.set("ring/1/1", json.dumps(right))
        with socket.create_connection((where["address"], where["port"])) as stranger:
            stranger.sendall(HELLO.pack(HELLO_MAGIC, 1, b"f" * 32))
            stranger.settimeout(10)
            assert stranger.recv(1) == b"", "it was not closed"
        with pytest.raises(RuntimeError, match="was not there within 1 s") as raised:
            first.result(DEADLINE_S)
    assert is_lost_peer(raised.value)


def test_a_silent_connection_is_closed_after_its_time(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HELLO_TIMEOUT_S", 0.2)
    store = dist.HashStore()
    first, where = begin(pool, store)
    with socket.create_server(("127.0.0.1", 0)) as server:
        right = {"address": "127.0.0.1", "port": server.getsockname()[1], "token": "0" * 32}
        store.set("ring/1/1", json.dumps(right))
        with socket.create_connection((where["address"], where["port"]), timeout=10) as stranger:
            assert stranger.recv(1) == b""
        neighbour = socket.create_connection((where["address"], where["port"]))
        neighbour.sendall(HELLO.pack(HELLO_MAGIC, 1, where["token"].encode()))
        close(first.result(DEADLINE_S), (neighbour, neighbour))


def test_a_neighbour_that_refuses_is_a_lost_connection(pool: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    first, _ = begin(pool, store)
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    store.set("ring/1/1", json.dumps({"address": "127.0.0.1", "port": closed, "token": "0" * 32}))
    with pytest.raises(RuntimeError, match=r"connection with rank 1 \(node1\): Connection refused"):
        first.result(DEADLINE_S)


def test_ranks_connect_over_ipv6(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "address", "::1")
    store = dist.HashStore()
    first, second = (pool.submit(connect_ring, Group(rank, 2, store, DEADLINE_S)) for rank in range(2))
    pairs = first.result(DEADLINE_S), second.result(DEADLINE_S)
    assert all(each.family == socket.AF_INET6 and each.getpeername()[0] == "::1" for pair in pairs for each in pair)
    close(*pairs)
