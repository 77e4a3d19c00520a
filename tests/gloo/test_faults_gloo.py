"""A sample of `make soak` on plain processes: killed, frozen, resumed, random bytes on its ports, a full disk."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
from pathlib import Path

import pytest

from testbed.results.records import read
from testbed.spec.errors import RankFailed, TestbedError, UsageError
from tests.soak import faults, garbage, torn
from tests.support.command import run_command

pytestmark = pytest.mark.gloo
PATIENT = ["--set", "deadline=60"]  # on a busy machine a rank may get no processor for seconds
AT_ONCE_S = 40.0  # before that deadline
SMALL = ["--model", "lenet5", "--data", "synthetic", "--batch", "12", "--on", "process", "--set", "probe=false"]


@pytest.mark.parametrize(("mode", "rank"), [("ddp", 0), ("ring/bucket:2MiB/pipeline", 2)])
def test_a_killed_rank_ends_the_run_at_once_and_is_named(mode: str, rank: int) -> None:
    outcome = faults.fatal_case(mode, "process", f"kill:rank{rank}@step5", rank, limit=AT_ONCE_S, flags=PATIENT)
    assert outcome["ok"] and outcome["named"], outcome


@pytest.mark.parametrize("mode", ["ring", "ring/bucket:2MiB/pipeline"])
def test_a_frozen_rank_ends_the_run_after_the_deadline_and_is_named(mode: str) -> None:
    flags = ["--set", "deadline=10"]
    outcome = faults.fatal_case(mode, "process", "pause:rank1@step5", 1, limit=10 + AT_ONCE_S, flags=flags)
    assert outcome["ok"] and outcome["named"] and outcome["seconds"] > 9, outcome


@pytest.mark.parametrize("mode", ["ddp", "ring/bucket:2MiB/pipeline", "ring/every:3"])
def test_a_resumed_run_ends_with_the_undisturbed_hash(mode: str) -> None:
    """With every:3 the checkpoint after step 28 is inside a period."""
    flags = ["--fault", "kill:rank1@step30", "--retries", "1", "--set", "checkpoint=7"]
    outcome = faults.identical_case([*faults.run_flags(mode, 60, "process"), "--nodes", "2", *PATIENT], flags, {})
    assert outcome["ok"] and outcome["after"] >= 28, outcome  # a run that began anew would have this hash, too


def test_a_failed_run_is_resumed_by_hand_and_its_records_read_as_one(tmp_path: Path) -> None:
    flags = [*SMALL, "--nodes", "2", "--steps", "60", "--set", "checkpoint=10", "--fault", "kill:rank0@step25"]
    flags += ["--mode", "ring/pipeline"]  # the size of its buckets is chosen once
    failed = run_command("run", *flags, "--json", "--out", "r", cwd=tmp_path)
    document = json.loads(failed.stdout)
    ended = (document["status"], document["exit_code"], document["folder"])
    assert ended == ("failed", RankFailed.exit_code, "r")
    assert failed.returncode == RankFailed.exit_code and "rank 0 (node0) was killed by SIGKILL" in failed.stderr, (
        failed.stderr
    )
    for rank in range(2):  # a second attempt, which ended before its first step and recorded its start alone
        records = tmp_path / "r" / f"rank{rank}.jsonl"
        start = records.read_text().splitlines(keepends=True)[0]
        records.rename(tmp_path / "r" / f"rank{rank}.attempt1.jsonl")
        records.write_text(start)
    resumed = run_command("run", "--resume", "r", "--on", "process", "--json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    (summary,) = json.loads(resumed.stdout)["runs"]
    assert summary["status"] == "ok" and len(summary["losses"]) == 60 and summary["replicas_agree"]
    assert (tmp_path / "r" / "rank0.attempt2.jsonl").exists()
    steps = [vars(record) for record in read(tmp_path / "r" / "rank1.jsonl") if record.kind == "step"]
    done = sum(record["attempt"] == 1 for record in steps)
    assert done in (20, 30, 40, 50) and [s["attempt"] for s in steps] == [1] * done + [None] * (60 - done)
    assert [note for note in summary["notes"] if note.startswith(f"resumed after step {done}:")], summary["notes"]
    chosen = "ring/pipeline: buckets of 256KiB, as in the attempt before"
    assert chosen in summary["notes"] and chosen in (tmp_path / "r" / "rank1.log").read_text()
    usual = statistics.median(b["sent"] - a["sent"] for a, b in itertools.pairwise(steps))
    assert usual > 0 and summary["sent_per_step"][1] == pytest.approx(usual, rel=0.1)
    again = run_command("run", "--resume", "r", "--on", "process", cwd=tmp_path)
    assert again.returncode == UsageError.exit_code and "is finished" in again.stderr


@pytest.mark.parametrize(("port", "phase"), [("rendezvous", "train"), ("heartbeat", "meet"), ("ring", "train")])
def test_random_bytes_on_a_port_do_not_stop_a_run(port: str, phase: str) -> None:
    outcome = garbage.garbage_case(port, phase, seed=0)
    assert outcome["ok"], outcome


def test_a_writer_killed_inside_a_write_leaves_the_last_complete_files() -> None:
    for _, case in torn.torn(3):
        outcome = case()
        assert outcome["ok"], outcome


def test_ranks_listen_on_the_clusters_address_alone(tmp_path: Path) -> None:
    """All listening sockets of a rank: store, heartbeat, Gloo."""
    from tests.support.command import rank_pids, start_command, wait_for_steps

    flags = [*SMALL, "--nodes", "2", "--steps", "100000", "--out", "r"]
    process = start_command("run", *flags, cwd=tmp_path)
    try:
        wait_for_steps(tmp_path / "r", 0, 2)
        found = [address for pid in rank_pids(tmp_path / "r") for address in listening(pid)]
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert len(found) >= 4 and set(found) == {"0100007F"}, found  # 127.0.0.1


def listening(pid: int) -> list[str]:
    """Local addresses, in the kernel's hexadecimal, of a process's listening TCP sockets."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the rank is training: it closes files between these two calls
            target = str(descriptor.readlink())
            inodes |= {target[8:-1]} if target.startswith("socket:[") else set()
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk_leaves_no_run_that_looks_finished(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)], check=True)
    try:
        flags = [*SMALL, "--nodes", "2", "--steps", "5000", "--set", "deadline=5"]
        result = run_command("run", *flags, "--out", str(disk / "r"), cwd=tmp_path)
        assert result.returncode == RankFailed.exit_code and "Traceback" not in result.stderr, result.stderr
        assert "could not write any more" in result.stderr and "No space left on device" in result.stderr
        assert f"(file system {disk} (tmpfs): 0.0 of 0.1 MB free). Make room there" in result.stderr
        assert (
            not (disk / "r" / "summary.json").exists()
            or '"status": "ok"' not in (disk / "r" / "summary.json").read_text()
        )
        assert [path.name for path in (disk / "r").iterdir() if path.name.endswith(".tmp")] == []
        refused = run_command("run", *flags, "--out", str(disk / "second"), cwd=tmp_path)  # there is no room at all
        assert refused.returncode == TestbedError.exit_code and "Traceback" not in refused.stderr, refused.stderr
        assert f"(file system {disk} (tmpfs): 0.0 of 0.1 MB free). Make room there" in refused.stderr
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
