"""CPU quotas apply while ranks train."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.control.runs.quotas import Quotas
from testbed.control.runs.supervisor import RankState, Tail
from testbed.control.substrates.fake import FakeProcess, FakeSubstrate
from testbed.spec import quota_signal
from testbed.spec.run import RunSpec


class Nothing:
    polls = 0

    def poll(self, ranks: object) -> None:
        self.polls += 1


def quotas(late: bool = False, **values: object) -> tuple[Quotas, FakeSubstrate, list[RankState]]:
    substrate = FakeSubstrate(2)
    substrate.late_quotas = late
    spec = RunSpec.load({"nodes": 2, "batch": 8, **values}, "test")
    ranks = [RankState(FakeProcess(pid=k), Tail(Path(f"/nowhere/rank{k}.jsonl"))) for k in range(2)]
    return Quotas(spec, substrate, Nothing()), substrate, ranks


def test_they_are_lifted_once_when_the_slowest_rank_has_done_its_last_step() -> None:
    made, substrate, ranks = quotas(steps=6)
    ranks[0].last_step = 5
    made.poll(ranks)
    assert substrate.limits == [True]
    ranks[1].last_step = 5
    made.poll(ranks)
    made.poll(ranks)
    assert substrate.limits == [True, False]


@pytest.mark.parametrize("values", [{"epochs": 1}, {"epochs": 1, "steps": 6}])
def test_they_stay_where_the_last_step_is_not_known(values: dict[str, int]) -> None:
    made, substrate, ranks = quotas(**values)
    for rank in ranks:
        rank.last_step = 10_000
    made.poll(ranks)
    assert substrate.limits == [True]


def test_they_are_applied_when_the_last_rank_is_ready_and_then_the_ranks_are_told() -> None:
    made, substrate, ranks = quotas(late=True, steps=6)
    assert made.environment() == {quota_signal.VARIABLE: "1"} and substrate.limits == [False]
    ranks[0].started = 1.0
    made.poll(ranks)
    assert substrate.limits == [False]
    ranks[1].started = 2.0
    made.poll(ranks)
    made.poll(ranks)
    assert substrate.limits == [False, True]
    assert [rank.process.signals for rank in ranks] == [[quota_signal.SIGNAL]] * 2  # type: ignore[attr-defined]


def test_where_they_last_as_long_as_the_nodes_no_rank_waits() -> None:
    made, substrate, _ = quotas(steps=6)
    assert made.environment() == {} and substrate.limits == [True]


def test_faults_wait_until_quotas_apply_or_a_rank_has_ended() -> None:
    """A fault may change a node's quota: applied later, the planned one would undo it."""
    for ends in (False, True):
        made, substrate, ranks = quotas(late=True, steps=6)
        inner = made._inner
        assert isinstance(inner, Nothing)
        ranks[0].started = 1.0
        made.poll(ranks)
        assert inner.polls == 0
        ranks[1].started, ranks[1].code = (None, 1) if ends else (2.0, None)
        made.poll(ranks)
        assert inner.polls == 1 and substrate.limits == ([False] if ends else [False, True])
