"""Sender: one thread through which all of a rank's parts leave, the most urgent first."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable

from testbed.rank.group import Group, Work

WINDOW = 2 << 20  # bytes handed to Gloo and not yet taken by the kernel: enough to keep the wire busy
Urgency = tuple[int, ...]  # the smaller leaves first


class Sender:
    """What is handed to Gloo leaves in that order, so it gets little at a time: what is urgent need not queue long."""

    def __init__(self, group: Group, fail: Callable[[Exception], None]) -> None:
        self._group, self._fail = group, fail
        self._waiting: list[tuple[Urgency, int, int, Callable[[], Work]]] = []
        self._numbers = itertools.count()  # equally urgent ones leave in the order they came
        self._changed = threading.Condition()
        self._stopped = False
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

    def _run(self) -> None:
        leaving: deque[tuple[int, Work]] = deque()
        outstanding = 0
        try:
            while (item := self._next()) is not None:
                size, send = item
                while leaving and outstanding + size > WINDOW:
                    freed, work = leaving.popleft()
                    self._group.wait(work)
                    outstanding -= freed
                leaving.append((size, send()))
                outstanding += size
            self._group.wait(*(work for _, work in leaving))
        except Exception as error:  # whatever it is, the loop must not wait for ever
            self._fail(error)

    def _next(self) -> tuple[int, Callable[[], Work]] | None:
        with self._changed:
            while not self._waiting and not self._stopped:
                self._changed.wait()
            if not self._waiting:
                return None
            _, _, size, send = heapq.heappop(self._waiting)
            return size, send
