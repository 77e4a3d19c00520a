"""Marks of owners, and what dead controllers left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed.control.cli import main
from testbed.control.machine import ownership
from testbed.control.machine.ownership import OwnedResource
from testbed.control.substrates import engine
from tests.support.processes import state, until
from tests.support.scripted_engine import ScriptedEngine, serve

REALM = ownership.current().rpartition("-")[2]
DEAD = f"{2**22 + 1}-1-{REALM}"  # no process has that pid
ELSEWHERE = f"{2**22 + 1}-1-{'0' * 16}"


def test_an_owner_is_alive_only_with_the_same_start_time() -> None:
    assert ownership.alive(ownership.current())
    assert not ownership.alive(f"{os.getpid()}-1-{REALM}")
    assert not ownership.alive(DEAD) and not ownership.alive("nonsense")


def test_an_owner_on_another_host_counts_as_alive() -> None:
    """Its pid means another process here, or none. One engine may serve both hosts."""
    assert ownership.other_host(ELSEWHERE) and ownership.alive(ELSEWHERE)
    assert OwnedResource("project", "x", ELSEWHERE).in_use
    assert not ownership.other_host(ownership.current())


def test_a_realm_is_this_boot_and_this_pid_namespace(tmp_path: Path) -> None:
    def realm(boot: str, inode: str) -> str:
        proc = tmp_path / f"{boot}-{inode}"
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
        (proc / "self/ns").mkdir(parents=True)
        (proc / "self/ns/pid").hardlink_to(tmp_path / inode)
        return ownership.realm(proc)

    for name in ("inode1", "inode2"):
        (tmp_path / name).touch()
    assert len({realm(boot, inode) for boot in ("a", "b") for inode in ("inode1", "inode2")}) == 4


def test_the_owner_is_part_of_a_name() -> None:
    for name in (ownership.owned_name("node0"), f"testbed-{DEAD}-deadbeef"):
        match = ownership.OWNED_NAME.fullmatch(name)
        assert match is not None and match[1] in (ownership.current(), DEAD)
    assert not ownership.OWNED_NAME.fullmatch("testbed-12-node0")


def start_controller(folder: Path, script: str) -> subprocess.Popen[bytes]:
    """Another process that starts `script` on a node and then waits to be killed."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from testbed.control.substrates.base import NodePlan\n"
        "from testbed.control.substrates.process import ProcessSubstrate\n"
        "with ProcessSubstrate([NodePlan(name='node0')]) as substrate:\n"
        "    substrate.start(0, ['sh', '-c', sys.argv[1]], {}, Path(sys.argv[2]) / 'log')\n"
        "    print('started', flush=True); time.sleep(60)\n"
    )
    controller = subprocess.Popen([sys.executable, "-c", program, script, str(folder)], stdout=subprocess.PIPE)
    assert controller.stdout is not None
    with controller.stdout:
        assert controller.stdout.readline() == b"started\n"
    time.sleep(0.3)  # the shell sets its trap some time after its start
    return controller


def test_ranks_get_sigterm_when_the_controller_is_killed(tmp_path: Path) -> None:
    controller = start_controller(tmp_path, "trap 'echo told to end; exit' TERM; while :; do sleep 0.02; done")
    controller.kill()
    controller.wait(10)
    until(lambda: "told to end" in (tmp_path / "log").read_text())


def test_a_rank_that_ignores_sigterm_is_a_leftover_and_is_removed(tmp_path: Path) -> None:
    controller = start_controller(tmp_path, "trap '' TERM; echo $$; while :; do sleep 0.02; done")
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().strip().isdigit())
    pid = (tmp_path / "log").read_text().strip()
    (found,) = [each for each in ownership.find_processes() if each.name == pid]
    assert found.in_use and found not in ownership.find()
    controller.kill()
    controller.wait(10)
    assert found in ownership.find()
    assert found.remove() == [int(pid)]
    assert state(int(pid)) in ("", "Z")


PROJECTS = {
    "mine": ownership.current(),
    "killed": DEAD,
    "elsewhere": ELSEWHERE,
    "up": engine.RUNNING,
    "down": engine.STOPPED,  # made by `docker compose up` and ended; its logs are the user's
}


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedEngine]:
    """An engine with a container and a network of each of these projects."""
    made = ScriptedEngine()
    for name, owner in PROJECTS.items():
        mark = {} if owner in (engine.RUNNING, engine.STOPPED) else {"testbed.owner": owner}
        labels = {"testbed": "compose", "com.docker.compose.project": name} | mark
        made.add_container(name, labels, "running" if name == "up" else "exited")
        made.networks[name] = labels
    made.networks["network of others"] = {"testbed": "x"}
    with serve(made, tmp_path / "docker.sock") as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        yield made


def test_projects_are_listed_with_their_owners(docker: ScriptedEngine) -> None:
    assert engine.projects() == PROJECTS


def test_only_projects_whose_controller_is_dead_are_removed_before_a_run(docker: ScriptedEngine) -> None:
    elsewhere, killed = ownership.remove_dead_projects(ownership.find_projects())
    assert docker.removed == ["killed"] and "killed" not in docker.networks and "up" in docker.networks
    assert killed.startswith("project killed was removed") and elsewhere.startswith("project elsewhere on this engine")


def test_clean_keeps_what_another_host_may_use_and_says_so(
    docker: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "FINDERS", (ownership.find_projects,))  # nothing else of this machine
    result = CliRunner().invoke(main.app, ["clean"])
    assert result.exit_code == 0 and docker.removed == ["down", "killed"]
    assert result.stdout == "project down\nproject killed\n"
    assert result.stderr.startswith("project elsewhere stays: ") and "--all" in result.stderr
    assert "mine" not in result.output
