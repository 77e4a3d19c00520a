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


def test_a_rank_blocks_the_signal_in_all_threads() -> None:
    """numpy starts threads when it is imported. The signal would end the process in one that does not block it."""
    code = """
import testbed.rank.__main__
from pathlib import Path
for status in Path("/proc/self/task").glob("*/status"):
    print(next(line for line in status.read_text().splitlines() if line.startswith("SigBlk")).split()[1])
"""
    variables = {quota_signal.VARIABLE: "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    masks = [int(word, 16) for word in done.stdout.split()]
    assert masks and all(mask >> (quota_signal.SIGNAL - 1) & 1 for mask in masks)
