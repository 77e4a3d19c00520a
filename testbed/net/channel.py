"""Control connections: JSON objects over TCP, one per line, with a token and a limit of the line length.

The probe and the heartbeats of the ranks use them. Any process can connect, so received data is not trusted: a line
that is too long or not a JSON object ends the connection, and a process without the token is rejected.
This module imports the standard library only, because the probe must start before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from typing import Any

from testbed.spec.errors import ChannelClosed

MAX_LINE_BYTES = 1 << 20
READ_BYTES = 1 << 16
# Whoever listens for other ranks (rank/watchdog.py, rank/sync/transport.py) closes a connection that does not identify
# itself in time, and the oldest of them if there are too many: the newest may be a rank.
HELLO_TIMEOUT_S = 5.0
MAX_UNIDENTIFIED = 64


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at an IPv4 or IPv6 address. Raise OSError if the port is in use."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def new_token() -> str:
    """Return a random secret, which the nodes of one probe or the ranks of one run share."""
    return secrets.token_hex(16)


def token_matches(given: object, token: str) -> bool:
    """Return True if a received value is the token. The time does not depend on the result."""
    text = given.encode("utf-8", "replace") if isinstance(given, str) else b""
    return secrets.compare_digest(text, token.encode())


class Channel:
    """One connection. `name`: the name of the other end in error messages."""

    def __init__(self, sock: socket.socket, name: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.sock = sock
        self.name = name
        self._max_line_bytes = max_line_bytes
        self._received = b""
        self._unsent = b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        """Send one object. Raise ChannelClosed if it cannot be sent within the socket's timeout."""
        try:
            self.sock.sendall(self._unsent + _encode(message))
            self._unsent = b""
        except OSError as error:
            raise ChannelClosed(f"{self.name} closed the connection ({error})") from None

    def try_send(self, message: dict[str, Any]) -> None:
        """Send without waiting, on a non-blocking socket. The message may be dropped, so the caller must repeat it.

        If an earlier message was sent in part, send its rest instead. The next read raises any error.
        """
        data = self._unsent or _encode(message)
        with contextlib.suppress(OSError):
            self._unsent = data[self.sock.send(data) :]

    def read_once(self) -> bool:
        """Read once. Return False if nothing has arrived on a non-blocking socket.

        Raise ChannelClosed if the other end is closed or its line is too long.
        """
        try:
            data = self.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise ChannelClosed(f"{self.name} closed the connection ({error})") from None
        if not data:
            raise ChannelClosed(f"{self.name} closed the connection")
        self._received += data
        if len(self._received) > self._max_line_bytes and b"\n" not in self._received[: self._max_line_bytes]:
            raise ChannelClosed(f"{self.name} sent a line of more than {self._max_line_bytes} bytes")
        return True

    def next_message(self) -> dict[str, Any] | None:
        """Return the next received object, or None. Raise ChannelClosed if the line is not a JSON object."""
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ChannelClosed(f"{self.name} sent a line that is not a JSON object")
        return message


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
