"""The command prefix that drops all privileges. Ranks in a container start with it.

The compose substrate and docker/entrypoint.py use it, on either side of the container.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534  # uid and gid of a rank if root owns the run folder, and of a script that is not trusted
LAUNCHER = 65533  # uid and gid of the launcher of such a script, if root owns the run folder
# What that launcher needs to start the script as another user, to give it its files, and to end it.
LAUNCHER_CAPABILITIES = ("chown", "kill", "setgid", "setpcap", "setuid")


def alone_as(uid_map: Path = Path("/proc/self/uid_map")) -> int | None:
    """Return the user that uid 0 really is, in a user namespace that has no other user; else None.

    There root has that user's rights on files, and can become nobody else.
    """
    try:
        lines = [line.split() for line in uid_map.read_text().splitlines()]
    except OSError:
        return None
    (inside, outside, count), *others = lines or [["", "", ""]]
    return int(outside) if (inside, count) == ("0", "1") and not others else None


def is_root() -> bool:
    """Return True if this process has root's rights, on this machine or in its container."""
    return os.geteuid() == 0 and alone_as() is None


def as_outside(uid: int, gid: int) -> list[str]:
    """Run with the ids that uid and gid 0 have outside of this user namespace, without any right in it."""
    return ["unshare", "--user", f"--map-user={uid}", f"--map-group={gid}", "--"]


def without_privileges(uid: int, gid: int, kept: Sequence[str] = ()) -> list[str]:
    """Run as this user without groups, without capabilities, and without a way to gain them from a set-uid file.

    `kept`: capabilities that the command has all the same.
    """
    user = ["--reuid", str(uid), "--regid", str(gid), "--clear-groups"]
    wanted = ",".join(["-all", *(f"+{name}" for name in kept)])
    sets = [f"--bounding-set={wanted}", f"--inh-caps={wanted}", f"--ambient-caps={wanted}"]
    return ["setpriv", *user, *sets, "--no-new-privs", "--"]


def without_new_privileges() -> list[str]:
    """Run as the present user, without a way to gain privileges. Any user may do this."""
    return ["setpriv", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs", "--"]
