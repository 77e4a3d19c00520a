"""The `testbed` command as a user types it, its rank processes, and the browser."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "testbed.control"]
OWN_METHOD = """
import torch.distributed as dist

def mean_(buffer, group):
    dist.all_reduce(buffer)
    buffer.div_(group.size)
"""


def write_method(folder: Path) -> str:
    """Make methods/my_way.py in this folder, the method of a user's own; return the name of its mode."""
    (folder / "methods").mkdir()
    (folder / "methods" / "my_way.py").write_text(OWN_METHOD)
    return "my-way"


def run_command(*arguments: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `testbed ...` and wait until it has ended."""
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout)


def start_command(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start `testbed ...` and return while it runs."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *arguments], cwd=cwd, stdout=pipe, stderr=pipe, text=True)


def wait_for_steps(folder: Path, rank: int, steps: int, seconds: float = 120) -> None:
    """Wait until a rank has recorded so many steps; fail after `seconds`."""
    end = time.monotonic() + seconds
    path = folder / f"rank{rank}.jsonl"
    while time.monotonic() < end:
        if path.exists() and path.read_text().count('"kind":"step"') >= steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} did not record {steps} steps within {seconds} s")


def rank_pids(folder: Path) -> list[int]:
    """Return the rank processes whose command line contains this run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if b"testbed.rank" in command and str(folder).encode() in command:
            found.append(int(entry.name))
    return found


def chromium() -> str | None:
    """Return the path of the browser, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
