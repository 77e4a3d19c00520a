"""Recorder: one JSON line per record, flushed at once. It draws no random number and adds no barrier."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

from testbed.spec.folder import RunFolder
from testbed.spec.records import Record, Repeated, Step, encode, read_repeated


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
        found: dict[tuple[str, int], Repeated] = {}
        for number, path in self._earlier.items():
            for record in read_repeated(path):
                if record.step < step:
                    found[record.kind, record.step] = _marked(record, number)
        found.pop(("hash", 0), None)  # this attempt compared the start, too
        for record in sorted(found.values(), key=lambda each: (each.step, each.kind == "step")):
            self.write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take is lost, and was complained of
            self._file.close()


def _marked(record: Repeated, attempt: int) -> Repeated:
    """A step with the number of the attempt that did it: its counters are no other attempt's."""
    return replace(record, attempt=record.attempt or attempt) if isinstance(record, Step) else record
