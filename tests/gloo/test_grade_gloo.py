"""`testbed grade --on process --trusted` with real ranks: a model solution and two wrong ones, without an engine."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.support.command import run_command

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(900)]
COURSE = Path(__file__).parents[2] / "course"
EXPECTED = tomllib.loads((COURSE / "wrong" / "expected.toml").read_text())


def test_solutions_get_the_points_they_should(tmp_path: Path) -> None:
    shutil.copytree(COURSE / "solutions" / "model", tmp_path / "in" / "model")
    wrong = ("sum_without_division", "gather_without_scatter")
    for name in wrong:
        shutil.copytree(COURSE / "wrong" / name, tmp_path / "in" / name)
    flags = ["--on", "process", "--trusted", "--share", "--out", "out", "--json"]
    arguments = [str(COURSE / "assignment2.toml"), str(tmp_path / "in"), *flags]
    done = run_command("grade", *arguments, cwd=tmp_path, timeout=800)
    assert done.returncode == 0, done.stderr
    results = {each["name"]: each for each in json.loads(done.stdout)["submissions"]}
    # Beside other work an order of speed cannot be shown: tests/docker has it, on a quiet machine and a shaped network.
    kept = [each for each in results["model"]["verdicts"] if each["kind"] != "speed"]
    assert [each for each in kept if not each["points"]] == []
    assert sum(each["points"] for each in kept) == 96
    for name in wrong:
        part = EXPECTED[name]["part"]
        own = [each for each in results[name]["verdicts"] if each["part"] in ("1", part)]
        assert sorted(each["kind"] for each in own if not each["points"]) == sorted(EXPECTED[name]["lost"]), own
    kinds = {each["kind"]: each["evidence"] for each in results["model"]["verdicts"] if each["part"] == "2a"}
    assert kinds["bytes"] == "records" and kinds["runs"] == "records and outside"


def test_every_wrong_solution_is_in_the_table() -> None:
    folders = {path.name for path in (COURSE / "wrong").iterdir() if path.is_dir()}
    assert folders == set(EXPECTED) and len(folders) == 8
