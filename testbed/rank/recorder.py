"""Recorder: one JSON line per record, flushed at once. It draws no random number and adds no barrier."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from testbed.spec.records import Record, encode


class Recorder:
    """Appends to rankN.jsonl; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(encode(record) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
