"""Network namespaces without root: a user namespace of the controller's own, in which it may make and shape them.

    controller (uid 1000) --starts--> keeper: unshare --user --map-root-user --net --mount, ends with the controller
                          --starts--> nsenter --target KEEPER ... ip netns add ..., a rank, a probe

The keeper only keeps the namespaces open. In them uid 0 is the controller's user: files belong to that user, and no
process has a right on this machine that the user does not have. /run/netns is a tmpfs there, which disappears with all
named network namespaces when the keeper and the last rank have ended, however they end.

Root needs none of this: `prefix()` is empty then, and named namespaces are in /run/netns. But root of a container may
lack the right to make any, so `check` tries it for root as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed.spec.datasets import data_dir
from testbed.spec.errors import Unavailable, one_line

NAMED = Path("/run/netns")  # where `ip netns` keeps its named namespaces
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--")
UNSHARE_AS_ROOT = ("unshare", "--net", "--mount", "--")
# Where no root has made /run/netns yet, the user cannot make it, so all of /run is covered.
MAKE_ROOM = "if test -d /run/netns; then mount -t tmpfs tmpfs /run/netns; else mount -t tmpfs tmpfs /run; fi"
# What a run needs and a container may forbid: `ip netns exec` mounts /sys again.
TRY = f"{MAKE_ROOM} && ip netns add try && ip netns exec try true"
READY = b"ready\n"
KEEP = f"{MAKE_ROOM} && echo ready && exec cat"  # cat ends when the controller's end of the pipe is closed
TIMEOUT_S = 20.0  # each of these commands takes milliseconds
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
SYSCTL = Path("/proc/sys")
# A setting of the kernel, the value that forbids user namespaces, and what allows them.
FORBIDDING = (
    ("kernel/unprivileged_userns_clone", "0", "As root: sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "As root: sysctl -w user.max_user_namespaces=15000"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "As root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; give unshare an AppArmor profile "
        "that has `userns,`",
    ),
)
UNSHAPED = "or use --on process (unshaped)"
INSTEAD = f"run as root, {UNSHAPED}"
CONTAINER_FIX = "Start the container with --privileged, use the machine itself"


@dataclass
class _Keeper:
    process: subprocess.Popen[bytes]
    users: int = 0  # substrates that need it


_keeper: _Keeper | None = None


def needed() -> bool:
    """Return True if this process may make network namespaces only in a user namespace."""
    return os.geteuid() != 0


@contextmanager
def held(mark: Mapping[str, str]) -> Iterator[None]:
    """Keep the user namespace open while one of several `with` blocks needs it; no-op for root. Raises Unavailable.

    `mark` is in the keeper's environment, so that `testbed clean` finds it.
    """
    global _keeper
    if not needed():
        yield
        return
    _keeper = _keeper or _Keeper(_start_keeper(mark))
    _keeper.users += 1
    try:
        yield
    finally:
        _keeper.users -= 1
        if _keeper.users == 0:
            ended, _keeper = _keeper, None
            _end_keeper(ended.process)


def _start_keeper(mark: Mapping[str, str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    argv = [*UNSHARE, "sh", "-c", KEEP]
    # in a session of its own: Ctrl-C at the terminal reaches only the controller
    process = subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | dict(mark), start_new_session=True
    )
    assert process.stdout is not None and process.stderr is not None
    if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
        process.kill()
        process.communicate()
        raise Unavailable(f"substrate netns: unshare is not ready after {TIMEOUT_S:g} s. {INSTEAD}")
    if process.stdout.readline() != READY:
        raise Unavailable(f"substrate netns: {refusal(process.communicate()[1].decode(errors='replace'))}")
    return process


def _end_keeper(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=TIMEOUT_S)  # closes its standard input
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def prefix() -> list[str]:
    """Return the words in front of a command that makes, enters or removes network namespaces."""
    if _keeper is None:
        return []
    # --mount changes to the folder /, and a user's own model may read files by relative paths
    enter = ["nsenter", "--target", str(_keeper.process.pid), "--user", "--net", "--mount", "--preserve-credentials"]
    return [*enter, "--", "env", f"--chdir={Path.cwd()}", f"PATH={search_path()}"]


def named() -> Path:
    """Return the folder of the named network namespaces, as this process sees it."""
    return NAMED if _keeper is None else Path(f"/proc/{_keeper.process.pid}/root{NAMED}")


def temporary() -> list[str]:
    """Return the words in front of a command for a network namespace that the kernel removes when the command ends."""
    return [*UNSHARE, "env", f"PATH={search_path()}"] if needed() else ["unshare", "--net", "--"]


def search_path() -> str:
    """Return PATH with the folders of `tc` and `sysctl` at its end, which an ordinary user may not have there."""
    present = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join([*present, *(folder for folder in SYSTEM_FOLDERS if folder not in present)])


def check() -> None:
    """Raise Unavailable, with the way out, if this user, or this root, may not make network namespaces. It is tried."""
    check_visible(*run_folders())
    unshare = UNSHARE if needed() else UNSHARE_AS_ROOT
    argv, env = [*unshare, "sh", "-c", TRY], {**os.environ, "PATH": search_path()}
    try:
        found = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"substrate netns: unshare has not ended after {TIMEOUT_S:g} s. {INSTEAD}") from None
    if found.returncode != 0:
        raise Unavailable(f"substrate netns: {refusal(found.stderr)}")


def run_folders() -> list[Path]:
    """The folders that ranks read besides that of the run."""
    return [Path.cwd(), Path(sys.prefix), data_dir()]


def first_hidden(folders: Iterable[Path], roots: Iterable[Path]) -> Path | None:
    """The first of these folders that is in one of the roots, which the ranks see differently; None if none is."""
    roots = list(roots)
    return next((each for each in folders if any(each.resolve().is_relative_to(root) for root in roots)), None)


def check_visible(*folders: Path) -> None:
    """Raise Unavailable if the namespaces would hide one of these folders from the ranks."""
    hidden = first_hidden(folders, [NAMED.parent] if needed() and not NAMED.is_dir() else [])
    if hidden is not None:
        rule = "which is in /run, and namespaces without root hide /run where /run/netns does not exist"
        raise Unavailable(f"substrate netns: {hidden}, {rule}. Use another folder, or as root: mkdir /run/netns")


def refusal(error: str) -> str:
    """Say why namespaces cannot be made here, and what to change: `error` is what the command printed."""
    settings = {}
    for name, _, _ in FORBIDDING if needed() else ():
        with contextlib.suppress(OSError):
            settings[name] = (SYSCTL / name).read_text().strip()
    return explain(error, settings, in_container(), root=not needed())


def explain(error: str, settings: Mapping[str, str], container: bool, root: bool = False) -> str:
    """Say it from the command's error, the values of FORBIDDING that this kernel has, and where this process is."""
    what = "without root a user namespace is needed, which is not allowed here"
    if root:
        what = "root may not make network namespaces here"
    for name, value, fix in FORBIDDING:
        if settings.get(name) == value:
            return f"{what} ({name.replace('/', '.')} = {value}). {fix}, {INSTEAD}"
    last, instead = one_line(error.strip().rpartition("\n")[2]) or "unknown reason", UNSHAPED if root else INSTEAD
    if container:
        return f"{what} (inside a container: {last}). {CONTAINER_FIX}, {instead}"
    if root:
        return f"{what} ({last}). Give it the capabilities SYS_ADMIN and NET_ADMIN, {instead}"
    return f"{what} ({last}). Ask whoever administers this machine to allow them, {instead}"


def in_container(marks: Sequence[str] = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")) -> bool:
    """Return True if a file says that this is a container."""
    return any(Path(mark).exists() for mark in marks)
