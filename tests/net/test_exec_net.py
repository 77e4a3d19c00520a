"""`testbed exec` as root: what a script can reach, and a script on shaped links."""

from __future__ import annotations

import itertools
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.results.observations import Setup
from testbed.results.records import Step, read
from testbed.spec.errors import NetworkInvalid
from testbed.spec.privileges import NOBODY
from tests.support.command import COMMAND, write_method

pytestmark = [pytest.mark.net, pytest.mark.gloo]
SCRIPTS = Path(__file__).parents[1] / "scripts"
SECRETS = {"SSH_AUTH_SOCK": "/tmp/agent", "GITHUB_TOKEN": "secret", "HANDED": "by name"}


def execute(folder: Path, *flags: str, argv: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, folder / path.name)
    whole = [*COMMAND, "exec", "--share", "--out", "r", *flags, "--", *argv]
    return subprocess.run(whole, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=240)


@pytest.fixture
def secrets() -> Iterator[dict[str, Path]]:
    """Files and folders that anyone may read or write, outside of the script's folder."""
    shared = Path(tempfile.mkdtemp(dir="/var", prefix="testbed-test-"))
    shared.chmod(0o777)
    in_home = Path.home() / f".testbed-test-{os.getpid()}"
    in_home.write_text("secret")
    in_home.chmod(0o644)
    yield {"shared": shared, "home": in_home}
    in_home.unlink()
    shutil.rmtree(shared)


def reach(folder: Path, secrets: dict[str, Path], *flags: str, **env: str) -> dict[str, Any]:
    read = [str(secrets["home"]), str(folder / "private.txt"), "/etc/hostname"]
    write = [str(secrets["shared"]), str(folder), "/etc", "/var/tmp", os.environ.get("HOME", "/root")]
    (folder / "private.txt").write_text("in the folder of the script")
    paths = json.dumps({"read": read, "write": write}).replace("{", "{{").replace("}", "}}")
    done = execute(folder, "--nodes", "1", *flags, argv=["python", "reach.py", paths], **env)
    assert done.returncode == 3 and "no step of an optimizer" in done.stderr, done.stderr
    return dict(json.loads((folder / "r" / "rank0.log").read_text().splitlines()[0]))


@pytest.mark.parametrize("on", ["process", "netns"])
def test_a_script_of_root_reaches_its_own_copy_and_nothing_else(
    tmp_path: Path, secrets: dict[str, Path], on: str
) -> None:
    tmp_path.chmod(0o777)
    found = reach(tmp_path, secrets, "--on", on, "--env", "HANDED", "--env", "GIVEN=1", **SECRETS, SUDO_UID="")
    assert found["uid"] == NOBODY and found["groups"] == []
    assert found["capabilities"] == [0, 0, 0, 0] and found["bounding"] == 0 and found["no_new_privileges"] == "1"
    assert found["processes"] <= 4 and found["input"] == ""
    assert found["reads"][str(secrets["home"])] == found["reads"][str(tmp_path / "private.txt")] == "FileNotFoundError"
    writes = found["writes"]
    assert writes.pop("/var/tmp") == 1 and not Path("/var/tmp/x").exists()  # it is the script's own
    assert set(writes.values()) <= {"OSError", "PermissionError", "FileNotFoundError"}, writes
    assert not (secrets["shared"] / "x").exists() and not (tmp_path / "mine.txt").exists()
    collected = tmp_path / "r" / "rank0.files" / "mine.txt"
    assert collected.read_text() == "written by the script" and collected.stat().st_uid == NOBODY
    variables = found["variables"]
    assert (variables["HANDED"], variables["GIVEN"]) == ("by name", "1") and "secret" not in variables.values()
    assert not {"SSH_AUTH_SOCK", "SUDO_UID", "GITHUB_TOKEN"} & set(variables)
    assert "HANDED" not in json.loads((tmp_path / "r" / "spec.json").read_text())["script"]["environment"]
    assert sorted(path.name for path in Path(variables["PYTHONPATH"]).parent.glob("*")) == []  # it is removed


SHADOW = """import os, sys
print("imported as", os.getuid(), file=sys.stderr)
raise ImportError
"""


@pytest.mark.parametrize("on", ["process", "netns"])
def test_modules_in_the_folder_of_a_script_are_never_imported_as_root(tmp_path: Path, on: str) -> None:
    names = ("argparse", "ctypes", "json", "pwd", "shutil", "sitecustomize", "testbed")
    for name in names:
        (tmp_path / f"{name}.py").write_text(SHADOW)
    (tmp_path / "main.py").write_text("import os\nprint('script as', os.getuid())\nimport argparse\n")
    flags = ["--nodes", "1", "--set", "probe=false", "--on", on, "--env", "PYTHONPATH=.", "--env", "LD_PRELOAD=none.so"]
    argv = [*COMMAND[:1], "-P", *COMMAND[1:], "exec", "--share", "--out", "r", *flags, "--", "python", "main.py"]
    done = subprocess.run(argv, cwd=tmp_path, env=os.environ | {"SUDO_UID": ""}, capture_output=True, text=True)
    lines = (tmp_path / "r" / "rank0.log").read_text().splitlines()
    assert f"script as {NOBODY}" in lines, (done.stderr, lines)
    assert {line for line in lines if line.startswith("imported as")} == {f"imported as {NOBODY}"}
    assert len([line for line in lines if "LD_PRELOAD" in line]) == 1, lines  # the script alone has the variable


def test_the_caller_of_sudo_runs_the_script_and_owns_what_it_wrote(tmp_path: Path, secrets: dict[str, Path]) -> None:
    user = next(each for each in pwd.getpwall() if each.pw_uid not in (0, NOBODY))
    found = reach(
        tmp_path, secrets, "--on", "process", SUDO_UID=str(user.pw_uid), SUDO_GID=str(user.pw_gid), SUDO_USER="x"
    )
    assert found["uid"] == user.pw_uid and found["capabilities"] == [0, 0, 0, 0]
    assert (tmp_path / "r" / "rank0.files" / "mine.txt").stat().st_uid == user.pw_uid
    assert found["reads"][str(secrets["home"])] == "FileNotFoundError"


@pytest.mark.quiet
def test_a_script_gets_the_rate_that_was_requested(tmp_path: Path) -> None:
    """Two ranks sum 2 million numbers: each link carries all bytes of the gradients once, each way."""
    done = execute(
        tmp_path,
        "--on",
        "netns",
        "--nodes",
        "2",
        "--rate",
        "200mbit",
        "--steps",
        "4",
        "--json",
        "--keep-going",
        argv=["python", "large.py"],
    )
    assert done.returncode in (0, NetworkInvalid.exit_code), done.stderr
    (summary,) = json.loads(done.stdout)["runs"]
    assert summary["counter"] == "interface eth0"
    (sent, _), seconds = summary["sent_per_step"], summary["seconds_per_step"]
    size = summary["gradient_bytes"]
    assert size <= sent < 1.06 * size, f"{sent} bytes sent a step, {size} bytes of gradients"
    assert 8 * sent / seconds < 1.03 * 200e6, f"{8 * sent / seconds / 1e6:.0f} Mbit/s requested 200"


def test_an_isolated_python_is_observed_by_the_attach_file(tmp_path: Path) -> None:
    done = execute(
        tmp_path,
        "--on",
        "process",
        "--nodes",
        "1",
        "--set",
        "probe=false",
        "--steps",
        "3",
        "--json",
        argv=[sys.executable, "-I", "{attach}", "plain.py", "word"],
    )
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["runs"]
    assert len(summary["losses"]) == 3 and "word" in (tmp_path / "r" / "rank0.log").read_text()


@pytest.mark.parametrize("on", ["netns", "process"])
def test_a_hard_coded_address_and_interface_are_served(tmp_path: Path, on: str) -> None:
    flags = ["--on", on, "--nodes", "2", "--set", "probe=false", "--address", "10.10.1.1", "--interface", "eth1"]
    done = execute(tmp_path, *flags, "--json", argv=["python", "fixed_address.py", "{rank}", "{world}"])
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["runs"]
    setup = next(each for each in read(tmp_path / "r" / "rank0.jsonl") if isinstance(each, Setup))
    assert len(summary["losses"]) == 6 and setup.world == 2
    if on == "netns":
        assert summary["counter"] == "interface eth1" and setup.changed == []
    else:
        assert "instead of tcp://10.10.1.1:6585" in " ".join(setup.changed)
        assert "GLOO_SOCKET_IFNAME was lo instead of eth1" in " ".join(setup.changed)


def test_a_mode_of_the_users_own_sends_what_it_must_instead_of_gather_and_scatter(tmp_path: Path) -> None:
    mode, gradient = write_method(tmp_path), 4 * (64 * 512 + 512 * 512 + 512 * 10 + 512 + 512 + 10)
    flags = ["--nodes", "3", "--rate", "100mbit", "--on", "netns", "--set", "probe=false", "--steps", "12"]
    flags += ["--env", "SCRIPT_WIDTH=512", "--instead", mode]
    done = execute(tmp_path, *flags, argv=["python", "gather_mean.py"])
    assert done.returncode == 0, done.stderr
    sent = [each.sent for each in read(tmp_path / "r" / "rank0.jsonl") if isinstance(each, Step)]
    shares = [(b - a) / gradient for a, b in itertools.pairwise(sent)]
    assert shares[1] == pytest.approx(2, rel=0.1), "rank 0 scatters to two others"
    assert shares[-2] == pytest.approx(4 / 3, rel=0.1), "a ring all-reduce of three ranks"
