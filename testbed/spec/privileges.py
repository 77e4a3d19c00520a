"""Command prefixes that drop privileges, so that ranks and scripts start without rights that they do not need.

Used on the host by substrates, and in a container by docker/entrypoint.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534  # uid and gid of a rank if root owns the run folder, and of a script that is not trusted
LAUNCHER = 65533  # uid and gid of the launcher of such a script, if root owns the run folder
# The launcher starts the script as another user, changes the owner of the script's files, and ends the script.
LAUNCHER_CAPABILITIES = ("chown", "kill", "setgid", "setpcap", "setuid")


def alone_as(uid_map: Path = Path("/proc/self/uid_map")) -> int | None:
    """Return the uid outside that uid 0 maps to, in a user namespace that maps no other uid; else None.

    In such a namespace root has that user's rights on files and cannot change to another user.
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
    """Return the prefix that runs a command in a user namespace of its own, with this uid and gid and without rights.

    `uid` and `gid` are the ids that 0 maps to outside of the present namespace.
    """
    return ["unshare", "--user", f"--map-user={uid}", f"--map-group={gid}", "--"]


def without_privileges(uid: int, gid: int, kept: Sequence[str] = ()) -> list[str]:
    """Return the prefix that runs a command as this user, without groups, capabilities or a way to gain privileges.

    The command keeps the capabilities in `kept`. A set-uid file gives it no privileges.
    """
    user = ["--reuid", str(uid), "--regid", str(gid), "--clear-groups"]
    wanted = ",".join(["-all", *(f"+{name}" for name in kept)])
    sets = [f"--bounding-set={wanted}", f"--inh-caps={wanted}", f"--ambient-caps={wanted}"]
    return ["setpriv", *user, *sets, "--no-new-privs", "--"]


def without_new_privileges() -> list[str]:
    """Return the prefix that runs a command as the present user, without a way to gain privileges. Needs no rights."""
    return ["setpriv", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs", "--"]
