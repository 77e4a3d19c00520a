"""A node's share of the processors as a quota per period, which is how the kernel and the Docker engine take it."""

from __future__ import annotations

import math

from testbed.spec.errors import refuse

CPU_PERIOD_US = 10_000  # the kernel's default of 100 ms would stop a rank for longer than a small step takes
MIN_QUOTA_US = 1_000  # the kernel refuses less
MAX_PERIOD_US = 1_000_000


NO_QUOTA = -1  # as version 1 of cgroups and the Docker engine write it


def quota_and_period(cpus: float | None) -> tuple[int, int]:
    """Return (quota, period) in microseconds: 0.4 -> (4000, 10000). A small share gets a longer period.

    None means no limit: the quota is NO_QUOTA.
    """
    if cpus is None:
        return NO_QUOTA, CPU_PERIOD_US
    smallest = MIN_QUOTA_US / MAX_PERIOD_US
    if not smallest <= cpus < math.inf:
        raise refuse("node.cpus", cpus, f"must be at least {smallest}", "Write e.g. 0.4.")
    period = max(CPU_PERIOD_US, math.ceil(MIN_QUOTA_US / cpus))
    return round(cpus * period), period
