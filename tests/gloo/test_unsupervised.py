"""`python -m testbed.rank` without a controller, as torchrun and srun start it: real processes on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed.results.folder import RunFolder
from testbed.results.records import read
from testbed.spec.errors import Interrupted, PeerLost, SpecError, TestbedError, UsageError
from tests.support.command import run_command
from tests.support.rank_pool import ROOT, RankRun, free_port, rank_environment
from tests.support.run_files import keys_by_file

pytestmark = pytest.mark.gloo

SMALL = {"MODE": "ring", "MODEL": "lenet5", "DATA": "synthetic", "BATCH": "24", "STEPS": "4"}
SUBSET = "data.subset=96 data.test_subset=20"
TIMEOUT_S = 150.0  # for processes to start and end on a busy machine


def launched(tmp_path: Path, size: int, own: dict[int, dict[str, str]] | None = None, **variables: str) -> RankRun:
    environment = SMALL | {"SET": SUBSET} | variables
    return RankRun(None, size, runs=tmp_path / "runs", own=own, **environment)


def only_folder(tmp_path: Path) -> RunFolder:
    (path,) = (tmp_path / "runs" / "launched").iterdir()
    return RunFolder(path)


def summary_of(folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(folder.summary.read_text())
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the ranks did not get going"
        time.sleep(0.05)


def wait_for_steps(tmp_path: Path, rank: int, steps: int) -> None:
    runs = tmp_path / "runs" / "launched"
    wait_until(lambda: any(sum(r.kind == "step" for r in read(p)) >= steps for p in runs.glob(f"*/rank{rank}.jsonl")))


# --- one path: the same files as under a controller ----------------------------------------------------------------


def test_launched_ranks_leave_the_same_files_with_the_same_keys_as_a_controller(tmp_path: Path) -> None:
    with launched(tmp_path, 2) as run:
        assert run.wait(TIMEOUT_S) == [0, 0], run.log_of(0) + run.log_of(1)
    flags = ["--mode", "ring", "--nodes", "2", "--model", "lenet5", "--data", "synthetic", "--batch", "24"]
    settings = [word for setting in SUBSET.split() for word in ("--set", setting)]
    done = run_command("run", *flags, "--steps", "4", *settings, "--on", "process", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder, supervised = only_folder(tmp_path), RunFolder(tmp_path / "r")
    assert keys_by_file(folder.path) == keys_by_file(supervised.path)
    for rank in range(2):
        kinds = [[record.kind for record in read(each.records(rank))] for each in (folder, supervised)]
        assert kinds[0] == kinds[1], rank


def test_rank_0_prints_the_table_and_its_log_has_it_too(tmp_path: Path) -> None:
    with launched(tmp_path, 2, MODE="none") as run:
        assert run.wait(TIMEOUT_S) == [0, 0], run.log_of(0)
    folder, log = only_folder(tmp_path), run.log_of(0)
    assert "| none |" in log and "note: none: " in log, log  # the footnote on the control
    assert f"all files are in runs/launched/{folder.path.name}" in log
    assert folder.log(0).read_text() == log
    assert "step 1/4 loss" in folder.log(1).read_text()
    assert summary_of(folder)["substrate"] == "launched" and folder.substrate.read_text().strip() == "launched"


def test_nodes_without_a_shared_disk_keep_their_own_files(tmp_path: Path) -> None:
    elsewhere = tmp_path / "other" / "runs"
    with launched(tmp_path, 2, own={1: {"TESTBED_RUNS": str(elsewhere)}}) as run:
        assert run.wait(TIMEOUT_S) == [0, 0], run.log_of(0) + run.log_of(1)
    folder = only_folder(tmp_path)
    other = RunFolder(elsewhere / "launched" / folder.path.name)
    assert not folder.records(1).exists() and other.records(1).exists() and other.log(1).exists()
    assert not other.summary.exists() and summary_of(folder)["status"] == "ok"


def test_in_mode_single_the_other_ranks_wait_for_rank_0(tmp_path: Path) -> None:
    with launched(tmp_path, 4, MODE="single", STEPS="600") as run:
        wait_for_steps(tmp_path, 0, 1)
        wait_until(lambda: all("has nothing to do" in run.log_of(rank) for rank in (1, 2, 3)))
        assert [process.poll() for process in run.processes] == [None] * 4
        run.processes[3].send_signal(signal.SIGKILL)  # a rank that does not train may end
        run.processes[2].send_signal(signal.SIGTERM)
        assert run.wait(TIMEOUT_S) == [0, 0, Interrupted.exit_code, -signal.SIGKILL], run.log_of(0)
    folder = only_folder(tmp_path)
    assert summary_of(folder)["status"] == "ok" and not folder.records(1).exists()


def test_in_mode_single_no_rank_that_is_stopped_exits_with_0(tmp_path: Path) -> None:
    with launched(tmp_path, 3, MODE="single", STEPS="100000") as run:
        wait_for_steps(tmp_path, 0, 1)
        wait_until(lambda: all("has nothing to do" in run.log_of(rank) for rank in (1, 2)))
        run.processes[0].send_signal(signal.SIGTERM)
        run.processes[1].send_signal(signal.SIGTERM)
        codes = run.wait(TIMEOUT_S)
    assert codes[:2] == [Interrupted.exit_code] * 2, run.log_of(0)


def test_a_single_node_needs_no_meeting(tmp_path: Path) -> None:
    with launched(tmp_path, 1, MODE="single") as run:
        assert run.wait(TIMEOUT_S) == [0], run.log_of(0)
    assert summary_of(only_folder(tmp_path))["network"] == "one node, no network"


SLOW = {"NODES": "2", "RATE": "10mbit", "GLOO_SOCKET_IFNAME": "lo"}  # of the variables of Compose; nothing shapes here


def test_a_network_that_is_not_the_requested_one_ends_the_run_before_training(tmp_path: Path) -> None:
    with launched(tmp_path, 2, **SLOW) as run:
        assert run.wait(TIMEOUT_S) == [5, 5], run.log_of(0) + run.log_of(1)
    (path,) = (tmp_path / "runs" / "compose").iterdir()
    summary, folder = summary_of(RunFolder(path)), RunFolder(path)
    assert (summary["status"], summary["steps"]) == ("invalid", 0)
    assert "NOT within 5 %" in summary["reason"] and "KEEP_GOING=true" in summary["reason"]
    assert folder.receipt.is_file() and not list(read(folder.records(0))) and not list(read(folder.records(1)))
    assert f"left out: {path.name}: invalid" in run.log_of(0)


def test_with_keep_going_it_trains_and_is_left_out_of_tables(tmp_path: Path) -> None:
    with launched(tmp_path, 2, **SLOW, KEEP_GOING="true") as run:
        assert run.wait(TIMEOUT_S) == [5, 5], run.log_of(0) + run.log_of(1)
    (path,) = (tmp_path / "runs" / "compose").iterdir()
    summary = summary_of(RunFolder(path))
    assert (summary["status"], len(summary["losses"])) == ("invalid", 4) and "NOT within 5 %" in summary["reason"]


COUNTING = """
import sys
from testbed.rank import __main__ as rank
from testbed.spec.run import RunSpec

count = []
parse = RunSpec.load.__func__
RunSpec.load = classmethod(lambda cls, *args, **options: count.append(1) or parse(cls, *args, **options))
code = rank.main()
print("parsed", len(count), "times")
sys.exit(code)
"""


def test_an_address_of_another_machine_is_refused_as_the_address_of_rank_0(tmp_path: Path) -> None:
    """Only rank 0 is started: another one would try to connect to that address."""
    env = rank_environment(0, 2, free_port()) | SMALL | {"MASTER_ADDR": "192.0.2.1", "TESTBED_RUNS": str(tmp_path)}
    argv = [sys.executable, "-m", "testbed.rank"]
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == UsageError.exit_code, done.stderr
    rule = "rank 0 cannot listen there (Cannot assign requested address)"
    assert f"MASTER_ADDR '192.0.2.1': {rule}. Set it to an address of rank 0's machine." in done.stderr


def test_a_rank_parses_its_spec_once(tmp_path: Path) -> None:
    runs = {"TESTBED_RUNS": str(tmp_path), "SET": SUBSET, "MODE": "single", "PYTHONPATH": str(ROOT)}
    env = os.environ | SMALL | runs | {"RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", COUNTING], env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "parsed 1 times", done.stdout + done.stderr
    assert "| single |" in done.stdout


# --- the same request on all ranks ---------------------------------------------------------------------------------


def test_a_rank_with_another_request_is_named_with_the_key_and_nothing_is_made(tmp_path: Path) -> None:
    with launched(tmp_path, 3, own={2: {"BATCH": "48"}}) as run:
        assert run.wait(TIMEOUT_S) == [SpecError.exit_code] * 3, [run.log_of(rank) for rank in range(3)]
    for rank in range(3):
        assert "batch 48 on rank 2, 24 on rank 0: all ranks must get the same request" in run.log_of(rank)
    assert not (tmp_path / "runs" / "launched").exists()


def test_a_rank_that_wants_to_train_where_rank_0_trains_alone_is_refused(tmp_path: Path) -> None:
    with launched(tmp_path, 2, MODE="single", own={1: {"MODE": "ring"}}) as run:
        assert run.wait(TIMEOUT_S) == [SpecError.exit_code] * 2, [run.log_of(rank) for rank in range(2)]
    assert all("mode 'ring' on rank 1, 'single' on rank 0" in run.log_of(rank) for rank in range(2)), run.log_of(1)
    assert not (tmp_path / "runs" / "launched").exists()


def test_a_rank_that_wants_to_be_idle_where_rank_0_does_not_is_refused(tmp_path: Path) -> None:
    with launched(tmp_path, 2, own={1: {"MODE": "single"}}) as run:
        assert run.wait(TIMEOUT_S) == [SpecError.exit_code] * 2, [run.log_of(rank) for rank in range(2)]
    assert all("mode 'single' on rank 1, 'ring' on rank 0" in run.log_of(rank) for rank in range(2)), run.log_of(1)


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_and_the_others_end_with_6(tmp_path: Path, victim: int) -> None:
    others = [rank for rank in range(3) if rank != victim]
    with launched(tmp_path, 3, STEPS="100000", SET=f"{SUBSET} deadline=60") as run:
        wait_for_steps(tmp_path, victim, 3)
        run.processes[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait(60.0, others) == [PeerLost.exit_code] * 2, run.log_of(others[0])
        assert time.monotonic() - killed < 40.0  # before the deadline
    folder = only_folder(tmp_path)
    for rank in others:
        last = list(read(folder.records(rank)))[-1]
        assert (last.kind, last.code, last.failed_rank) == ("error", PeerLost.exit_code, victim)
    if victim == 0:
        assert not folder.summary.exists()  # rank 0, which writes it, has ended
    else:
        summary = summary_of(folder)
        assert summary["status"] == "failed"
        assert summary["reason"].startswith("rank 2 (node2) ended after step "), summary["reason"]
        assert "rank 0, rank 1 lost it" in summary["reason"] and summary["reason"] in run.log_of(0)
        assert "silent" not in summary["reason"]


def test_a_frozen_rank_is_named_after_the_deadline(tmp_path: Path) -> None:
    with launched(tmp_path, 3, STEPS="100000", SET=f"{SUBSET} deadline=5") as run:
        wait_for_steps(tmp_path, 1, 3)
        run.processes[1].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert run.wait(60.0, [0, 2]) == [PeerLost.exit_code] * 2, run.log_of(0)
        assert time.monotonic() - stopped > 4.0
    reason = summary_of(only_folder(tmp_path))["reason"]
    assert reason.startswith("rank 1 (node1) is silent since step ") and "frozen or cut off" in reason


def test_ctrl_c_leaves_an_interrupted_run_with_whole_files(tmp_path: Path) -> None:
    with launched(tmp_path, 2, STEPS="100000") as run:
        wait_for_steps(tmp_path, 1, 3)
        for process in run.processes:
            process.send_signal(signal.SIGINT)
        assert run.wait(30.0) == [Interrupted.exit_code, Interrupted.exit_code], run.log_of(0)
    folder = only_folder(tmp_path)
    assert summary_of(folder)["status"] == "interrupted"
    assert [list(read(folder.records(rank)))[-1].kind for rank in range(2)] == ["error", "error"]
    assert not list(folder.path.glob(".*"))


def test_a_rank_that_fails_by_itself_is_the_root_cause(tmp_path: Path) -> None:
    """Rank 1 finds its runs folder to be a file."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    with launched(tmp_path, 2, own={1: {"TESTBED_RUNS": str(blocked)}}) as run:
        assert run.wait(TIMEOUT_S) == [PeerLost.exit_code, TestbedError.exit_code], run.log_of(0)
    assert "Not a directory" in run.log_of(1) and "Traceback" not in run.log_of(1)
    reason = summary_of(only_folder(tmp_path))["reason"]
    assert reason.startswith("rank 1 (node1) ended with code 1 before its first step: "), reason
    assert "Not a directory" in reason and "Then rank 0 lost it." in reason and "silent" not in reason


def test_a_summary_that_cannot_be_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    with launched(tmp_path, 2, STEPS="40") as run:
        wait_for_steps(tmp_path, 0, 1)
        folder = only_folder(tmp_path)
        folder.summary.mkdir()
        codes = run.wait(TIMEOUT_S)
    assert codes == [TestbedError.exit_code, 0], run.log_of(0)
    assert "summary.json" in run.log_of(0) and "Is a directory" in run.log_of(0) and "Traceback" not in run.log_of(0)
