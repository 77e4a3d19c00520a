"""Watching ranks from outside: who failed first, and how it is told."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from testbed.control.cli.progress import Silent
from testbed.control.runs import supervisor
from testbed.control.runs.supervisor import Tail
from testbed.results.folder import RunFolder
from testbed.spec.errors import RankFailed, ReplicasDiffer, UsageError

NEVER = 10**9  # polls


@dataclass
class Scripted:
    """A process that ends with `code` at its n-th poll."""

    code: int
    polls: int = 1
    pid: int = 1
    seen: int = field(default=0)

    def poll(self):
        self.seen += 1
        return self.code if self.seen >= self.polls else None

    def wait(self, timeout=None):
        return self.code

    def signal(self, signum): ...


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    monkeypatch.setattr(supervisor, "GRACE", 0.3)
    monkeypatch.setattr(supervisor, "POLL", 0.01)


def records(folder: RunFolder, rank: int, *rows: dict) -> None:
    folder.records(rank).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_all_well_returns(tmp_path):
    supervisor.follow([Scripted(0), Scripted(0, polls=3)], RunFolder(tmp_path), Silent())


def test_a_killed_rank_is_blamed_before_those_that_lost_it(tmp_path):
    folder = RunFolder(tmp_path)
    records(folder, 2, {"kind": "step", "step": 6})
    records(folder, 0, {"kind": "error", "code": 6, "message": "rank 0 lost a peer"})
    with pytest.raises(RankFailed, match=r"rank 2 \(node2\) was killed by SIGKILL after step 7.*rank 0 lost it"):
        supervisor.follow([Scripted(6), Scripted(0), Scripted(-9, polls=4)], folder, Silent())


def test_a_ranks_refusal_becomes_ours(tmp_path):
    folder = RunFolder(tmp_path)
    records(folder, 0, {"kind": "error", "code": 2, "message": "model 'x': unknown"})
    with pytest.raises(UsageError, match=r"^model 'x': unknown$"):
        supervisor.follow([Scripted(2)], folder, Silent())


def test_replicas_that_differ_keep_their_exit_code(tmp_path):
    with pytest.raises(ReplicasDiffer) as error:
        supervisor.follow([Scripted(4), Scripted(4)], RunFolder(tmp_path), Silent())
    assert error.value.exit_code == 4


def test_a_run_in_which_nobody_moves_ends_and_names_the_slowest(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "STALL", 2)
    folder = RunFolder(tmp_path)
    records(folder, 0, {"kind": "start", "deadline": 0.05}, {"kind": "step", "step": 3})
    records(folder, 1, {"kind": "start", "deadline": 0.1}, {"kind": "step", "step": 1})
    with pytest.raises(RankFailed, match=r"rank 1 \(node1\) is behind, and no rank moved for 0\.2 s"):
        supervisor.follow([Scripted(0, polls=NEVER), Scripted(0, polls=NEVER)], folder, Silent())


def test_before_ranks_say_how_long_they_wait_they_get_the_time_to_start(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "STALL", 0.001)
    records(RunFolder(tmp_path), 0, {"kind": "start", "deadline": 0.05})
    with pytest.raises(RankFailed, match=r"no rank moved for 0\.06 s"):  # the longest of all ranks: rank 1 is silent
        supervisor.follow([Scripted(0, polls=NEVER), Scripted(0, polls=NEVER)], RunFolder(tmp_path), Silent())


def test_a_frozen_rank_is_named_by_those_that_lost_it(tmp_path):
    folder = RunFolder(tmp_path)
    lost = {"kind": "error", "code": 6, "message": "rank lost a peer: timed out"}
    records(folder, 0, {"kind": "step", "step": 6}, lost)
    records(folder, 1, {"kind": "step", "step": 5})
    records(folder, 2, {"kind": "step", "step": 6}, lost)
    with pytest.raises(RankFailed) as error:
        supervisor.follow([Scripted(6), Scripted(0, polls=NEVER), Scripted(6, polls=2)], folder, Silent())
    said = "rank 1 (node1) is silent since step 6; rank 0, rank 2 lost it."
    assert str(error.value) == f"{said} See {folder.log(1)}"


def test_of_two_silent_ranks_the_one_that_is_behind_is_the_frozen_one(tmp_path):
    folder = RunFolder(tmp_path)
    records(folder, 1, {"kind": "step", "step": 6})
    records(folder, 2, {"kind": "step", "step": 4})
    with pytest.raises(RankFailed, match=r"rank 2 \(node2\) is silent since step 5; rank 0 lost it"):
        supervisor.follow([Scripted(6), Scripted(0, polls=NEVER), Scripted(0, polls=NEVER)], folder, Silent())


def test_a_rank_that_broke_is_blamed_even_if_another_never_ends(tmp_path):
    with pytest.raises(RankFailed, match=r"rank 2 \(node2\) ended with code 1 before its first step.*rank 0 lost it"):
        supervisor.follow([Scripted(6), Scripted(0, polls=NEVER), Scripted(1)], RunFolder(tmp_path), Silent())


def test_a_half_written_line_waits_for_its_end(tmp_path):
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"kind":"step","step":0}\n{"kind":"st')
    tail = Tail(path)
    assert [r["step"] for r in tail.read()] == [0]
    path.write_text('{"kind":"step","step":0}\n{"kind":"step","step":1}\n')
    assert [r["step"] for r in tail.read()] == [1]


def test_the_guilty_is_called_as_the_inventory_calls_it_also_in_other_ranks_words(tmp_path):
    folder = RunFolder(tmp_path)
    records(folder, 0, {"kind": "error", "code": 6, "failed_rank": 1, "message": "rank 1 (node1) is silent"})
    with pytest.raises(RankFailed) as told:
        processes = [Scripted(6), Scripted(0, polls=NEVER)]
        supervisor.follow(processes, folder, Silent(), nodes=["anna", "bert"])
    assert "rank 1 (bert) is silent since step 0" in str(told.value) and "node1" not in str(told.value)


def test_of_two_ranks_that_lost_each_other_neither_is_accused(tmp_path):
    folder = RunFolder(tmp_path)
    records(
        folder, 0, {"kind": "step", "step": 4}, {"kind": "error", "code": 6, "failed_rank": 1, "message": "no rank 1"}
    )
    records(
        folder, 1, {"kind": "step", "step": 5}, {"kind": "error", "code": 6, "failed_rank": 0, "message": "no rank 0"}
    )
    with pytest.raises(RankFailed) as told:
        supervisor.follow([Scripted(6), Scripted(6, polls=3)], folder, Silent())
    said = "rank 0 (node0) and rank 1 (node1) lost each other since step 5."
    assert str(told.value) == f"{said} See {folder.log(0)} and {folder.log(1)}"


def test_where_a_third_rank_saw_it_the_one_that_most_lost_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    for rank, guilty in enumerate((1, 0, 1)):
        records(folder, rank, {"kind": "error", "code": 6, "failed_rank": guilty, "message": f"no rank {guilty}"})
    with pytest.raises(RankFailed, match=r"^rank 1 \(node1\) was cut off"):
        supervisor.follow([Scripted(6) for _ in range(3)], folder, Silent())
