"""Sender: one thread through which all of a rank's parts leave, the most urgent first.

What was handed over leaves in that order, so whatever is queued below this thread stands before what is urgent, at
every hop. Hence both queues are kept short: Gloo's by handing it little at a time, the kernel's by a limit on what its
sockets may hold unsent. The kernel's own choice is a tenth of a second's worth at 400 Mbit, and a ring has 2(N-1) hops.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from testbed.rank.group import Group, Work
from testbed.rank.patience import be_patient

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
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # one that was closed meanwhile
            if path.is_socket():
                with socket.socket(fileno=os.dup(int(path.name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        each.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, size)
