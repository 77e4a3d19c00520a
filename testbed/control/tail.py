"""Tail: the JSON lines that a growing file has gained since the last look."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


class Tail:
    """Reads on from where it stopped; a line without its end waits for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def read(self) -> list[dict[str, Any]]:
        """New objects; lines that are no JSON objects are someone else's."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
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
