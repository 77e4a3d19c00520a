"""The lock of a folder names its holder; the lock of the machine waits. Both are free when their holder is dead."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.control.runs import locks
from testbed.control.runs.locks import LOCK_NAME, folder_lock, machine_lock, reserve_machine
from testbed.control.runs.select import SUBSTRATES, SubstrateChoice, hosts_type
from testbed.spec.errors import Interrupted, Unavailable
from testbed.spec.inventory import HostNode, Inventory

NOBODY = 65534
FOLDER_HOLDER = (
    "import sys, time; from pathlib import Path; from testbed.control.runs.locks import folder_lock\n"
    "with folder_lock(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)\n"
)
HOLDER = (
    "import os, sys, time; from pathlib import Path; from testbed.control.runs.locks import reserve_machine\n"
    "os.setuid(int(sys.argv[2])); os.umask(0o077)\n"
    "report = lambda text: print(text, file=sys.stderr, flush=True)\n"
    "with reserve_machine(report, Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(float(sys.argv[3]))\n"
)
WAITER = (  # a run as the command line starts it, with a lock of its own: the machine's may be in use
    "import signal, sys; from pathlib import Path\n"
    "from testbed.control.runs.locks import machine_lock; from testbed.control.runs.run import execute\n"
    "from testbed.control.runs.progress import Screen, open_progress; from testbed.control.runs.select import choose\n"
    "from testbed.results.folder import RunFolder; from testbed.spec.errors import TestbedError\n"
    "from testbed.spec.experiment import spec_from_flags\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "def lock(choice, report):\n"  # a line on stdout says that the wait was reported, also if the run is quiet
    "    told = lambda text: (report(text), print('reported', flush=True))\n"
    "    return machine_lock(choice, told, folders=[Path(sys.argv[1])])\n"
    "spec = spec_from_flags({'model': 'lenet5', 'data': 'synthetic', 'nodes': 2, 'batch': 8})\n"
    "progress = open_progress(Screen(stderr=True, soft_wrap=True), quiet=len(sys.argv) > 3)\n"
    "try:\n    execute(spec, choose('process', spec), RunFolder(Path(sys.argv[2])), progress, lock=lock)\n"
    "except TestbedError as error:\n    print(error, file=sys.stderr); sys.exit(error.exit_code)\n"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may write to, as /run/lock; those of pytest are not."""
    made = Path(tempfile.mkdtemp(prefix="lock-"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


@pytest.fixture(autouse=True)
def _locks_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(locks.SHARE, raising=False)


def start(*argv: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", *argv], stdout=pipe, stderr=pipe, text=True)


def line(stream: object) -> str:
    return str(stream.readline())  # type: ignore[attr-defined]


# The lock of a folder


def test_a_second_controller_is_refused_with_the_firsts_process_id_and_a_stale_lock_is_taken_over(
    tmp_path: Path,
) -> None:
    with start(FOLDER_HOLDER, str(tmp_path / "quick")) as holder:
        try:
            assert line(holder.stdout) == "held\n"
            with pytest.raises(Unavailable, match=rf"quick: in use by process {holder.pid} \(.*python.*\)\. Wait"):
                with folder_lock(tmp_path / "quick"):
                    pass
            with folder_lock(tmp_path / "other"):
                pass
        finally:
            holder.kill()
    assert (tmp_path / ".quick.lock").exists()  # as a killed controller leaves it
    with folder_lock(tmp_path / "quick"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_free_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            with folder_lock(tmp_path / "x"):
                raise RuntimeError
    assert list(tmp_path.iterdir()) == []


# The lock of the machine

USERS = [(0, NOBODY), (NOBODY, 0)] if os.geteuid() == 0 else [(os.geteuid(), os.geteuid())]


@pytest.mark.parametrize(("first", "second"), USERS)
def test_the_second_process_waits_for_the_first_of_any_user_and_a_stale_lock_is_free(
    folder: Path, first: int, second: int
) -> None:
    file = folder / "x.lock"
    with start(HOLDER, str(file), str(first), "60") as holder:
        try:
            assert line(holder.stdout) == "held\n"
            with start(HOLDER, str(file), str(second), "0") as waiter:
                words = line(waiter.stderr)
                assert words.startswith(f"waiting for process {holder.pid} ("), words
                assert words.endswith("to end; --share does not wait\n"), words
                time.sleep(0.5)
                assert waiter.poll() is None
                holder.kill()
                assert line(waiter.stdout) == "held\n"
                assert waiter.wait(20) == 0
        finally:
            holder.kill()
    with reserve_machine(print, file):  # whether the last holder could remove the file or not
        pass


def test_a_run_that_waits_can_be_interrupted_and_has_created_nothing(folder: Path) -> None:
    with start(HOLDER, str(folder / LOCK_NAME), str(os.geteuid()), "60") as holder:
        try:
            assert line(holder.stdout) == "held\n"
            with start(WAITER, str(folder), str(folder / "r")) as waiter:
                assert f"waiting for process {holder.pid} (" in line(waiter.stderr)
                waiter.send_signal(signal.SIGINT)
                assert waiter.wait(20) == Interrupted.exit_code
                assert waiter.stderr is not None
                assert (
                    waiter.stderr.read()
                    == "interrupted while waiting for another run on this machine; nothing was started\n"
                )
            assert [path.name for path in folder.iterdir()] == [LOCK_NAME]
        finally:
            holder.kill()


def test_a_quiet_run_prints_nothing_while_it_waits(folder: Path) -> None:
    with start(HOLDER, str(folder / LOCK_NAME), str(os.geteuid()), "60") as holder:
        try:
            assert line(holder.stdout) == "held\n"
            with start(WAITER, str(folder), str(folder / "r"), "quiet") as waiter:
                assert line(waiter.stdout) == "reported\n"
                waiter.send_signal(signal.SIGINT)
                assert waiter.wait(20) == Interrupted.exit_code
                assert waiter.stderr is not None
                assert (
                    waiter.stderr.read()
                    == "interrupted while waiting for another run on this machine; nothing was started\n"
                )
        finally:
            holder.kill()


def test_a_command_is_shown_without_its_interpreter_and_without_control_characters() -> None:
    script = "import time; print(1, flush=True); time.sleep(60)"
    argv = [sys.executable, "-c", script, "testbed.control", "sweep", "a\x1b[31m b.toml"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            assert locks.command_of(process.pid) == "testbed sweep 'a?[31m b.toml'"
        finally:
            process.kill()
    assert locks.command_of(process.pid) == "unknown"


def test_a_process_that_holds_the_lock_does_not_wait_for_itself_and_leaves_nothing(folder: Path) -> None:
    for _ in range(2):
        with reserve_machine(print, folder / "x.lock"), reserve_machine(print, folder / "x.lock"):
            assert (folder / "x.lock").exists()
        assert list(folder.iterdir()) == []


def test_a_symlink_or_a_pipe_is_refused(folder: Path) -> None:
    (folder / "elsewhere").write_text("")
    (folder / "link").symlink_to(folder / "elsewhere")
    os.mkfifo(folder / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(Unavailable, match=rf"{name}: .*--share"), reserve_machine(print, folder / name):
            pass
    assert (folder / "elsewhere").exists()


def test_only_substrates_that_use_this_machines_cores_take_the_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = SubstrateChoice(hosts_type(Inventory(nodes=[HostNode(name="a", address="10.0.0.1")])), "")
    local = [SubstrateChoice(SUBSTRATES[name], "") for name in ("process", "netns", "compose")]
    for choice, locked in [*((each, True) for each in local), (hosts, False)]:
        with machine_lock(choice, print, [folder]):
            assert (folder / LOCK_NAME).exists() == locked, choice.name
    with machine_lock(replace(local[0], allow_concurrent=True), print, [folder]):
        assert list(folder.iterdir()) == []
    monkeypatch.setenv("DOCKER_HOST", "ssh://elsewhere")
    with machine_lock(local[2], print, [folder]):
        assert list(folder.iterdir()) == []
    monkeypatch.setenv(locks.SHARE, "1")
    with machine_lock(local[0], print, [folder]):
        assert list(folder.iterdir()) == []
