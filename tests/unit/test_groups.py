"""A group of tests that cannot run here is skipped with the reason, and fails where CI=true."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run_without_tools(tmp_path: Path, ci: str) -> subprocess.CompletedProcess[str]:
    """One test of group net, in a pytest of its own that finds neither ip nor tc."""
    (tmp_path / "test_one.py").write_text("import pytest\n\n@pytest.mark.net\ndef test_one():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    net: needs root\n")
    env = os.environ | {"PATH": str(tmp_path), "CI": ci, "PYTHONPATH": str(TESTS)}
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-rs",
        str(tmp_path / "test_one.py"),
    ]
    return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("ci", "code", "words"), [("", 0, "1 skipped"), ("true", 1, "group net cannot run")])
def test_a_group_that_cannot_run_is_skipped_locally_and_fails_in_ci(
    tmp_path: Path, ci: str, code: int, words: str
) -> None:
    done = run_without_tools(tmp_path, ci)
    assert done.returncode == code, done.stdout
    assert words in done.stdout
    assert "ip and tc not found" in done.stdout or "only root" in done.stdout
