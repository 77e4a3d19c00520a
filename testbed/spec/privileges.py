"""The prefix that takes every privilege from a command; what a container's rank is started with."""

from __future__ import annotations

NOBODY = 65534  # who a rank is where root would own its files


def without_privileges(uid: int, gid: int) -> list[str]:
    """No groups, no capability in any set, none to be had from a set-uid file."""
    who = ["--reuid", str(uid), "--regid", str(gid), "--clear-groups"]
    sets = ["--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]
    return ["setpriv", *who, *sets, "--no-new-privs", "--"]
