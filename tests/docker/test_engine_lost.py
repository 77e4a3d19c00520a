"""The engine dies during a run: the run says so, and no rank trains beside the next one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.control.substrates.engine import image_name
from tests.docker.cluster import wait_for
from tests.docker.private_engine import PrivateEngine
from tests.support.command import rank_pids, run_command, start_command, wait_for_steps
from tests.support.processes import state

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]
SMALL = ["--model", "lenet5", "--data", "synthetic", "--batch", "12", "--nodes", "2", "--set", "probe=false"]
ENDLESS = [*SMALL, "--steps", "1000000", "--on", "compose"]


@pytest.fixture(scope="module")
def private(image: str) -> Iterator[PrivateEngine]:
    made = PrivateEngine()
    try:
        made.start()
        made.load(image)
        yield made
    finally:
        made.close()


@pytest.fixture
def second(private: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> PrivateEngine:
    """The private engine, running, as the engine of every command."""
    private.start()  # no-op if it answers
    monkeypatch.setenv("DOCKER_HOST", private.host)
    return private


def ranks(folder: Path) -> list[int]:
    """The pids of the ranks in containers, without the `docker exec` on this side."""
    own = Path("/proc/self/ns/pid").readlink()
    found = []
    for pid in rank_pids(folder):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/ns/pid").readlink() != own:
                found.append(pid)
    return found


def train(folder: Path) -> subprocess.Popen[str]:
    """A run that has made a few steps and would go on for hours."""
    process = start_command("run", *ENDLESS, "--out", "runs/r", cwd=folder.parents[1])
    try:
        wait_for_steps(folder, 0, 3, seconds=500)
        assert len(ranks(folder)) >= 2
    except AssertionError:
        process.terminate()
        raise AssertionError("".join(process.communicate(timeout=120))) from None
    return process


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_run_whose_engine_is_lost_ends_with_3_and_says_at_which_step(
    second: PrivateEngine, tmp_path: Path, end: str
) -> None:
    folder = tmp_path / "runs/r"
    process = train(folder)
    getattr(second, end)()
    printed = "".join(process.communicate(timeout=300))
    assert process.returncode == 3, printed
    assert "the Docker engine stopped answering at step " in printed and "runs/r" in printed, printed
    assert "docker exec" not in printed and "docker compose" not in printed, "no command line of ours"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed" and "stopped answering" in summary["reason"] and len(summary["losses"]) >= 3
    assert ranks(folder) == []


def test_the_next_engine_ends_the_containers_of_a_killed_one(second: PrivateEngine) -> None:
    """The container has no mark, so that only the engine can know it."""

    def docker(*argv: str) -> str:
        return subprocess.run(["docker", *argv], check=True, capture_output=True, text=True, timeout=120).stdout.strip()

    container = docker("run", "--detach", "--entrypoint", "sleep", image_name(), "100000")
    pid = int(docker("inspect", "--format", "{{.State.Pid}}", container))
    second.kill()
    assert state(pid) not in ("", "Z"), "containers outlive their engine"
    second.start()
    wait_for(lambda: state(pid) in ("", "Z"), "the container to end")
    docker("rm", container)


@pytest.mark.quiet  # a run of another test kills what dead controllers left
def test_the_next_run_ends_ranks_that_no_engine_knows_and_says_so(second: PrivateEngine, tmp_path: Path) -> None:
    folder = tmp_path / "runs/r"
    process = train(folder)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    second.kill()
    orphans = ranks(folder)
    assert len(orphans) >= 2
    result = run_command(
        "run", *SMALL, "--steps", "4", "--on", "process", "--json", "--out", "runs/next", cwd=tmp_path, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert ranks(folder) == []
    (summary,) = json.loads(result.stdout)["runs"]
    (note,) = [note for note in summary["notes"] if "dead controller" in note]
    assert all(str(pid) in note for pid in orphans)
