"""Commands that run to their end, and signals."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from testbed.control.machine.processes import kill_until_gone, run, send, start_time
from testbed.spec.errors import CommandFailed


def test_run_returns_stdout() -> None:
    assert run(["echo", "hello"], 10) == "hello\n"


def test_a_failure_has_the_command_its_code_and_stderr() -> None:
    with pytest.raises(CommandFailed, match=r"sh -c .*: exit code 3: no luck") as failure:
        run(["sh", "-c", "echo no luck >&2; exit 3"], 10)
    assert (failure.value.code, failure.value.output) == (3, "no luck")


def test_a_timeout_ends_the_command_with_all_its_children() -> None:
    began = time.monotonic()
    with pytest.raises(CommandFailed, match=r"not finished after 0\.2 s") as failure:
        run(["sh", "-c", "sleep 60 & sleep 60"], 0.2)
    assert time.monotonic() - began < 30 and failure.value.code == 124


def test_ctrl_c_stays_ctrl_c_if_the_command_ends_at_the_same_moment() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(["sh", "-c", f"kill -INT {os.getpid()}"], 10)


def test_a_process_that_has_ended_has_no_start_time_and_takes_no_signal() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert start_time(child.pid) is not None
    assert kill_until_gone(lambda: [child.pid] if start_time(child.pid) else []) == [child.pid]
    assert start_time(child.pid) is None, "a zombie counts as ended"
    child.wait(10)
    send([child.pid], 15)
