"""The command prefix that drops all privileges. Ranks in a container start with it.

The compose substrate and docker/entrypoint.py use it, on either side of the container.
"""

from __future__ import annotations

NOBODY = 65534  # uid and gid of a rank if root owns the run folder


def without_privileges(uid: int, gid: int) -> list[str]:
    """Run as this user without groups, without capabilities, and without a way to gain them from a set-uid file."""
    user = ["--reuid", str(uid), "--regid", str(gid), "--clear-groups"]
    sets = ["--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]
    return ["setpriv", *user, *sets, "--no-new-privs", "--"]


def without_new_privileges() -> list[str]:
    """Run as the present user, without a way to gain privileges. Any user may do this."""
    return ["setpriv", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs", "--"]
