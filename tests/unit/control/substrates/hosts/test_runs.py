"""Runs on hosts without a controller: find, collect, clean. The hosts answer by a function; their folders are real."""

from __future__ import annotations

from pathlib import Path

import paramiko
import pytest

from testbed.control.cli import hosts
from testbed.control.cli.report import exit_code
from testbed.control.runs.progress import Silent
from testbed.control.runs.run import execute, resume_run
from testbed.control.runs.select import choose_hosts
from testbed.control.substrates.docker_cli import local_user
from testbed.control.substrates.hosts import runs as hosts_runs
from testbed.control.substrates.hosts.substrate import HOSTS_FILE
from testbed.results.folder import RunFolder
from testbed.results.records import End, encode
from testbed.spec.errors import ConnectionLost, SpecError, UsageError
from testbed.spec.inventory import Inventory
from testbed.spec.run import RunSpec
from tests.support.scripted_hosts import RUN, Machine, ScriptedHost, failing

SPEC = RunSpec.load({"nodes": 2, "model": "lenet5", "data": {"name": "synthetic"}, "batch": 8, "steps": 6}, "")
END = encode(End(steps=0, seconds=1.0, sent=0, received=0)) + "\n"


def machine(tmp_path: Path, rank: int, records: str | None = END, **container: object) -> Machine:
    values = {"purpose": "rank", "state": "exited", "code": 0, "user": local_user()} | container
    row = (f"c{rank}", rank, values["purpose"], values["state"], values["code"], values["user"])
    made = Machine(tmp_path / f"home{rank}", f"node{rank}", [row])  # type: ignore[list-item]
    made.run_dir.mkdir(parents=True)
    (made.run_dir / "spec.json").write_text(SPEC.to_json())
    if records is not None:
        (made.run_dir / f"rank{rank}.jsonl").write_text(records)
    return made


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESTBED_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_a_run_whose_ranks_finished_is_ok_and_is_removed_from_the_hosts(tmp_path: Path) -> None:
    machines = [machine(tmp_path, 0), machine(tmp_path, 1)]
    (found,), problems = hosts_runs.find(machines)
    summary, folder, failures = hosts_runs.collect(found)
    assert (summary.status, problems, failures) == ("ok", [], [])
    assert (folder / HOSTS_FILE).is_file() and not any(each.run_dir.exists() or each.containers for each in machines)


def test_a_run_that_ended_with_its_probe_is_failed_and_collect_exits_with_3(tmp_path: Path) -> None:
    machines = [machine(tmp_path, rank, records=None, purpose="probe") for rank in (0, 1)]
    (found,), _ = hosts_runs.find(machines)
    summary, _, _ = hosts_runs.collect(found)
    assert summary.status == "failed" and "rank 0 did not finish" in summary.reason and exit_code([summary]) == 3


def test_the_state_of_a_run_is_that_of_its_rank_and_not_of_a_probe(tmp_path: Path) -> None:
    there = machine(tmp_path, 1, state="running")
    there.containers.insert(0, ("probe", 1, "probe", "exited", 0, local_user()))
    (found,), _ = hosts_runs.find([there])
    assert (found.ranks[0].state, found.ranks[0].code, found.running) == ("running", None, True)
    assert hosts._status_row(RUN, found.ranks[0])[-1] == "-", "nothing has ended, so there is no code"


def test_missing_records_are_named_and_a_later_collect_completes_the_run(tmp_path: Path) -> None:
    first, second = machine(tmp_path, 0), machine(tmp_path, 1)
    (found,), _ = hosts_runs.find([first])
    summary, folder, _ = hosts_runs.collect(found)
    assert summary.status == "failed" and "rank 1 did not finish, or its records are not here" in summary.reason
    (rest,), _ = hosts_runs.find([first, second])
    again, same, _ = hosts_runs.collect(rest)
    assert (again.status, same) == ("ok", folder)


def test_a_host_whose_files_cannot_be_copied_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = [machine(tmp_path, 0), machine(tmp_path, 1)]

    def broken() -> paramiko.SFTPClient:
        raise ConnectionLost("node1: the connection broke")

    monkeypatch.setattr(machines[1], "files", broken)
    (found,), _ = hosts_runs.find(machines)
    summary, _, failures = hosts_runs.collect(found)
    assert summary.status == "failed" and [str(error) for error in failures] == ["node1: the connection broke"]
    assert machines[1].run_dir.exists() and not machines[0].run_dir.exists()


def test_a_container_that_was_only_created_does_not_run(tmp_path: Path) -> None:
    machines = [machine(tmp_path, 0), machine(tmp_path, 1, records=None, state="created")]
    (found,), _ = hosts_runs.find(machines)
    assert not found.running and hosts_runs.collect(found)[0].status == "failed"


def test_a_rank_without_a_container_is_found_by_its_records(tmp_path: Path) -> None:
    machines = [machine(tmp_path, 0), machine(tmp_path, 1)]
    machines[1].containers = []
    (found,), _ = hosts_runs.find(machines)
    assert hosts_runs.collect(found)[0].status == "ok"


def test_a_host_without_an_engine_does_not_hide_the_others(tmp_path: Path) -> None:
    dead = ScriptedHost(failing(1, "Cannot connect to the Docker daemon"), "node1")
    found, problems = hosts_runs.find([machine(tmp_path, 0), dead])
    assert [each.id for each in found] == [RUN] and "node1: no Docker engine answers" in str(problems[0])


def test_runs_of_another_user_of_the_engine_are_neither_listed_nor_removed(tmp_path: Path) -> None:
    theirs = machine(tmp_path, 0, state="running", user="somebody@else")
    assert hosts_runs.find([theirs]) == ([], [])
    removed = hosts_runs.clean(theirs, everything=True)
    assert theirs.containers and theirs.run_dir.exists() and removed == ["not the image, which other users need"]
    ours = machine(tmp_path, 1, state="running")
    hosts_runs.clean(ours, everything=True)
    assert not ours.containers and not ours.run_dir.exists()


def inventory() -> Inventory:
    return Inventory.load({"nodes": [{"name": "a", "address": "h1"}, {"name": "b", "address": "h2"}]}, "")


def test_a_run_on_hosts_cannot_be_resumed_and_the_way_out_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.create(SPEC)
    with pytest.raises(UsageError, match=r"--resume .*checkpoints are stored on the nodes.*--retries N"):
        resume_run(SPEC, choose_hosts(inventory(), SPEC), folder, Silent(), 0)


@pytest.mark.parametrize("fault", ["cut:rank0@step1", "rate:rank0@step1=1mbit", "slow:rank0@step1=0.5cpu"])
def test_faults_that_would_change_a_host_are_refused_with_the_reason(tmp_path: Path, fault: str) -> None:
    spec = SPEC.model_copy(update={"faults": RunSpec.load({"nodes": 2, "faults": [fault]}, "").faults})
    with pytest.raises(SpecError, match=r"cannot be injected on hosts, which supports kill, exit, pause, oom\."):
        execute(spec, choose_hosts(inventory(), spec), RunFolder(tmp_path / "run"), Silent())
