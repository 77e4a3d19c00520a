"""A rank waits for the signal that its quota applies."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from testbed.spec import quota_signal

RANK = """
import sys, threading, time
from testbed.spec import quota_signal
quota_signal.block()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("ready", flush=True)
print(quota_signal.wait(float(sys.argv[1])))
"""


def start(timeout_s: float, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(timeout_s)], env=variables, stdout=subprocess.PIPE, text=True
    )


def test_it_waits_until_the_signal_comes_and_the_signal_ends_nothing() -> None:
    rank = start(60, **{quota_signal.VARIABLE: "1"})
    assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    rank.send_signal(signal.SIGUSR2)
    assert rank.communicate(timeout=20)[0] == "True\n" and rank.returncode == 0


def test_without_a_signal_it_says_so_after_the_time() -> None:
    assert start(0.1, **{quota_signal.VARIABLE: "1"}).communicate(timeout=20)[0] == "ready\nFalse\n"


def test_without_a_quota_it_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(quota_signal.VARIABLE, raising=False)
    assert quota_signal.wait(60)
