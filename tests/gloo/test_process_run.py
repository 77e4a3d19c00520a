"""The `testbed` command itself, on plain processes: whole runs, sweeps that resume, Ctrl-C, a killed rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.spec.errors import Interrupted, RankFailed, UsageError
from tests.support.command import rank_pids, run_command, start_command, wait_for_steps

pytestmark = pytest.mark.gloo
SMALL = ["--model", "lenet5", "--data", "synthetic", "--batch", "12", "--on", "process"]
LONG = [*SMALL, "--steps", "100000", "--set", "probe=false"]


def test_a_run_leaves_a_whole_folder_and_prints_one_json_document(tmp_path):
    flags = ["--mode", "ring", "--nodes", "3", "--steps", "6", *SMALL]
    result = run_command("run", *flags, "--json", "--out", "r", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (summary,) = json.loads(result.stdout)["runs"]
    names = {path.name for path in (tmp_path / "r").iterdir()}
    of_ranks = {f"rank{k}.{end}" for k in range(3) for end in ("jsonl", "log")}
    assert {"spec.json", "receipt.json", "summary.json", *of_ranks} <= names
    assert summary["status"] == "ok" and summary["replicas_agree"] and len(summary["losses"]) == 6
    gradient = summary["gradient_bytes"]
    for sent in summary["sent_per_step"]:  # the ring's bound, 2(N-1)/N, with 10 % for Gloo's framing
        assert 2 * 2 / 3 * gradient <= sent <= 1.1 * 2 * 2 / 3 * gradient


def test_other_work_on_the_machine_is_measured_and_the_run_still_counts(tmp_path):
    """The busy process gets at most one core, and what takes the rest from it are other processes, too."""
    flags = ["--mode", "single", "--steps", "1500", *SMALL, "--set", "data.test_subset=20"]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            result = run_command("run", *flags, "--json", "--out", "r", cwd=tmp_path)
        finally:
            busy.kill()
    assert result.returncode == 0, result.stderr
    (summary,) = json.loads(result.stdout)["runs"]
    (machine,) = summary["machines"]
    assert summary["status"] == "ok" and (machine["ranks"], machine["cores"]) == ([0], os.cpu_count())
    assert machine["others"] > 0.3, machine  # cores
    assert machine["load_at_start"] is not None


def test_a_folder_that_exists_and_a_port_in_use_are_refused(tmp_path):
    (tmp_path / "r").mkdir()
    result = run_command("run", "--steps", "4", *SMALL, "--out", "r", "--set", "probe=false", cwd=tmp_path)
    assert result.returncode == UsageError.exit_code and "exists" in result.stderr and "--out" in result.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--steps", "4", *SMALL, "--out", "s", "--set", f"port={port}"]
        result = run_command("run", *flags, cwd=tmp_path)
    assert result.returncode == UsageError.exit_code and str(port) in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "s").exists()


def test_an_unknown_model_is_the_users_mistake(tmp_path):
    result = run_command("run", "--steps", "4", *SMALL, "--model", "vgg99", "--set", "probe=false", cwd=tmp_path)
    assert result.returncode == UsageError.exit_code and "'vgg99'" in result.stderr and "Traceback" not in result.stderr


def test_a_sweep_skips_what_is_finished_and_fresh_measures_again(tmp_path):
    file = tmp_path / "two.toml"
    file.write_text(
        'title = "two modes"\n'
        '[base]\nmodel = "lenet5"\ndata = { name = "synthetic" }\nnodes = 2\nbatch = 8\nsteps = 4\nprobe = false\n'
        '[axes]\nmode = ["single", "tree"]\n'
    )
    first = run_command("sweep", str(file), "--on", "process", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "| single" in first.stdout and "| tree" in first.stdout
    again = run_command("sweep", str(file), "--on", "process", cwd=tmp_path)
    assert again.stdout.count("finished earlier") == 2
    (tmp_path / "runs/two/tree/summary.json").unlink()  # as a killed controller leaves it
    resumed = run_command("sweep", str(file), "--on", "process", cwd=tmp_path)
    assert resumed.stdout.count("finished earlier") == 1 and resumed.returncode == 0
    assert (tmp_path / "runs/two/.superseded/tree~0/rank1.jsonl").exists()


def test_ctrl_c_stops_all_ranks_and_keeps_what_was_measured(tmp_path):
    folder = tmp_path / "r"
    process = start_command("run", "--nodes", "2", *LONG, "--out", str(folder), cwd=tmp_path)
    wait_for_steps(folder, 1, 5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == Interrupted.exit_code and str(folder) in err and "Traceback" not in err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted" and len(summary["losses"]) >= 5
    assert rank_pids(folder) == []


def pid_of(folder: Path, rank: int) -> int:
    mark = f"\0RANK={rank}\0".encode()
    (pid,) = [pid for pid in rank_pids(folder) if mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]
    return pid


def until_left(folder: Path, pids: list[int], seconds: float) -> None:
    """Wait until no other ranks than these are left. A run of another test may end them: their controller is dead."""
    end = time.monotonic() + seconds
    while not set(rank_pids(folder)) <= set(pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert set(rank_pids(folder)) <= set(pids)


def test_a_killed_rank_is_named(tmp_path):
    folder = tmp_path / "r"
    process = start_command("run", "--nodes", "3", *LONG, "--out", str(folder), cwd=tmp_path)
    wait_for_steps(folder, 1, 5)
    os.kill(pid_of(folder, 1), signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == RankFailed.exit_code
    assert "rank 1 (node1) was killed by SIGKILL" in err, err
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert rank_pids(folder) == []


def test_ranks_end_with_a_killed_controller(tmp_path):
    folder = tmp_path / "r"
    process = start_command("run", "--nodes", "2", *LONG, "--out", str(folder), cwd=tmp_path)
    wait_for_steps(folder, 0, 3)
    process.kill()
    process.communicate()
    until_left(folder, [], 20)


@pytest.mark.quiet  # a run of another test kills what dead controllers left, before it has written its last record
def test_ranks_end_with_a_killed_controller_even_while_they_wait_for_a_frozen_one(tmp_path):
    folder = tmp_path / "r"
    process = start_command("run", "--nodes", "3", *LONG, "--out", str(folder), cwd=tmp_path)
    wait_for_steps(folder, 0, 3)
    frozen = pid_of(folder, 1)
    try:
        os.kill(frozen, signal.SIGSTOP)
        time.sleep(1)  # the others finish what was under way, and wait for it inside Gloo
        process.kill()
        process.communicate()
        until_left(folder, [frozen], 10)
        with contextlib.suppress(ProcessLookupError):
            os.kill(frozen, signal.SIGCONT)  # while it is stopped, its SIGTERM waits, too
        until_left(folder, [], 10)
    finally:
        for pid in rank_pids(folder):
            os.kill(pid, signal.SIGKILL)
    last = json.loads((folder / "rank0.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["code"]) == ("error", Interrupted.exit_code) and "SIGTERM" in last["message"]


def test_a_method_of_ones_own_is_one_file(tmp_path):
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "naive.py").write_text(
        "def mean_(buffer, group):\n    group.all_reduce(buffer)\n    buffer.div_(group.size)\n"
    )
    result = run_command(
        "run", "--mode", "naive/param", "--nodes", "2", "--steps", "4", *SMALL, "--set", "probe=false", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "| naive/param" in result.stdout
    assert "naive" in run_command("modes", cwd=tmp_path).stdout


def test_a_method_that_forgets_to_divide_is_refused_with_expected_and_found(tmp_path):
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "my_sum.py").write_text("def mean_(buffer, group):\n    group.all_reduce(buffer)\n")
    flags = ["--mode", "my_sum", "--nodes", "2", "--steps", "4", *SMALL, "--set", "probe=false", "--out", "r"]
    result = run_command("run", *flags, cwd=tmp_path)
    assert result.returncode == UsageError.exit_code, result.stderr
    assert (
        "mode 'my-sum': wrong on all ranks: requested the mean of 2 ranks of known numbers in float32" in result.stderr
    )
    assert "2 times the mean: the sum was not divided by N" in result.stderr
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["status"] == "failed" and "2 times the mean" in summary["reason"]


def test_what_cannot_work_is_refused_before_a_folder_exists(tmp_path):
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "broken.py").write_text("def mean_(buffer, group)\n")
    for wrong in (["--model", "vit_b_16"], ["--model", "nosuch"], ["--mode", "broken"]):
        result = run_command("run", "--steps", "4", *SMALL, *wrong, "--out", "r", cwd=tmp_path)
        assert result.returncode == UsageError.exit_code and wrong[1] in result.stderr, result.stderr
        assert not (tmp_path / "r").exists()
