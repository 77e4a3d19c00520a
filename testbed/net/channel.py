"""Control connections: JSON objects over TCP, one a line, with a largest line and a token.

The probe and the heartbeats of the ranks use them. Any process can connect, so nothing that arrives is trusted: a line
that is too long or not a JSON object ends the connection, and a process without the token is rejected.
Standard library only: the probe starts before anything heavy is imported.
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


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """Listen at an IPv4 or IPv6 address; OSError if the port is in use."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def new_token() -> str:
    """A random secret, shared by the nodes of one probe or the ranks of one run."""
    return secrets.token_hex(16)


def token_matches(given: object, token: str) -> bool:
    """Return True if a received value is the token; takes the same time whether or not it is."""
    text = given.encode("utf-8", "replace") if isinstance(given, str) else b""
    return secrets.compare_digest(text, token.encode())


class Channel:
    """One connection. `name` is what messages call the other end."""

    def __init__(self, sock: socket.socket, name: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.sock = sock
        self.name = name
        self._max_line_bytes = max_line_bytes
        self._received = b""
        self._unsent = b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        """Send one object within the socket's timeout; ChannelClosed if that is not possible."""
        try:
            self.sock.sendall(self._unsent + _encode(message))
            self._unsent = b""
        except OSError as error:
            raise ChannelClosed(f"{self.name} closed the connection ({error})") from None

    def try_send(self, message: dict[str, Any]) -> None:
        """Send without waiting, on a non-blocking socket. For messages that are repeated soon: this one may be dropped.

        If an earlier message was sent in part, its rest is sent instead. Errors are raised by the next read.
        """
        data = self._unsent or _encode(message)
        with contextlib.suppress(OSError):
            self._unsent = data[self.sock.send(data) :]

    def read_once(self) -> bool:
        """Read once; return False if nothing has arrived on a non-blocking socket.

        Raises ChannelClosed if the other end is closed or its line is too long.
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
        """The next object that has arrived, or None; ChannelClosed if the line is not a JSON object."""
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
