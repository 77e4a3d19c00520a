"""Records against what was counted outside."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from testbed.control.grading.evidence import Node, Outside, PartEvidence, contradictions, sent_by_collectives
from testbed.results.observations import Call, Calls
from tests.support.submissions import GRADIENT_BYTES, STEPS, evidence


def outside(found: PartEvidence, sent: float = 1.0, seconds: float = 1.0) -> PartEvidence:
    """The same evidence with counters and a clock that are off by these factors."""
    nodes = [replace(node, sent=int((node.sent or 0) * sent)) for node in found.outside.nodes]
    return replace(found, outside=Outside(seconds=found.outside.seconds * seconds, nodes=nodes))


def test_records_that_agree_with_the_counters() -> None:
    assert contradictions(evidence()) == []
    assert contradictions(replace(evidence(), outside=Outside())) == [], "nothing was counted"


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_bytes_that_the_interfaces_did_not_count(factor: float) -> None:
    found = contradictions(outside(evidence(), sent=factor))
    assert any("rank 0 claims" in each for each in found), found
    assert any("the collectives that the records claim" in each for each in found), found


def test_claimed_steps_that_are_longer_than_the_run() -> None:
    (found,) = contradictions(outside(evidence(seconds=2.0), seconds=0.1))
    assert "claim steps of 20.0 s" in found


def test_claimed_steps_that_are_too_short_for_the_link() -> None:
    found = contradictions(evidence(seconds=0.001, gradient_bytes=10_000_000, rate=10_000_000))
    assert len(found) == 1 and "a link needs" in found[0]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -0.1])
def test_a_step_that_no_clock_can_measure_is_a_contradiction(seconds: float) -> None:
    found = contradictions(evidence(seconds=seconds, gradient_bytes=10_000_000, rate=10_000_000))
    assert found == [f"the records claim a step of {seconds:g} s"]


def test_hidden_communication_is_a_contradiction() -> None:
    """The records claim no collective, and the interfaces counted gradients."""
    found = evidence()
    records = [[each for each in rows if not isinstance(each, Calls)] for rows in found.records]
    assert any(
        "the collectives that the records claim send 0.00 MB" in each
        for each in contradictions(replace(found, records=records))
    )


def call(operation: str, size: int) -> Call:
    return Call(operation=operation, site="a.py:1", phase="sync", count=STEPS, bytes=size)


@pytest.mark.parametrize(
    ("operation", "total"),
    [("all_reduce", 4.0), ("gather", 2.0), ("scatter", 2.0), ("broadcast", 2.0), ("send", 3.0), ("barrier", 0.0)],
)
def test_the_bytes_of_a_collective(operation: str, total: float) -> None:
    """Three ranks; multiples of the tensor that all ranks together send."""
    assert sent_by_collectives([[call(operation, GRADIENT_BYTES)]] * 3) == pytest.approx(total * GRADIENT_BYTES)


def test_incidents_name_the_node() -> None:
    seen = Outside(nodes=[Node(), Node(unreachable=2), Node(refused=5)])
    assert [each.partition(" tried")[0] for each in seen.incidents()] == ["node 1", "node 2"]
