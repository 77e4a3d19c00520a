"""Supervising ranks from outside: which one failed first, and what the message says."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

import pytest

from testbed.control.runs import supervisor
from testbed.control.runs.progress import Silent
from testbed.control.runs.supervisor import Tail, Timing
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


QUICK = Timing(grace_s=0.3, poll_s=0.01)


def supervise(processes, folder, nodes=(), timing=QUICK):
    supervisor.supervise(processes, folder, Silent(), nodes=nodes, timing=timing)


def records(folder: RunFolder, rank: int, *rows: dict) -> None:
    folder.records(rank).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_it_returns_when_all_ranks_ended_well(tmp_path):
    supervise([Scripted(0), Scripted(0, polls=3)], RunFolder(tmp_path))


def test_a_killed_rank_is_the_root_cause_not_those_that_lost_it(tmp_path):
    folder = RunFolder(tmp_path)
    records(folder, 2, {"kind": "step", "step": 6})
    records(folder, 0, {"kind": "error", "code": 6, "message": "rank 0 lost a peer"})
    with pytest.raises(RankFailed, match=r"rank 2 \(node2\) was killed by SIGKILL after step 7.*rank 0 lost it"):
        supervise([Scripted(6), Scripted(0), Scripted(-9, polls=4)], folder)


def test_a_ranks_refusal_is_raised_as_it_is(tmp_path):
    folder = RunFolder(tmp_path)
    records(folder, 0, {"kind": "error", "code": 2, "message": "model 'x': unknown"})
    with pytest.raises(UsageError, match=r"^model 'x': unknown$"):
        supervise([Scripted(2)], folder)


def test_replicas_that_differ_keep_their_exit_code(tmp_path):
    with pytest.raises(ReplicasDiffer) as error:
        supervise([Scripted(4), Scripted(4)], RunFolder(tmp_path))
    assert error.value.exit_code == ReplicasDiffer.exit_code


def test_a_run_without_progress_ends_and_names_the_slowest(tmp_path):
    folder = RunFolder(tmp_path)
    records(folder, 0, {"kind": "start", "deadline": 0.05}, {"kind": "step", "step": 3})
    records(folder, 1, {"kind": "start", "deadline": 0.1}, {"kind": "step", "step": 1})
    with pytest.raises(RankFailed, match=r"rank 1 \(node1\) is behind, and no rank made progress for 0\.2 s"):
        processes = [Scripted(0, polls=NEVER), Scripted(0, polls=NEVER)]
        supervise(processes, folder, timing=Timing(poll_s=0.01, stall_deadlines=2))


def test_until_all_ranks_have_recorded_their_deadline_the_one_for_the_start_holds(tmp_path):
    records(RunFolder(tmp_path), 0, {"kind": "start", "deadline": 0.05})
    with pytest.raises(RankFailed, match=r"no rank made progress for 0\.06 s"):  # of rank 1, which has recorded nothing
        processes = [Scripted(0, polls=NEVER), Scripted(0, polls=NEVER)]
        supervise(processes, RunFolder(tmp_path), timing=Timing(poll_s=0.01, stall_deadlines=0.001))


def test_a_frozen_rank_is_named_by_those_that_lost_it(tmp_path):
    folder = RunFolder(tmp_path)
    lost = {"kind": "error", "code": 6, "message": "rank lost a peer: timed out"}
    records(folder, 0, {"kind": "step", "step": 6}, lost)
    records(folder, 1, {"kind": "step", "step": 5})
    records(folder, 2, {"kind": "step", "step": 6}, lost)
    with pytest.raises(RankFailed) as error:
        supervise([Scripted(6), Scripted(0, polls=NEVER), Scripted(6, polls=2)], folder)
    said = "rank 1 (node1) is silent since step 6; rank 0, rank 2 lost it."
    assert str(error.value) == f"{said} See {folder.log(1)}"


def test_of_two_silent_ranks_the_one_that_is_behind_is_the_frozen_one(tmp_path):
    folder = RunFolder(tmp_path)
    records(folder, 1, {"kind": "step", "step": 6})
    records(folder, 2, {"kind": "step", "step": 4})
    with pytest.raises(RankFailed, match=r"rank 2 \(node2\) is silent since step 5; rank 0 lost it"):
        supervise([Scripted(6), Scripted(0, polls=NEVER), Scripted(0, polls=NEVER)], folder)


def test_a_rank_that_failed_is_the_root_cause_even_if_another_never_ends(tmp_path):
    with pytest.raises(RankFailed, match=r"rank 2 \(node2\) ended with code 1 before its first step.*rank 0 lost it"):
        supervise([Scripted(6), Scripted(0, polls=NEVER), Scripted(1)], RunFolder(tmp_path))


def test_ranks_that_wait_for_one_that_ended_before_it_joined_get_little_time(tmp_path):
    """They cannot notice it. The grace for ranks that do would exceed the time of this test."""
    timing = Timing(poll_s=0.01, grace_s=10**9, start_grace_s=0.1)
    records(RunFolder(tmp_path), 0, {"kind": "start", "deadline": 60.0})
    with pytest.raises(RankFailed, match=r"^rank 1 \(node1\) was killed by SIGKILL before its first step"):
        supervise([Scripted(0, polls=NEVER), Scripted(-9)], RunFolder(tmp_path), timing=timing)


@pytest.mark.parametrize("code", [-9, 6])
def test_ranks_that_can_notice_the_failure_get_their_time_to_report_it(tmp_path, code):
    """Rank 1 has joined the others before it was killed; or it lost rank 0 itself, which may say why it ended."""
    folder = RunFolder(tmp_path)
    records(folder, 0, {"kind": "start", "deadline": 60.0}, {"kind": "error", "code": 1, "message": "no space"})
    records(folder, 1, *([{"kind": "start", "deadline": 60.0}] if code == -9 else []))
    ended = [Scripted(1, polls=20), Scripted(code)]
    with pytest.raises(RankFailed, match=r"rank 0 .*ended with code 1.*no space|Also rank 0 ended with code 1"):
        supervise(ended, folder, timing=Timing(poll_s=0.01, grace_s=60.0, start_grace_s=0.0))


def test_a_half_written_line_is_read_when_it_is_complete(tmp_path):
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"kind":"step","step":0}\n{"kind":"st')
    tail = Tail(path)
    assert [r["step"] for r in tail.read()] == [0]
    path.write_text('{"kind":"step","step":0}\n{"kind":"step","step":1}\n')
    assert [r["step"] for r in tail.read()] == [1]


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_records_that_are_no_regular_file_end_the_run(tmp_path, kind):
    path = RunFolder(tmp_path).records(0)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(RankFailed, match=r"rank 0 \(node0\): its records cannot be read: .*rank0\.jsonl: is"):
        supervise([Scripted(0, polls=1000)], RunFolder(tmp_path))


def test_records_with_forged_values_are_ignored(tmp_path):
    folder = RunFolder(tmp_path)
    forged = [{}, {"kind": "step"}, {"kind": "step", "step": "x"}, {"kind": ["start"]}, {"kind": "start"}]
    records(folder, 0, *forged, {"kind": "error", "message": 5}, {"kind": "error", "message": "x", "at": "now"})
    with folder.records(0).open("a") as out:
        out.write("[" * 100_000 + "\n")
    supervise([Scripted(0, polls=3)], folder)


def test_a_file_without_lines_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "CHUNK_BYTES", 1 << 16)
    path = tmp_path / "rank0.jsonl"
    with path.open("wb") as out:
        out.truncate((1 << 16) + 1)
        out.seek((1 << 16) + 1)
        out.write(b'\n{"kind":"end"}\n')
    tail = Tail(path)
    assert (tail.read(), tail.read()) == ([], [{"kind": "end"}])


def test_the_failed_rank_has_the_inventorys_name_also_in_other_ranks_messages(tmp_path):
    folder = RunFolder(tmp_path)
    records(folder, 0, {"kind": "error", "code": 6, "failed_rank": 1, "message": "rank 1 (node1) is silent"})
    with pytest.raises(RankFailed) as told:
        processes = [Scripted(6), Scripted(0, polls=NEVER)]
        supervise(processes, folder, nodes=["anna", "bert"])
    silent = "rank 1 (bert) is silent since its start, before the first step"
    assert silent in str(told.value) and "node1" not in str(told.value)


def test_of_two_ranks_that_lost_each_other_both_are_named(tmp_path):
    folder = RunFolder(tmp_path)
    records(
        folder, 0, {"kind": "step", "step": 4}, {"kind": "error", "code": 6, "failed_rank": 1, "message": "no rank 1"}
    )
    records(
        folder, 1, {"kind": "step", "step": 5}, {"kind": "error", "code": 6, "failed_rank": 0, "message": "no rank 0"}
    )
    with pytest.raises(RankFailed) as told:
        supervise([Scripted(6), Scripted(6, polls=3)], folder)
    said = "rank 0 (node0) and rank 1 (node1) lost each other since step 5."
    assert str(told.value) == f"{said} See {folder.log(0)} and {folder.log(1)}"


def test_of_three_ranks_the_one_that_most_report_as_lost_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    for rank, lost in enumerate((1, 0, 1)):
        records(folder, rank, {"kind": "error", "code": 6, "failed_rank": lost, "message": f"no rank {lost}"})
    with pytest.raises(RankFailed, match=r"^rank 1 \(node1\) was cut off"):
        supervise([Scripted(6) for _ in range(3)], folder)
