"""The compose substrate with a scripted engine: what it requests of its containers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.control.machine import ownership
from testbed.control.substrates.base import MEMORY_HEADROOM_BYTES, NodePlan
from testbed.control.substrates.compose import ComposeSubstrate, ContainerProcess, idle_override, script_limits
from testbed.control.substrates.engine import PROJECT_LABEL, connect
from testbed.spec.errors import EngineLost, TestbedError
from testbed.spec.script import Mount, ScriptSpec
from tests.support.scripted_engine import MEMORY_BYTES, ScriptedEngine, serve


@pytest.fixture
def engine() -> ScriptedEngine:
    made = ScriptedEngine()
    made.add_container("c0", {})
    return made


@pytest.fixture
def substrate(tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[ComposeSubstrate]:
    made = ComposeSubstrate([NodePlan(name="node0", cpus=0.4)], tmp_path / "r")
    with serve(engine, tmp_path / "docker.sock") as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        with contextlib.closing(connect()) as made._client:
            made._containers = [made._client.containers.get("c0")]
            yield made


def test_a_paused_container_is_resumed_by_stop_and_only_once(
    substrate: ComposeSubstrate, engine: ScriptedEngine
) -> None:
    """With --retries a run stops its ranks, which resumes them, and then reverts the fault."""
    substrate.pause(0)
    substrate.stop()
    assert engine.containers["c0"]["State"] == "running"
    substrate.resume(0)
    substrate.pause(0)
    engine.broken = True
    substrate.stop()
    # The container is still paused, so the error is not hidden.
    with pytest.raises(TestbedError, match="the Docker engine refused: Container c0 is not paused"):
        substrate.resume(0)


def test_none_restores_the_planned_quota(substrate: ComposeSubstrate, engine: ScriptedEngine) -> None:
    substrate.set_cpus(0, 0.1)
    substrate.set_cpus(0, None)
    substrate.set_cpus(0, 0.05)
    quotas = [(update["CpuQuota"], update["CpuPeriod"]) for update in engine.updates]
    assert quotas == [(1000, 10_000), (4000, 10_000), (1000, 20_000)]


def test_a_rank_has_the_quota_and_the_probe_after_it_has_none(
    substrate: ComposeSubstrate, engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tmp_path / "bin" / "docker"
    client.parent.mkdir()
    client.write_text("#!/bin/sh\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    substrate._cores = [None]
    for quota in (False, True, True, False, False):
        substrate.start(0, ["true"], {}, tmp_path / "log", quota=quota)
    substrate.stop()
    assert [(update["CpuQuota"], update["CpuPeriod"]) for update in engine.updates] == [(4000, 10_000), (-1, 10_000)]


def test_a_quota_that_applies_later_is_set_for_the_steps_alone(
    substrate: ComposeSubstrate, engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_docker(tmp_path, monkeypatch, "#!/bin/sh\n")
    substrate._cores = [None]
    assert substrate.late_quotas
    substrate.limit_cpus(False)
    substrate.start(0, ["true"], {}, tmp_path / "log")
    assert engine.updates == []
    for limited in (True, True, False):
        substrate.limit_cpus(limited)
    substrate.start(0, ["true"], {}, tmp_path / "log", quota=False)
    substrate.stop()
    assert [update["CpuQuota"] for update in engine.updates] == [4000, -1]


def test_the_probe_after_training_has_all_cores_also_without_a_quota(
    substrate: ComposeSubstrate, engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_docker(tmp_path, monkeypatch, "#!/bin/sh\n")
    substrate._plans, substrate._cores = (NodePlan(name="node0"),), [frozenset({1})]
    for quota in (False, True, False, False):
        substrate.start(0, ["true"], {}, tmp_path / "log", quota=quota)
    substrate.stop()
    assert [update["CpusetCpus"] for update in engine.updates] == ["1", "0,1,2,3"]


def test_a_memory_limit_is_the_usage_and_a_headroom_and_is_reverted_to_all_memory_where_there_was_none(
    substrate: ComposeSubstrate, engine: ScriptedEngine
) -> None:
    substrate.limit_memory(0)
    substrate.unlimit_memory(0)
    limits = [(update["Memory"], update["MemorySwap"]) for update in engine.updates]
    assert limits == [((100 << 20) + MEMORY_HEADROOM_BYTES,) * 2, (MEMORY_BYTES,) * 2]


def test_idle_containers_have_the_owners_mark() -> None:
    service = idle_override(2, ["/a:/a"])["services"]["rank1"]
    assert service["entrypoint"] == ["sleep", "infinity"]
    assert str(os.getpid()) in service["labels"]["testbed.owner"]
    assert service["environment"] == {ownership.VARIABLE: ownership.current()}, (
        "by it ranks are found without an engine"
    )


def test_the_router_between_racks_has_the_owners_mark_and_the_checked_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGE", "mine:1")
    override = idle_override(2, [], racks=(0, 1))
    router = override["services"]["router"]
    assert router["image"] == "mine:1" and "volumes" not in router
    assert router["labels"] == {"testbed.owner": ownership.current()} and ownership.VARIABLE in router["environment"]
    assert set(override["networks"]) == {"rack0", "rack1"} and "internal" not in override["networks"]["rack0"]
    assert set(idle_override(2, [])["networks"]) == {"cluster"}
    assert idle_override(2, [])["networks"]["cluster"]["internal"] is True


def add_docker(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a command `docker` in front of the path."""
    (folder / "bin").mkdir()
    (folder / "bin" / "docker").write_text(script)
    (folder / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_the_exit_code_of_a_rank_is_not_that_of_a_docker_exec_without_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_docker(tmp_path, monkeypatch, "#!/bin/sh\nexit 7\n")
    ended = [ContainerProcess("c", ["rank"], {}, tmp_path / "log", (0, 0)) for _ in range(2)]
    assert [process.wait(30) for process in ended] == [7, 7]
    with serve(ScriptedEngine(), tmp_path / "e.sock") as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        assert ended[0].poll() == 7
    assert ended[0].poll() == 7, "it was the exit code of the rank"
    with pytest.raises(EngineLost):
        ended[1].poll()


def test_what_a_lost_engine_left_running_is_killed_by_its_mark(
    substrate: ComposeSubstrate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has another parent than its `docker exec`, as in a container."""
    add_docker(tmp_path, monkeypatch, "#!/bin/sh\nsleep 1000 & echo $!\nexit 1\n")
    monkeypatch.setattr(ownership, "current", lambda: "1-1-0123456789abcdef")
    substrate.start(0, ["rank"], {}, tmp_path / "log", quota=False).wait(30)
    (pid,) = (tmp_path / "log").read_text().split()
    assert ownership.owned_processes()[int(pid)] == ownership.current()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/missing.sock")
    substrate.stop()
    assert int(pid) not in ownership.owned_processes()


def test_projects_of_dead_controllers_are_removed_before_containers_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker compose up` records which containers exist when it is called; then it fails."""
    engine = ScriptedEngine()
    owner = re.sub(r"^\d+", str(1 << 22), ownership.current())  # no process has a number above pid_max
    engine.add_container("killed", {"testbed": "compose", PROJECT_LABEL: "killed", "testbed.owner": owner})
    socket, seen = tmp_path / "docker.sock", tmp_path / "seen"
    script = f"""#!{sys.executable}
import http.client, socket, sys
if "up" in sys.argv:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect({str(socket)!r})
        request = http.client.HTTPConnection("docker")
        request.sock = connection
        request.request("GET", "/containers/json")
        open({str(seen)!r}, "wb").write(request.getresponse().read())
    sys.exit("no containers in this test")
"""
    add_docker(tmp_path, monkeypatch, script)
    with serve(engine, socket) as url:
        monkeypatch.setenv("DOCKER_HOST", url)
        made = ComposeSubstrate([NodePlan(name="node0")], tmp_path / "runs/r")
        with pytest.raises(TestbedError, match="no containers in this test"), made:
            pass
    assert engine.removed == ["killed"]
    assert json.loads(seen.read_text()) == []
    (note,) = made.notes
    assert note.startswith("project killed was removed before the run")


def test_a_script_sees_its_folder_and_the_data_read_only_and_of_all_runs_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path))
    mounts = (Mount(source="/a", target="/b"), Mount(source="/c", target="/d", writable=True))
    script = ScriptSpec(argv=("python", "a.py"), folder="/home/me/x:y", mounts=mounts, image="mine:1")
    made = ComposeSubstrate([NodePlan(name="node0")], tmp_path / "runs" / "r", script)
    made._staged, made._source = tmp_path / "runs" / ".r.staged", script.folder
    volumes = made._volumes()
    found = {each["target"]: (each["source"], each["read_only"]) for each in volumes}
    assert found == {
        "/runs": (str(made._staged), False),
        "/data": (str(tmp_path), True),
        "/script": ("/home/me/x:y", True),
        "/b": ("/a", True),
        "/d": ("/c", False),
    }
    service = idle_override(1, volumes, script)["services"]["rank0"]
    assert service["image"] == "mine:1" and service["volumes"] == volumes
    assert service["tmpfs"] == [f"/tmp:size={1 << 30},mode=1777,exec"] and service["pids_limit"] > 0
    assert script_limits(4 << 30)["shm_size"] == 2 << 30


def test_the_folder_that_is_mounted_becomes_the_run_folder(tmp_path: Path) -> None:
    script = ScriptSpec(argv=("python", "a.py"), folder="/x")
    made = ComposeSubstrate([NodePlan(name="node0")], tmp_path / "r", script)
    made._staged = tmp_path / ".r.staged"
    made._staged.mkdir(mode=0o700)
    number = made._staged.stat().st_ino
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "spec.json").write_text("{}")
    made.prepare_folder(folder)
    assert (folder / "spec.json").read_text() == "{}" and folder.stat().st_ino == number
    assert folder.stat().st_mode & 0o777 == 0o755 and [path.name for path in tmp_path.iterdir()] == ["r"]
