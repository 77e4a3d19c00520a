"""The JSON document of a command with --json: exactly one per command line, also if the command fails."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.results.conclude import Summary
from testbed.results.folder import RunFolder, finite
from testbed.spec.errors import Interrupted, TestbedError, UsageError

_printed: list[object] = []  # the document of this command line after it was printed; else empty


def reset() -> None:
    """Begin a new command line, which has not printed a document."""
    _printed.clear()


def print_document(value: object) -> None:
    """Print the document, with null for nan and infinity. After this, `print_failure` prints nothing."""
    _printed.append(value)
    print(json.dumps(finite(value), indent=1, default=str, allow_nan=False))


def print_failure(error: TestbedError) -> None:
    """Print a document about a command that failed, unless the command has printed its own."""
    if not _printed:
        runs = _summaries(error.folder)
        status = {"status": runs[0].status} if runs else {}
        print_document(results(runs, error.folder, outcome(error) | status))


def outcome(error: TestbedError | None, status: str = "ok", reason: str = "", exit_code: int = 0) -> dict[str, Any]:
    """Return how a command ended: status, reason and exit code. An error replaces the three arguments."""
    if error is None:
        return {"status": status, "reason": reason, "exit_code": exit_code}
    refused = isinstance(error, UsageError) and error.folder is None
    status = "interrupted" if isinstance(error, Interrupted) else "refused" if refused else "failed"
    return {"status": status, "reason": str(error), "exit_code": error.exit_code}


def results(summaries: Sequence[Summary], folder: Path | None, ended: dict[str, Any]) -> dict[str, Any]:
    """Return the document of `run` and `sweep`: how the command ended, the folder, and every run's summary."""
    runs = [json.loads(summary.model_dump_json(by_alias=True)) for summary in summaries]
    return {**ended, "folder": None if folder is None else str(folder), "runs": runs}


def _summaries(folder: Path | None) -> list[Summary]:
    with contextlib.suppress(UsageError, OSError):
        return [Summary.read(RunFolder(folder))] if folder else []
    return []
