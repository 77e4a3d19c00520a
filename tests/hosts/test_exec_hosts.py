"""`testbed exec --on hosts`: the user's script on real hosts by SSH; its records and files come back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testbed.results.observations import Swap
from testbed.results.records import read
from testbed.spec.errors import HostFailed, RankFailed, UsageError
from tests.hosts.nodes import ROOT, Nodes
from tests.support.command import write_method

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
QUICK = ("--on", "hosts", "--set", "probe=false")


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder with scripts, which is all that is sent to the hosts."""
    return Path(shutil.copytree(ROOT / "tests" / "scripts", tmp_path / "scripts"))


def test_a_script_runs_on_every_host_and_what_it_wrote_comes_back(nodes: Nodes, scripts: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    done = nodes.testbed(
        "exec", *QUICK, "--nodes", "2", "--out", str(out), "--", "python", "surroundings.py", cwd=scripts
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "ok" and len(summary["losses"]) == 3 and summary["substrate"] == "hosts"
    for rank in range(2):
        lines = (out / f"rank{rank}.log").read_text().splitlines()
        found = json.loads(next(line for line in lines if line.startswith("{")))
        assert found["uid"] != 0 and found["capabilities"] == 0 and found["no_new_privileges"] == "1"
        assert found["writes"] == [] and found["tmp_bytes"] == found["shm_bytes"] == 1 << 30
        assert (out / f"rank{rank}.files" / "written.txt").read_text() == "kept"
    assert [nodes.of_runs(node) for node in range(2)] == [[], []], "containers and files of the run are gone"


def test_a_script_that_fails_is_quoted_and_nothing_stays(nodes: Nodes, scripts: Path, tmp_path: Path) -> None:
    (scripts / "fails.py").write_text("import torch\nraise ValueError('no such world')\n")
    out = str(tmp_path / "r")
    done = nodes.testbed("exec", *QUICK, "--nodes", "2", "--out", out, "--", "python", "fails.py", cwd=scripts)
    assert done.returncode == RankFailed.exit_code and "no such world" in done.stderr, done.stderr
    assert [nodes.of_runs(node) for node in range(2)] == [[], []]


def test_an_image_that_a_host_lacks_is_named_with_the_command_that_sends_it(nodes: Nodes, scripts: Path) -> None:
    done = nodes.testbed("exec", *QUICK, "--nodes", "2", "--image", "mine:1", "--", "python", "ddp.py", cwd=scripts)
    assert done.returncode == HostFailed.exit_code and "image mine:1 is missing" in done.stderr, done.stderr
    assert f"docker save mine:1 | ssh {nodes.addresses[0]} docker load" in done.stderr


@pytest.mark.parametrize("mode", ["ring/bucket:16KiB/overlap", "my-way/bucket:16KiB"])
def test_a_mode_synchronises_a_script_on_hosts_instead_of_its_own_way(
    nodes: Nodes, scripts: Path, tmp_path: Path, mode: str
) -> None:
    write_method(scripts)
    losses = {}
    for name, flags in {"own": (), "swapped": ("--instead", mode)}.items():
        options = (*QUICK, "--nodes", "2", "--steps", "9", *flags, "--out", str(tmp_path / name))
        done = nodes.testbed("exec", *options, "--", "python", "gather_mean.py", cwd=scripts)
        assert done.returncode == 0, done.stdout + done.stderr
        losses[name] = json.loads((tmp_path / name / "summary.json").read_text())["losses"]
    assert losses["swapped"] == pytest.approx(losses["own"], rel=1e-3) and len(losses["own"]) == 9
    for rank in range(2):
        swaps = [each for each in read(tmp_path / "swapped" / f"rank{rank}.jsonl") if isinstance(each, Swap)]
        assert [swap.mode for swap in swaps] == [mode]
    assert [nodes.of_runs(node) for node in range(2)] == [[], []]


def test_a_script_that_no_mode_can_synchronise_is_refused_on_hosts(nodes: Nodes, scripts: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    options = (*QUICK, "--nodes", "2", "--instead", "ring", "--out", str(out))
    done = nodes.testbed("exec", *options, "--env", "SCRIPT_STEPS=3", "--", "python", "gather_mean.py", cwd=scripts)
    assert done.returncode == UsageError.exit_code, done.stdout + done.stderr
    assert "--instead ring: the script made 3 steps" in done.stderr
    assert [nodes.of_runs(node) for node in range(2)] == [[], []]
