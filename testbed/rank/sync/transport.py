"""Transport: segments to the right neighbour of a ring and from the left one, over TCP, by one thread.

Each rank has two connections: it listens for its left neighbour and connects to its right one. Addresses go through the
store, each with a token that the neighbour must send before anything else. Once the left neighbour is there, nothing
listens any more. What a segment is, where it is received and what follows from it is the caller's (pipeline.py):

    place(segment)       where the body of a segment is to be received, by its header; None if there is no such segment
    received(segment)    its body is there
    expects()            True while segments are still to come: the left neighbour must not end
    fail(error)          the first error of the thread, which ends with it

All are called in the transport's thread, as are the tasks that `post` queues. Between two tasks the thread sends and
receives what it can. Whenever the socket has room, the most urgent segment of all that wait is sent.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from testbed.net.channel import HELLO_TIMEOUT_S, MAX_UNIDENTIFIED, listen, new_token
from testbed.rank.counters import keep_counts
from testbed.rank.group import Group
from testbed.results.theory import UNSENT_BYTES
from testbed.spec.errors import TestbedError

# Sizes that were measured to be fast, as UNSENT_BYTES is. With smaller receive buffers a rank whose thread waits for a
# core stops its neighbour.
RECEIVE_BYTES = 4 << 20  # the kernel's receive buffer; on paths with a delay the kernel chooses it, which may need more
WAKE_BYTES = 128 << 10  # the thread is woken when so much, or the rest of a segment, has arrived
TCP_NOTSENT_LOWAT = 25  # Linux's socket option; Python has no name for it

HELLO = struct.Struct("!4sI32s")  # magic, rank, token
HELLO_MAGIC = b"TBR1"
HEADER = struct.Struct("!HBxHHQ")  # magic, kind, shard, bucket, bytes of the body
HEADER_MAGIC = 0x5E60
LINGER_S = 5.0  # how long `close` waits for the neighbours to close, too
BACKLOG = 128
TICK_S = 0.1  # between two looks at the clock while ranks connect

Urgency = tuple[int, ...]  # the smaller is first


class Segment(NamedTuple):
    """What the header of a segment says."""

    kind: int
    bucket: int
    shard: int
    size: int  # bytes of the body


class Transport:
    """One rank's two connections and the thread that serves them. With a single rank there is only the thread."""

    def __init__(
        self,
        group: Group,
        place: Callable[[Segment], memoryview | None],
        received: Callable[[Segment], None],
        expects: Callable[[], bool],
        fail: Callable[[Exception], None],
    ) -> None:
        """Connect to both neighbours; RuntimeError if they are not there within the deadline."""
        self._place, self._received, self._expects, self._fail = place, received, expects, fail
        self._left, self._right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        self._waiting: list[tuple[Urgency, int, Segment, memoryview]] = []  # a heap: segments to send
        self._tasks: list[tuple[Urgency, int, Callable[[], None]]] = []  # a heap
        self._posted: deque[tuple[Urgency, Callable[[], None]]] = deque()  # by any thread
        self._numbers = itertools.count()  # what is equally urgent keeps its order
        self._unsent: list[memoryview] = []  # of the segment that is being sent
        self._has_room = True
        self._header = memoryview(bytearray(HEADER.size))
        self._of_header = 0  # bytes of it that have arrived
        self._coming: Segment | None = None  # the segment whose body is being received
        self._rest = memoryview(bytearray())  # of the body, where it is still missing
        self._wake_at = 0  # the value of SO_RCVLOWAT
        self._stopping = self._left_ended = self._right_ended = False
        self._inward: socket.socket | None = None
        self._outward: socket.socket | None = None
        if group.size > 1:
            self._inward, self._outward = connect_ring(group)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._wakeup, select.EPOLLIN)
        if self._inward and self._outward:
            self._poll.register(self._inward, select.EPOLLIN)
            self._poll.register(self._outward, select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        self._thread = threading.Thread(target=self._run, name="ring", daemon=True)
        self._thread.start()

    # --- called by any thread ---

    def post(self, urgency: Urgency, task: Callable[[], None]) -> None:
        """Have the thread call `task`; of all that wait, the most urgent first."""
        self._posted.append((urgency, task))
        if threading.current_thread() is not self._thread:
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Send what waits, then close both connections as soon as the neighbours have read all and close, too.

        A neighbour may do other work for minutes before it closes, so after LINGER_S the thread waits alone. This rank
        may then end: a neighbour that has nothing left to send or receive does not need the connection.
        """
        if self._poll.closed:
            return
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join(LINGER_S)
        if self._thread.is_alive():
            return
        for each in (self._inward, self._outward):
            if each is not None:
                keep_counts(each)
                each.close()
        self._poll.close()
        os.close(self._wakeup)

    def abort(self) -> None:
        """Close both connections at once. The neighbours report them as lost, as after the end of this process."""
        self._shut_down()
        self.close()

    def _shut_down(self) -> None:
        for each in (self._inward, self._outward):
            with contextlib.suppress(OSError):  # the neighbour has reset it
                if each is not None:
                    each.shutdown(socket.SHUT_RDWR)

    # --- called by the thread's own tasks ---

    def send(self, urgency: Urgency, segment: Segment, body: memoryview) -> None:
        """Queue a segment for the right neighbour. Its body must not change until that neighbour has it."""
        if self._left_ended:  # what is sent comes round the ring, so something would be missing
            raise self._lost(self._left)
        if self._right_ended:
            raise self._lost(self._right)
        heapq.heappush(self._waiting, (urgency, next(self._numbers), segment, body))

    # --- the thread ---

    def _run(self) -> None:
        use_sched_batch()
        try:
            while True:
                busy = bool(self._posted or self._tasks)
                for descriptor, events in self._poll.poll(0 if busy else None):
                    self._handle(descriptor, events)
                while self._posted:
                    urgency, task = self._posted.popleft()
                    heapq.heappush(self._tasks, (urgency, next(self._numbers), task))
                if self._tasks:
                    heapq.heappop(self._tasks)[2]()
                self._send_waiting()
                if self._stopping and not (self._posted or self._tasks or self._waiting or self._unsent):
                    return self._end_connections()
        except Exception as error:  # any error: without this the training loop would wait for ever
            self._fail(error)
            self._shut_down()  # now: the loop may compute for long before it sees the error and ends

    def _handle(self, descriptor: int, events: int) -> None:
        if descriptor == self._wakeup:
            os.eventfd_read(self._wakeup)
        elif self._outward is not None and descriptor == self._outward.fileno():
            self._has_room = True
            if events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                self._right_has_ended()
        else:
            self._receive()

    def _lost(self, rank: int, why: object = "closed by peer") -> RuntimeError:
        return RuntimeError(f"connection with rank {rank} (node{rank}): {why}")

    def _not_understood(self, what: str) -> TestbedError:
        """The error for what breaks the protocol. The neighbour is not lost, so it is none of a connection."""
        who = f"rank {self._left} (node{self._left})"
        return TestbedError(f"{who} sent {what}. Run the same version and spec on all ranks.")

    def _send_waiting(self) -> None:
        """Send while the socket has room."""
        while self._has_room and (self._unsent or self._waiting):
            if not self._unsent:
                _, _, segment, body = heapq.heappop(self._waiting)
                header = HEADER.pack(HEADER_MAGIC, segment.kind, segment.shard, segment.bucket, segment.size)
                self._unsent = [memoryview(header), body]
            assert self._outward is not None
            try:
                sent = self._outward.sendmsg(self._unsent)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._lost(self._right, error.strerror) from None
            while self._unsent and sent >= len(self._unsent[0]):
                sent -= len(self._unsent.pop(0))
            if self._unsent:  # the socket took a part only: epoll reports when it has room again
                self._unsent[0] = self._unsent[0][sent:]
                self._has_room = False

    def _receive(self) -> None:
        """Receive once: the rest of a segment's body and the next header, each as far as it has arrived."""
        assert self._inward is not None
        try:
            size, *_ = self._inward.recvmsg_into([self._rest, self._header[self._of_header :]])
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(self._left, error.strerror) from None
        if not size:
            return self._left_has_ended()
        of_body = min(size, len(self._rest))
        self._rest = self._rest[of_body:]
        self._of_header += size - of_body
        if self._coming is not None and not self._rest:
            segment, self._coming = self._coming, None
            self._received(segment)
        if self._of_header == HEADER.size:
            self._begin_segment()
        return self._set_wake_at(min(len(self._rest), WAKE_BYTES) or 1)

    def _begin_segment(self) -> None:
        magic, kind, shard, bucket, size = HEADER.unpack(self._header)
        self._of_header = 0
        segment = Segment(kind, bucket, shard, size)
        if magic != HEADER_MAGIC:
            raise self._not_understood(f"{bytes(self._header)!r}, which is no header of a segment")
        place = self._place(segment)
        if place is None:
            raise self._not_understood(f"{segment}, which this mode does not have")
        self._rest = place
        if len(self._rest) != size:
            raise self._not_understood(f"{segment}, and {len(self._rest)} bytes were expected")
        if size:
            self._coming = segment
        else:
            self._received(segment)

    def _left_has_ended(self) -> None:
        """The left neighbour has sent its last byte. That is its failure, unless it has finished and closes."""
        assert self._inward is not None
        if self._coming is not None or self._of_header or self._expects():
            raise self._lost(self._left)
        self._poll.unregister(self._inward)
        self._left_ended = True

    def _right_has_ended(self) -> None:
        """The right neighbour has closed. That is its failure, unless nothing is left to send or to come."""
        assert self._outward is not None
        if self._waiting or self._unsent or self._expects():
            raise self._lost(self._right)
        self._poll.unregister(self._outward)
        self._right_ended = True

    def _set_wake_at(self, size: int) -> None:
        if size != self._wake_at:
            assert self._inward is not None
            self._wake_at = size
            self._inward.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def _end_connections(self) -> None:
        """End the own half of each connection and wait for the other half's end: then all bytes have arrived.

        The half towards the right ends first. The other one ends when the left neighbour has ended its own.
        """
        if self._inward is None or self._outward is None:
            return
        with contextlib.suppress(OSError):  # a neighbour that has failed: this rank has all that it needs
            for each in (self._inward, self._outward):
                each.setblocking(True)  # `close` has the deadline
            self._outward.shutdown(socket.SHUT_WR)
            self._inward.recv(1)
            self._inward.shutdown(socket.SHUT_WR)
            self._outward.recv(1)


def use_sched_batch() -> None:
    """Give the calling thread the scheduling class SCHED_BATCH. Do nothing if the kernel does not permit it.

    By default Linux wakes this thread for every packet or two, and the thread preempts the one that computes: four
    ranks on two cores switch threads ten thousand times a step. A thread of class SCHED_BATCH preempts no other
    thread, so it handles more packets each time that it runs.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# --- the connections -------------------------------------------------------------------------------------------------


def connect_ring(group: Group) -> tuple[socket.socket, socket.socket]:
    """Return the connections from the left neighbour and to the right one, both non-blocking.

    Any process can connect to the listener. A connection that does not send the token in time is closed, and if too
    many have sent nothing, the oldest is. Raises RuntimeError if a neighbour is not there within the deadline.
    """
    number = group.store.add(f"ring/{group.rank}", 1)  # a mode may be attached several times in one run
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    token = new_token()
    with listen(group.address, 0, BACKLOG) as listener:
        if not group.round_trip_s and allows_receive_buffer(RECEIVE_BYTES):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)  # its connections inherit it
        where = {"address": group.address, "port": listener.getsockname()[1], "token": token}
        group.store.set(f"ring/{group.rank}/{number}", json.dumps(where))
        end = time.monotonic() + group.deadline.total_seconds()
        group.store.wait([f"ring/{right}/{number}"], group.deadline)
        theirs = json.loads(group.store.get(f"ring/{right}/{number}"))
        hello = HELLO.pack(HELLO_MAGIC, group.rank, theirs["token"].encode())
        wanted = HELLO.pack(HELLO_MAGIC, left, token.encode())
        try:
            outward = begin_connection(group.address, theirs["address"], theirs["port"])
            inward = Meeting(listener, outward, hello, wanted).wait(end)
        except TimeoutError:
            missing = f"rank {left} (node{left}) or rank {right} (node{right})"
            limit = f"{group.deadline.total_seconds():g} s"
            raise RuntimeError(f"connection with {missing} timed out: it was not there within {limit}") from None
        except OSError as error:
            raise RuntimeError(f"connection with rank {right} (node{right}): {error.strerror}") from None
    inward.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    outward.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    outward.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    return inward, outward


def begin_connection(own_address: str, address: str, port: int) -> socket.socket:
    """A non-blocking socket that connects from one address to another."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        sock.bind((own_address, 0))
        sock.connect((address, port))
    return sock


def allows_receive_buffer(size: int) -> bool:
    """True if this machine allows a receive buffer of this size. A smaller fixed one is worse than the kernel's own."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= size


class Meeting:
    """Sends the hello of one connection and waits for the right hello on another, whatever else connects."""

    def __init__(self, listener: socket.socket, outward: socket.socket, hello: bytes, wanted: bytes) -> None:
        self.listener, self.outward, self.hello, self.wanted = listener, outward, hello, wanted
        self.pending: dict[socket.socket, tuple[float, bytes]] = {}  # since when, and what it has sent
        self.found: socket.socket | None = None

    def wait(self, end: float) -> socket.socket:
        """Return the connection whose hello is the wanted one, once the own hello is sent; OSError if it cannot be."""
        self.listener.setblocking(False)
        with selectors.DefaultSelector() as self.selector:
            self.selector.register(self.listener, selectors.EVENT_READ)
            self.selector.register(self.outward, selectors.EVENT_WRITE)
            try:
                while self.hello or self.found is None:
                    self._tick(end)
            except OSError:
                self.outward.close()
                if self.found is not None:
                    self.found.close()
                raise
            finally:
                for each in list(self.pending):
                    self._drop(each)
        return self.found

    def _tick(self, end: float) -> None:
        now = time.monotonic()
        if now > end:
            raise TimeoutError
        for key, _ in self.selector.select(TICK_S):
            self._handle(key.fileobj)
        for each in [each for each, (since, _) in self.pending.items() if now - since > HELLO_TIMEOUT_S]:
            self._drop(each)

    def _handle(self, ready: object) -> None:
        if ready is self.listener:
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it has ended meanwhile
                connection, _ = self.listener.accept()
                connection.setblocking(False)
                if len(self.pending) >= MAX_UNIDENTIFIED:
                    self._drop(next(iter(self.pending)))  # the oldest: the newest may be the neighbour
                self.pending[connection] = (time.monotonic(), b"")
                self.selector.register(connection, selectors.EVENT_READ)
        elif ready is self.outward:
            if error := self.outward.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            self.hello = self.hello[self.outward.send(self.hello) :]
            if not self.hello:
                self.selector.unregister(self.outward)
        elif isinstance(ready, socket.socket) and ready in self.pending:
            self._read_hello(ready)

    def _read_hello(self, connection: socket.socket) -> None:
        since, said = self.pending[connection]
        try:
            more = connection.recv(HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        if len(said) == HELLO.size and self.found is None and secrets.compare_digest(said, self.wanted):
            self.selector.unregister(connection)
            del self.pending[connection]
            self.found = connection
        elif not more or len(said) == HELLO.size:
            self._drop(connection)
        else:
            self.pending[connection] = (since, said)

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        del self.pending[connection]
        connection.close()
