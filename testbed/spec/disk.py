"""Errors of the file system as messages. The message of a full disk names the file system and its free space."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from testbed.spec.errors import TestbedError
from testbed.spec.words import Place, current_place, shown_path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, no quota, no larger file
STEP_BYTES = 64 << 10  # more than the record of a step with some hundred buffers


def is_full(error: BaseException) -> bool:
    """Return True if the error means that no more can be written."""
    return isinstance(error, OSError) and error.errno in DISK_FULL


def os_failure(error: OSError, where: object) -> TestbedError:
    """Return the exception for a full disk, a removed folder and the like; `where` replaces a missing file name."""
    reason = error.strerror or str(error) or type(error).__name__
    path = error.filename if isinstance(error.filename, str) else where
    if is_full(error):
        return TestbedError(full_disk(path, reason))
    way_out = "Remove the cause, then try again."
    return TestbedError(f"{shown_path(str(path))}: {reason}, so nothing was finished. {way_out}")


def full_disk(path: object, reason: str = os.strerror(errno.ENOSPC)) -> str:
    """Return the message for a path on a full disk: the path, the reason, the free space, and the way out."""
    found = file_system(Path(str(path)))
    space = f" ({found})" if found else ""
    resume = "; a run with checkpoints continues with --resume" if current_place() is Place.COMMAND_LINE else ""
    way_out = f"Make room there, then try again{resume}."
    return f"{shown_path(str(path))}: {reason}{space}. {way_out}"


def nearly_full(path: Path) -> bool:
    """Return True if the file system of an existing folder has no room for the records of a step."""
    with contextlib.suppress(OSError):
        space = os.statvfs(path)
        return space.f_bavail * space.f_frsize < STEP_BYTES or (space.f_files > 0 and space.f_favail == 0)
    return False


def file_system(path: Path) -> str:
    """Return the file system of a path and its free space: "file system /runs (tmpfs): 0.0 of 1.0 MB free".

    Return "" if it cannot be read, e.g. because no folder above the path exists.
    """
    with contextlib.suppress(OSError, ValueError):
        existing = next(each for each in [path.absolute(), *path.absolute().parents] if each.exists())
        mount = next(each for each in [existing.resolve(), *existing.resolve().parents] if each.is_mount())
        space = os.statvfs(existing)
        free, total = (blocks * space.f_frsize / 1e6 for blocks in (space.f_bavail, space.f_blocks))
        return f"file system {shown_path(mount)}{_kind(mount)}: {free:.1f} of {total:.1f} MB free"
    return ""


def _kind(mount: Path) -> str:
    """Return the type of the file system at this mount point, e.g. " (tmpfs)"; "" if it is unknown.

    If several are mounted on one folder, the last one counts, because it covers the others.
    """
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
        kinds = [row[2] for row in rows if len(row) > 2 and row[1] == str(mount)]
        return f" ({kinds[-1]})" if kinds else ""
    return ""
