"""A rank that is killed while the ranks start and wait for each other: the run ends at once and names that rank.

Most times are generous, because a slow machine may need long to start, notice and end processes. They are below the
deadline for the start, after which ranks that wait would end in any case. Alone on the machine, a run ends in 3 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.results.folder import RunFolder
from testbed.results.records import read
from testbed.spec.errors import PeerLost, RankFailed
from tests.support.command import rank_pids, start_command
from tests.support.processes import state, until
from tests.support.rank_pool import RankRun

pytestmark = pytest.mark.gloo
SMALL = ["--model", "lenet5", "--data", "synthetic", "--batch", "12", "--steps", "100000", "--on", "process"]
DEADLINE = "start_deadline=400"
SETTINGS = ["--set", "probe=false", "--set", DEADLINE]
START_S = 300.0  # for a process to reach a point of its start on a busy machine
END_S = 60.0  # for the run to end after the kill
ALONE_END_S = 3.0  # the same if nothing else runs; without a shorter grace for ranks that wait it took 8 to 9 s


def established(pid: int) -> int:
    """The number of TCP connections that a process has: to the store, to the watchdog, to other ranks."""
    tables = "".join(Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6"))
    rows = [line.split() for line in tables.splitlines()]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "01"}
    links: set[str] = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.add(str(link.readlink()))
    return len(inodes & links)


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def is_up(pid: int) -> bool:
    return state(pid) != ""


def has_joined(pid: int) -> bool:
    """Connected to the store and to the watchdog of rank 0; the group is not complete while a rank is stopped."""
    return established(pid) >= 2


def pid_of(folder: Path, rank: int) -> int | None:
    mark = f"\0RANK={rank}\0".encode()
    pids = [pid for pid in rank_pids(folder) if mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]
    return pids[0] if pids else None


def wait_for_pid(folder: Path, rank: int) -> int:
    until(lambda: pid_of(folder, rank) is not None, START_S)
    pid = pid_of(folder, rank)
    assert pid is not None
    return pid


@pytest.mark.parametrize(
    ("point", "end_s"),
    [
        (is_up, END_S),
        pytest.param(loads_torch, ALONE_END_S, marks=pytest.mark.quiet),
        pytest.param(has_joined, ALONE_END_S, marks=pytest.mark.quiet),
    ],
)
def test_a_rank_that_is_killed_before_the_first_step_is_named_and_the_run_ends(
    tmp_path: Path, point: Callable[[int], bool], end_s: float
) -> None:
    """Rank 1 is stopped, so that the others wait for it wherever they are when rank 2 is killed."""
    folder = tmp_path / "r"
    command = ["run", "--mode", "ring", "--nodes", "3", *SMALL, *SETTINGS, "--out", str(folder)]
    process = start_command(*command, cwd=tmp_path)
    os.kill(wait_for_pid(folder, 1), signal.SIGSTOP)
    victim = wait_for_pid(folder, 2)
    until(lambda: point(victim), START_S)
    if point is not has_joined:  # rank 0 comes as far as the victim, too
        until(lambda: (pid := pid_of(folder, 0)) is not None and loads_torch(pid), START_S)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=START_S)
    seconds = time.monotonic() - killed
    assert process.returncode == RankFailed.exit_code, err
    assert "rank 2 (node2) was killed by SIGKILL before its first step" in err, err
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert rank_pids(folder) == []
    last = list(read(RunFolder(folder).records(2)))
    assert not last or last[-1].kind != "error"  # it was killed, and did not wait for a deadline
    assert seconds < end_s, f"the run ended {seconds:.1f} s after the kill"
    print(f"{point.__name__}: the run ended {seconds:.2f} s after the kill")


@pytest.mark.quiet
def test_when_rank_0_is_killed_before_it_listens_the_others_do_not_wait_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    command = ["run", "--mode", "ring", "--nodes", "3", *SMALL, *SETTINGS, "--out", str(folder)]
    process = start_command(*command, cwd=tmp_path)
    first = wait_for_pid(folder, 0)
    os.kill(first, signal.SIGSTOP)
    for rank in (1, 2):
        until(lambda rank=rank: (pid := pid_of(folder, rank)) is not None and loads_torch(pid), START_S)
    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=START_S)
    seconds = time.monotonic() - killed
    assert (
        process.returncode == RankFailed.exit_code
        and "rank 0 (node0) was killed by SIGKILL before its first step" in err
    ), err
    assert rank_pids(folder) == []
    assert seconds < ALONE_END_S, f"the run ended {seconds:.1f} s after the kill"
    print(f"rank 0: the run ended {seconds:.2f} s after the kill")


@pytest.mark.quiet
def test_without_a_controller_rank_0_names_a_rank_that_is_killed_while_it_waits(tmp_path: Path) -> None:
    """Rank 2 has reached rank 0, rank 1 never does. Who starts the ranks must end those that wait for rank 1."""
    variables = {"MODE": "ring", "MODEL": "lenet5", "DATA": "synthetic", "BATCH": "24", "SET": DEADLINE}
    with RankRun(None, 3, runs=tmp_path / "runs", **variables) as run:
        run.processes[1].send_signal(signal.SIGSTOP)
        until(lambda: has_joined(run.processes[2].pid), START_S)
        run.processes[2].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait(START_S, [0]) == [PeerLost.exit_code], run.log_of(0)
        seconds = time.monotonic() - killed
    assert "rank 2 (node2) is gone: its connection ended" in run.log_of(0), run.log_of(0)
    assert seconds < ALONE_END_S, f"rank 0 ended {seconds:.1f} s after the kill"
    print(f"without a controller: rank 0 ended {seconds:.2f} s after the kill")
