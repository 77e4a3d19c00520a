"""What a node may use of its machine: a CPU share, its cores, and memory.

The kernel and the Docker engine take a CPU share as quota per period. If a container's memory limit is too small for a
rank, the run is refused with the reason; otherwise the kernel would kill the rank without a reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from testbed.spec.errors import refuse
from testbed.spec.models import model_info
from testbed.spec.run import RunSpec

CPU_PERIOD_US = 10_000  # the kernel's default of 100 ms would stop a rank for longer than a small step takes
MIN_QUOTA_US = 1_000  # the kernel refuses less
MAX_PERIOD_US = 1_000_000


NO_QUOTA = -1  # the value in cgroups v1 and in the Docker engine


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
    """Return the cores of each node if all nodes can get equally many; else None for all nodes: no affinity is set.

    Every node computes with `threads` threads; `cpus` are the nodes' quotas in cores. If there are more cores than
    threads of all nodes, no affinity is set either: no core is shared then, and cores may differ in speed.
    """
    nodes = len(cpus)
    if len(cores) % threads or nodes * threads % len(cores):
        return [None] * nodes
    if any(share is not None and share > threads for share in cpus):  # the quota could not be used up
        return [None] * nodes
    groups = [frozenset(cores[first : first + threads]) for first in range(0, len(cores), threads)]
    return [groups[node % len(groups)] for node in range(nodes)]


LOADED_BYTES = 128 << 20  # a rank that has imported torch uses about 155 MiB that the kernel cannot reclaim
DEFAULT_LIMIT = "2g"  # of a container, where MEM_LIMIT is not set
CGROUP = Path("/sys/fs/cgroup")  # in a container this is the container's own cgroup
LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")  # cgroups v2, v1
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([bkmgt]?)b?", re.ASCII | re.IGNORECASE)
_FACTORS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def least_memory_bytes(spec: RunSpec) -> int:
    """Return a lower bound of the bytes that a rank of the run needs to train."""
    itemsize = {"float32": 4, "float64": 8}[spec.dtype]
    copies = 2 + max(1, _optimizer_copies(spec))  # values, gradients, and the state or a buffer that is sent
    return LOADED_BYTES + copies * itemsize * model_info(spec.model).parameters


def _optimizer_copies(spec: RunSpec) -> int:
    """Return how many numbers the optimizer keeps for each parameter."""
    if spec.mode.schedule == "pipeline":
        return 0  # a rank has the state of 1/N of the parameters only
    momentum = 1 if spec.optimizer.momentum else 0
    return {"sgd": momentum, "adam": 2, "rmsprop": 1 + momentum}[spec.optimizer.name]


def check_memory(spec: RunSpec, limit_bytes: int | None) -> None:
    """Raise SpecError if a container with this limit (None: no limit) cannot hold a rank of the run."""
    least = least_memory_bytes(spec)
    if limit_bytes is not None and limit_bytes < least:
        rule = f"a rank that trains {spec.model} needs more than {least >> 20}m"
        way_out = f"Use e.g. MEM_LIMIT={max(2, math.ceil(2 * least / (1 << 30)))}g, or a smaller model."
        raise refuse("MEM_LIMIT", f"{limit_bytes >> 20}m", rule, way_out)


def read_limit(text: str) -> int:
    """Return the bytes of MEM_LIMIT, which is written as for Docker: 512m, 2g. Raises SpecError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise refuse("MEM_LIMIT", text, "must be a number and one of b, k, m, g", "Write e.g. MEM_LIMIT=2g.")
    return int(float(found[1]) * _FACTORS[found[2].lower()])


def limit_of_container(cgroup: Path = CGROUP) -> int | None:
    """Return the memory limit of this process's container in bytes; None if there is no limit."""
    for name in LIMIT_FILES:
        try:
            return int((cgroup / name).read_text())
        except (OSError, ValueError):  # no such file; "max"
            continue
    return None
