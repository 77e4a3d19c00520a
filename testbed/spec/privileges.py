"""The command prefix that drops all privileges. Ranks in a container start with it.

The compose substrate and docker/entrypoint.py use it, on either side of the container.
"""

from __future__ import annotations

from collections.abc import Sequence

NOBODY = 65534  # uid and gid of a rank if root owns the run folder, and of a script that is not trusted
LAUNCHER = 65533  # uid and gid of the launcher of such a script, if root owns the run folder
# What that launcher needs to start the script as another user, to give it its files, and to end it.
LAUNCHER_CAPABILITIES = ("chown", "kill", "setgid", "setpcap", "setuid")


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
