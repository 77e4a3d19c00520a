"""Start commands as an ordinary user, in tests that run as root.

The interpreter may be in a folder that only root may enter, e.g. /root. The command then sees, in a mount namespace of
its own, that folder empty but for the interpreter and the packages. It has no way to root's rights.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from testbed.attach.sandbox import covers
from testbed.spec.privileges import NOBODY, without_privileges

USER = NOBODY
VARIABLES = ("PATH", "TESTBED_SHARE", "CI")  # of the caller's environment; root's other variables are root's


def as_ordinary_user(argv: Sequence[str], home: Path) -> list[str]:
    """The command line that runs `argv` as USER, whose home folder is `home`."""
    repository = Path(__file__).parents[2]
    needed = [Path(sys.prefix), Path(sys.base_prefix), repository]
    script = []
    for cover, inside in covers(needed, USER, []).items():
        folder = shlex.quote(str(cover))
        for number, path in enumerate(inside):
            script.append(f"exec {number + 3}< {shlex.quote(str(path))}")
        script.append(f"mount -t tmpfs -o mode=755 tmpfs {folder}")
        for number, path in enumerate(inside):
            place = shlex.quote(str(path))
            bind = f"mount --no-canonicalize --bind /proc/self/fd/{number + 3} {place}"
            script += [f"mkdir -p {place}", bind, f"exec {number + 3}<&-"]
    kept = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    own = ["env", "-i", *kept, f"HOME={home}", f"PYTHONPATH={repository}"]
    command = shlex.join([*without_privileges(USER, USER), *own, *argv])
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join([*script, f"exec {command}"])]
