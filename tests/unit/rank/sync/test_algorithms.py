"""Algorithms: every row has its function, a user's method is loaded from its file, and plans follow the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.rank.sync.algorithms import MEANS, find_mean, plan_for
from testbed.spec.errors import SpecError
from testbed.spec.mode import ALGORITHMS

SHARDED = ["ring", "direct"]  # rank k owns shard k


def test_every_row_has_its_function_and_every_function_its_row() -> None:
    """`server` and `ddp` step by themselves, so a schedule of their own carries them out."""
    averaged = {
        name for name, row in ALGORITHMS.items() if (row.rounds or row.rack_rounds) and name not in ("server", "ddp")
    }
    assert set(MEANS) == averaged


@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("name", SHARDED)
def test_in_a_plan_what_one_rank_sends_another_receives_in_the_same_round(name: str, n: int) -> None:
    plans = [plan_for(name, rank, n) for rank in range(n)]
    for half in ("reduce", "gather"):
        assert len({len(getattr(plan, half)) for plan in plans}) == 1
        for rounds in zip(*(getattr(plan, half) for plan in plans), strict=True):
            sent = {(rank, hop.peer, hop.shard) for rank, each in enumerate(rounds) for hop in each.sends}
            received = {(hop.peer, rank, hop.shard) for rank, each in enumerate(rounds) for hop in each.receives}
            assert sent == received
    for plan in plans:
        assert sum(len(each.sends) for each in plan.reduce) == sum(len(each.sends) for each in plan.gather) == n - 1


@pytest.mark.parametrize("n", [3, 4, 7])
def test_in_direct_no_two_ranks_begin_with_the_same_peer(n: int) -> None:
    rounds = [
        each for rank in range(n) for each in (*plan_for("direct", rank, n).reduce, *plan_for("direct", rank, n).gather)
    ]
    assert len({each.sends[0].peer for each in rounds}) == n
    for rank in range(n):
        peers = [(rank + k) % n for k in range(1, n)]
        (reduce,), (gather,) = plan_for("direct", rank, n).reduce, plan_for("direct", rank, n).gather
        assert [hop.peer for hop in reduce.sends] == [hop.peer for hop in reduce.receives] == peers
        assert [hop.peer for hop in gather.sends] == [hop.peer for hop in gather.receives] == peers


def test_a_users_method_comes_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_METHODS", str(tmp_path))
    (tmp_path / "my_way.py").write_text("def mean_(buffer, group):\n    return 'mine'\n")
    (tmp_path / "empty.py").write_text("")
    assert find_mean("my-way")(None, None) == "mine"  # type: ignore[arg-type, func-returns-value]
    with pytest.raises(SpecError, match=r"empty\.py defines no mean_\(buffer, group\). Add it\."):
        find_mean("empty")
    with pytest.raises(SpecError, match=r"no file .*lost\.py on this node\. Copy it there"):
        find_mean("lost")
