"""A group of tests that cannot run here is skipped with the reason and fails if CI=true; workers share the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import GROUPS

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


def test_only_a_test_marked_quiet_samples_the_machine_and_its_failure_says_how_busy_it_was(tmp_path: Path) -> None:
    test = "import pytest\n\n@pytest.mark.quiet\ndef test_one():\n    assert 0\n\ndef test_two():\n    assert 0\n"
    (tmp_path / "test_one.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    quiet: measures\n")
    done = run_pytest(str(tmp_path / "test_one.py"), cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(TESTS.parent)})
    assert "2 failed" in done.stdout
    assert done.stdout.count("of the processors were in use before this test") == 1


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_is_in_the_table_for_contributors(group: str) -> None:
    assert f"| `tests/{group}` |" in (TESTS.parent / "CONTRIBUTING.md").read_text()


WRITES_ITS_WORKER = """
import os, time
from pathlib import Path
import pytest

{mark}
def test_one():
    began = time.monotonic()
    time.sleep(0.1)
    text = f"{{os.environ['PYTEST_XDIST_WORKER']}} {{began}} {{time.monotonic()}}"
    Path(__file__).with_suffix(".worker").write_text(text)
"""
FILES = {  # file: its mark
    "hosts/test_a.py": "",
    "hosts/test_b.py": "",
    "gloo/test_algorithms.py": "",
    "gloo/test_training.py": "",
    "net/test_a.py": "@pytest.mark.quiet",
    "net/test_b.py": "",
    "docker/test_a.py": "",
    "docker/test_b.py": "@pytest.mark.quiet",
    "unit/test_a.py": "",
}


def test_workers_keep_together_what_shares_a_start_and_quiet_files_run_alone(tmp_path: Path) -> None:
    """All files of hosts/ go to one worker, and those of gloo/ that use pools; file names may repeat."""
    markers = "markers =\n    quiet: alone\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = --import-mode=importlib\n{markers}")
    for name, mark in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(WRITES_ITS_WORKER.format(mark=mark))
    env = os.environ | {"PYTHONPATH": str(TESTS.parent), "TMPDIR": str(tmp_path)}  # with lock files of its own
    done = run_pytest("-n", "3", "-q", str(tmp_path), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "minutes by folder" in done.stdout and done.stdout.count("  0.0  hosts/") == 2
    found = {name: (tmp_path / name).with_suffix(".worker").read_text().split() for name in FILES}
    assert found["hosts/test_a.py"][0] == found["hosts/test_b.py"][0]
    assert found["gloo/test_algorithms.py"][0] == found["gloo/test_training.py"][0]
    spans = {name: (float(began), float(ended)) for name, (_, began, ended) in found.items()}
    for name in (name for name, mark in FILES.items() if mark):
        others = [span for other, span in spans.items() if other != name]
        assert all(ended <= spans[name][0] or began >= spans[name][1] for began, ended in others), spans
        own = [other for other, mark in FILES.items() if found[other][0] == found[name][0] and not mark]
        assert all(spans[other][1] <= spans[name][0] for other in own), "a worker begins with what is not quiet"
