"""Two locks: one controller per run folder or experiment, and one measurement at a time on this machine.

Both are flock(2) on a file, so the kernel frees them when the process ends, however it ends. A lock file that no
process holds is stale and is taken over.
`folder_lock` does not wait: it raises Unavailable and names the holder, whose process id is in the file.
`machine_lock` waits. Its file is empty and opened for reading only, so that users can lock a file of another user; the
holder is found in /proc/locks. (The package filelock truncates the file before it locks it, which erases
the name of the holder.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from pathlib import Path
from typing import TypeVar

from testbed.control.machine import ownership
from testbed.control.runs.select import SubstrateChoice
from testbed.results.folder import RunFolder
from testbed.spec.errors import Interrupted, Unavailable, one_line

Found = TypeVar("Found")
Lock = Callable[[SubstrateChoice, Callable[[str], None]], AbstractContextManager[None]]  # machine_lock
SHARE = (
    "TESTBED_SHARE"  # environment variable: if set, runs do not take the machine's lock. Tests start many runs at once
)
LOCK_FOLDERS = (Path("/run/lock"), Path("/tmp"))  # not TMPDIR: all users must use the same file
LOCK_NAME = "testbed.lock"
POLL_S = 0.2  # between two tries
MAX_COMMAND_CHARS = 80  # of the holder's command line in a message
_held: list[int] = []  # the machine's lock, while this process holds it: a sweep keeps it over all its runs


class LockState(Enum):
    """How a try to lock an opened file ended."""

    OURS, TAKEN, GONE = "ours", "taken", "gone"  # gone: its holder removed the file after we had opened it


def try_lock(handle: int, file: Path) -> LockState:
    """Lock the opened `file` without waiting. The lock counts only if the name still refers to the opened file."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockState.TAKEN
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), file.lstat()):
            return LockState.OURS
    return LockState.GONE


# The lock of a folder


@contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, which need not exist: a hidden file next to it. Raises Unavailable."""
    file = path.parent / f".{path.name}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = _lock_folder(file)
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock holds, but its holder cannot be named
            os.truncate(handle, 0)
            os.pwrite(handle, f"{ownership.current()}\n".encode(), 0)
        yield
    finally:
        file.unlink(missing_ok=True)  # before the lock is freed, so that no process locks a deleted file
        os.close(handle)


def set_aside_unless(
    folder: RunFolder, finished: Callable[[], Found | None], report: Callable[[str], None]
) -> Found | None:
    """What `finished` returns, if a run is finished in the folder; else None, and an earlier attempt is set aside.

    Raises Unavailable if another process uses the folder.
    """
    with folder_lock(folder.path):
        found = finished()
        if found is None and folder.path.exists():
            report(f"an earlier attempt was moved to {folder.set_aside()}")
    return found


def _lock_folder(file: Path) -> int:
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        if (state := try_lock(handle, file)) is LockState.OURS:
            return handle
        pid = os.pread(handle, 64, 0).decode(errors="replace").partition("-")[0].strip()
        os.close(handle)
        if state is LockState.TAKEN:
            what = str(file.with_name(file.name[1:].removesuffix(".lock")))
            holder = f"process {pid} ({command_of(int(pid))})" if pid.isdecimal() else "another process"
            raise Unavailable(f"{what}: in use by {holder}. Wait until it ends, or use another folder.")


# The lock of the machine


@contextmanager
def machine_lock(
    choice: SubstrateChoice, report: Callable[[str], None], folders: Sequence[Path] = LOCK_FOLDERS
) -> Iterator[None]:
    """Hold the machine's lock if the nodes of this substrate share its cores; wait while another process holds it.

    `report` is called with a sentence that names the process that is waited for.
    """
    if choice.needs_machine_lock:
        with reserve_machine(report, folders=folders):
            yield
    else:
        yield


@contextmanager
def reserve_machine(
    report: Callable[[str], None], file: Path | None = None, folders: Sequence[Path] = LOCK_FOLDERS
) -> Iterator[None]:
    """Hold the machine's lock, unless this process holds it already or TESTBED_SHARE is set."""
    if _held or os.environ.get(SHARE, "0") not in ("", "0"):
        yield
        return
    file = file or _folder_for_all_users(folders) / LOCK_NAME
    _held.append(_wait(file, report))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a file of another user cannot be removed, and the next one reuses it
            file.unlink()
        os.close(_held.pop())


def _folder_for_all_users(folders: Sequence[Path]) -> Path:
    """Return the first folder in which all users may create files, so that all take the same. Raises Unavailable."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if folder.stat().st_mode & stat.S_IWOTH:
                return folder
    names = ", ".join(map(str, folders))
    raise Unavailable(f"lock: none of {names} can be written by all users. Use --share to run without the lock.")


def _wait(file: Path, report: Callable[[str], None]) -> int:
    """Return the locked file's handle. Report the process that holds it while waiting. Raises Interrupted."""
    reported = ""
    try:
        while (handle := _try_machine(file)) is None:
            holder = _holder(file)
            if holder != reported:
                reported = holder
                report(f"waiting for {holder} to end; --share does not wait")
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise Interrupted("interrupted while waiting for another run on this machine; nothing was started") from None
    return handle


def _try_machine(file: Path) -> int | None:
    """Return the locked file's handle; None if another process holds it, or removed it after our open."""
    handle = _open(file)
    if try_lock(handle, file) is LockState.OURS:
        return handle
    os.close(handle)
    return None


def _open(file: Path) -> int:
    """Return a handle for reading, without following symlinks; create the file if it is missing. Raises Unavailable.

    O_CREAT is used only for a new file: in a sticky folder the kernel may refuse it on a file of another user.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        try:
            handle = os.open(file, flags)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                made = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o644)
                os.fchmod(made, 0o644)  # independent of the umask: other users must be able to open it
                os.close(made)
            handle = os.open(file, flags)
    except OSError as error:
        raise Unavailable(f"lock {file}: {error.strerror}. Remove it, or use --share to run without it.") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Unavailable(f"lock {file}: is not a regular file. Remove it, or use --share to run without it.")
    return handle


def _holder(file: Path) -> str:
    """Return the process that holds the lock, from /proc/locks, which lists no process outside our container."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        status = file.lstat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        pids = [int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == device]
    return f"process {pids[0]} ({command_of(pids[0])})" if pids and pids[0] > 0 else "another process"


def command_of(pid: int) -> str:
    """Return the command line of a process, printable and shortened; `testbed` without its interpreter and folder."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return "unknown"
    starts = [k for k, word in enumerate(words[:4]) if Path(word).name in ("testbed", "testbed.control")]
    text = shlex.join(["testbed", *words[starts[0] + 1 :]] if starts else words)
    return one_line(text)[:MAX_COMMAND_CHARS] or "unknown"
