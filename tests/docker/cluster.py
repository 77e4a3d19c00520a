"""One Compose project in its own folder, as in a user's clone; `down` removes everything."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RANKS = [f"rank{k}" for k in range(4)]
# Small enough for a test; a test that needs the probe or the evaluation sets SET itself.
QUICK = {"MODEL": "lenet5", "DATA": "synthetic", "STEPS": "4", "SET": "probe=false evaluate=never"}
TIMEOUT_S = 200.0  # a busy machine takes a minute to import torch four times


class Cluster:
    """The files of a clone, and the commands that a user types."""

    def __init__(self, folder: Path, owner: int = 0) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        for path in (self.runs, folder / "data"):
            path.mkdir(parents=True)
            os.chown(path, owner, owner)
        os.chown(folder, owner, owner)
        folder.chmod(0o755)
        shutil.copyfile(ROOT / "compose.yaml", folder / "compose.yaml")
        for name in ("testbed", "docker"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        self._started: list[subprocess.Popen[str]] = []

    def compose(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `docker compose` to its end."""
        command = ["docker", "compose", "--ansi", "never", *argv]
        whole = self._environment(env)
        return subprocess.run(command, cwd=self.folder, env=whole, capture_output=True, text=True, timeout=TIMEOUT_S)

    def _environment(self, env: dict[str, str]) -> dict[str, str]:
        """A shell sets PWD; a process with `cwd` inherits that of the caller."""
        return {**os.environ, **QUICK, "PWD": str(self.folder), **env}

    def project(self) -> str:
        """The name of the Compose project."""
        return str(json.loads(self.compose("config", "--format", "json").stdout)["name"])

    def up(self, *argv: str, **env: str) -> str:
        """Run `docker compose up` to its end and return all output."""
        done = self.compose("up", "--no-build", *argv, **env)
        return done.stdout + done.stderr

    def start(self, *argv: str, **env: str) -> subprocess.Popen[str]:
        """Start `docker compose up` in a session of its own, for `interrupt`."""
        up = subprocess.Popen(
            ["docker", "compose", "--ansi", "never", "up", "--no-build", *argv],
            cwd=self.folder,
            env=self._environment(env),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        self._started.append(up)
        return up

    def interrupt(self, up: subprocess.Popen[str]) -> None:
        """Send SIGINT, as Ctrl-C does, and wait until everything has ended."""
        up.send_signal(signal.SIGINT)
        up.wait(60)

    def codes(self) -> dict[str, int]:
        """Each container's exit code, once all have ended."""

        def rows() -> list[dict[str, Any]]:
            lines = self.compose("ps", "--all", "--format", "json").stdout.splitlines()
            return [json.loads(line) for line in lines]

        wait_for(lambda: all(row["State"] == "exited" for row in rows()), "all containers to end")
        return {row["Service"]: row["ExitCode"] for row in rows()}

    def folders(self) -> list[Path]:
        return sorted((self.runs / "compose").glob("*"))

    def steps(self, rank: int) -> int:
        """How many steps a rank of the newest run has recorded."""
        files = [folder / f"rank{rank}.jsonl" for folder in self.folders()[-1:]]
        return sum(path.read_text().count('"kind":"step"') for path in files if path.exists())

    def down(self) -> None:
        """Remove the project, and wait for every `docker compose up`, which ends with its containers."""
        self.compose("down", "--volumes", "--timeout", "1")
        for up in self._started:
            up.wait(60)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.5)


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found
