"""Cores: which of a machine's cores each node computes on, so that equal nodes keep an equal pace.

Left to the kernel, four ranks on two cores share them evenly over seconds, not within a step: one rank has a core to
itself while three take turns on the other, all wait for the last of those, and the wire waits with them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from testbed.control.substrates.base import NodePlan

Cores = frozenset[int]


def share_out(plans: Sequence[NodePlan], cores: Sequence[int]) -> list[Cores | None]:
    """Each node's cores, where all of them can be shared evenly; else None: whatever the kernel does is fairer.

    Where there are more cores than threads nobody shares, and the kernel knows better which cores are worth having.
    """
    alike = {plan.threads for plan in plans}
    threads = alike.pop() if len(alike) == 1 else None
    if threads is None or len(cores) % threads or len(plans) * threads % len(cores):
        return [None] * len(plans)
    if any(plan.cpus is not None and plan.cpus > threads for plan in plans):  # a quota that could not be used up
        return [None] * len(plans)
    groups = [frozenset(cores[first : first + threads]) for first in range(0, len(cores), threads)]
    return [groups[node % len(groups)] for node in range(len(plans))]


def here() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


@contextmanager
def limited_to(cores: Cores | None) -> Iterator[None]:
    """What this thread starts inside inherits the limit, from its first instruction on."""
    before = os.sched_getaffinity(0)
    try:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        yield
    finally:
        os.sched_setaffinity(0, before)
