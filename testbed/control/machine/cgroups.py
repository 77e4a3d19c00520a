"""A node's share of the processors: a cgroup with a quota, in version 1 (cpu controller) or 2 (unified)."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from testbed.control.machine import ownership
from testbed.spec.errors import TestbedError, Unavailable, refuse

ROOT = Path("/sys/fs/cgroup")
TOP = "testbed"  # everything of ours lies under this folder
PERIOD = 10_000  # microseconds; the kernel's 100 ms would freeze a rank for longer than a small step takes
MIN_QUOTA = 1_000  # microseconds; the kernel refuses less
MAX_PERIOD = 1_000_000
_MEMORY_1, _MEMORY_2 = ("memory.usage_in_bytes", "memory.limit_in_bytes"), ("memory.current", "memory.max")
# The shell joins the group and becomes the command, so the pid stays and no code runs between fork and exec.
JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@dataclass(frozen=True)
class Hierarchy:
    """Where the cpu controller is mounted, and which version speaks there."""

    path: Path
    version: int

    @property
    def top(self) -> Path:
        """The folder that holds one folder per owner."""
        return self.path / TOP


def find_hierarchy(root: Path = ROOT, controller: str = "cpu") -> Hierarchy:
    """Where a controller is mounted; Unavailable where there is none that we may write to."""
    with contextlib.suppress(OSError):
        if controller in (root / "cgroup.controllers").read_text().split():
            return _writable(Hierarchy(root, 2))
    for name in (controller, f"{controller},cpuacct"):
        if (root / name / "cgroup.procs").exists():
            return _writable(Hierarchy(root / name, 1))
    raise Unavailable(f"CPU quota: no {controller} controller under {root}. Leave node.cpus unset, or mount cgroups")


def _writable(hierarchy: Hierarchy) -> Hierarchy:
    if os.access(hierarchy.path, os.W_OK):
        return hierarchy
    raise Unavailable(f"CPU quota: {hierarchy.path} is not writable. Run as root, or leave node.cpus unset")


def quota_and_period(cpus: float) -> tuple[int, int]:
    """Microseconds of processor per period: 0.4 -> (4000, 10000); small shares get a longer period."""
    if not MIN_QUOTA / MAX_PERIOD <= cpus < math.inf:
        raise refuse("node.cpus", cpus, f"must be at least {MIN_QUOTA / MAX_PERIOD}", "Write e.g. 0.4.")
    period = max(PERIOD, math.ceil(MIN_QUOTA / cpus))
    return round(cpus * period), period


class CpuGroup:
    """One node's cgroup: `create` it, start processes behind `prefix`, `remove` it."""

    def __init__(self, hierarchy: Hierarchy, name: str | PurePosixPath) -> None:
        self._hierarchy = hierarchy
        self.path = hierarchy.top / name

    def create(self, cpus: float | None = None) -> None:
        """Make the folder and set the quota; None means no limit."""
        self.make()
        self.set_quota(cpus)

    def make(self) -> None:
        """Make the folder alone."""
        for attempt in range(10):
            try:
                self._make()
                break
            except FileNotFoundError:  # another testbed removed the empty top folder under our feet
                if attempt == 9:
                    raise

    def _make(self) -> None:
        self.path.mkdir(parents=True)
        if self._hierarchy.version == 2:
            self._hand_down("cpu")

    def _hand_down(self, controller: str) -> None:
        for folder in self._above():
            _write(folder / "cgroup.subtree_control", f"+{controller}")

    def _above(self) -> list[Path]:
        """From the mount point down to our parent: version 2 hands a controller down one level at a time."""
        below = self.path.relative_to(self._hierarchy.path)
        return [self._hierarchy.path / parent for parent in reversed(below.parents)]

    def set_quota(self, cpus: float | None) -> None:
        """Change the share, also while processes run in it."""
        quota, period = (-1, PERIOD) if cpus is None else quota_and_period(cpus)
        if self._hierarchy.version == 2:
            _write(self.path / "cpu.max", f"{'max' if quota < 0 else quota} {period}")
        else:
            _write(self.path / "cpu.cfs_quota_us", "-1")  # else a new period may clash with the old quota
            _write(self.path / "cpu.cfs_period_us", str(period))
            _write(self.path / "cpu.cfs_quota_us", str(quota))

    def set_memory(self, limit: int | None) -> None:
        """At most `limit` bytes more than are in use: who asks for more is killed by the kernel. None: no limit."""
        (used, most), none = _MEMORY_1, "-1"
        if self._hierarchy.version == 2:
            self._hand_down("memory")
            (used, most), none = _MEMORY_2, "max"
        _write(self.path / most, none if limit is None else str(int((self.path / used).read_text()) + limit))

    def take_in(self, pids: Sequence[int]) -> None:
        """Move processes that run already; one that has ended meanwhile is fine."""
        for pid in pids:
            with contextlib.suppress(TestbedError):
                _write(self.path / "cgroup.procs", str(pid))

    def prefix(self) -> list[str]:
        """Put this in front of a command and it runs inside, under the same pid."""
        return ["sh", "-c", JOIN, str(self.path)]

    def pids(self) -> list[int]:
        """Every process inside."""
        return pids_of(self.path)

    def kill(self) -> list[int]:
        """SIGKILL every process inside, each by its pid; who was killed."""
        return ownership.kill_until_gone(self.pids)

    def remove(self) -> None:
        """Remove the folder, and those above it that are ours and empty; a group that is gone is fine."""
        remove_folder(self.path)
        for folder in (self.path.parent, self._hierarchy.top):
            with contextlib.suppress(OSError):
                folder.rmdir()


def pids_of(folder: Path) -> list[int]:
    """The processes in one cgroup; none where it does not exist."""
    try:
        return [int(word) for word in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def remove_folder(folder: Path, seconds: float = 2.0) -> None:
    """rmdir, again for a while: a killed process leaves its group a moment after it is reaped."""
    deadline = time.monotonic() + seconds
    while folder.exists():
        try:
            folder.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                reason = f"{error.strerror}; inside: {pids_of(folder)}"
                raise TestbedError(f"cgroup {folder} cannot be removed: {reason}") from None
            time.sleep(0.02)


def owners(hierarchy: Hierarchy) -> dict[str, Sequence[Path]]:
    """Every owner that has groups here, with the folders of its nodes."""
    if not hierarchy.top.is_dir():
        return {}
    folders = [entry for entry in hierarchy.top.iterdir() if entry.is_dir()]
    return {entry.name: sorted(node for node in entry.iterdir() if node.is_dir()) for entry in sorted(folders)}


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise TestbedError(f"cgroup: writing {text!r} to {file} failed: {error.strerror}") from None
