"""The output of a script: a bounded log, and the words in it that say why the script ended."""

from __future__ import annotations

import contextlib
import os
import re
from typing import BinaryIO

from testbed.spec.errors import one_line
from testbed.spec.units import approximate_size

CHUNK_BYTES = 1 << 16
TAIL_BYTES = 64 << 10  # the end of the output, which is kept also if the log is full
_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # torch marks the lines of an exception with the rank
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\s*$")  # not at the beginning after half a line
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(:.*)?$")
_WRAPPERS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "SignalException")
# What torch and Gloo say on a rank when another rank has ended or cannot be reached.
_LOST = re.compile(
    r"connection (closed|reset|refused|aborted|was closed|was reset)|broken pipe|closed by peer|reset by peer"
    r"|connectfullmesh|dist(network|store|backend)error|failed to (recv|send|connect)|timed out|timeout"
    r"|no route to host|unreachable|recvbytes|sendbytes|rendezvous(closed|connection|timeout)",
    re.IGNORECASE,
)


class Output:
    """Copies what the script prints to a log of at most `limit` bytes. The end is kept in any case."""

    def __init__(self, target: BinaryIO, limit: int) -> None:
        self._target, self._left, self._limit = target, limit, limit
        self._tail = bytearray()
        self.total = 0  # bytes that the script has printed

    def copy(self, source: int) -> None:
        """Read a pipe to its end. A log that cannot be written, e.g. on a full disk, does not block the script."""
        while chunk := os.read(source, CHUNK_BYTES):
            self.add(chunk)

    def add(self, chunk: bytes) -> None:
        """Take the next bytes of the output."""
        self.total += len(chunk)
        self._tail += chunk
        del self._tail[:-TAIL_BYTES]
        if self._left > 0:
            self._write(chunk[: self._left])
            self._left -= len(chunk)

    def finish(self) -> None:
        """Say what is missing in the log, and append the end of the output."""
        missing = self.total - self._limit
        if missing > 0:
            end = bytes(self._tail[-min(missing, TAIL_BYTES) :])
            left_out = missing - len(end)
            rule = f"{approximate_size(self.total)} of output, and a log has at most {approximate_size(self._limit)}"
            self._write(f"\ntestbed: {rule}; {approximate_size(left_out)} are left out here\n".encode() + end)

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._target.write(content)
            self._target.flush()

    @property
    def tail(self) -> str:
        return bytes(self._tail).decode(errors="replace")


def last_words(text: str) -> str:
    """The line that says why a script ended: its last exception, else its last line; empty if it printed nothing."""
    found = [line for line in exceptions(text) if not line.split(":")[0].endswith(_WRAPPERS)]
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines() if line.strip()]
    return one_line(found[-1] if found else lines[-1] if lines else "")


def exceptions(text: str) -> list[str]:
    """The exception line of every traceback, in order."""
    found, inside = [], False
    for line in (_PREFIX.sub("", each) for each in text.splitlines()):
        if _TRACEBACK.search(line):
            inside = True
        elif inside and _EXCEPTION.match(line):
            found.append(line)
            inside = False
    return found


def lost_another(text: str) -> bool:
    """True if the words are those of a rank that lost another one, or did not reach it."""
    return bool(_LOST.search(text))
