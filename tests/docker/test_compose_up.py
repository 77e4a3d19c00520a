"""`docker compose up`: four real containers, no controller."""

from __future__ import annotations

import contextlib
import json
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.control.machine import ownership
from testbed.control.substrates import engine
from testbed.control.substrates.clone import image_files
from testbed.spec.errors import Interrupted, NetworkInvalid, UsageError
from testbed.spec.resources import divide_cores
from tests.docker.cluster import QUICK, RANKS, ROOT, Cluster, summary_of, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]
USER = 12345  # an ordinary user, who need not exist
ALL_OK = dict.fromkeys(RANKS, 0)


@pytest.fixture
def cluster(image: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A clone that an ordinary user owns, or (parametrised) root."""
    made = Cluster(tmp_path, owner=getattr(request, "param", USER))
    try:
        yield made
    finally:
        made.down()


@pytest.mark.quiet  # its network must be valid
@pytest.mark.parametrize("cluster", [USER, 0], indirect=True, ids=["user", "root"])
def test_up_trains_on_four_shaped_nodes_and_leaves_a_folder(cluster: Cluster) -> None:
    printed = cluster.up(RATE="100mbit", SET="")
    assert cluster.codes() == ALL_OK, printed
    (folder,) = cluster.folders()
    logs = [f"rank{k}.{kind}" for k in range(4) for kind in ("jsonl", "log")]
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [*logs, "receipt.json", "spec.json", "substrate.txt", "summary.json"]
    )
    summary = summary_of(folder)
    assert (summary["status"], summary["substrate"], summary["replicas_agree"]) == ("ok", "compose", True)
    assert summary["spec"]["node"]["cpus"] == 0.4
    assert [machine["ranks"] for machine in summary["machines"]] == [[0, 1, 2, 3]], "the load of their one machine"
    receipt = json.loads((folder / "receipt.json").read_text())
    assert len(receipt["links"]) == 12
    assert receipt["congestion"] == ["cubic"] * 4
    assert "| ring |" in printed and "| s/iter |" in printed, printed
    owner = folder.stat().st_uid
    assert {path.stat().st_uid for path in folder.iterdir()} == {owner}
    assert owner == (USER if cluster.runs.stat().st_uid == USER else 65534)


@pytest.mark.parametrize("mode", ["ddp", "gather", "allreduce"])
def test_up_runs_every_mode(cluster: Cluster, mode: str) -> None:
    printed = cluster.up(MODE=mode)
    assert cluster.codes() == ALL_OK, printed
    assert f"| {mode} " in printed


def test_single_trains_on_rank_0_and_the_others_print_a_note(cluster: Cluster) -> None:
    printed = cluster.up(MODE="single")
    assert cluster.codes() == ALL_OK, printed
    assert printed.count("has nothing to do") == 3
    assert "1 node, 0.4 cores, 1 thread, on compose" in printed, printed
    assert not (cluster.folders()[0] / "rank1.jsonl").exists()


def test_exit_code_from_rank_0_works_and_a_second_up_makes_a_second_folder(cluster: Cluster) -> None:
    script = ["up", "--no-build", "--abort-on-container-exit", "--exit-code-from", "rank0"]
    for count in (1, 2):
        done = cluster.compose(*script)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(cluster.folders()) == count
        assert summary_of(cluster.folders()[-1])["status"] == "ok"


REFUSED = {
    "not a rate": ({"RATE": "fast"}, "'fast'"),
    "an unknown mode": ({"MODE": "rong"}, "'rong'"),
    "an unknown shaping": ({"SHAPING": "maybe"}, "'maybe'"),
    "not a setting": ({"SET": "lr"}, "'lr'"),
    "an unknown model": ({"MODEL": "nosuch"}, "MODEL='nosuch': unknown"),
    "an unknown data set": ({"DATA": "nosuch"}, "DATA='nosuch': is not a known data set"),
    "an unknown congestion control": ({"CONGESTION": "foo"}, "CONGESTION='foo': this kernel has no such"),
    "too little memory for a rank": ({"MEM_LIMIT": "100m"}, "MEM_LIMIT '100m': a rank that trains lenet5 needs more"),
    "more nodes than containers": ({"NODES": "8"}, "NODES '8': compose.yaml has 4 nodes"),
}


@pytest.mark.parametrize(("env", "words"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_refused_by_every_container(cluster: Cluster, env: dict[str, str], words: str) -> None:
    printed = cluster.up(**env)
    assert cluster.codes() == dict.fromkeys(RANKS, 2), printed
    assert sum(words in line for line in printed.splitlines()) == 4, printed
    assert "Traceback" not in printed
    assert cluster.folders() == []


@pytest.mark.parametrize("attempt", range(4))
def test_a_refusal_is_the_exit_code_of_a_script_whichever_rank_refuses_first(cluster: Cluster, attempt: int) -> None:
    done = cluster.compose("up", "--no-build", "--abort-on-container-exit", "--exit-code-from", "rank0", RATE="fast")
    assert done.returncode == UsageError.exit_code, done.stdout + done.stderr
    assert cluster.codes() == dict.fromkeys(RANKS, 2), done.stdout + done.stderr


def test_a_runs_folder_that_cannot_be_written_is_refused_by_every_container(cluster: Cluster) -> None:
    cluster.runs.chmod(stat.S_IRUSR | stat.S_IXUSR)
    printed = cluster.up()
    assert cluster.codes() == dict.fromkeys(RANKS, 2), printed
    assert printed.count("not writable") == 4


def test_a_runs_folder_that_the_engine_made_as_root_is_refused_by_every_container(cluster: Cluster) -> None:
    shutil.rmtree(cluster.runs)
    printed = cluster.up()
    assert cluster.runs.stat().st_uid == 0, "the engine makes a folder that is missing"
    assert cluster.codes() == dict.fromkeys(RANKS, 2), printed
    assert printed.count(f"sudo chown {USER}:{USER} runs") == 4


def test_with_compose_yaml_alone_the_owner_is_known_and_no_folder_of_the_clone_is_created(cluster: Cluster) -> None:
    for name in ("testbed", "docker", "runs"):
        shutil.rmtree(cluster.folder / name)
    printed = cluster.up()
    assert printed.count(f"sudo chown {USER}:{USER} runs") == 4, printed
    assert {path.name for path in cluster.folder.iterdir()} == {"compose.yaml", "runs", "data"}


def test_a_rank_cannot_read_the_clone(cluster: Cluster) -> None:
    cluster.start(STEPS="100000")
    wait_for(lambda: cluster.steps(0) >= 1, "a step")
    found = {
        user: cluster.compose("exec", "-T", "--user", user, "rank0", "ls", "/clone/files")
        for user in ("0", f"{USER}:{USER}")
    }
    assert "compose.yaml" in found["0"].stdout, "the entrypoint can"
    assert "Permission denied" in found[f"{USER}:{USER}"].stderr and not found[f"{USER}:{USER}"].stdout


def test_code_that_was_changed_after_the_image_was_built_is_noted(cluster: Cluster) -> None:
    assert "older than the code" not in cluster.up()
    (cluster.folder / "testbed/rank/train.py").write_text("# edited\n")
    printed = cluster.up()
    assert cluster.codes() == ALL_OK, printed
    note = "the image is older than the code: testbed/rank/train.py changed. `make image` builds it again"
    assert f"note: {note}" in printed and note in summary_of(cluster.folders()[-1])["notes"]


def test_a_first_up_without_an_image_registry_says_make_image(cluster: Cluster) -> None:
    """Nothing listens at the registry of this base, which is an address of this machine."""
    done = cluster.compose("up", IMAGE=f"testbed:missing-{cluster.folder.name}"[:100].lower(), BASE="127.0.0.1:1/base")
    printed = done.stdout + done.stderr
    assert done.returncode != 0 and "[without-a-registry-run-make-image internal] load metadata" in printed, printed
    assert "Pulling" not in printed, "no registry has our image"


def test_a_container_without_net_admin_is_refused(image: str, tmp_path: Path) -> None:
    may = [word for cap in ("SETUID", "SETGID", "SETPCAP", "CHOWN") for word in ("--cap-add", cap)]
    env = [word for pair in ({**QUICK, "RATE": "100mbit"}).items() for word in ("-e", "=".join(pair))]
    argv = ["docker", "run", "--rm", "--cap-drop", "ALL", *may, *env, "-v", f"{tmp_path}:/runs", image]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == NetworkInvalid.exit_code, done.stderr
    assert "cannot be shaped: tc qdisc add" in done.stderr and "NET_ADMIN" in done.stderr


def test_shaping_off_makes_a_run_invalid(cluster: Cluster) -> None:
    printed = cluster.up(SHAPING="off")
    assert cluster.codes() == ALL_OK, printed
    summary = summary_of(cluster.folders()[0])
    assert summary["status"] == "invalid" and "SHAPING=off" in summary["reason"]
    assert summary["spec"]["link"]["rate"] is None


def cores_of(rank: str) -> str:
    """The cores that a controller would give one of four nodes with 0.4 cores each, as the kernel lists them."""
    with contextlib.closing(engine.connect()) as client:
        every = range(client.info()["NCPU"])
    own = divide_cores(1, [0.4] * 4, every)[RANKS.index(rank)]
    return ",".join(map(str, sorted(own))) if own else f"0-{every[-1]}"


def test_a_running_rank_has_no_privilege_and_ctrl_c_leaves_complete_files(cluster: Cluster) -> None:
    up = cluster.start(STEPS="100000")
    wait_for(lambda: cluster.steps(3) >= 3, "three steps of rank 3")
    for rank in RANKS:
        status = cluster.compose("exec", "-T", rank, "cat", "/proc/1/status").stdout
        values = {line.partition(":")[0]: line.partition(":")[2].split() for line in status.splitlines()}
        assert [values[key] for key in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")] == [["0" * 16]] * 5
        assert values["NoNewPrivs"] == ["1"] and values["Groups"] == []
        assert set(values["Uid"]) == set(values["Gid"]) == {str(USER)}
        assert values["Cpus_allowed_list"] == [cores_of(rank)]
        assert "Read-only" in cluster.compose("exec", "-T", rank, "touch", "/opt/x").stderr
    cluster.interrupt(up)
    assert cluster.codes() == dict.fromkeys(RANKS, Interrupted.exit_code), "none had to be killed"
    (folder,) = cluster.folders()
    for rank in RANKS:
        records = [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
        assert records[-1]["kind"] == "error" and records[-1]["code"] == Interrupted.exit_code
    assert summary_of(folder)["status"] == "interrupted"
    assert not list(folder.glob(".*"))


def test_a_killed_rank_ends_the_run_and_is_named(cluster: Cluster) -> None:
    up = cluster.start(STEPS="100000")
    wait_for(lambda: cluster.steps(0) >= 3, "three steps of rank 0")
    cluster.compose("kill", "rank2")
    up.wait(60)
    assert cluster.codes() == {"rank0": 6, "rank1": 6, "rank2": 137, "rank3": 6}
    summary = summary_of(cluster.folders()[0])
    assert summary["status"] == "failed" and "rank 2" in summary["reason"]


def test_two_clones_in_folders_of_one_name_do_not_end_each_others_runs(image: str, tmp_path: Path) -> None:
    clones = [Cluster(tmp_path / parent / "clone", owner=USER) for parent in ("a", "b")]
    try:
        first = clones[0].start("--exit-code-from", "rank0", STEPS="100000")
        wait_for(lambda: clones[0].steps(0) >= 1, "a step of the first clone's run")
        printed = clones[1].up()
        assert clones[1].codes() == ALL_OK, printed
        before = clones[0].steps(0)
        wait_for(lambda: clones[0].steps(0) > before, "another step of the first clone's run")
        clones[0].compose("stop", "rank0")
        assert first.wait(60) == Interrupted.exit_code, "a script sees that its run was stopped"
    finally:
        for clone in clones:
            clone.down()


def test_a_rank_that_waits_for_rank_0_and_is_stopped_does_not_exit_with_0(cluster: Cluster) -> None:
    cluster.start(MODE="single", STEPS="100000")
    wait_for(lambda: cluster.compose("logs", "rank1").stdout.count("has nothing to do") == 1, "rank 1 to wait")
    cluster.compose("stop", "rank1")
    cluster.compose("stop", "rank0")
    codes = cluster.codes()
    assert (codes["rank0"], codes["rank1"]) == (130, 130)


def test_clean_removes_the_project_of_an_interrupted_up_of_this_clone_alone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def owners() -> dict[str | None, str]:
        return {each.folder: each.owner for each in engine.projects()}

    up = cluster.start(STEPS="100000")
    wait_for(lambda: any((folder / "rank0.log").is_file() for folder in cluster.folders()), "a run")
    folder = str(cluster.folder)
    assert owners()[folder] == engine.RUNNING
    cluster.interrupt(up)
    ownership.remove()
    assert owners()[folder] == engine.STOPPED, "it is another clone's"
    monkeypatch.setattr(ownership, "CLONE", cluster.folder)
    ownership.remove()
    assert folder not in owners()


def test_the_example_environment_changes_nothing() -> None:
    def config(*flags: str) -> str:
        command = ["docker", "compose", *flags, "config"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert config("--env-file", ".env.example") == config("--env-file", "/dev/null")


@pytest.mark.parametrize("setting", ["node.cpus=2", "nodes=3", "overrides.node2.cpus=0.1"])
def test_a_setting_that_would_not_be_applied_is_refused(cluster: Cluster, setting: str) -> None:
    printed = cluster.up(SET=setting)
    assert set(cluster.codes().values()) == {2}, printed
    assert "CPU_QUOTA" in printed


def test_the_image_has_exactly_the_files_that_its_hash_covers(image: str) -> None:
    look = ["/opt/testbed", "-type", "f", "-not", "-path", "*/__pycache__/*", "-printf", "%P\n"]
    argv = ["docker", "run", "--rm", "--entrypoint", "find", image, *look]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stdout.splitlines()) == {path.relative_to(ROOT).as_posix() for path in image_files(ROOT)}
