"""Tail: the JSON lines that a growing file has gained since the last look."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


class Tail:
    """Reads on from where it stopped; a line without its end waits for it."""

    def __init__(self, path: Path, anew: bool = False) -> None:
        """`anew`: what is there already is of no interest; a file that takes its place is."""
        self.path = path
        self.offset = 0
        self.inode: int | None = None
        if anew and path.is_file():
            self.inode, self.offset = path.stat().st_ino, path.stat().st_size

    def read(self) -> list[dict[str, Any]]:
        """New objects; lines that are no JSON objects are someone else's."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self.inode:
                self.inode, self.offset = inode, 0
            file.seek(self.offset)
            whole = file.read()
            whole = whole[: whole.rfind(b"\n") + 1]
            self.offset += len(whole)
            return [value for value in map(_parse, whole.splitlines()) if value is not None]
        return []


def _parse(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None
