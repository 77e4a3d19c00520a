"""Recorder: one JSON line per record, flushed at once. It draws no random number and adds no barrier."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Self

from testbed.spec.folder import RunFolder
from testbed.spec.records import Record, encode, read


class Recorder:
    """Appends to rankN.jsonl; a context manager."""

    def __init__(self, path: Path, earlier: Path | None = None) -> None:
        self.folder = RunFolder(path.parent)
        self._earlier = earlier  # what an attempt before this one recorded
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(encode(record) + "\n")

    def repeat(self, step: int) -> None:
        """Take over what the earlier attempt recorded of the steps before `step`: this run goes on from there."""
        for record in read(self._earlier) if self._earlier else ():
            again = record["kind"] == "hash" and record["step"] == 0  # this attempt compared the start, too
            if record["kind"] in ("step", "eval", "hash") and record["step"] < step and not again:
                self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take is lost, and was complained of
            self._file.close()
