"""What a rank records: the lines of rankN.jsonl and the environment.

The recorder draws no random numbers and does not synchronise ranks.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from testbed import __version__
from testbed.net.tcp import congestion_in_use
from testbed.results.folder import RunFolder
from testbed.results.records import (
    Eval,
    Hash,
    Record,
    Step,
    encode,
    read,
)


class Recorder:
    """Appends records to rankN.jsonl, one JSON line each, written at once. A context manager."""

    def __init__(self, path: Path, earlier: Mapping[int, Path] | None = None) -> None:
        self.folder = RunFolder(path.parent)
        self._earlier = earlier or {}  # records of earlier attempts, oldest first
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(encode(record) + "\n")

    def copy_earlier(self, step: int) -> None:
        """Copy the records that earlier attempts wrote about steps before `step`, because this attempt resumes there.

        All earlier attempts are read, and the last one that did a step counts: an attempt may have ended before it
        copied anything itself.
        """
        found: dict[tuple[str, int], Step | Eval | Hash] = {}
        for number, path in self._earlier.items():
            for record in read(path):
                if isinstance(record, Step | Eval | Hash) and record.step < step:
                    found[record.kind, record.step] = _with_attempt(record, number)
        found.pop(("hash", 0), None)  # this attempt has compared the start itself
        for record in sorted(found.values(), key=lambda each: (each.step, each.kind == "step")):
            self.write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when the record was written
            self._file.close()


def _with_attempt(record: Step | Eval | Hash, attempt: int) -> Step | Eval | Hash:
    """Set the number of the attempt that did a step, because every attempt counts bytes from 0."""
    return replace(record, attempt=record.attempt or attempt) if isinstance(record, Step) else record


def describe_environment() -> dict[str, Any]:
    """What a measurement depends on and the spec does not contain: versions, kernel, processor, load."""
    return {
        "testbed": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "own cores": sorted(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "congestion": congestion_in_use(),
        "host": platform.node(),
    }


def _cpu_model() -> str:
    lines = _read("/proc/cpuinfo").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
