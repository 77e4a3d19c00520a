"""The connections between the observer and the process that started the script (launch.py), through a Unix socket.

`Channel` sends records as JSON lines; the launcher writes them to rankN.jsonl and sends nothing back. If the connection
breaks, the observer sends no more records and the script goes on.

`listen` starts a thread that sleeps until the launcher asks where the script is. The answer is the line of the script
that the main thread executes, and whether torch waits there for other ranks. The launcher asks when a script makes no
step, and the error message names that line.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from types import FrameType
from typing import Any

from testbed.attach.events import OURS, is_library

VARIABLE = "TESTBED_OBSERVER"  # the path of the launcher's Unix socket; empty or missing: nothing is observed
REQUEST = "TESTBED_OBSERVE"  # what the launcher requests, as JSON: schema, steps, deadline, interface, ...
SEND_TIMEOUT_S = 5.0  # if the launcher reads nothing for this time, the connection counts as broken
SEND_BUFFER_BYTES = 1 << 20  # so that a step does not wait for the launcher; the kernel may grant less
ENCODER = json.JSONEncoder(separators=(",", ":"), default=str)


class Channel:
    """Sends lines from any thread. A forked process calls `reopen` to get a connection of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.reopen()

    def reopen(self) -> None:
        """Forget the connection without closing it. After a fork, the connection belongs to the parent."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.broken = False

    def send(self, record: dict[str, Any]) -> None:
        """Send one line. Raise nothing: a record that cannot be encoded as JSON or sent is dropped."""
        if self.broken:
            return
        try:
            line = ENCODER.encode(record).encode() + b"\n"
        except (TypeError, ValueError, RecursionError):
            return
        with self._lock:
            try:
                self._connected().sendall(line)
            except OSError:
                self.broken = True
                self.close()

    def close(self) -> None:
        """Close the connection. The next `send` opens another one, unless `broken` is set."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket = made
            made.settimeout(SEND_TIMEOUT_S)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            made.connect(self.path)
        return self._socket


READY_TO_ANSWER = {"kind": "asks"}  # the first line on the connection on which the launcher asks where the script is
QUESTION = b"where\n"
MAX_DEPTH = 200


def listen(path: str) -> None:
    """Connect to the launcher and answer its questions in a thread. Raise OSError if the connection fails."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    connection.sendall(json.dumps(READY_TO_ANSWER).encode() + b"\n")
    main = threading.main_thread().ident

    def answer() -> None:
        try:
            while connection.recv(len(QUESTION)):
                frame = sys._current_frames().get(main or 0)
                connection.sendall(json.dumps(position(frame)).encode() + b"\n")
        except OSError:
            return

    threading.Thread(target=answer, name="testbed-where", daemon=True).start()


def position(frame: FrameType | None) -> dict[str, Any]:
    """Return where a thread is, as a record: the innermost line of the script, and whether torch waits there."""
    waits, site, depth = False, "", 0
    while frame is not None and depth < MAX_DEPTH and not site:
        path = frame.f_code.co_filename
        if not path.startswith((OURS, "<")) and not is_library(path):
            site = f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        # backward() waits inside torch for DDP's reductions
        waits = waits or "/torch/distributed/" in path or "/torch/autograd/" in path
        frame, depth = frame.f_back, depth + 1
    return {"kind": "where", "site": site, "waits": waits}
