"""Foreign: what is read of a run folder that may come from a stranger: plain files inside it, none of them endless."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from testbed.spec.errors import SpecError
from testbed.spec.folder import RunFolder, read_bounded

MAX_RECORDS = 128 << 20  # bytes of one rank's records, all attempts together; a rank of ours writes no more
MAX_FAULTS = 16 << 20  # of faults.jsonl; a controller writes some dozen lines
MAX_SMALL = 16 << 20  # of any other file; the receipt of 64 nodes has about one million


def check_inside(folder: RunFolder) -> None:
    """No link, pipe or device in it. The folder itself, or one above it, may be a link: that one the user made."""
    RunFolder(folder.path.resolve()).check_foreign()


def check_size(paths: Iterable[Path], most: int) -> None:
    """Files that are read line by line, and kept: not more than `most` bytes together."""
    sizes = {path.name: path.stat().st_size for path in paths}
    if sum(sizes.values()) > most:
        raise SpecError(f"{', '.join(sizes)} has {sum(sizes.values())} bytes, and at most {most} are read")


def read_json(path: Path) -> Any:
    """A small file, whole."""
    return json.loads(read_bounded(path, MAX_SMALL))
