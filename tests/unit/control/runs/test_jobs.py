"""Runs on Slurm whose controller has gone, with the answers of squeue scripted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.control.runs import jobs
from testbed.control.runs.locks import folder_lock
from testbed.control.substrates import slurm
from testbed.results.folder import RunFolder
from testbed.spec.errors import UsageError
from testbed.spec.run import RunSpec


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of two ranks that were killed: neither has a record."""
    found = RunFolder(tmp_path / "runs" / "adhoc" / "r")
    spec = RunSpec.load({"nodes": 2, "model": "lenet5", "data": {"name": "synthetic"}, "batch": 16}, "test")
    found.create(spec.without_shaping(), "slurm")
    (found.path / slurm.SLURM_FILE).write_text(json.dumps({"job": "7", "name": "testbed-a1", "nodes": ["n0", "n1"]}))
    return found


def scripted(monkeypatch: pytest.MonkeyPatch, state: str, steps: str = "") -> list[tuple[str, ...]]:
    asked: list[tuple[str, ...]] = []

    def ask(*argv: str, **options: object) -> str:
        asked.append(argv)
        return steps if "--steps" in argv else f"7|{state}|n[0-1]|p|5:00|N/A|None\n"

    monkeypatch.setattr(slurm, "ask", ask)
    return asked


def test_a_run_without_a_summary_is_found_with_the_state_of_its_job(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, "RUNNING")
    root = folder.path.parents[1]
    (found,) = jobs.find(root)
    assert (found.state, found.nodes, found.steps) == ("job 7 RUNNING", ["n0", "n1"], [0, 0])
    with folder_lock(folder.path):
        (held,) = jobs.find(root)
    assert held.controlled and held.state.endswith("its controller runs")
    (folder.path / slurm.SLURM_FILE).write_text("{")
    assert list(jobs.find(root)) == [] == list(jobs.find(root / "nowhere"))


def test_a_run_with_tasks_is_not_collected(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "RUNNING", "7.batch|batch\n7.3|testbed-1-0\n")
    (found,) = jobs.find(folder.path)
    with pytest.raises(UsageError, match=r"job 7 still runs \(rank 0 at step 0.*scancel 7"):
        jobs.collect(found)
    assert not folder.summary.exists()


def test_ranks_that_left_nothing_have_failed_and_the_job_that_only_waits_is_ended(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(monkeypatch, "RUNNING", "7.batch|batch\n")
    (found,) = jobs.find(folder.path)
    summary = jobs.collect(found)
    assert summary.status == "failed" and "rank 1 did not finish" in summary.reason and summary.substrate == "slurm"
    assert asked[-1] == ("scancel", "--name=testbed-a1", "7") and list(jobs.find(folder.path)) == []


def in_an_allocation_of_the_user(folder: RunFolder) -> None:
    (folder.path / slurm.SLURM_FILE).write_text(json.dumps({"job": "7", "name": "", "nodes": ["n0", "n1"]}))


def test_an_allocation_of_the_user_stays_and_its_own_steps_are_no_ranks(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_an_allocation_of_the_user(folder)
    asked = scripted(monkeypatch, "RUNNING", "7.batch|batch\n7.0|interactive\n7.2|bash\n")
    (found,) = jobs.find(folder.path)
    assert jobs.collect(found).status == "failed" and not [argv for argv in asked if argv[0] == "scancel"]


def test_of_an_allocation_of_the_user_only_the_steps_are_said_to_be_ended(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_an_allocation_of_the_user(folder)
    scripted(monkeypatch, "RUNNING", "7.2|bash\n7.3|testbed-1-0\n7.4|testbed-1-1\n")
    (found,) = jobs.find(folder.path)
    with pytest.raises(UsageError, match=r"Wait, or end it: scancel 7\.3 7\.4$"):
        jobs.collect(found)
