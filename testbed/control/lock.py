"""Lock: one controller per run folder and per experiment; the kernel frees it with the process, however that ends.

`grasp` is the lock itself, of the machine's too (machine.py), where whoever comes second waits.

The file says who holds it, by the owner's mark, for the message. A file that nobody holds is what a dead controller
left, and is simply taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from testbed.control.substrates import owner
from testbed.spec.errors import Unavailable


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock of `path` (a folder that need not exist): a hidden file beside it."""
    file = path.parent / f".{path.name}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = _take(file)
    try:
        os.truncate(handle, 0)
        os.pwrite(handle, f"{owner.current()}\n".encode(), 0)
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is held: who waits for nothing may make a new one
        os.close(handle)


def _take(file: Path) -> int:
    """The locked file; where another holds it, that one is named."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        if (state := grasp(handle, file)) is Grasp.OURS:
            return handle
        who = os.pread(handle, 64, 0).decode(errors="replace").partition("-")[0].strip() or "unknown"
        os.close(handle)
        if state is Grasp.TAKEN:
            what = str(file.with_name(file.name[1:].removesuffix(".lock")))
            raise Unavailable(f"{what}: process {who} is at it. Wait for its end, or use another folder.")


class Grasp(Enum):
    """How a try to lock an opened file ended."""

    OURS, TAKEN, GONE = "ours", "taken", "gone"  # gone: another freed and removed it after we had opened it


def grasp(handle: int, file: Path) -> Grasp:
    """Lock what was opened as `file`, without waiting; it counts only while the name still means that very file."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Grasp.TAKEN
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), file.lstat()):
            return Grasp.OURS
    return Grasp.GONE
