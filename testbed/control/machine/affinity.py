"""CPU affinity: which cores of a machine each node computes on, so that equal nodes take equal time for a step.

Left to the kernel, four ranks on two cores share them evenly over seconds, but not within a step: one rank runs alone
on a core while three take turns on the other. All ranks then wait for the slowest, and the network is idle meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from testbed.control.substrates.base import NodePlan

Cores = frozenset[int]


def assign_cores(plans: Sequence[NodePlan], cores: Sequence[int]) -> list[Cores | None]:
    """Return each node's cores if all nodes can get an equal number; else None for all, and the kernel decides.

    With more cores than threads no core is shared. The kernel also decides then, because cores may differ in speed.
    """
    different = {plan.threads for plan in plans}
    threads = different.pop() if len(different) == 1 else None
    if threads is None or len(cores) % threads or len(plans) * threads % len(cores):
        return [None] * len(plans)
    if any(plan.cpus is not None and plan.cpus > threads for plan in plans):  # the quota could not be used up
        return [None] * len(plans)
    groups = [frozenset(cores[first : first + threads]) for first in range(0, len(cores), threads)]
    return [groups[node % len(groups)] for node in range(len(plans))]


def usable_cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


@contextmanager
def limited_to(cores: Cores | None) -> Iterator[None]:
    """Limit this thread to `cores`; processes started in the `with` block inherit it."""
    before = os.sched_getaffinity(0)
    try:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        yield
    finally:
        os.sched_setaffinity(0, before)
