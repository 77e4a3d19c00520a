"""One measurement at a time on this machine: the second waits, whoever it belongs to, and never through a link."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.control.runs import locks, select
from testbed.control.runs.locks import alone, reserved
from testbed.spec.errors import Unavailable
from testbed.spec.inventory import HostNode, Inventory

NOBODY = 65534
HOLDER = (
    "import os, sys, time; from pathlib import Path; from testbed.control.runs.locks import reserved\n"
    "os.setuid(int(sys.argv[2])); os.umask(0o077)\n"
    "with reserved(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(float(sys.argv[3]))\n"
)
COMMAND = (  # the command itself, with a lock of its own: the machine's may be in use
    "import sys; from pathlib import Path\n"
    "from testbed.control.cli.main import main; from testbed.control.runs import locks\n"
    "locks.FOLDERS = (Path(sys.argv.pop(1)),)\nmain()\n"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """As open to all as the system's own, which pytest's are not."""
    made = Path(tempfile.mkdtemp(prefix="lock-"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


@pytest.fixture(autouse=True)
def _nobody_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(locks.SHARE, raising=False)


def start(*argv: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", *argv], stdout=pipe, stderr=pipe, text=True)


def line(stream: object) -> str:
    return str(stream.readline())  # type: ignore[attr-defined]


USERS = [(0, NOBODY), (NOBODY, 0)] if os.geteuid() == 0 else [(os.geteuid(), os.geteuid())]


@pytest.mark.parametrize(("first", "second"), USERS)
def test_the_second_waits_for_the_first_whosever_it_is_and_a_dead_ones_lock_is_free(
    folder: Path, first: int, second: int
) -> None:
    file = folder / "x.lock"
    with start(HOLDER, str(file), str(first), "60") as holder:
        try:
            assert line(holder.stdout) == "held\n"
            with start(HOLDER, str(file), str(second), "0") as waiter:
                words = line(waiter.stderr)
                assert words.startswith(f"  waiting for process {holder.pid} ("), words
                assert words.endswith("to end; --share measures beside it\n"), words
                time.sleep(0.5)
                assert waiter.poll() is None
                holder.kill()
                assert line(waiter.stdout) == "held\n"
                assert waiter.wait(20) == 0
        finally:
            holder.kill()
    with reserved(file):  # whether the last one could remove it or not
        pass


def test_who_waits_can_be_stopped_and_is_told_the_command(folder: Path) -> None:
    run = ["run", "--model", "lenet5", "--data", "synthetic", "--on", "process", "--nodes", "2", "--batch", "8"]
    with start(HOLDER, str(folder / locks.NAME), str(os.geteuid()), "60") as holder:
        try:
            assert line(holder.stdout) == "held\n"
            with start(COMMAND, str(folder), *run, "--out", str(folder / "r")) as waiter:
                assert f"waiting for process {holder.pid} (" in line(waiter.stderr)
                waiter.send_signal(signal.SIGINT)
                assert waiter.wait(20) == 130
                assert waiter.stderr is not None
                assert waiter.stderr.read() == "testbed: interrupted while waiting; nothing was begun\n"
            assert [path.name for path in folder.iterdir()] == [locks.NAME]
        finally:
            holder.kill()


def test_a_command_is_named_without_its_interpreter_and_without_what_does_not_print() -> None:
    script = "import time; print(1, flush=True); time.sleep(60)"
    argv = [sys.executable, "-c", script, "testbed.control", "sweep", "a\x1b[31m b.toml"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            assert locks._command(process.pid) == "testbed sweep 'a?[31m b.toml'"
        finally:
            process.kill()
    assert locks._command(process.pid) == "unknown"


def test_a_process_that_has_it_does_not_wait_for_itself_and_nothing_is_left(folder: Path) -> None:
    for _ in range(2):
        with reserved(folder / "x.lock"), reserved(folder / "x.lock"):
            assert (folder / "x.lock").exists()
        assert list(folder.iterdir()) == []


def test_what_is_no_plain_file_is_refused(folder: Path) -> None:
    (folder / "elsewhere").write_text("")
    (folder / "link").symlink_to(folder / "elsewhere")
    os.mkfifo(folder / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(Unavailable, match=rf"{name}: .*--share"), reserved(folder / name):
            pass
    assert (folder / "elsewhere").exists()


def test_only_places_on_this_machines_cores_wait_and_only_unless_shared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "FOLDERS", (folder,))
    hosts = select.Hosts("hosts", "", False, Inventory(nodes=[HostNode(name="a", address="10.0.0.1")]))
    local = [select.Place(name, "", True) for name in ("process", "netns", "compose")]
    for where, waits in [*((each, True) for each in local), (hosts, False)]:
        with alone(where):
            assert (folder / locks.NAME).exists() == waits, where.name
    with alone(select.Place("process", "", False, beside=True)):
        assert list(folder.iterdir()) == []
    monkeypatch.setenv("DOCKER_HOST", "ssh://elsewhere")
    with alone(local[2]):
        assert list(folder.iterdir()) == []
    monkeypatch.setenv(locks.SHARE, "1")
    with alone(local[0]):
        assert list(folder.iterdir()) == []
