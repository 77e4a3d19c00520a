"""Substrate uml without its kernel: what is refused, where the kernel is looked for, and messages of its agent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import pytest

from testbed.control.machine.processes import start_time
from testbed.control.runs.select import SUBSTRATES
from testbed.control.substrates import uml
from testbed.control.substrates.base import NodeCounts, NodePlan
from testbed.net.shaping import Bucket, Shaping
from testbed.spec.errors import CommandFailed, RankFailed, TestbedError, Unavailable
from testbed.spec.link import Link
from testbed.spec.run import RunSpec

ROOT = Path(__file__).parents[4]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel in the cache folder of an ordinary user."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(uml, "HIDDEN", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = tmp_path / "testbed/uml/usr/bin/linux.uml"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    modules = tmp_path / "testbed/uml/usr/lib/uml/modules/6.1.0"
    modules.mkdir(parents=True)
    (modules / "modules.dep").write_text("kernel/net/802/stp.ko:\nkernel/net/bridge.ko: kernel/net/802/stp.ko\n")
    return program


def plans(count: int, **values: Any) -> list[NodePlan]:
    return [NodePlan(name=f"node{k}", **values) for k in range(count)]


def test_the_kernel_in_the_cache_of_the_user_is_found(kernel: Path) -> None:
    uml.check(plans(4))
    assert uml.find_kernel() == (kernel, kernel.parents[1] / "lib/uml/modules/6.1.0")


def test_of_several_versions_of_the_modules_the_highest_is_taken(kernel: Path) -> None:
    folder = kernel.parents[1] / "lib/uml/modules"
    for version in ("6.1.99", "6.1.140"):
        shutil.copytree(folder / "6.1.0", folder / version)
    assert uml.find_kernel() == (kernel, folder / "6.1.140")


def test_a_module_that_the_kernel_refuses_is_an_error_with_the_kernels_reason(kernel: Path) -> None:
    _, folder = uml.find_kernel()
    file = folder / "kernel/net/802/stp.ko"
    file.parent.mkdir(parents=True)
    file.write_text("of another version")
    with pytest.raises(Unavailable, match=rf"refuses its module bridge \(.+\): {file}. Fetch both again: make uml"):
        uml.load_modules(["bridge"], folder)


def test_make_uml_leaves_nothing_of_an_earlier_version(tmp_path: Path) -> None:
    """A download that fails leaves the earlier one."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, line in {
        "apt-get": 'touch "user-mode-linux_$VERSION.deb" && [ $VERSION ]',
        "dpkg-deb": "mkdir $VERSION",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "a cache")}
    for version, code in (("6.1.99", 0), ("6.1.140", 0), ("", 2)):
        done = subprocess.run(["make", "uml"], cwd=ROOT, env=env | {"VERSION": version}, capture_output=True, text=True)
        assert done.returncode == code, done
    assert [path.name for path in (tmp_path / "a cache/testbed/uml").iterdir()] == ["6.1.140"]


def test_without_a_kernel_the_message_says_how_to_get_one(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.unlink()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Unavailable, match=r"no user-mode Linux \(linux.uml\) here. Install .*, or .*: make uml$"):
        uml.check(plans(2))


def test_root_is_refused(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(Unavailable, match=r"never runs as root, .* Start testbed as an ordinary user"):
        uml.check(plans(2))


def test_more_than_one_processor_can_do_is_refused(kernel: Path) -> None:
    with pytest.raises(Unavailable, match=r"9 nodes would take turns on its one processor; 8 can. Use --nodes 8"):
        uml.check(plans(9))
    with pytest.raises(Unavailable, match=r"the nodes have 1.6 CPUs together. Use e.g. --set node.cpus=0.2$"):
        uml.check(plans(4, cpus=0.4))
    uml.check(plans(4, cpus=0.2))


def test_a_large_model_is_refused_also_where_the_nodes_of_a_sweep_are_up_already() -> None:
    with pytest.raises(Unavailable, match=r"vgg11 has 9231114 parameters"):
        SUBSTRATES["uml"].check_size(RunSpec.load({"model": "vgg11"}, "test"))


def test_a_large_model_and_a_script_are_refused() -> None:
    uml.check_model(RunSpec.load({"model": "lenet5"}, "test"))
    with pytest.raises(Unavailable, match=r"vgg11 has 9231114 parameters, .* Use --model lenet5, or --on netns"):
        uml.check_model(RunSpec.load({"model": "vgg11"}, "test"))
    with pytest.raises(Unavailable, match="not scripts"):
        uml.check_model(RunSpec.load({"script": {"argv": ["python", "main.py"], "folder": "/tmp"}}, "test"))


def test_a_folder_that_the_kernel_would_hide_is_refused_before_it_exists(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uml, "HIDDEN", (tmp_path / "hidden",))
    with pytest.raises(Unavailable, match=r"hidden/runs/r is in a folder .* of its own\. Use another"):
        SUBSTRATES["uml"].make(RunSpec(), tmp_path / "hidden/runs/r")
    uml.check(plans(2))
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path / "hidden/data"))
    with pytest.raises(Unavailable, match=r"hidden/data is in a folder"):
        uml.check(plans(2))


def test_the_agent_gets_every_variable_of_the_user_whatever_its_name(tmp_path: Path) -> None:
    """A shell's `export` refuses some names and values, and then the kernel would not start."""
    given = {"été": "1", "OPTIND": "x", "A": "it's\ntwo $lines", "PATH": os.environ["PATH"]}
    shown = "import json, os; print(json.dumps([os.getcwd(), dict(os.environ)]))"
    script = uml.boot_script(given, tmp_path, [sys.executable, "-c", shown])
    begin = script.index("cd ")  # what comes before mounts file systems
    done = subprocess.run(["sh", "-c", script[begin:]], env={}, capture_output=True, check=True)
    folder, found = json.loads(done.stdout)
    assert folder == str(tmp_path) and given.items() <= found.items()


def test_ranks_know_how_large_a_users_model_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(uml.Kernel, "call", lambda self, name, **arguments: asked.append(arguments))
    uml.UmlSubstrate(plans(1)).start(0, ["python"], {"RANK": "0"}, tmp_path / "log")
    assert asked[0]["env"] == {"RANK": "0", "TESTBED_MAX_PARAMETERS": "1000000"}


def test_a_keeper_that_does_not_end_is_killed_with_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uml, "END_TIMEOUT_S", 0.1)
    deaf = "trap '' TERM; sleep 100 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", deaf], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        kernel = int(process.stdout.readline())
        uml._end(process)
    assert process.returncode == -signal.SIGKILL and start_time(kernel) is None


def test_a_keeper_that_cannot_be_killed_is_an_error_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uml, "END_TIMEOUT_S", 0.01)
    monkeypatch.setattr(uml, "KILLED_TIMEOUT_S", 0.01)
    monkeypatch.setattr(uml, "kill_until_gone", lambda find: [])
    with subprocess.Popen(["sh", "-c", "trap '' TERM; echo; exec sleep 100"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(TestbedError, match=rf"process {process.pid} .* does not end, although it was killed"):
            uml._end(process)
        process.kill()


class Nodes:
    """Answers as NetnsSubstrate does."""

    def shaping(self, node: int) -> Shaping:
        return Shaping(50, {"eth0": Bucket(50, 7, 1)}, {"eth0": 7})

    def uplinks(self) -> dict[int, Shaping]:
        return {1: Shaping(20)}

    def counts(self, node: int) -> NodeCounts:
        return NodeCounts(sent=3)

    def kill(self, node: int) -> None:
        raise Unavailable("not here. Use another")

    def stop(self) -> None:
        raise CommandFailed("ip: exit code 1", 1, "")


class Ended:
    """A process; all of them have the same pid, one after the other."""

    pid = 7

    def poll(self) -> int:
        return 3


def test_a_process_with_the_pid_of_an_earlier_one_has_a_number_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nodes, "start", lambda *arguments: Ended(), raising=False)
    agent = uml.Agent(-1, Path())
    agent._nodes, agent._writable = Nodes(), [tmp_path]
    controller = uml.Kernel(0)
    first, second = (uml.UmlProcess(controller, agent._start(0, [], {}, str(tmp_path / "log"), True)) for _ in "ab")
    controller._receive({"ended": first.pid, "code": 3})
    assert first.poll() == 3 and second.poll() is None


def asked(agent_line: int, controller_line: int, name: str, **arguments: Any) -> Any:
    """What the controller gets for a request: through the agent and the line."""
    agent = uml.Agent(agent_line, Path())
    agent._nodes = Nodes()
    agent._answer({"id": 1, "do": name, "with": arguments})
    controller = uml.Kernel(0)
    controller._requests = os.open(os.devnull, os.O_WRONLY)
    controller._receive(json.loads(os.read(controller_line, 1 << 16)))
    try:
        return controller.call(name, **arguments)
    finally:
        os.close(controller._requests)


def test_answers_of_the_agent_arrive_as_they_were() -> None:
    there, here = os.pipe()
    try:
        assert asked(here, there, "shaping", node=0) == Nodes().shaping(0)
        assert asked(here, there, "uplinks") == {1: Shaping(20)}
        assert asked(here, there, "counts", node=0) == NodeCounts(sent=3)
        with pytest.raises(Unavailable, match=r"^not here\. Use another$"):
            asked(here, there, "kill", node=0)
        with pytest.raises(TestbedError, match=r"^ip: exit code 1$"):
            asked(here, there, "stop")
        with pytest.raises(TestbedError, match=r"^agent: AttributeError"):
            asked(here, there, "unknown")
    finally:
        os.close(there)
        os.close(here)


def test_plans_arrive_as_they_were() -> None:
    wanted = plans(1, link=Link(rate=20_000_000, delay=0.05, loss=0.001), cpus=0.2, uplink=Link(rate=10_000_000))
    assert uml.PLANS.validate_python(json.loads(uml.PLANS.dump_json(wanted))) == wanted


PANIC = "Kernel panic - not syncing: no init"


@pytest.mark.parametrize(
    ("prints", "words"),
    [
        ("checking; /dev/shm must be not mounted noexec", r"did not start \(/dev/shm must be not mounted noexec\)"),
        (f"Warning; {PANIC}; Stack:; [<6002d37a>] show_stack", rf"did not start \({PANIC}\)"),
        ("", r"did not start \(it printed nothing\)"),
    ],
)
def test_a_kernel_that_dies_is_told_with_what_it_printed(kernel: Path, prints: str, words: str) -> None:
    """The keeper has removed the console's folder when the line of the kernel is found closed."""
    echo = "".join(f"echo '{line.strip()}'\n" for line in prints.split(";") if line)
    kernel.write_text(f"#!/bin/sh\n{echo}exit 1\n")
    with pytest.raises(Unavailable, match=words):
        uml.Kernel(1 << 20).__enter__()


def test_what_the_kernel_prints_at_its_end_is_told_after_it_was_ready(kernel: Path) -> None:
    ready = "line = int(re.search(r'ssl0=fd:[0-9]+,fd:([0-9]+)', ' '.join(sys.argv))[1])\n"
    ready += "os.write(line, b'{\"ready\": true}\\n')\n"
    kernel.write_text(f"#!{sys.executable}\nimport os, re, sys\n{ready}print('{PANIC}')\n")
    with uml.Kernel(1 << 20) as booted, pytest.raises(RankFailed, match=rf"did not keep running \({PANIC}\)"):
        booted.code(1, timeout_s=20)
    with pytest.raises(RankFailed):
        booted.code(1)


def test_memory_is_not_kept_in_a_folder_from_which_nothing_may_be_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [0]
    large = types.SimpleNamespace(f_bavail=1 << 30, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(**vars(large), f_flag=flags[0]))
    assert uml._memory_folder(1 << 20) == uml.SHARED_MEMORY
    flags[0] = os.ST_NOEXEC | os.ST_NOSUID
    assert uml._memory_folder(1 << 20) == Path(tempfile.gettempdir())


def test_the_keeper_removes_its_folder_if_the_kernel_ends_while_sigterm_comes(tmp_path: Path) -> None:
    """Three of eighty such ends left the folder when SIGTERM could interrupt the clean-up."""
    left = []
    for attempt in range(60):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        kernel = ["sh", "-c", f"touch {folder}/started; sleep 0.01"]
        keeper = subprocess.Popen(["sh", "-c", uml.KEEPER, str(folder), *kernel])
        while keeper.poll() is None and not (folder / "started").exists():
            time.sleep(0.001)
        time.sleep(0.01 + 0.0001 * attempt)
        keeper.terminate()
        keeper.wait(20)
        left += [attempt] if folder.exists() else []
    assert left == []
