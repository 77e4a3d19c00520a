"""The `testbed` command as a user types it, and its rank processes as the system sees them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "testbed.control"]


def run_command(*arguments: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """To its end."""
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout)


def start_command(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """To be interrupted."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *arguments], cwd=cwd, stdout=pipe, stderr=pipe, text=True)


def wait_for_steps(folder: Path, rank: int, steps: int, seconds: float = 120) -> None:
    """Until a rank has recorded so many steps."""
    end = time.monotonic() + seconds
    path = folder / f"rank{rank}.jsonl"
    while time.monotonic() < end:
        if path.exists() and path.read_text().count('"kind":"step"') >= steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} made no {steps} steps within {seconds} s")


def ranks_of(folder: Path) -> list[int]:
    """Processes whose command line names this run folder as a rank's."""
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
    """Where the browser is."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
