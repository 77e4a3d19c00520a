"""CPU affinity: which cores of a machine each node computes on, so that equal nodes take equal time for a step.

Left to the kernel, four ranks on two cores share them evenly over seconds, but not within a step: one rank runs alone
on a core while three take turns on the other. All ranks then wait for the slowest, and the network is idle meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from testbed.control.substrates.base import NodePlan
from testbed.spec.resources import divide_cores

Cores = frozenset[int]


def assign_cores(plans: Sequence[NodePlan], cores: Sequence[int]) -> list[Cores | None]:
    """Return each node's cores by the rule of `divide_cores`; None for all if the plans differ or request no cores."""
    different = {plan.threads for plan in plans}
    threads = different.pop() if len(different) == 1 else None
    return [None] * len(plans) if threads is None else divide_cores(threads, [plan.cpus for plan in plans], cores)


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
