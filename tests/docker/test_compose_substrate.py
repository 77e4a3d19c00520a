"""`testbed run --on compose`: the controller drives real containers, and nothing of them remains."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.control.machine.affinity import assign_cores
from testbed.control.runs.progress import Silent
from testbed.control.runs.select import SUBSTRATES, SubstrateChoice
from testbed.control.runs.sweep import run_all
from testbed.control.substrates import engine
from testbed.control.substrates.base import NodePlan, Substrate
from testbed.control.substrates.compose import ComposeSubstrate
from testbed.control.substrates.engine import check
from testbed.spec.errors import TestbedError, Unavailable, UsageError
from testbed.spec.link import Link
from testbed.spec.run import RunSpec
from tests.support.command import OWN_METHOD, run_command, start_command, wait_for_steps, write_method

pytestmark = pytest.mark.docker
SMALL = ["--model", "lenet5", "--data", "synthetic", "--batch", "12", "--on", "compose"]


def projects() -> set[str]:
    return {project.name for project in engine.projects()}


def host_config(substrate: ComposeSubstrate, node: int) -> dict[str, Any]:
    """The engine's settings of a node's container, as they are now."""
    found: dict[str, Any] = substrate._client.api.inspect_container(substrate._containers[node].id)["HostConfig"]
    return found


def test_a_shaped_run_leaves_the_same_folder_as_on_other_substrates(tmp_path: Path) -> None:
    flags = ["--mode", "tree", "--nodes", "3", "--rate", "100mbit", "--steps", "5", "--set", "node.cpus=0.4"]
    result = run_command("run", *flags, *SMALL, "--keep-going", "--json", "--out", "runs/r", cwd=tmp_path)
    assert result.returncode in (0, 5), result.stderr  # 5: the machine was too busy for the probe
    names = {path.name for path in (tmp_path / "runs/r").iterdir()}
    logs = {f"rank{k}.{end}" for k in range(3) for end in ("jsonl", "log")}
    assert {"spec.json", "receipt.json", "summary.json", *logs} <= names
    (summary,) = json.loads(result.stdout)["runs"]
    assert summary["substrate"] == "compose" and summary["replicas_agree"]
    assert summary["counter"] == "interface eth0" and summary["environment"]["congestion"] == "cubic"


def test_a_users_model_data_and_method_are_brought_to_the_containers(tmp_path: Path, repository: Path) -> None:
    shutil.copy(repository / "examples" / "own_model.py", tmp_path / "mine.py")
    flags = ["--model", "mine.py:make", "--data", "mine.py:load", "--nodes", "2", "--batch", "16", "--steps", "4"]
    flags += ["--mode", write_method(tmp_path)]
    result = run_command(
        "run", "--on", "compose", *flags, "--set", "probe=false", "--json", "--out", "runs/r", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    (summary,) = json.loads(result.stdout)["runs"]
    assert summary["replicas_agree"] and len(summary["losses"]) == 4
    copy, method = sorted(path for path in (tmp_path / "runs/r/files").rglob("*") if path.is_file())
    assert copy.read_bytes() == (tmp_path / "mine.py").read_bytes() and method.read_text() == OWN_METHOD


@pytest.mark.quiet
def test_a_network_in_containers_is_measured_as_requested(tmp_path: Path) -> None:
    """On a machine that others use a probe may fail; shaping that is wrong fails every time."""
    flags = ["--mode", "ring", "--nodes", "2", "--rate", "50mbit", "--steps", "4", *SMALL]
    for attempt in range(3):
        result = run_command("run", *flags, "--json", "--out", f"runs/r{attempt}", cwd=tmp_path)
        (summary,) = json.loads(result.stdout)["runs"]
        if summary["status"] == "ok":
            break
    assert summary["status"] == "ok" and result.returncode == 0, summary["reason"]
    assert "2 links and the fan-in within 5 %" in summary["network"], summary["network"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's ranks run as another user")
def test_a_run_folder_that_ranks_may_not_enter_is_refused_before_it_is_made(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    result = run_command("run", "--nodes", "2", "--steps", "4", *SMALL, "--out", "closed/r", cwd=tmp_path)
    assert result.returncode == UsageError.exit_code and "Traceback" not in result.stderr
    assert "has mode 700" in result.stderr and f"chmod o+x {closed}" in result.stderr
    assert not (closed / "r").exists()


def test_a_rank_has_no_privileges_and_its_container_has_the_planned_limits(tmp_path: Path) -> None:
    plans = [
        NodePlan(name="node0", cpus=0.3, threads=1, link=Link(rate=50_000_000)),
        NodePlan(name="node1", threads=1),
    ]
    with ComposeSubstrate(plans, tmp_path / "runs/r") as substrate:
        log = tmp_path / "log"
        process = substrate.start(0, ["cat", "/proc/self/status"], {}, log)
        assert process.wait(60) == 0
        status = dict(line.split(":\t", 1) for line in log.read_text().splitlines() if ":\t" in line)
        assert {int(status[key], 16) for key in ("CapEff", "CapPrm", "CapBnd", "CapAmb", "CapInh")} == {0}
        assert status["NoNewPrivs"] == "1" and status["Uid"].split()[0] != "0"
        denied = substrate.start(0, ["touch", "/opt/x"], {}, log)
        assert denied.wait(60) != 0
        killed = substrate.start(1, ["sleep", "1000"], {}, log)
        time.sleep(0.5)
        killed.signal(signal.SIGKILL)
        assert killed.wait(30) == -signal.SIGKILL
        limits, cores = host_config(substrate, 0), assign_cores(plans, range(substrate._client.info()["NCPU"]))[0] or ()
        assert (limits["CpuPeriod"], limits["CpuQuota"]) == (10_000, 3_000)
        assert limits["CpusetCpus"] == ",".join(map(str, sorted(cores)))
        assert "rate 50Mbit" in substrate.exec(0, ["tc", "qdisc", "show", "dev", "eth0"])
        assert "tbf" not in substrate.exec(1, ["tc", "qdisc", "show", "dev", "eth0"])
        assert substrate._project in projects()
    assert substrate._project not in projects()


@pytest.mark.quiet  # a run of another test removes what dead controllers left
def test_clean_removes_what_a_killed_controller_left(tmp_path: Path) -> None:
    flags = ["--nodes", "2", "--steps", "100000", *SMALL, "--set", "probe=false", "--out", "runs/r"]
    process = start_command("run", *flags, cwd=tmp_path)
    wait_for_steps(tmp_path / "runs/r", 0, 1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (project,) = (name for name in projects() if f"-{process.pid}-" in name)
    cleaned = run_command("clean", cwd=tmp_path)
    assert f"project {project}" in cleaned.stdout
    assert project not in projects()


@pytest.mark.quiet  # a run of another test removes what dead controllers left
def test_resume_after_a_killed_controller_first_removes_its_ranks(tmp_path: Path) -> None:
    """They still train in their containers, and would write the same checkpoints."""
    flags = ["--nodes", "2", "--steps", "500", *SMALL, "--set", "probe=false", "--set", "checkpoint=5"]
    process = start_command("run", *flags, "--out", "runs/r", cwd=tmp_path)
    wait_for_steps(tmp_path / "runs/r", 0, 10)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (project,) = (name for name in projects() if f"-{process.pid}-" in name)
    result = run_command("run", "--resume", "runs/r", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (summary,) = json.loads(result.stdout)["runs"]
    assert summary["substrate"] == "compose" and summary["replicas_agree"] and len(summary["losses"]) == 500
    assert any(note.startswith(f"project {project} was removed") for note in summary["notes"])
    assert project not in projects()
    assert run_command("clean", cwd=tmp_path).returncode == 0  # the folder of its compose files


def test_the_containers_of_a_sweep_stay_up_between_runs_and_their_quota_applies_to_the_steps(tmp_path: Path) -> None:
    made = []

    def make(spec: RunSpec, folder: Path) -> Substrate:
        made.append(folder)
        return SUBSTRATES["compose"].make(spec, folder)

    base = {"model": "lenet5", "data": {"name": "synthetic", "test_subset": 64}, "nodes": 2, "batch": 32, "steps": 80}
    more = {"node": {"cpus": 0.3}, "probe": False, "experiment": "kept"}
    specs = [RunSpec.load(base | more | {"mode": mode, "name": mode}, "test") for mode in ("ring", "tree")]
    choice = SubstrateChoice(replace(SUBSTRATES["compose"], make=make), "for a test", allow_concurrent=True)
    summaries = run_all(specs, choice, tmp_path / "runs", Silent())[0]
    assert [summary.status for summary in summaries] == ["ok", "ok"] and len(made) == 1
    for name in ("ring", "tree"):
        lines = (tmp_path / "runs/kept" / name / "rank1.jsonl").read_text().splitlines()
        end = json.loads(lines[-1])
        assert end["own_cpu"] < 1.2 * 0.3 * end["measured"], "the quota applied to the steps"


def test_an_override_of_one_node_shapes_one_container(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text(
        'title = "one slow link"\n[base]\nmodel = "lenet5"\ndata = { name = "synthetic" }\nnodes = 3\nbatch = 12\n'
        'steps = 4\nevaluate = "never"\nlink = { rate = "100mbit" }\n'
        'overrides = { node2 = { link = { rate = "20mbit" } } }\n'
    )
    result = run_command("sweep", str(file), "--on", "compose", "--keep-going", "--json", cwd=tmp_path)
    assert result.returncode in (0, 5), result.stderr
    receipt = json.loads((tmp_path / "runs/slow/base/receipt.json").read_text())
    requested = {(link["src"], link["dst"]): link["requested"] for link in receipt["links"]}
    assert requested == {
        pair: 20_000_000 if 2 in pair else 100_000_000 for pair in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    }


def test_delay_is_refused_before_anything_starts_if_the_kernel_lacks_netem(tmp_path: Path) -> None:
    plans = [NodePlan(name="node0", link=Link(delay=0.01))]
    try:
        check(plans)
        with ComposeSubstrate(plans, tmp_path / "runs/r") as substrate:
            assert "netem" in substrate.exec(0, ["tc", "qdisc", "show", "dev", "eth0"])
    except Unavailable as refusal:
        assert "netem" in str(refusal) and "Leave it out" in str(refusal)
        assert not (tmp_path / "runs").exists()


def test_a_container_that_was_cut_off_gets_its_routes_back(tmp_path: Path) -> None:
    plans = [NodePlan(name=f"node{k}", link=Link(rate=50_000_000), congestion="cubic") for k in range(2)]
    with ComposeSubstrate(plans, tmp_path / "runs/r") as substrate:
        before = sorted(substrate.exec(0, ["ip", "route"]).splitlines())
        assert any("congctl cubic" in route for route in before)
        substrate.cut(0)
        assert "congctl" not in substrate.exec(0, ["ip", "route"])
        substrate.reconnect(0)
        after = sorted(substrate.exec(0, ["ip", "route"]).splitlines())
        assert [route.split() for route in after] == [route.split() for route in before]
        substrate.set_rate(0, 10_000_000)
        assert "rate 10Mbit" in substrate.exec(0, ["tc", "qdisc", "show", "dev", "ifb0"])


def test_a_paused_container_is_stopped_and_a_refusal_of_the_engine_is_an_error(tmp_path: Path) -> None:
    with ComposeSubstrate([NodePlan(name="node0")], tmp_path / "runs/r") as substrate:
        process = substrate.start(0, ["sleep", "1000"], {}, tmp_path / "log")
        time.sleep(0.5)
        substrate.pause(0)
        with pytest.raises(TestbedError, match=r"the Docker engine refused: .*already paused"):
            substrate.pause(0)
        substrate.stop()
        assert process.poll() is not None
        killed = substrate.start(0, ["sleep", "1000"], {}, tmp_path / "log")
        time.sleep(0.5)
        substrate.kill(0)
        assert killed.wait(30) == -signal.SIGKILL
        assert substrate.start(0, ["true"], {}, tmp_path / "log").wait(30) == 0, "the container itself still runs"
    assert substrate._project not in projects()


def test_a_memory_limit_is_restored_to_that_of_the_compose_file(tmp_path: Path) -> None:
    with ComposeSubstrate([NodePlan(name="node0")], tmp_path / "runs/r") as substrate:

        def limits() -> tuple[int, int]:
            found = host_config(substrate, 0)
            return found["Memory"], found["MemorySwap"]

        given = limits()
        substrate.limit_memory(0)
        assert 0 < limits()[0] < given[0]
        substrate.unlimit_memory(0)
        assert limits() == given and given[0] == 2 << 30
        substrate.limit_memory(0)
        # As without mem_limit in the Compose file.
        substrate._containers[0].attrs["HostConfig"].update(Memory=0, MemorySwap=0)
        substrate.unlimit_memory(0)
        assert limits()[0] == substrate._client.info()["MemTotal"]


def test_a_killed_rank_is_restarted_from_its_checkpoint(tmp_path: Path) -> None:
    flags = ["--nodes", "2", "--steps", "60", *SMALL, "--set", "probe=false", "--set", "checkpoint=10"]
    fault = ["--fault", "kill:rank1@step25", "--retries", "1"]
    result = run_command("run", *flags, *fault, "--json", "--out", "runs/r", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (summary,) = json.loads(result.stdout)["runs"]
    assert len(summary["losses"]) == 60 and summary["replicas_agree"]
    assert any("rank 1 (node1) was killed by SIGKILL" in note for note in summary["notes"])


def test_a_rank_that_stays_paused_is_restarted_from_its_checkpoint(tmp_path: Path) -> None:
    flags = ["--nodes", "2", "--steps", "200", *SMALL, "--set", "probe=false", "--set", "checkpoint=10"]
    fault = ["--fault", "pause:rank1@step25", "--retries", "1", "--set", "deadline=5"]
    result = run_command("run", *flags, *fault, "--json", "--out", "runs/r", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (summary,) = json.loads(result.stdout)["runs"]
    assert len(summary["losses"]) == 200 and summary["replicas_agree"]
    assert any("rank 1 (node1) is silent" in note for note in summary["notes"])


def test_shaping_and_mem_limit_mean_the_same_as_for_docker_compose_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEM_LIMIT", "1g")
    monkeypatch.setenv("SHAPING", "egress")
    plans = [NodePlan(name=f"node{k}", link=Link(rate=50_000_000)) for k in range(2)]
    check(plans)
    with ComposeSubstrate(plans, tmp_path / "runs/r") as substrate:
        assert host_config(substrate, 0)["Memory"] == 1 << 30
        assert "rate 50Mbit" in substrate.exec(0, ["tc", "qdisc", "show", "dev", "eth0"])
        assert "ifb0" not in substrate.exec(0, ["ip", "link"])
    flags = ["--nodes", "2", "--rate", "100mbit", "--steps", "4", *SMALL, "--json", "--out", "runs/off"]
    monkeypatch.setenv("SHAPING", "off")
    result = run_command("run", *flags, cwd=tmp_path)
    (summary,) = json.loads(result.stdout)["runs"]
    assert (summary["status"], summary["reason"]) == ("invalid", "SHAPING=off: nothing is shaped"), result.stderr
    assert summary["spec"]["link"]["rate"] is None


def test_image_names_the_image_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str) -> None:
    other = f"testbed:other-{os.getpid()}"
    subprocess.run(["docker", "tag", image, other], check=True, timeout=60)
    try:
        monkeypatch.setenv("IMAGE", other)
        with ComposeSubstrate([NodePlan(name="node0")], tmp_path / "runs/r") as substrate:
            assert substrate._containers[0].attrs["Config"]["Image"] == other
    finally:
        subprocess.run(["docker", "rmi", other], check=True, capture_output=True, timeout=60)
    with pytest.raises(Unavailable, match=rf"image {other} is missing"):
        check([NodePlan(name="node0")])
