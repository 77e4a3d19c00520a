"""The `testbed` command as an ordinary user, without root and without a Docker engine: the network is shaped."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from testbed.results.receipt import Receipt
from testbed.spec.errors import Interrupted, NetworkInvalid, UsageError
from tests.support.command import COMMAND, wait_for_steps
from tests.support.ordinary_user import USER, as_ordinary_user

pytestmark = [pytest.mark.net, pytest.mark.gloo, pytest.mark.quiet]
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
SMALL = ["--on", "netns", "--nodes", "4", "--model", "lenet5", "--data", "synthetic", "--batch", "64"]
UNPROBED = [*SMALL, "--set", "probe=false"]
INVALID = NetworkInvalid.exit_code  # the probe failed twice on a busy machine
TWO = """
title = "two modes"
[base]
model = "lenet5"
nodes = 2
batch = 16
steps = 4
data = { name = "synthetic", test_subset = 64 }
link = { rate = "100mbit" }
[axes]
mode = ["ring", "tree"]
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A folder of the user's; pytest's own are root's."""
    folder = Path(tempfile.mkdtemp(prefix="ordinary-user-"))
    os.chown(folder, USER, USER)
    yield folder
    shutil.rmtree(folder)


def run_as_user(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = as_ordinary_user([*COMMAND, *arguments], home)
    return subprocess.run(argv, cwd=home, capture_output=True, text=True, timeout=240)


def start(home: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Every command before `testbed` becomes the next one, so the pid is that of the controller."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        as_ordinary_user([*COMMAND, *arguments], home), cwd=home, stdout=pipe, stderr=pipe, text=True
    )


def with_variable(text: str) -> list[int]:
    """The processes that have this text in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            content = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if text.encode() in content:
            found.append(int(entry.name))
    return found


def marked(controller: int) -> list[int]:
    """The processes of a controller, its keeper included."""
    return with_variable(f"TESTBED_OWNER={controller}-")


@pytest.fixture(scope="module")
def whole(home: Path) -> dict[str, Any]:
    """The summary of one run, which tests here share; its folder is `ring` in the home folder."""
    shaped = ["--rate", "200mbit", "--set", "node.cpus=0.4", "--steps", "20", "--keep-going"]
    done = run_as_user(home, "run", *SMALL, *shaped, "--json", "--out", "ring")
    assert done.returncode in (0, INVALID), done.stderr
    (summary,) = json.loads(done.stdout)["runs"]
    return dict(summary)


def test_every_link_has_the_requested_rate(whole: dict[str, Any], home: Path) -> None:
    receipt = Receipt.read(home / "ring" / "receipt.json")
    assert len(receipt.links) == 12 and receipt.valid(), f"{whole['network']}; before: {whole['notes']}"
    assert whole["status"] == "ok" and whole["substrate"] == "netns" and whole["counter"] == "interface eth0"


def test_the_files_are_the_users(whole: dict[str, Any], home: Path) -> None:
    assert {path.stat().st_uid for path in (home / "ring").rglob("*")} == {USER}


def test_a_quota_that_cannot_be_set_is_no_part_of_the_run_and_is_noted(whole: dict[str, Any]) -> None:
    assert whole["spec"]["node"]["cpus"] is None
    assert [note for note in whole["notes"] if note.startswith("0.4 CPUs per node not applied")]


def test_a_single_node_has_as_much_of_the_machine_as_one_of_four(home: Path) -> None:
    flags = ["--mode", "single", "--set", "node.cpus=0.4", "--steps", "60"]
    done = run_as_user(home, "run", *SMALL, *flags, "--out", "single")
    assert done.returncode == 0 and "single: 4 copies of the job ran at once" in done.stdout, done.stderr
    copies = sorted(path.name for path in (home / "single").glob("copy*"))
    ends = [json.loads((home / "single" / name / "rank0.jsonl").read_text().splitlines()[-1]) for name in copies]
    assert copies == ["copy1", "copy2", "copy3"] and {end["steps"] for end in ends} == {60}
    first = json.loads((home / "single" / "rank0.jsonl").read_text().splitlines()[-1])
    share = first["own_cpu"] / first["measured"]
    expected = len(os.sched_getaffinity(0)) / 4
    assert share <= 1.35 * min(1.0, expected), f"{share:.2f} cores, expected about {expected:.2f}, at most 35 % more"


@pytest.mark.parametrize("fault", ["slow:rank1@step5=0.25cpu", "oom:rank1@step5"])
def test_a_fault_that_needs_cgroups_is_refused_with_the_reason(home: Path, fault: str) -> None:
    done = run_as_user(home, "run", *UNPROBED, "--fault", fault, "--out", "fault")
    assert done.returncode == UsageError.exit_code and not (home / "fault").exists()
    assert fault in done.stderr and "controller of cgroups" in done.stderr and "is not writable" in done.stderr


def test_unequal_cpu_shares_are_refused(home: Path) -> None:
    done = run_as_user(home, "run", *UNPROBED, "--set", "overrides.node1.cpus=0.1", "--out", "unequal")
    assert done.returncode == UsageError.exit_code and "CPU quota" in done.stderr and "Delegate=yes" in done.stderr


def test_a_script_runs_as_the_user_and_cannot_change_the_network(home: Path) -> None:
    (home / "mine").mkdir()
    shutil.copy(SCRIPTS / "ddp.py", home / "mine")
    attempt = "tc qdisc del dev eth0 root; echo tc $?; ip link set eth0 down; echo ip $?; id -u"
    prepend = f"import subprocess; print(subprocess.run({attempt!r}, shell=True, capture_output=True, text=True))\n"
    script = home / "mine" / "ddp.py"
    script.write_text(prepend + script.read_text())
    flags = ["--on", "netns", "--nodes", "2", "--rate", "200mbit", "--set", "probe=false", "--out", str(home / "exec")]
    done = run_as_user(home / "mine", "exec", *flags, "--", sys.executable, "ddp.py")
    assert done.returncode == 0, done.stderr
    log = (home / "exec" / "rank0.log").read_text()
    assert f"tc 2\\nip 2\\n{USER}\\n" in log and "rank 0: loss" in log, log
    assert {path.stat().st_uid for path in (home / "exec").rglob("*")} == {USER}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_controller_that_was_stopped(home: Path, signum: int) -> None:
    folder = home / f"stopped-{signum}"
    process = start(home, ["run", *UNPROBED, "--rate", "200mbit", "--steps", "100000", "--out", str(folder)])
    try:
        wait_for_steps(folder, 0, 3)
        assert len(marked(process.pid)) >= 5  # four ranks and the keeper
    finally:
        process.send_signal(signum)
        _, said = process.communicate(timeout=30)
    if signum == signal.SIGKILL:
        assert run_as_user(home, "clean").returncode == 0
    else:
        assert process.returncode == Interrupted.exit_code, said
        assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    end = time.monotonic() + 10
    while (left := marked(process.pid)) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


def test_the_doctor_says_that_it_works(home: Path) -> None:
    said = run_as_user(home, "doctor").stdout
    assert "yes  network namespaces: works without root, in a user namespace" in said
    assert "no   CPU shares" in said and "Delegate=yes" in said


@pytest.mark.skipif(not (ROOT / ".git").exists() and not os.environ.get("CI"), reason="needs the repository")
def test_make_run_on_a_fresh_clone_ends_with_valid_receipts_a_table_and_a_page_of_the_users(home: Path) -> None:
    """With an experiment of two small runs, and this virtual environment instead of one that is built."""
    clone = home / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    program = clone / ".venv" / "bin" / "testbed"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    (clone / ".venv" / ".ready").touch()
    (clone / "experiments" / "quick.toml").write_text(TWO)
    subprocess.run(["chown", "-R", f"{USER}:{USER}", clone], check=True)
    argv = as_ordinary_user(["env", f"PYTHONPATH={clone}", "make", "--old-file=data", "run"], home)
    for _ in range(2):  # the same command runs again what is invalid, because the machine was busy
        done = subprocess.run(argv, cwd=clone, capture_output=True, text=True, timeout=240)
        if f"Error {INVALID}" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on netns: network namespaces, links shaped as requested, in a user namespace, without root" in done.stdout
    assert "| ring" in done.stdout and "| tree" in done.stdout and "100mbit each way, on netns" in done.stdout
    receipts = [Receipt.read(path) for path in (clone / "runs" / "quick").glob("*/receipt.json")]
    assert [(len(receipt.links), receipt.valid()) for receipt in receipts] == [(2, True)] * 2
    made = [path for path in (clone / "runs").rglob("*") if path.is_file()]
    assert clone / "runs/quick/report.html" in made and {path.stat().st_uid for path in made} == {USER}
    assert with_variable(f"HOME={home}\0") == []


def test_where_user_namespaces_are_not_allowed_the_way_out_is_named(home: Path) -> None:
    """A process that is in a chroot may not make them, whatever the kernel's settings."""
    shell = ["sh", "-c", 'mount --rbind / /mnt && exec chroot /mnt "$@"', "sh"]
    inside = as_ordinary_user([*COMMAND, "run", *UNPROBED, "--out", "refused"], home)
    argv = ["unshare", "--mount", "--propagation", "private", *shell, "env", f"--chdir={home}", *inside]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == UsageError.exit_code and not (home / "refused").exists()
    assert "a user namespace is needed, which is not allowed here" in done.stderr and "--on process" in done.stderr
