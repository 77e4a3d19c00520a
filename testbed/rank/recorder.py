"""Recorder: one JSON line per record, flushed at once. It draws no random number and adds no barrier."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from testbed.spec.folder import RunFolder
from testbed.spec.records import Record, encode, read


class Recorder:
    """Appends to rankN.jsonl; a context manager."""

    def __init__(self, path: Path, earlier: Mapping[int, Path] | None = None) -> None:
        self.folder = RunFolder(path.parent)
        self._earlier = earlier or {}  # what attempts before this one recorded, oldest first
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(encode(record) + "\n")

    def repeat(self, step: int) -> None:
        """Take over what earlier attempts recorded of the steps before `step`: this run goes on from there.

        All of them are asked, the last that did a step counts: one may have ended before it repeated anything.
        """
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for number, path in self._earlier.items():
            for record in read(path):
                if record["kind"] in ("step", "eval", "hash") and record["step"] < step:
                    found[record["kind"], record["step"]] = _marked(record, number)
        found.pop(("hash", 0), None)  # this attempt compared the start, too
        for record in sorted(found.values(), key=lambda each: (each["step"], each["kind"] == "step")):
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take is lost, and was complained of
            self._file.close()


def _marked(record: dict[str, Any], attempt: int) -> dict[str, Any]:
    """A step with the number of the attempt that did it: its counters are no other attempt's."""
    return record | {"attempt": record.get("attempt") or attempt} if record["kind"] == "step" else record
