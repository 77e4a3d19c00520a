"""Equal nodes on one machine: whose cores are whose."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from testbed.control.machine.affinity import here, limited_to, share_out
from testbed.control.runs.select import plans
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.process import ProcessSubstrate
from testbed.spec.run import RunSpec

OWN = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]


def shares(nodes: int, cores: int, threads: int | None = 1, cpus: float | None = None) -> list[list[int] | None]:
    asked = [NodePlan(name=f"node{k}", threads=threads, cpus=cpus) for k in range(nodes)]
    return [sorted(own) if own is not None else None for own in share_out(asked, range(cores))]


@pytest.mark.parametrize(
    ("nodes", "cores", "threads", "expected"),
    [
        (4, 2, 1, [[0], [1], [0], [1]]),
        (4, 4, 1, [[0], [1], [2], [3]]),
        (4, 4, 2, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        (2, 4, 2, [[0, 1], [2, 3]]),
    ],
)
def test_cores_that_divide_evenly_are_shared_out(
    nodes: int, cores: int, threads: int, expected: list[list[int]]
) -> None:
    assert shares(nodes, cores, threads) == expected


@pytest.mark.parametrize(
    ("nodes", "cores", "threads", "cpus"),
    [
        (3, 2, 1, None),  # one core would have two nodes, the other one
        (4, 8, 1, None),  # nobody need share
        (1, 2, 1, None),
        (4, 3, 2, None),  # two threads do not fit three cores
        (4, 2, None, None),  # not wanted
        (4, 2, 1, 1.5),  # more than one core was asked for
    ],
)
def test_elsewhere_the_kernel_decides(nodes: int, cores: int, threads: int | None, cpus: float | None) -> None:
    assert shares(nodes, cores, threads, cpus) == [None] * nodes


def test_a_node_of_two_threads_makes_all_unequal() -> None:
    asked = [NodePlan(name=f"node{k}", threads=threads) for k, threads in enumerate((2, 1, 1))]
    assert share_out(asked, range(2)) == [None] * 3


def test_the_key_turns_it_off() -> None:
    spec = RunSpec.load({"nodes": 2, "threads": 2, "node": {"pinned": False}}, "test")
    assert [plan.threads for plan in plans(spec)] == [None, None]
    assert [plan.threads for plan in plans(RunSpec.load({"nodes": 2, "threads": 2}, "test"))] == [2, 2]


def test_a_rank_starts_on_its_cores_and_whoever_started_it_keeps_all(tmp_path: Path) -> None:
    before, every = os.sched_getaffinity(0), here()
    asked = [NodePlan(name=f"node{k}", threads=1) for k in range(2 * len(every))]
    with ProcessSubstrate(asked) as substrate:
        ranks = [substrate.start(k, OWN, {}, tmp_path / f"{k}.log") for k in range(len(asked))]
        tool = substrate.start(0, OWN, {}, tmp_path / "tool.log", quota=False)
        assert [process.wait(60) for process in (*ranks, tool)] == [0] * (len(asked) + 1)
    found = [(tmp_path / f"{k}.log").read_text().strip() for k in range(len(asked))]
    assert found == [f"[{core}]" for core in every * 2]
    assert (tmp_path / "tool.log").read_text().strip() == str(every), "what measures the network may use all"
    assert os.sched_getaffinity(0) == before


def test_cores_are_given_back_after_a_failure() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="no luck"), limited_to(frozenset(here()[:1])):
        raise ValueError("no luck")
    assert os.sched_getaffinity(0) == before
