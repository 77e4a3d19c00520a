"""The descendants of a process are found and ended, in whatever session they are."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from testbed.spec.process_tree import descendants, end_descendants

PARENT = """
import subprocess, sys, time
from testbed.spec.process_tree import become_subreaper
become_subreaper()
# the middle process ends: its child, in a session of its own, is an orphan then
middle = 'import subprocess; subprocess.Popen(["sleep", "600"], start_new_session=True)'
subprocess.run([sys.executable, "-c", middle], check=True)
print("ready", flush=True)
time.sleep(600)
"""


def test_an_orphan_in_another_session_is_found_and_ended() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        (orphan,) = descendants(parent.pid)
        assert os.getsid(orphan) == orphan
        assert parent.pid in descendants(os.getpid())
        assert end_descendants(parent.pid, grace_s=5.0) == []  # SIGTERM was enough
        assert descendants(parent.pid) == []
    finally:
        parent.kill()
        parent.communicate()


def test_what_ignores_sigterm_is_killed() -> None:
    ignores = 'trap "" TERM; echo ready; while true; do sleep 1; done'
    parent = subprocess.Popen(["sh", "-c", f"sh -c '{ignores}' & wait"], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        assert end_descendants(parent.pid, grace_s=0.2)
        deadline = time.monotonic() + 10
        while descendants(parent.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert descendants(parent.pid) == []
    finally:
        parent.kill()
        parent.communicate()
