"""`make repeat`: results are appended and counted; those of the same commit are not made again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import repeat
from tests.support import provenance
from tests.support.provenance import DIRTY

GREEN = {"code": 0, "failed": [], "tests": 3, "skipped": 1, "seconds": 90}
RED = GREEN | {"code": 1, "failed": ["tests.a.test_b"]}


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`repeated("abc", [GREEN, RED], "--times", "2")`: the exit code, and of each run whether a core was kept busy."""

    def call(commit: str, results: list[dict[str, Any]], *argv: str) -> tuple[int, list[bool]]:
        beside: list[bool] = []
        coming = iter(results)

        def run(arguments: list[str], busy: bool) -> dict[str, Any]:
            beside.append(busy)
            return next(coming) | {"commit": commit, "arguments": arguments}

        monkeypatch.setattr(repeat, "run", run)
        monkeypatch.setattr(repeat, "code_commit", lambda *_: commit)
        monkeypatch.setattr(repeat, "RESULTS", tmp_path / "repeat.jsonl")
        monkeypatch.setattr(sys, "argv", ["repeat", *argv])
        return repeat.main(), beside

    return call


def test_it_resumes_and_every_second_run_is_beside_a_busy_core(repeated: Any, tmp_path: Path) -> None:
    assert repeated("abc", [GREEN] * 3, "--times", "3") == (0, [False, True, False])
    assert repeated("abc", [GREEN], "--times", "4") == (0, [True])
    assert repeated("abc", [], "--times", "4") == (0, [])
    assert repeated("abc", [GREEN], "--times", "1", "tests/unit") == (0, [False])
    assert repeated("def", [GREEN], "--times", "1") == (0, [False])
    assert len((tmp_path / "repeat.jsonl").read_text().splitlines()) == 6


def test_one_red_result_is_enough_and_is_never_forgotten(repeated: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert repeated("abc", [GREEN, RED], "--times", "2")[0] == 1
    assert "1 of 2 green at abc" in capsys.readouterr().out
    assert repeated("abc", [GREEN], "--times", "3")[0] == 1
    assert "  1 times: tests.a.test_b" in capsys.readouterr().out


def test_results_of_a_tree_with_changes_do_not_count(repeated: Any) -> None:
    for _ in range(2):
        assert repeated("abc" + DIRTY, [GREEN], "--times", "1") == (0, [False])


def test_outcomes_are_read_from_a_real_run_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert False\n"
        "@pytest.mark.skip\ndef test_later(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError\ndef test_error(broken): pass\n"
    )
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=junit.xml", "--rootdir=."]
    code = subprocess.run(argv, cwd=tmp_path, capture_output=True, check=False, timeout=60).returncode
    found = repeat.outcomes(tmp_path / "junit.xml")
    assert (found["tests"], found["skipped"]) == (4, 1)
    assert sorted(name.rpartition(".")[2] for name in found["failed"]) == ["test_bad", "test_error"]
    assert not repeat.green({"code": code, **found})
    assert "RED, exit code 1: " in repeat.sentence({"code": code, "seconds": 60, **found})


def test_the_busy_core_is_over_with_the_run() -> None:
    with repeat.busy_core():
        pass  # leaving waits for the process


def test_every_result_that_is_kept_can_be_read() -> None:
    for result in repeat.read(repeat.RESULTS):
        assert {"commit", "load", "beside", "seconds", "code", "tests", "failed"} <= result.keys(), json.dumps(result)


def test_a_change_of_any_file_but_the_results_themselves_asks_for_new_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    argv = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run([*argv, "init", "-q"], check=True)
    commits = []
    for name in ("README.md", "Makefile", "results/bench.json", "results/repeat.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a line\n")
        subprocess.run([*argv, "add", "-A"], check=True)
        subprocess.run([*argv, "commit", "-qm", name], check=True)
        commits.append(provenance.code_commit(*repeat.TESTED))
    (tmp_path / "results" / "repeat.jsonl").write_text("another line\n")
    assert len(set(commits)) == 3 and commits[2] == commits[3] == provenance.code_commit(*repeat.TESTED)
    (tmp_path / "README.md").write_text("changed\n")
    assert provenance.code_commit(*repeat.TESTED) == commits[3] + DIRTY
