"""The connection from the observer to the process that started the script (launch.py): JSON lines, one way.

The launcher writes them to rankN.jsonl. If the connection breaks, the observer is silent and the script goes on.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any

VARIABLE = "TESTBED_OBSERVER"  # the path of the launcher's Unix socket; empty or missing: nothing is observed
REQUEST = "TESTBED_OBSERVE"  # what the launcher requests, as JSON: schema, steps, deadline, interface, ...
SEND_TIMEOUT_S = 5.0  # a launcher that does not read for so long is treated as gone


class Channel:
    """Sends lines from any thread. After a fork the child has no channel: it opens its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._pid = 0
        self._socket: socket.socket | None = None
        self.broken = False

    def send(self, record: dict[str, Any]) -> None:
        """Send one line. Raises nothing."""
        if self.broken:
            return
        line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
        with self._lock:
            try:
                self._connected().sendall(line)
            except OSError:
                self.broken = True

    def _connected(self) -> socket.socket:
        if self._socket is None or self._pid != os.getpid():
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(SEND_TIMEOUT_S)
            self._socket.connect(self.path)
            self._pid = os.getpid()
        return self._socket
