"""Hold a script that is not trusted to its limits of time and disk, from outside; the nodes limit the rest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from testbed.control.runs.supervisor import RankObserver, RankState
from testbed.spec.errors import RankFailed
from testbed.spec.script import Limits

SIZE_EVERY_S = 0.5  # between two looks at the run folder, to which a script may be able to write


class Allowance:
    """A RankObserver that raises RankFailed when a limit is exceeded; `inner` observes the ranks as well."""

    def __init__(self, limits: Limits | None, folder: Path, inner: RankObserver) -> None:
        self._limits, self._folder, self._inner = limits, folder, inner
        self._began = self._looked = time.monotonic()

    def poll(self, ranks: Sequence[RankState]) -> None:
        """Raise RankFailed for the first limit that is exceeded while a rank runs."""
        self._inner.poll(ranks)
        if self._limits is None or all(rank.code is not None for rank in ranks):
            return
        now = time.monotonic()
        if now - self._began > self._limits.seconds:
            raise RankFailed(f"the script ran longer than {self._limits.seconds:g} s, which is its limit")
        if now - self._looked > SIZE_EVERY_S:
            self._looked = now
            if size_of(self._folder) > self._limits.disk:
                raise RankFailed(f"the run folder is larger than {self._limits.disk >> 20} MiB, which is its limit")


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; no link is followed."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total
