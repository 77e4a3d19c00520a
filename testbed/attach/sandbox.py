"""Start a script as an ordinary user without privileges, who can reach few processes, files and folders.

    setpriv --pdeathsig KILL -- unshare --mount --pid --fork --kill-child ... \\
        python -I -c ... --user UID:GID --writable ROOT --needs PATH... --variables FD -- COMMAND

Only root can do all of this. The script gets a mount namespace. There everything is read-only, except the working copy
and a /tmp and /dev/shm of its own. Home folders are empty except for what the script needs, e.g. an interpreter in
/root/venv. The script also gets a process namespace, so that all of its processes end with the first one, even if the
launcher is killed. Both namespaces end with the script, and nothing outside of them changes. A user other than root
starts the script with that user's own rights. If that user is uid 0 of a user namespace, the script gets another user
namespace, in which it cannot change the node's network.

While the process has root's rights, no code and no environment variable of the script may take effect. So Python is
isolated (-I); with -m it would import modules from the script's folder. The script's variables, e.g. LD_PRELOAD, come
from a file that only the last program before the script reads.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import testbed
from testbed.spec.errors import Unavailable
from testbed.spec.privileges import alone_as, as_outside, without_new_privileges, without_privileges

NAMESPACES = ("--mount", "--pid", "--ipc", "--fork", "--kill-child", "--propagation", "private")
DIES_WITH_LAUNCHER = ("setpriv", "--pdeathsig", "KILL", "--")
MOUNT_TIMEOUT_S = 20.0
PRIVATE = (Path("/tmp"), Path("/var/tmp"))  # folders that every user may write to
SHARED_MEMORY = Path("/dev/shm")
# mount_setattr(2), which has no function in the C library of older systems
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
# Python programs for -I -c: this module as root, and after it the script with its own variables and usual signals
ENTER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from testbed.attach.sandbox import main; sys.exit(main())"
EXECUTE = """
import json, os, signal, sys
with open(int(sys.argv[1]), "rb") as file:
    variables = json.load(file)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.execvpe(sys.argv[2], sys.argv[2:], variables)
"""
SIGNAL_BASE = 128  # exit code 128 + N of a script that signal N ended, as in a shell


def command(
    user: tuple[int, int], needs: Iterable[Path], writable: Path, argv: Sequence[str], variables: int
) -> list[str]:
    """Return the command that runs `argv` in the sandbox. Raise Unavailable if root cannot make namespaces here.

    `needs`: paths that must be visible. `writable`: the folder that the script may write to. `variables`: the file of
    `open_variables`, which is used by root only.
    """
    if (outside := alone_as()) is not None and os.geteuid() == 0:  # without root, in the controller's user namespace
        group = alone_as(Path("/proc/self/gid_map"))
        own = as_outside(outside, outside if group is None else group)
        return [*own, *DIES_WITH_LAUNCHER, *without_new_privileges(), *argv]
    if os.geteuid() not in (0, user[0]):  # in a container, with capabilities that the script does not get
        return [*without_privileges(*user), *DIES_WITH_LAUNCHER, *argv]
    if os.geteuid() != 0:
        return [*DIES_WITH_LAUNCHER, *without_new_privileges(), *argv]
    if not _can_unshare():
        rule = "root cannot make namespaces here, and without them a script is not isolated from the machine"
        raise Unavailable(f"substrate: {rule}. Run as another user, or use --on compose")
    package = str(Path(testbed.__file__).resolve().parent.parent)
    options = ["--user", f"{user[0]}:{user[1]}", "--writable", str(writable), "--variables", str(variables)]
    options += [flag for path in needs for flag in ("--needs", str(path))]
    own = [sys.executable, "-I", "-c", ENTER, package, *options]
    return [*DIES_WITH_LAUNCHER, "unshare", *NAMESPACES, "--", *own, "--", *argv]


def open_variables(variables: Mapping[str, str]) -> int:
    """Write a script's variables to a file in memory and return its descriptor, for `command`. The caller closes it."""
    handle = os.memfd_create("testbed-variables")
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(json.dumps(dict(variables)).encode())
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def _can_unshare() -> bool:
    return (
        subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, timeout=MOUNT_TIMEOUT_S).returncode == 0
    )


def interpreter_paths(program: str, path: str) -> list[Path]:
    """Return the folders of a program, of the files that its links lead to, and of their interpreters (#!)."""
    found: list[Path] = []
    file = shutil.which(program, path=path)
    while file:
        place = Path(os.path.abspath(file))
        found.append(place.parent.parent if place.parent.name == "bin" else place.parent)
        file = os.path.join(place.parent, os.readlink(place)) if place.is_symlink() else _interpreter(place)
    return found


def _interpreter(file: Path) -> str:
    """Return the program in the first line of a script (#!); empty if there is none, or if it is env."""
    with file.open("rb") as content:
        first = content.readline(1024)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    return words[0] if words and not words[0].endswith("/env") else ""


def homes(uid: int) -> list[Path]:
    """Return the home folders of root and of the script's user, because they may contain keys and tokens."""
    found = []
    for each in (0, uid):
        with contextlib.suppress(KeyError):
            home = Path(pwd.getpwuid(each).pw_dir)
            # the home of a system user may be a folder of root, such as /usr/sbin
            if home.is_dir() and len(home.parts) > 1 and home.stat().st_uid == each:
                found.append(home)
    return list(dict.fromkeys(found))


def hidden_ancestor(path: Path, uid: int) -> Path | None:
    """Return the outermost folder above `path` that the user may not enter; None if there is none."""
    for folder in reversed(path.parents):
        status = folder.stat()
        if not status.st_mode & (0o100 if status.st_uid == uid else 0o001):
            return folder
    return None


def covers(needs: Iterable[Path], uid: int, always: Iterable[Path]) -> dict[Path, list[Path]]:
    """Return the folders to cover, and the paths in each that must stay visible. Leave out folders inside others.

    `always`: folders to cover even if nothing in them is needed. A folder that is needed itself is not covered.
    """
    wanted = [path for path in dict.fromkeys(needs) if path.is_dir()]
    found = [path for path in always if path.is_dir() and path not in wanted]
    found += [cover for path in wanted if (cover := hidden_ancestor(path, uid)) is not None]
    outermost = [path for path in dict.fromkeys(found) if not any(path != o and path.is_relative_to(o) for o in found)]
    return {cover: _outermost(path for path in wanted if path.is_relative_to(cover)) for cover in outermost}


def _outermost(paths: Iterable[Path]) -> list[Path]:
    paths = list(paths)
    return [path for path in paths if not any(path != other and path.is_relative_to(other) for other in paths)]


def isolate(uid: int, needs: Sequence[Path], writable: Path) -> None:
    """Make everything read-only or empty, except `writable` and what the script `needs` to read.

    Call it as root, in mount and process namespaces that belong to the script alone.
    """
    _mount("-t", "proc", "proc", "/proc")
    for cover, inside in covers([*needs, writable], uid, [*homes(uid), *PRIVATE]).items():
        opened = {path: os.open(path, os.O_PATH) for path in inside}
        _mount("-t", "tmpfs", "-o", f"mode={'1777' if cover in PRIVATE else '755'}", "tmpfs", str(cover))
        for path, descriptor in opened.items():
            path.mkdir(parents=True)
            # mount must not resolve the link to its path, because that path is covered now
            _mount("--no-canonicalize", "--bind", f"/proc/{os.getpid()}/fd/{descriptor}", str(path))
            os.close(descriptor)
    if not writable.is_mount():
        _mount("--bind", str(writable), str(writable))
    if not set_read_only(Path("/"), True, recursive=True):
        print("testbed: this kernel cannot make all mounts read-only, so the script may write wherever its user may")
        return
    for path in (writable, *(each for each in PRIVATE if each.is_mount())):
        set_read_only(path, False)
    if SHARED_MEMORY.is_dir():
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(SHARED_MEMORY))


def set_read_only(path: Path, wanted: bool, recursive: bool = False) -> bool:
    """Make a mount read-only or writable, with `recursive` also those below it. Return False if the kernel cannot."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY if wanted else 0, 0 if wanted else MOUNT_ATTR_RDONLY, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    call = ctypes.CDLL(None, use_errno=True).syscall
    size = ctypes.sizeof(attributes)
    return bool(call(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, ctypes.byref(attributes), size) == 0)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=MOUNT_TIMEOUT_S)


def run(argv: list[str]) -> int:
    """Run a command as a child, wait for it and for orphans. Return the command's code: 128 + N for signal N.

    The first process of a process namespace ignores signals without a handler, so it must not be the script itself.
    """
    child = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=[signal.SIGPIPE])
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else SIGNAL_BASE - code


def main() -> int:
    """Mount the folders for the script in the new namespaces, run the command, and return its code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--user", required=True)
    parser.add_argument("--needs", type=Path, action="append", default=[])
    parser.add_argument("--writable", type=Path, required=True)
    parser.add_argument("--variables", required=True, help="descriptor of an open file")
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    uid, gid = map(int, options.user.split(":"))
    work = os.getcwd()
    isolate(uid, options.needs, options.writable)
    os.chdir(work)  # the path leads to the writable mount only now
    execute = [sys.executable, "-I", "-S", "-c", EXECUTE, options.variables]
    return run([*without_privileges(uid, gid), *execute, *options.argv])
