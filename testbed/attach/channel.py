"""The connection from the observer to the process that started the script (launch.py): JSON lines, one way.

The launcher writes them to rankN.jsonl. If the connection breaks, the observer is silent and the script goes on.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

VARIABLE = "TESTBED_OBSERVER"  # the path of the launcher's Unix socket; empty or missing: nothing is observed
REQUEST = "TESTBED_OBSERVE"  # what the launcher requests, as JSON: schema, steps, deadline, interface, ...
SEND_TIMEOUT_S = 5.0  # a launcher that does not read for so long is treated as gone
SEND_BUFFER_BYTES = 1 << 20  # so that a step does not wait for the launcher; the kernel allows less
ENCODER = json.JSONEncoder(separators=(",", ":"), default=str)


class Channel:
    """Sends lines from any thread. A process that was forked calls `reopen`: it has a connection of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.reopen()

    def reopen(self) -> None:
        """Forget the connection of the process that this one was forked from."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.broken = False

    def send(self, record: dict[str, Any]) -> None:
        """Send one line. Raises nothing: what cannot be sent, or is no JSON, is dropped."""
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
        """Close the connection; the next record opens another one unless it is broken."""
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
