"""The `testbed` command on a real Slurm: runs, a sweep, faults, and every way in which a job ends early.

The tests are in an order: the job with a time limit, which began with the first of them, ends before nodes are taken
away.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testbed.spec.errors import AllocationLost, Interrupted, RankFailed, Unavailable, UsageError
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.conftest import start_sleeping
from tests.support.command import rank_pids, wait_for_steps

pytestmark = [pytest.mark.slurm, pytest.mark.gloo, pytest.mark.usefixtures("timed")]
MODEL = ("--model", "lenet5", "--data", "synthetic", "--batch", "16", "--set", "data.test_subset=64")
SMALL = ("--on", "slurm", *MODEL)
UNPROBED = (*SMALL, "--set", "probe=false")
EXPERIMENT = """
name = "four"
title = "four modes in one allocation"
[base]
model = "lenet5"
nodes = 3
batch = 15
steps = 5
probe = false
data = {name = "synthetic", test_subset = 64}
[axes]
mode = ["ring", "ddp", "tree", "allreduce"]
"""
SCRIPTS = Path(__file__).parents[1] / "scripts"
ON_NETNS = ("ring", "ddp")


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def own_jobs(cluster: Cluster, timed: subprocess.Popen[str]) -> list[str]:
    """All jobs that have not ended, but for the one with a time limit."""
    rows = [line.split() for line in cluster.ask("squeue", "-h", "-o", "%i %l %j").splitlines()]
    return [row[0] for row in rows if row[1] != "1:00"]


def test_a_run_has_the_same_folder_and_table_as_elsewhere_and_leaves_no_job(
    cluster: Cluster, tmp_path: Path, timed: subprocess.Popen[str]
) -> None:
    options = ("--nodes", "4", "--mode", "ddp", "--steps", "150", "--fault", "pause:rank1@step3+1s")
    done = cluster.testbed("run", *SMALL, *options, "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has n0, n1, n2, n3" in done.stdout and "| ddp" in done.stdout
    found = summary_of(tmp_path / "r")
    assert (found["status"], found["substrate"], found["replicas_agree"]) == ("ok", "slurm", True)
    steps = [json.loads(line) for line in (tmp_path / "r" / "rank0.jsonl").read_text().splitlines()]
    assert max(step["total"] for step in steps if step["kind"] == "step") > 0.5, "rank 0 waited for the paused rank"
    receipt = json.loads((tmp_path / "r" / "receipt.json").read_text())
    assert len(receipt["links"]) == 12
    assert {path.name for path in (tmp_path / "r").iterdir()} >= {"slurm.json", "rank2.jsonl", "rank2.log"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r"], "the mark of the shared disk is gone"
    wait_for(lambda: own_jobs(cluster, timed) == [], "the job to be gone")


def test_a_sweep_has_one_allocation_and_the_losses_of_the_same_specs_on_namespaces(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "four.toml").write_text(EXPERIMENT)
    done = cluster.testbed("sweep", "four.toml", "--on", "slurm", "--slurm-option", "nice=1", cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    folders = [file.parent for file in (tmp_path / "runs" / "four").glob("*/slurm.json")]
    assert len(folders) == 4 and done.stdout.count("has n0, n1, n2") == 1
    assert len({(folder / "slurm.json").read_text() for folder in folders}) == 1, "one job"
    losses = {summary_of(folder)["spec"]["mode"].partition("/")[0]: summary_of(folder)["losses"] for folder in folders}
    for mode in ON_NETNS:
        flags = (
            "--on",
            "netns",
            *MODEL,
            "--nodes",
            "3",
            "--batch",
            "15",
            "--steps",
            "5",
            "--mode",
            mode,
            "--set",
            "probe=false",
        )
        there = cluster.testbed("run", *flags, "--out", mode, cwd=tmp_path)
        assert there.returncode == 0, there.stderr
        assert len(losses[mode]) == 5 and summary_of(tmp_path / mode)["losses"] == losses[mode]


def test_a_killed_rank_is_named_with_its_node(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--nodes", "3", "--batch", "15", "--steps", "5000", "--fault", "kill:rank2@step3", "--out", "r")
    options += ("--python", os.path.relpath(sys.executable, tmp_path))  # tasks begin in another folder than this one
    done = cluster.testbed("run", *UNPROBED, *options, cwd=tmp_path)
    assert done.returncode == RankFailed.exit_code, done.stdout + done.stderr
    assert "rank 2 (n2) was killed" in done.stderr and "SIGKILL" in done.stderr, done.stderr


def test_scancel_is_told_and_ranks_have_no_variable_that_was_not_listed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "a-secret")
    started = cluster.start_testbed("run", *UNPROBED, "--nodes", "2", "--steps", "100000", "--out", "r", cwd=tmp_path)
    wait_for_steps(tmp_path / "r", 0, 3)
    ranks = [pid for pid in rank_pids(tmp_path / "r") if Path(f"/proc/{pid}/comm").read_text().strip() != "srun"]
    assert len(ranks) == 2
    assert all(b"a-secret" not in Path(f"/proc/{pid}/environ").read_bytes() for pid in ranks)
    job = json.loads((tmp_path / "r" / "slurm.json").read_text())["job"]
    assert "a-secret" not in cluster.ask("scontrol", "show", "job", job)
    cluster.ask("scancel", job)
    _, err = started.communicate(timeout=60)
    assert started.returncode == AllocationLost.exit_code
    assert f"Slurm job {job} was cancelled (scancel) at step" in err and "--resume r" in err, err
    assert summary_of(tmp_path / "r")["status"] == "failed"


def test_ctrl_c_leaves_no_job(cluster: Cluster, tmp_path: Path, timed: subprocess.Popen[str]) -> None:
    started = cluster.start_testbed("run", *UNPROBED, "--nodes", "2", "--steps", "100000", "--out", "r", cwd=tmp_path)
    wait_for_steps(tmp_path / "r", 0, 3)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert started.returncode == Interrupted.exit_code and "all ranks are stopped" in err, err
    assert summary_of(tmp_path / "r")["status"] == "interrupted"
    wait_for(lambda: own_jobs(cluster, timed) == [], "the job to be gone")


def test_a_run_whose_controller_was_killed_finishes_and_is_collected(
    cluster: Cluster, tmp_path: Path, timed: subprocess.Popen[str]
) -> None:
    started = cluster.start_testbed(
        "run", *UNPROBED, "--nodes", "2", "--steps", "1000", "--out", "runs/adhoc/r", cwd=tmp_path
    )
    folder = tmp_path / "runs" / "adhoc" / "r"
    wait_for_steps(folder, 0, 3)
    shown = cluster.testbed("status", cwd=tmp_path).stdout
    assert "runs/adhoc/r" in shown and "RUNNING, its controller runs" in shown, shown
    started.kill()
    started.communicate()
    wait_for(lambda: all('"kind":"end"' in (folder / f"rank{k}.jsonl").read_text() for k in range(2)), "the ranks")
    wait_for(lambda: "testbed-" not in cluster.ask("squeue", "-h", "--steps", "-o", "%j"), "the steps", 20)
    done = cluster.testbed("collect", cwd=tmp_path)
    assert done.returncode == 0 and "| ring" in done.stdout, done.stdout + done.stderr
    assert summary_of(folder)["status"] == "ok"
    assert "no unfinished runs" in cluster.testbed("status", cwd=tmp_path).stdout
    wait_for(lambda: own_jobs(cluster, timed) == [], "the job to be gone")


def test_inside_an_allocation_that_one_is_used_and_kept(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.ask("sbatch", "--parsable", "-N2", "--output=/dev/null", "--wrap", "sleep 300").strip()
    try:
        wait_for(lambda: cluster.ask("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", "the allocation")
        shutil.copy(SCRIPTS / "ddp.py", tmp_path)
        script = ("python", "ddp.py")
        exec_ = ("exec", "--on", "slurm", "--set", "probe=false", "--nodes")
        many = cluster.testbed(*exec_, "3", "--", *script, cwd=tmp_path, SLURM_JOB_ID=job)
        assert (
            many.returncode == Unavailable.exit_code
            and f"Slurm job {job}, which this is inside of, has 2" in many.stderr
        )
        limit = cluster.testbed(*exec_, "2", "--time", "5", "--", *script, cwd=tmp_path, SLURM_JOB_ID=job)
        assert limit.returncode == Unavailable.exit_code and "--time: this is inside Slurm job" in limit.stderr
        done = cluster.testbed(*exec_, "2", "--out", "r", "--", *script, cwd=tmp_path, SLURM_JOB_ID=job)
        assert done.returncode == 0, done.stdout + done.stderr
        logs = [(tmp_path / "r" / f"rank{rank}.log").read_text() for rank in range(2)]
        assert [f"rank {rank}: loss" in log for rank, log in enumerate(logs)] == [True, True], logs
        found = summary_of(tmp_path / "r")
        assert found["status"] == "ok" and found["replicas_agree"] and len(found["losses"]) == 12
        assert cluster.ask("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", "it is the user's"
    finally:
        cluster.ask("scancel", job)


@pytest.mark.parametrize(
    ("options", "words"),
    {
        "partition": (["--partition", "nope"], "--partition nope: Slurm refuses a job of 4 nodes"),
        "nodes": (["--nodes", "8"], "Requested node configuration is not available"),
        "option": (["--slurm-option", "wrap=reboot"], "'wrap' is not allowed"),
        "rate": (["--rate", "10mbit"], "never shaped"),
        "python": (["--python", "/nowhere/python"], "python /nowhere/python: cannot be started on n0"),
    }.values(),
)
def test_what_cannot_be_run_is_refused_and_nothing_is_left(
    cluster: Cluster, tmp_path: Path, timed: subprocess.Popen[str], options: list[str], words: str
) -> None:
    done = cluster.testbed("run", *SMALL, *options, "--out", "r", cwd=tmp_path)
    assert done.returncode == UsageError.exit_code and words in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []
    wait_for(lambda: own_jobs(cluster, timed) == [], "no job")


def test_a_time_limit_is_told(timed: subprocess.Popen[str]) -> None:
    _, err = timed.communicate(timeout=150)
    assert timed.returncode == AllocationLost.exit_code and "reached its time limit of 1:00" in err, err
    assert "Give it longer with --time" in err


def test_preemption_is_told_and_a_wait_in_the_queue_has_its_reason_and_ends_by_ctrl_c(
    cluster: Cluster, tmp_path: Path
) -> None:
    first = start_sleeping(cluster, tmp_path)
    wait_for(lambda: "testbed-" in cluster.ask("squeue", "-h", "--steps", "-o", "%j"), "its steps")
    urgent = ("sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300")
    job = cluster.ask(*urgent).strip()
    _, err = first.communicate(timeout=60)
    assert first.returncode == AllocationLost.exit_code and "was preempted" in err, err
    waiting = cluster.start_testbed("run", *UNPROBED, "--out", "w", cwd=tmp_path)
    assert waiting.stdout is not None
    line = next(line for line in waiting.stdout if "waits" in line)
    assert "waits in partition debug: " in line and ("Resources" in line or "Priority" in line), line
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == Interrupted.exit_code and "is cancelled" in err, err
    assert not (tmp_path / "w").exists()
    cluster.ask("scancel", job)
    wait_for(lambda: cluster.jobs() == [], "no job")


def test_a_node_whose_slurmd_dies_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.wait_until_idle()
    started = start_sleeping(cluster, tmp_path)
    wait_for(lambda: cluster.ask("squeue", "-h", "--steps", "-o", "%j").count("testbed-") == 2, "its steps")
    cluster.daemons["n1"].kill()
    cluster.daemons.pop("n1").wait(20)
    _, err = started.communicate(timeout=120)
    assert started.returncode == AllocationLost.exit_code and "lost a node that failed (n1)" in err, err
