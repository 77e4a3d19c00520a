"""The examples run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gloo
def test_compare_modes_prints_every_mode_and_the_fastest(repository: Path, tmp_path: Path) -> None:
    argv = [sys.executable, str(repository / "examples" / "compare_modes.py"), "--on", "process", "--steps", "4"]
    env = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for mode in ("gather", "ring", "ddp"):
        assert sum(line.startswith(mode) for line in done.stdout.splitlines()) == 2, done.stdout
    assert "fastest: " in done.stdout
    assert {path.name for path in (tmp_path / "runs" / "compare-modes").iterdir()} >= {"gather", "ring", "ddp"}
