"""One measurement at a time on this machine: nodes that share its cores are nobody else's while they are timed.

The lock is an empty file where every user may make one. It is opened for reading only, so that one user's file locks
out the others too, and through no link; the kernel frees it with the process, and says who holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from testbed.control.machine import ownership
from testbed.control.runs.select import Place
from testbed.spec.errors import Interrupted, Unavailable, one_line

# Lock: one controller per run folder and per experiment; the kernel frees it with the process, however that ends.
#
# `grasp` is the lock itself, of the machine's too (machine.py), where whoever comes second waits.
#
# The file says who holds it, by the owner's mark, for the message. A file that nobody holds is what a dead controller
# left, and is simply taken over.


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock of `path` (a folder that need not exist): a hidden file beside it."""
    file = path.parent / f".{path.name}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = _take(file)
    try:
        os.truncate(handle, 0)
        os.pwrite(handle, f"{ownership.current()}\n".encode(), 0)
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


SHARE = "TESTBED_SHARE"  # set it, and nobody waits: for tests, which start many at once
FOLDERS = (Path("/run/lock"), Path("/tmp"))  # not TMPDIR: all users must mean the same one
NAME = "testbed.lock"
POLL = 0.2  # seconds between two tries
LONGEST = 80  # characters of another's command
_held: list[int] = []  # what this process holds: a sweep keeps it over all its runs


@contextmanager
def alone(place: Place) -> Iterator[None]:
    """Have this machine's cores to ourselves, where the place uses them; whoever was first is waited for."""
    if place.here and not place.beside:
        with reserved():
            yield
    else:
        yield


@contextmanager
def reserved(file: Path | None = None) -> Iterator[None]:
    """Hold the machine's lock, unless this process does already, or everybody shares (TESTBED_SHARE)."""
    if _held or os.environ.get(SHARE, "0") not in ("", "0"):
        yield
        return
    file = file or _folder() / NAME
    _held.append(_wait(file))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # another user's stays: who comes next takes it as it is
            file.unlink()
        os.close(_held.pop())


def _folder() -> Path:
    """The first that is open to all; what it depends on is the same for every user."""
    for folder in FOLDERS:
        with contextlib.suppress(OSError):
            if folder.stat().st_mode & stat.S_IWOTH:
                return folder
    raise Unavailable(f"lock: none of {', '.join(map(str, FOLDERS))} is open to all users. Use --share: no lock then.")


def _wait(file: Path) -> int:
    """The locked file. Says for whom it waits."""
    told = ""
    try:
        while (handle := _try(file)) is None:
            who = _holder(file)
            if who != told:
                told = who
                print(f"  waiting for {who} to end; --share measures beside it", file=sys.stderr, flush=True)
            time.sleep(POLL)
    except KeyboardInterrupt:
        raise Interrupted("interrupted while waiting; nothing was begun") from None
    return handle


def _try(file: Path) -> int | None:
    """The file, locked; None where another has it, or freed and removed it between our opening and locking it."""
    handle = _open(file)
    if grasp(handle, file) is Grasp.OURS:
        return handle
    os.close(handle)
    return None


def _open(file: Path) -> int:
    """For reading, and never through a link; made where it is missing. The kernel may refuse O_CREAT on another's."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        try:
            handle = os.open(file, flags)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                made = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o644)
                os.fchmod(made, 0o644)  # whatever the umask says: others must be able to wait for it
                os.close(made)
            handle = os.open(file, flags)
    except OSError as error:
        raise Unavailable(f"lock {file}: {error.strerror}. Remove it, or use --share: no lock then.") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Unavailable(f"lock {file}: is no plain file. Remove it, or use --share: no lock then.")
    return handle


def _holder(file: Path) -> str:
    """Who has the lock, by the kernel's list, which does not know processes outside of our container."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        status = file.lstat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        pids = [int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == device]
    return f"process {pids[0]} ({_command(pids[0])})" if pids and pids[0] > 0 else "another process"


def _command(pid: int) -> str:
    """What it was started as, `python -m` and folders left out; somebody else's words, so only what prints."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return "unknown"
    starts = [k for k, word in enumerate(words[:4]) if Path(word).name in ("testbed", "testbed.control")]
    text = shlex.join(["testbed", *words[starts[0] + 1 :]] if starts else words)
    return one_line(text)[:LONGEST] or "unknown"
