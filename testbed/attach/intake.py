"""Receive the observer's lines through a Unix socket and write them to rankN.jsonl.

A script can write any bytes to the socket. So a line is stored only if it is a record of a kind that the observer sends
and its values have the right types (results/records.py). The size of the file is limited.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from testbed.attach.channel import QUESTION, READY_TO_ANSWER
from testbed.results.folder import MAX_RECORDS_BYTES, process_records
from testbed.results.observations import Files, Made, Unseen, Where
from testbed.results.records import MAX_LINE_BYTES, End, Error, decode, encode
from testbed.spec.errors import one_line

KINDS = {"start", "step", "setup", "calls", "gradients", "parameters", "batch", "pass", "unseen", "hash", "swap"}
RESERVED_BYTES = 8 << 20  # of the size limit, for the launcher's own records
MADE_S = 1.0  # between two `made` records, of which the reserve has room for more than two days
OTHERS_SHARE = 0.25  # of the size limit, for the processes that are not the rank
MAX_PROCESSES = 32  # whose records are kept, on one node
ACCEPT_BACKLOG = 64
MAX_CONNECTIONS = 256  # at once: two for each process of a script that imports torch
PAUSE_S = 0.05  # between two reads of one connection; meanwhile the kernel buffers what the observer sends
READ_BYTES = 1 << 16
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of a connected process
READY = json.dumps(READY_TO_ANSWER).encode() + b"\n"


class Records:
    """Writes rankN.jsonl: the lines of the first process that sends `start`, which is the rank.

    Other processes that send `start` are further ranks, which the script has forked. Each has a file of its own beside
    rankN.jsonl (RunFolder.processes); these files together have one size limit. Lines that a process sends before
    `start` are stored when `start` comes.

    When the limit is reached, an `unseen` record says so, and nothing more of the observer is stored. Steps are still
    counted, and a short `made` record once a second shows the controller that the script does not hang.
    """

    def __init__(self, path: Path, limit_bytes: int = MAX_RECORDS_BYTES - RESERVED_BYTES) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()
        self._left = limit_bytes
        self._left_of_others = int(OTHERS_SHARE * limit_bytes)
        self._full = False  # a line of the rank was not stored
        self._why_full = f"they have reached their limit of {limit_bytes / (1 << 20):g} MiB"
        self._made_at = 0.0  # monotonic time of the last `made`
        self._rank: int | None = None  # the first connection that sent `start`
        self._started: dict[int, TextIO | None] = {}  # connections that sent `start`, in order, and their files
        self._unstarted: dict[int, list[bytes]] = {}  # lines of connections that have not started
        self.steps = 0
        self.last_step = time.monotonic()
        self.reached_limit = False  # the script has made the requested steps
        self.on_limit: Callable[[], None] = lambda: None
        self.dropped = 0  # number of lines that are no records
        self.swapped = False  # --instead: a mode synchronises the script's gradients
        self.refused = ""  # the message of --instead if it refused the script

    def accept(self, connection: int, line: bytes) -> None:
        """Store one line of the observer. Drop a line that is no record."""
        try:
            kind = decode(line).kind
        except ValidationError:
            self._accept_message(line)
            return
        with self._lock:
            if kind == "start" and connection not in self._started:
                self._start(connection)
            self.swapped = self.swapped or kind == "swap"
            if kind in KINDS:
                self._store(connection, kind, line)

    def _accept_message(self, line: bytes) -> None:
        """Read a line that is for the launcher and is not stored."""
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            values = json.loads(line)
            kind = values.get("kind")
            with self._lock:
                if kind == "limit" and not self.reached_limit:
                    self.reached_limit = True
                    self.on_limit()
                elif kind == "refused":
                    self.refused = one_line(str(values.get("message", "")))
                elif kind != "limit":
                    self.dropped += 1

    def _start(self, connection: int) -> None:
        """Open the file of a process that sent `start`, and write its earlier lines. The first process is the rank."""
        number, file = len(self._started), None
        if not self._started:
            self._rank, file = connection, self._file
        elif number < MAX_PROCESSES:
            with contextlib.suppress(OSError):
                file = process_records(self._path, number).open("a", encoding="utf-8", buffering=1)
        self._started[connection] = file
        for line in self._unstarted.pop(connection, []):
            self._write(file, line)

    def _store(self, connection: int, kind: str, line: bytes) -> None:
        other = self._rank is not None and connection != self._rank
        if kind == "step" and not other:
            self.steps, self.last_step = self.steps + 1, time.monotonic()
        if other and len(line) > self._left_of_others:
            return
        if not other and (self._full or len(line) > self._left):
            self._skip()
            return
        if other:
            self._left_of_others -= len(line)
        else:
            self._left -= len(line)
        if connection in self._started:
            self._write(self._started[connection], line)
        elif kind == "unseen" and not self._started:  # a forked process does not send it again
            self._write(self._file, line)
        else:
            self._unstarted.setdefault(connection, []).append(line)

    def _skip(self) -> None:
        """Do not store a line of the rank, because the limit is reached. A later, shorter line is not stored either."""
        if not self._full:
            self._full = True
            what = f"{self._why_full}, so later steps are not stored"
            self._write(self._file, encode(Unseen(seam="records", error=what)).encode())
        if self.steps and time.monotonic() >= self._made_at + MADE_S:
            self._made_at = time.monotonic()
            self._write(self._file, encode(Made(steps=self.steps)).encode())

    def _write(self, file: TextIO | None, line: bytes) -> None:
        try:
            if file is not None:
                file.write(line.decode().rstrip() + "\n")
        except OSError as error:  # e.g. a full disk: the script goes on, and nothing more is stored
            self._left = self._left_of_others = 0
            self._why_full = f"they could not be written ({error.strerror})"

    @property
    def rank(self) -> int | None:
        """The connection of the process that is the rank; None before it has sent `start`."""
        return self._rank

    @property
    def processes(self) -> int:
        """The number of processes that have sent `start`."""
        return len(self._started)

    def write(self, record: End | Error | Files | Unseen | Where) -> None:
        """Write a record of the launcher. Before Error or Files, write what arrived without a `start`."""
        with self._lock:
            if isinstance(record, Error | Files):
                self._write_unstarted()
            self._file.write(encode(record) + "\n")

    def _write_unstarted(self) -> None:
        """Write the lines of connections without a `start` if no process has sent one, else discard them."""
        for line in (line for lines in self._unstarted.values() for line in lines if not self._started):
            self._write(self._file, line)
        self._unstarted.clear()

    def close(self) -> None:
        with self._lock:
            self._write_unstarted()
            for file in (self._file, *self._started.values()):
                if file is not None:
                    file.close()


class Pausing(io.RawIOBase):
    """Reads a connection at most every PAUSE_S, so that a short step of the script does not wake up the launcher."""

    def __init__(self, connection: socket.socket, finishing: threading.Event) -> None:
        self._connection, self._finishing = connection, finishing
        self._more = True  # the last read filled its buffer, so there may be more

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._more:
            self._finishing.wait(PAUSE_S)
        size = self._connection.recv_into(buffer)
        self._more = size == len(buffer)
        return size


class Intake:
    """Listens for connections of observers, in daemon threads. Connections of other users than `user` are closed."""

    def __init__(self, path: Path, records: Records, user: int) -> None:
        self._records = records
        self._users = (user, os.geteuid())  # the second one: a script in a user namespace is this user here
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        path.chmod(0o666)  # any user of the machine can connect, so `_serve` asks who it is
        self._server.listen(ACCEPT_BACKLOG)
        self._path = path
        self._finishing = threading.Event()  # set: no reader pauses any more
        self._readers: list[threading.Thread] = []
        self._pids: list[int] = []  # of the connected processes, by number of the connection
        self._asked: dict[int, socket.socket] = {}  # connections that answer questions, by pid
        self._questions: set[int] = set()  # pids that were asked and have not answered yet
        self._room = threading.Semaphore(MAX_CONNECTIONS)
        self._acceptor = threading.Thread(target=self._serve, daemon=True)
        self._acceptor.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # also BlockingIOError: `finish` was called, and no connection is left
                return
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            pid, uid, _ = CREDENTIALS.unpack(credentials)
            if uid not in self._users or not self._room.acquire(blocking=False):
                connection.close()
                continue
            number = len(self._readers)
            self._pids.append(pid)
            reader = threading.Thread(target=self._read, args=(connection, number), daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, connection: socket.socket, number: int) -> None:
        pid = self._pids[number]
        paused = Pausing(connection, self._finishing)
        with contextlib.suppress(OSError), connection, io.BufferedReader(paused, READ_BYTES) as lines:
            for line in iter(lambda: lines.readline(MAX_LINE_BYTES), b""):
                if line == READY:
                    self._asked[pid] = connection
                elif self._asked.get(pid) is connection:
                    self._answered(pid, line)
                elif line.endswith(b"\n"):
                    self._records.accept(number, line)
        self._room.release()

    def ask(self) -> None:
        """Ask the process that is the rank where it is. If no process has sent `start`, ask all."""
        asked = dict(self._asked)
        if self._records.rank is not None:
            own = self._pids[self._records.rank]
            asked = {own: asked[own]} if own in asked else {}
        for pid, connection in asked.items():
            with contextlib.suppress(OSError):
                self._questions.add(pid)
                connection.send(QUESTION, socket.MSG_DONTWAIT)

    def _answered(self, pid: int, line: bytes) -> None:
        if pid not in self._questions:
            return
        self._questions.discard(pid)
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            values = json.loads(line)
            self._records.write(Where(site=str(values.get("site"))[:200], waits=bool(values.get("waits"))))

    def finish(self, timeout_s: float) -> None:
        """Read all connections to their end. Call it when the processes of the script have ended."""
        self._finishing.set()
        self._server.setblocking(False)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wake:
            wake.connect(str(self._path))  # wakes the acceptor, which may wait in accept()
        self._acceptor.join(timeout_s)
        self._server.close()
        for reader in tuple(self._readers):
            reader.join(timeout_s)
