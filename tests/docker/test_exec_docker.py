"""`testbed exec --on compose`: the user's script in containers, what it can reach, and what is brought back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from testbed.control.substrates.compose import rank_uid_gid
from testbed.control.substrates.engine import image_name
from testbed.control.substrates.layer import kept_layers
from testbed.results.observations import Swap
from testbed.results.records import read
from testbed.spec.errors import RankFailed, UsageError
from tests.support.command import run_command, write_method

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]
SCRIPTS = Path(__file__).parents[1] / "scripts"
QUICK = ("--on", "compose", "--share", "--set", "probe=false")


def execute(
    folder: Path, *flags: str, command: tuple[str, ...], nodes: int = 2
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a script of tests/scripts in containers; return the finished command and the summary of the run."""
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, folder / path.name)
    fixed = ["--nodes", str(nodes), "--out", "r", "--json"]
    done = run_command("exec", *QUICK, *fixed, *flags, "--", *command, cwd=folder)
    summary = folder / "r" / "summary.json"
    return done, json.loads(summary.read_text()) if summary.exists() else {}


def mounted_sources() -> str:
    """What all containers of the testbed on this engine mount; another run may use it at the same time."""
    listing = ["docker", "ps", "--all", "--quiet", "--filter", "label=testbed"]
    found = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    form = "{{range .Mounts}}{{.Source}} {{end}}"
    argv = ["docker", "inspect", "--format", form, *found]
    return subprocess.run(argv, capture_output=True, text=True).stdout if found else ""


def test_a_ddp_script_is_measured_on_shaped_links(tmp_path: Path) -> None:
    done, summary = execute(tmp_path, "--rate", "200mbit", command=("python", "ddp.py"))
    assert done.returncode == 0, done.stderr
    assert summary["status"] == "ok" and len(summary["losses"]) == 12 and summary["counter"] == "interface eth0"
    spec = json.loads((tmp_path / "r" / "spec.json").read_text())
    assert spec["script"]["path"] == "", "the programs are those of the image"


def test_a_method_of_the_users_own_synchronises_a_script(tmp_path: Path) -> None:
    mode = write_method(tmp_path)
    done, summary = execute(tmp_path, "--instead", mode, "--steps", "9", command=("python", "gather_mean.py"))
    assert done.returncode == 0, done.stderr
    assert summary["status"] == "ok" and any(isinstance(each, Swap) for each in read(tmp_path / "r" / "rank0.jsonl"))


def test_torchrun_finds_the_other_nodes(tmp_path: Path) -> None:
    where = ("--nnodes", "{world}", "--node-rank", "{rank}", "--master-addr", "{master}", "--master-port", "{port}")
    done, summary = execute(tmp_path, command=("torchrun", *where, "ddp.py"))
    assert done.returncode == 0, done.stderr
    assert summary["status"] == "ok" and len(summary["losses"]) == 12


def test_a_script_reaches_nothing_but_its_nodes_and_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "other-run").mkdir()
    (tmp_path / "given.txt").write_text("from the host")
    done, summary = execute(
        tmp_path, "--mount", f"{tmp_path}/given.txt:/mnt/g.txt", command=("python", "surroundings.py", "/mnt/g.txt")
    )
    assert done.returncode == 0, done.stderr
    assert summary["status"] == "ok" and len(summary["losses"]) == 3
    first = (tmp_path / "r" / "rank0.log").read_text().splitlines()[0]
    found = json.loads(first)
    assert found["uid"] == rank_uid_gid()[0] != 0 and found["capabilities"] == 0 and found["no_new_privileges"] == "1"
    assert found["writes"] == [] and not found["internet"] and not found["name"]
    assert "other-run" not in found["runs"] and "spec.json" in found["runs"]
    assert found["tmp_bytes"] == found["shm_bytes"] == 1 << 30, "half of the container's memory each"
    assert not {"SSH_AUTH_SOCK", "TESTBED_RUNS"} & set(found["variables"])
    assert found["given"] == "from the host"


def test_a_killed_rank_is_named_and_no_container_stays(tmp_path: Path) -> None:
    many = ("env", "SCRIPT_STEPS=100000", "python", "ddp.py")
    done, summary = execute(tmp_path, "--fault", "kill:rank1@step3", command=many)
    assert done.returncode == RankFailed.exit_code and "rank 1" in done.stderr, done.stderr
    assert summary["status"] == "failed" and (tmp_path / "r" / "rank0.jsonl").stat().st_size
    assert str(tmp_path) not in mounted_sources()


QUOTA = """import os
from pathlib import Path
one, two = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu.max")
text = one.read_text() if one.exists() else two.read_text()
print("quota", text.split()[0], flush=True)
import ddp
"""


def test_overrides_and_faults_act_on_single_nodes(tmp_path: Path) -> None:
    (tmp_path / "quota.py").write_text(QUOTA)
    flags = ["--rate", "100mbit", "--set", "node.cpus=0.4", "--set", "overrides.node1.cpus=0.3"]
    faults = ["pause:rank0@step5+1s", "rate:rank1@step8+1s=20mbit", "slow:rank0@step10+1s=0.2cpu"]
    flags += [word for fault in faults for word in ("--fault", fault)]
    done, summary = execute(tmp_path, *flags, command=("env", "SCRIPT_STEPS=600", "python", "quota.py"))
    assert done.returncode == 0 and summary["status"] == "ok", done.stderr
    quotas = [(tmp_path / "r" / f"rank{k}.log").read_text().split("quota ")[1].split()[0] for k in range(2)]
    assert quotas == ["4000", "3000"]  # of 10000 microseconds
    events = [json.loads(line) for line in (tmp_path / "r" / "faults.jsonl").read_text().splitlines()]
    over = [each["fault"] for each in events if each["event"] == "over"]
    assert sorted(over) == sorted(faults), events


def test_a_memory_limit_ends_a_rank(tmp_path: Path) -> None:
    many = ("env", "SCRIPT_STEPS=100000", "python", "ddp.py")
    done, summary = execute(tmp_path, "--fault", "oom:rank1@step3", command=many)
    assert done.returncode == RankFailed.exit_code and "rank 1 (node1) was killed by SIGKILL" in done.stderr, (
        done.stderr
    )
    assert summary["status"] == "failed"


def test_requirements_become_a_layer_that_is_built_once_and_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel of the test is in a folder that the file names, so nothing is downloaded but pip."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    number = os.getpid()
    wheel = tmp_path / "wheels" / f"testbed_probe-{number}-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        info = f"testbed_probe-{number}.dist-info"
        archive.writestr("testbed_probe.py", f"number = {number}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: testbed-probe\nVersion: {number}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    file = tmp_path / "requirements.txt"
    file.write_text(f"--find-links {wheel.parent}\ntestbed-probe\ntorch\n")
    (tmp_path / "uses.py").write_text("import testbed_probe\nprint(testbed_probe.number)\nimport ddp\n")
    images = set()
    try:
        for name in ("first", "second"):
            if name == "second":
                shutil.rmtree(tmp_path / "cache")  # nothing of it is needed any more
                shutil.rmtree(tmp_path / "r")
            done, summary = execute(tmp_path, "--requirements", str(file), command=("python", "uses.py"))
            assert done.returncode == 0 and summary["status"] == "ok", done.stderr
            assert f"{number}\n" in (tmp_path / "r" / "rank1.log").read_text()
            images.add(json.loads((tmp_path / "r" / "spec.json").read_text())["script"]["image"])
        assert len(images) == 1 and not (tmp_path / "cache").exists()
        (layer,) = (each for each in kept_layers(everything=True) if each.name in images)
        assert layer not in kept_layers(everything=False)  # it is up to date
        layer.remove()
        assert layer not in kept_layers(everything=True)
    finally:
        subprocess.run(["docker", "image", "rm", "--force", *images], check=True)


def test_requirements_that_pip_refuses_have_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("--no-index\nno-such-package\n")
    done, _ = execute(tmp_path, "--requirements", "r.txt", command=("python", "ddp.py"))
    assert done.returncode == UsageError.exit_code and len(done.stderr.splitlines()) == 1, done.stderr
    assert "No matching distribution found for no-such-package" in done.stderr and "--image" in done.stderr


def test_an_image_that_is_not_made_from_ours_is_refused(tmp_path: Path) -> None:
    done, _ = execute(tmp_path, "--image", "testbed-base:bookworm", command=("python", "ddp.py"))
    assert done.returncode == UsageError.exit_code and f"FROM {image_name()}, after `make image`" in done.stderr
    assert not (tmp_path / "r").exists()
