"""A node's share of the processors: a quota per period, as the kernel and the Docker engine take it, and its cores."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def divide_cores(threads: int, cpus: Sequence[float | None], cores: Sequence[int]) -> list[frozenset[int] | None]:
    """Return each node's cores if all nodes can get an equal number; else None for all, and the kernel decides.

    Every node computes with `threads` threads; `cpus` are the nodes' quotas in cores. With more cores than threads no
    core is shared. The kernel also decides then, because cores may differ in speed.
    """
    nodes = len(cpus)
    if len(cores) % threads or nodes * threads % len(cores):
        return [None] * nodes
    if any(share is not None and share > threads for share in cpus):  # the quota could not be used up
        return [None] * nodes
    groups = [frozenset(cores[first : first + threads]) for first in range(0, len(cores), threads)]
    return [groups[node % len(groups)] for node in range(nodes)]
