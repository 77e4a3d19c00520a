"""Become the script's user, without privileges, in a mount namespace where that user can reach its interpreter.

    unshare --mount --propagation private python -m testbed.attach.sandbox --user UID:GID --needs PATH... -- COMMAND

An interpreter in a home folder that only its owner may enter, e.g. /root, cannot be started by another user. Such a
folder is covered by an empty one in which only the needed paths exist, so the rest of it is out of the script's reach.
The namespace ends with the script; nothing outside of it changes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from testbed.spec.privileges import without_privileges

UNSHARE = ("unshare", "--mount", "--propagation", "private", "--")
MOUNT_TIMEOUT_S = 20.0


def command(uid: int, gid: int, needs: Iterable[Path], argv: Sequence[str]) -> list[str]:
    """The command that root starts instead of `argv`."""
    flags = [flag for path in needs for flag in ("--needs", str(path))]
    return [*UNSHARE, sys.executable, "-m", "testbed.attach.sandbox", "--user", f"{uid}:{gid}", *flags, "--", *argv]


def interpreter_paths(program: str, path: str) -> list[Path]:
    """The folders that a program needs: of the file, and of each file that it is a link to or an interpreter of."""
    found: list[Path] = []
    file = shutil.which(program, path=path)
    while file:
        place = Path(os.path.abspath(file))
        found.append(place.parent.parent if place.parent.name == "bin" else place.parent)
        file = os.path.join(place.parent, os.readlink(place)) if place.is_symlink() else _interpreter(place)
    return found


def _interpreter(file: Path) -> str:
    """The program in the first line of a script (#!); empty if it has none."""
    with file.open("rb") as content:
        first = content.readline(1024)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    return words[0] if words and not words[0].endswith("/env") else ""


def hidden_ancestor(path: Path, uid: int) -> Path | None:
    """The outermost folder above `path` that the user may not enter; None if there is none."""
    for folder in reversed(path.parents):
        status = folder.stat()
        if not status.st_mode & (0o100 if status.st_uid == uid else 0o001):
            return folder
    return None


def reveal(paths: Iterable[Path], uid: int) -> None:
    """Cover every folder that hides one of the paths; only these paths exist in it then."""
    hidden: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(paths):
        cover = hidden_ancestor(path, uid)
        if cover is not None and path.is_dir():
            hidden.setdefault(cover, []).append(path)
    for cover, inside in hidden.items():
        inside = [path for path in inside if not any(path != other and path.is_relative_to(other) for other in inside)]
        opened = {path: os.open(path, os.O_PATH) for path in inside}
        _mount("-t", "tmpfs", "-o", "mode=755,size=1m", "tmpfs", str(cover))
        for path, descriptor in opened.items():
            path.mkdir(parents=True)
            # mount must not follow the link by its text: that path is covered now
            _mount("--no-canonicalize", "--bind", f"/proc/{os.getpid()}/fd/{descriptor}", str(path))
            os.close(descriptor)
        _mount("-o", "remount,ro", str(cover))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=MOUNT_TIMEOUT_S)


def main() -> None:
    """Make the paths visible, then become the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--user", required=True)
    parser.add_argument("--needs", type=Path, action="append", default=[])
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    uid, gid = map(int, options.user.split(":"))
    reveal(options.needs, uid)
    argv = [*without_privileges(uid, gid), *options.argv]
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
