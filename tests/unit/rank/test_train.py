"""The training loop: the deadline of a wait, as requested or by the slowest link."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.rank.train import deadline
from testbed.spec.run import STEP_DEADLINE_S, RunSpec

VGG11 = 9_231_114 * 4  # bytes of gradients


def seconds(size: int = VGG11, **values: Any) -> float:
    return deadline(RunSpec.load({"nodes": 4} | values, "test"), size)


def test_the_requested_deadline_is_used() -> None:
    assert seconds(deadline=7.5, link={"rate": "1mbit"}) == 7.5


def test_an_unshaped_network_has_the_shortest_deadline() -> None:
    assert seconds() == STEP_DEADLINE_S


def test_a_slow_link_adds_twice_the_time_of_all_gradients() -> None:
    assert seconds(link={"rate": "10mbit"}) == pytest.approx(STEP_DEADLINE_S + 2 * 4 * VGG11 * 8 / 10e6)


def test_it_grows_as_links_get_slower_models_larger_and_ranks_more() -> None:
    rates = [seconds(link={"rate": rate}) for rate in ("1gbit", "200mbit", "10mbit", "1mbit")]
    assert rates == sorted(rates) and rates[0] > STEP_DEADLINE_S
    assert seconds(2 * VGG11, link={"rate": "10mbit"}) > seconds(link={"rate": "10mbit"})
    assert seconds(nodes=8, link={"rate": "10mbit"}) > seconds(link={"rate": "10mbit"})


def test_the_slowest_node_decides() -> None:
    slow = {"node2": {"link": {"rate": "10mbit"}}, "node1": {"cpus": 0.1}}
    assert seconds(link={"rate": "1gbit"}, overrides=slow) == seconds(link={"rate": "10mbit"})
    assert seconds(overrides=slow) == seconds(link={"rate": "10mbit"})  # also if the other links have no limit
    every = {f"node{k}": {"link": {"rate": "1gbit"}} for k in range(4)}
    assert seconds(link={"rate": "10mbit"}, overrides=every) == seconds(link={"rate": "1gbit"})  # in no node's link


def test_with_every_k_the_deadline_is_k_times_as_long() -> None:
    assert seconds(mode="ring/every:4") == 4 * STEP_DEADLINE_S
    assert seconds(mode="ring/every:1000") == 30 * STEP_DEADLINE_S


def test_a_slower_link_of_a_fault_counts_too() -> None:
    drop = ["kill:rank1@step9", "rate:rank2@step8=10mbit"]
    assert seconds(link={"rate": "1gbit"}, faults=drop) == seconds(link={"rate": "10mbit"})
    assert seconds(link={"rate": "1mbit"}, faults=drop) == seconds(link={"rate": "1mbit"})
    assert seconds(faults=["rate:rank?@step?+5s=10mbit"]) == seconds(link={"rate": "10mbit"})
