"""CPU affinity: which cores each node gets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from testbed.control.machine.affinity import assign_cores, limited_to, usable_cores
from testbed.control.runs.select import node_plans
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.process import ProcessSubstrate
from testbed.spec.run import RunSpec

OWN = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]


def shares(nodes: int, cores: int, threads: int | None = 1, cpus: float | None = None) -> list[list[int] | None]:
    requested = [NodePlan(name=f"node{k}", threads=threads, cpus=cpus) for k in range(nodes)]
    return [sorted(own) if own is not None else None for own in assign_cores(requested, range(cores))]


@pytest.mark.parametrize(
    ("nodes", "cores", "threads", "expected"),
    [
        (4, 2, 1, [[0], [1], [0], [1]]),
        (4, 4, 1, [[0], [1], [2], [3]]),
        (4, 4, 2, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        (2, 4, 2, [[0, 1], [2, 3]]),
    ],
)
def test_cores_that_divide_evenly_are_assigned(nodes: int, cores: int, threads: int, expected: list[list[int]]) -> None:
    assert shares(nodes, cores, threads) == expected


@pytest.mark.parametrize(
    ("nodes", "cores", "threads", "cpus"),
    [
        (3, 2, 1, None),  # one core would have two nodes, the other one
        (4, 8, 1, None),  # there are more cores than threads
        (1, 2, 1, None),
        (4, 3, 2, None),  # two threads do not fit three cores
        (4, 2, None, None),  # node.pinned = false
        (4, 2, 1, 1.5),  # the quota is more than one core
    ],
)
def test_otherwise_the_kernel_decides(nodes: int, cores: int, threads: int | None, cpus: float | None) -> None:
    assert shares(nodes, cores, threads, cpus) == [None] * nodes


def test_unequal_threads_assign_nothing() -> None:
    requested = [NodePlan(name=f"node{k}", threads=threads) for k, threads in enumerate((2, 1, 1))]
    assert assign_cores(requested, range(2)) == [None] * 3


def test_node_pinned_false_turns_it_off() -> None:
    spec = RunSpec.load({"nodes": 2, "threads": 2, "node": {"pinned": False}}, "test")
    assert [plan.threads for plan in node_plans(spec)] == [None, None]
    assert [plan.threads for plan in node_plans(RunSpec.load({"nodes": 2, "threads": 2}, "test"))] == [2, 2]


def test_a_rank_starts_on_its_cores_and_the_controller_keeps_all(tmp_path: Path) -> None:
    before, every = os.sched_getaffinity(0), usable_cores()
    requested = [NodePlan(name=f"node{k}", threads=1) for k in range(2 * len(every))]
    with ProcessSubstrate(requested) as substrate:
        ranks = [substrate.start(k, OWN, {}, tmp_path / f"{k}.log") for k in range(len(requested))]
        tool = substrate.start(0, OWN, {}, tmp_path / "tool.log", quota=False)
        assert [process.wait(60) for process in (*ranks, tool)] == [0] * (len(requested) + 1)
    found = [(tmp_path / f"{k}.log").read_text().strip() for k in range(len(requested))]
    assert found == [f"[{core}]" for core in every * 2]
    assert (tmp_path / "tool.log").read_text().strip() == str(every), "a probe may use all cores"
    assert os.sched_getaffinity(0) == before


def test_the_limit_ends_after_an_exception() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="no luck"), limited_to(frozenset(usable_cores()[:1])):
        raise ValueError("no luck")
    assert os.sched_getaffinity(0) == before
