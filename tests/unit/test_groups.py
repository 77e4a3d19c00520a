"""A group of tests that cannot run here is skipped with the reason and fails if CI=true; two workers share the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run_without_tools(tmp_path: Path, ci: str) -> subprocess.CompletedProcess[str]:
    """Run one test of group net in a separate pytest whose PATH has neither ip nor tc."""
    (tmp_path / "test_one.py").write_text("import pytest\n\n@pytest.mark.net\ndef test_one():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    net: needs root\n")
    env = os.environ | {"PATH": str(tmp_path), "CI": ci, "PYTHONPATH": str(TESTS.parent)}
    return run_pytest("-rs", str(tmp_path / "test_one.py"), cwd=tmp_path, env=env)


def run_pytest(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a separate pytest with the groups of this project."""
    argv = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("ci", "code", "words"), [("", 0, "1 skipped"), ("true", 1, "group net cannot run")])
def test_a_group_that_cannot_run_is_skipped_locally_and_fails_in_ci(
    tmp_path: Path, ci: str, code: int, words: str
) -> None:
    done = run_without_tools(tmp_path, ci)
    assert done.returncode == code, done.stdout
    assert words in done.stdout
    assert "ip and tc not found" in done.stdout or "need root" in done.stdout


WRITES_ITS_WORKER = """
import os
from pathlib import Path

def test_one():
    Path(__file__).with_suffix(".worker").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


def test_two_workers_keep_ranks_and_the_engine_apart(tmp_path: Path) -> None:
    """Files of gloo/ and net/ go to one worker, files of docker/ and hosts/ to the other; file names may repeat."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for folder in ("gloo", "net", "docker", "hosts"):
        (tmp_path / folder).mkdir()
        for name in ("test_a.py", "test_b.py"):
            (tmp_path / folder / name).write_text(WRITES_ITS_WORKER)
    env = os.environ | {"PYTHONPATH": str(TESTS.parent), "TMPDIR": str(tmp_path)}  # with lock files of its own
    done = run_pytest("-n", "2", "-q", str(tmp_path), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    workers = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.glob("*/*.worker")}
    assert len(workers) == 8
    ranks = {worker for path, worker in workers.items() if path.parts[0] in ("gloo", "net")}
    engine = {worker for path, worker in workers.items() if path.parts[0] in ("docker", "hosts")}
    assert len(ranks) == len(engine) == 1 and ranks != engine, workers
