"""cgroups, version 1 (a hierarchy per controller) and 2 (unified): CPU quota of a node, and memory limit for faults.

Root uses the whole hierarchy. Another user can only use the cgroup that this process is in, if it was delegated to that
user, e.g. by `systemd-run --user --scope --property Delegate=yes make run`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from testbed.control.machine.processes import kill_until_gone
from testbed.spec.errors import TestbedError, Unavailable
from testbed.spec.resources import NO_QUOTA, quota_and_period

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
DELEGATED = "a cgroup of your own: systemd-run --user --scope --property Delegate=yes COMMAND"
DROP_IN = "/etc/systemd/system/user@.service.d/delegate.conf"  # of systemd, for what users may delegate
TOP = "testbed"  # all our groups are below this folder
DELEGATE_MARK = "user.delegate"  # the extended attribute that systemd sets on a delegated cgroup
CALLERS = "testbed-callers"  # in a delegated cgroup of version 2: the group of this process and of its callers
CREATE_ATTEMPTS = 10
REMOVE_TIMEOUT_S = 2.0
_NEEDED_FOR = {"cpu": ("CPU quota", "Leave node.cpus unset"), "memory": ("memory limit", "Leave the fault out")}
_MEMORY_V1, _MEMORY_V2 = ("memory.usage_in_bytes", "memory.limit_in_bytes"), ("memory.current", "memory.max")
# The shell joins the group and then becomes the command, so the pid stays and no code runs between fork and exec.
JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@dataclass(frozen=True)
class Hierarchy:
    """Where a controller is mounted, and the version of cgroups there."""

    path: Path
    version: int
    delegated: bool = False  # True if `path` is not the mount point but a cgroup that a user may use

    @property
    def top(self) -> Path:
        """The folder that holds one folder per owner."""
        return self.path / TOP


def find_hierarchy(root: Path = ROOT, controller: str = "cpu", own: Path = OWN) -> Hierarchy:
    """Return where a cgroup controller (cpu, memory) can be used; raise Unavailable if it cannot.

    That is where it is mounted, or the cgroup of this process, which `own` lists, if it is delegated to this user.
    """
    with contextlib.suppress(OSError):
        if controller in (root / "cgroup.controllers").read_text().split():
            return _writable(Hierarchy(root, 2), controller, own)
    for name in (controller, f"{controller},cpuacct"):
        if (root / name / "cgroup.procs").exists():
            return _writable(Hierarchy(root / name, 1), controller, own)
    what, way_out = _NEEDED_FOR[controller]
    raise Unavailable(f"{what}: no {controller} controller under {root}. {way_out}, or mount cgroups")


def _writable(hierarchy: Hierarchy, controller: str, own: Path) -> Hierarchy:
    if os.access(hierarchy.path, os.W_OK):
        return hierarchy
    folder = hierarchy.path / _own_group(hierarchy.version, controller, own)
    needed = ["", "cgroup.procs", *(["cgroup.subtree_control"] if hierarchy.version == 2 else [])]
    what, without = _NEEDED_FOR[controller]
    if folder == hierarchy.path or not all(os.access(folder / name, os.W_OK) for name in needed):
        raise Unavailable(f"{what}: {hierarchy.path} is not writable. {without}, run as root, or in {DELEGATED}")
    if hierarchy.version == 2 and not is_delegated(folder):
        rule = f"{folder} is writable, but not marked as delegated ({DELEGATE_MARK}), so systemd may change it"
        mark = f"setfattr -n {DELEGATE_MARK} -v 1 {folder}"
        way_out = f"{without}, run as root, or in {DELEGATED}; if this is one, of an older systemd, mark it: {mark}"
        raise Unavailable(f"{what}: {rule}. {way_out}")
    if hierarchy.version == 2 and controller not in (folder / "cgroup.controllers").read_text().split():
        allow = f"as root write the lines [Service] and Delegate=cpu memory pids to {DROP_IN} and log in again"
        rule = f"{folder} was delegated without the {controller} controller"
        raise Unavailable(f"{what}: {rule}. {without}, run as root, or {allow}")
    return Hierarchy(folder, hierarchy.version, delegated=True)


def is_delegated(folder: Path) -> bool:
    """True if systemd marks a cgroup as delegated. A user may write to others, too, but systemd manages those."""
    try:
        return os.getxattr(folder, DELEGATE_MARK) == b"1"
    except OSError:
        return False


def _own_group(version: int, controller: str, own: Path) -> str:
    """Return the path of this process's cgroup below the mount point, by a file like /proc/self/cgroup."""
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (controller in controllers.split(",")) if version == 1 else not controllers:
            return path.strip("/").removesuffix(f"/{CALLERS}")
    return ""


def missing_controller(controller: str) -> str:
    """Return why a controller cannot be used here; empty if it can."""
    try:
        find_hierarchy(controller=controller)
    except Unavailable as error:
        return str(error).partition(". ")[0]
    return ""


def has_controller(controller: str) -> bool:
    """Return True if a controller can be used here."""
    return not missing_controller(controller)


def mounted_hierarchies() -> list[Hierarchy]:
    """Where our groups may be: the hierarchy of the cpu controller, and that of memory if it is another."""
    found = []
    for controller in ("cpu", "memory"):
        with contextlib.suppress(Unavailable):
            found.append(find_hierarchy(controller=controller))
    return list(dict.fromkeys(found))


class Cgroup:
    """One node's cgroup: `create` it, start processes with `join_argv` in front, `remove` it."""

    def __init__(self, hierarchy: Hierarchy, name: str | PurePosixPath) -> None:
        self._hierarchy = hierarchy
        self.path = hierarchy.top / name

    def create(self, controller: str = "cpu") -> None:
        """Make the group's folder. Version 2 also enables the controller on each level above it."""
        for attempt in range(CREATE_ATTEMPTS):
            try:
                self.path.mkdir(parents=True)
                break
            except FileNotFoundError:  # another testbed has just removed the empty top folder
                if attempt == CREATE_ATTEMPTS - 1:
                    raise
        if self._hierarchy.version == 2:
            self._enable(controller)

    def _enable(self, controller: str) -> None:
        """Enable a controller of version 2 on every level from the mount point down to the folder above this group."""
        below = self.path.relative_to(self._hierarchy.path)
        if self._hierarchy.delegated:
            self._vacate()
        for parent in reversed(below.parents):
            _write(self._hierarchy.path / parent / "cgroup.subtree_control", f"+{controller}")

    def _vacate(self) -> None:
        """Move all processes of the delegated cgroup one level down: a cgroup with processes cannot enable anything."""
        callers = self._hierarchy.path / CALLERS
        callers.mkdir(exist_ok=True)
        for pid in pids_of(self._hierarchy.path):
            with contextlib.suppress(TestbedError):  # it has ended
                _write(callers / "cgroup.procs", str(pid))

    def set_quota(self, cpus: float | None) -> None:
        """Change the CPU share, also while processes run in the group; None removes the limit."""
        quota, period = quota_and_period(cpus)
        if self._hierarchy.version == 2:
            _write(self.path / "cpu.max", f"{'max' if quota == NO_QUOTA else quota} {period}")
        else:
            _write(self.path / "cpu.cfs_quota_us", str(NO_QUOTA))  # the new period may conflict with the old quota
            _write(self.path / "cpu.cfs_period_us", str(period))
            _write(self.path / "cpu.cfs_quota_us", str(quota))

    def limit_memory(self, headroom_bytes: int | None) -> None:
        """Limit memory to the bytes in use plus `headroom_bytes`; the kernel kills what exceeds it. None: no limit."""
        (used, limit), none = _MEMORY_V1, "-1"
        if self._hierarchy.version == 2:
            self._enable("memory")
            (used, limit), none = _MEMORY_V2, "max"
        value = none if headroom_bytes is None else str(int((self.path / used).read_text()) + headroom_bytes)
        _write(self.path / limit, value)

    def add(self, pids: Sequence[int]) -> None:
        """Move running processes into the group; one that has ended meanwhile is ignored."""
        for pid in pids:
            with contextlib.suppress(TestbedError):
                _write(self.path / "cgroup.procs", str(pid))

    def join_argv(self) -> list[str]:
        """The prefix that makes a command run inside the group, with an unchanged pid."""
        return ["sh", "-c", JOIN, str(self.path)]

    def pids(self) -> list[int]:
        """Every process in the group."""
        return pids_of(self.path)

    def kill(self) -> list[int]:
        """Send SIGKILL to every process in the group; return their pids."""
        return kill_until_gone(self.pids)

    def remove(self) -> None:
        """Remove the group's folder, then the folders above it that are ours and empty. A missing group is ignored."""
        remove_folder(self.path)
        for folder in (self.path.parent, self._hierarchy.top):
            with contextlib.suppress(OSError):
                folder.rmdir()


def pids_of(folder: Path) -> list[int]:
    """The processes in a cgroup's folder; an empty list if there is no such folder."""
    try:
        return [int(word) for word in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def remove_folder(folder: Path, timeout_s: float = REMOVE_TIMEOUT_S) -> None:
    """Remove a cgroup's folder, with retries: a killed process leaves its group a moment after it is reaped."""
    deadline = time.monotonic() + timeout_s
    while folder.exists():
        try:
            folder.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                reason = f"{error.strerror}; processes inside: {pids_of(folder)}"
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
