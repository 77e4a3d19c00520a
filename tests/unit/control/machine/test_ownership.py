"""Marks of owners, and what dead controllers left behind."""

from __future__ import annotations

import json
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


@pytest.mark.quiet  # a run of another test kills what dead controllers left
def test_ranks_get_sigterm_when_the_controller_is_killed(tmp_path: Path) -> None:
    controller = start_controller(tmp_path, "trap 'echo told to end; exit' TERM; while :; do sleep 0.02; done")
    controller.kill()
    controller.wait(10)
    until(lambda: "told to end" in (tmp_path / "log").read_text())


@pytest.mark.quiet
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


@pytest.mark.quiet
def test_what_a_dead_controller_left_running_is_killed_before_a_run_and_a_living_one_keeps_its_ranks(
    tmp_path: Path,
) -> None:
    pids = []
    for name in ("killed", "living"):
        (tmp_path / name).mkdir()
        controller = start_controller(tmp_path / name, "trap '' TERM; echo $$; while :; do sleep 0.02; done")
        log = tmp_path / name / "log"
        until(lambda log=log: log.exists() and log.read_text().strip().isdigit())
        pids.append(int(log.read_text()))
        if name == "killed":
            controller.kill()
            controller.wait(10)
    try:
        notes = [note for note in ownership.end_orphans() if str(pids[0]) in note]
        assert len(notes) == 1 and "dead controller" in notes[0]
        assert state(pids[0]) in ("", "Z") and state(pids[1]) not in ("", "Z")
        assert not any(str(pids[0]) in note for note in ownership.end_orphans())
    finally:
        controller.kill()
        controller.wait(10)
        ownership.end_orphans()


@pytest.mark.quiet
def test_a_run_in_a_shell_of_a_dead_controller_does_not_kill_that_shell() -> None:
    program = "from testbed.control.machine import ownership; ownership.end_orphans()"
    env = os.environ | {ownership.VARIABLE: DEAD}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done


HERE, THERE = str(ownership.CLONE), "/home/bob/testbed"
PROJECTS = [
    engine.Project("down", engine.STOPPED, HERE),  # made by `docker compose up` and ended
    engine.Project("down", engine.STOPPED, THERE),  # of another clone in a folder of the same name
    engine.Project("elsewhere", ELSEWHERE, THERE),
    engine.Project("killed", DEAD, THERE),
    engine.Project("mine", ownership.current(), HERE),
    engine.Project("theirs", engine.STOPPED, THERE),
    engine.Project("up", engine.RUNNING, HERE),
]
STRANGERS = {"com.docker.compose.project": "down"}  # a project that is not ours, with the same name


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedEngine]:
    """An engine with a container and a network of each of these projects."""
    made = ScriptedEngine()
    for number, each in enumerate(PROJECTS):
        mark = {} if each.owner in (engine.RUNNING, engine.STOPPED) else {"testbed.owner": each.owner}
        labels = {"testbed": "compose", "com.docker.compose.project": each.name} | mark
        folder = {"com.docker.compose.project.working_dir": str(each.folder)}
        made.add_container(f"{each.name}{number}", labels | folder, "running" if each.name == "up" else "exited")
        made.networks[each.name] = labels
    made.networks["network of others"] = {"testbed": "x"}
    made.add_container("stranger", STRANGERS)
    monkeypatch.setattr(ownership, "FINDERS", (ownership.find_projects,))  # nothing else of this machine
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serve(made, tmp_path / "docker.sock") as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        yield made


def test_projects_are_listed_with_their_owners_and_folders(docker: ScriptedEngine) -> None:
    assert sorted(engine.projects(), key=str) == sorted(PROJECTS, key=str)
    docker.networks["left"] = {"testbed": "compose", "com.docker.compose.project": "left"}
    assert engine.Project("left", engine.STOPPED, None) in engine.projects()


def test_only_projects_whose_controller_is_dead_are_removed_before_a_run(docker: ScriptedEngine) -> None:
    elsewhere, killed = ownership.remove_dead_projects(ownership.find_projects())
    assert docker.removed == ["killed3"] and "killed" not in docker.networks and "up" in docker.networks
    assert killed.startswith("project killed was removed") and elsewhere.startswith("project elsewhere on this engine")


def test_clean_removes_what_is_dead_or_stopped_by_this_clone_and_names_what_stays(docker: ScriptedEngine) -> None:
    result = CliRunner().invoke(main.app, ["clean"])
    assert result.exit_code == 0 and docker.removed == ["down0", "killed3"]
    assert "down" in docker.networks, "another clone's containers have the same project name"
    assert result.stdout == "project down\nproject killed\n"
    down, elsewhere, theirs = result.stderr.splitlines()
    assert down.startswith(f"project down stays: `docker compose up` made it in {THERE}, and it is stopped. ")
    assert elsewhere.startswith("project elsewhere stays: ") and "--all" in elsewhere and THERE in elsewhere
    assert "docker compose --project-name theirs down" in theirs
    assert "mine" not in result.output and "up stays" not in result.output


def test_clean_all_removes_what_this_clone_uses_and_nothing_of_another_one(docker: ScriptedEngine) -> None:
    result = CliRunner().invoke(main.app, ["clean", "--all"])
    assert docker.removed == ["down0", "killed3", "mine4", "up6"]
    assert {"down1", "elsewhere2", "theirs5", "stranger"} == set(docker.containers)
    assert [line.split(" stays")[0] for line in result.stderr.splitlines()] == [
        "project down",
        "project elsewhere",
        "project theirs",
    ]


def test_a_dry_run_lists_what_clean_would_remove_and_why_and_removes_nothing(docker: ScriptedEngine) -> None:
    result = CliRunner().invoke(main.app, ["clean", "--dry-run"])
    assert docker.removed == [] and len(docker.networks) == len(PROJECTS)  # two have one name; one is of others
    down, killed = result.stdout.splitlines()
    assert down.startswith("would remove project down: `docker compose up` made it in")
    assert killed == f"would remove project killed: its controller (process {2**22 + 1}, made in {THERE}) is dead"
    listed = json.loads(CliRunner().invoke(main.app, ["clean", "--dry-run", "--json"]).stdout)
    assert [line.partition(":")[0] for line in listed] == ["project down", "project killed"]


def test_a_folder_has_the_clone_of_a_process_with_the_same_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        OwnedResource("process", "7", ELSEWHERE, HERE),
        OwnedResource("folder", "/tmp/x", ELSEWHERE),
        OwnedResource("folder", "/tmp/y", f"9-9-{'1' * 16}"),
    ]
    monkeypatch.setattr(ownership, "FINDERS", (lambda: found,))
    assert [each.removable(everything=True) for each in ownership.find(everything=True)] == [True, True, False]


def test_a_process_that_cannot_be_seen_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """With /proc mounted hidepid=2, the processes of other users are missing there."""

    def refuse(pid: int, signum: int) -> None:
        raise PermissionError

    monkeypatch.setattr(ownership, "start_time", lambda pid: None)
    monkeypatch.setattr(os, "kill", refuse)
    assert ownership.alive(f"1-1-{REALM}")


def test_what_no_recorded_clone_made_is_removed_by_a_command_that_needs_none() -> None:
    """`testbed clean --all` keeps it in every clone."""
    ways = {kind: OwnedResource(kind, "x", ELSEWHERE).way_out() for kind in ownership.BY_HAND}
    assert ways["namespace"] == "If nothing uses it, remove it with `ip netns delete x`"
    assert ways["project"] == "If nothing uses it, remove it with `docker compose --project-name x down`"
    assert not any("testbed clean" in way for way in ways.values())
    known = OwnedResource("project", "x", ELSEWHERE, "/elsewhere")
    assert known.way_out() == "Remove it with `testbed clean --all` in /elsewhere"
