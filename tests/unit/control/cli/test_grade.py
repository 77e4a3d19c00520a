"""`testbed grade` on the command line: bad input is a sentence and the exit code of a usage error."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.control.cli.main import call
from testbed.spec.errors import UsageError

COURSE = Path(__file__).parents[4] / "course"
FILE, SOLUTIONS = str(COURSE / "assignment2.toml"), str(COURSE / "solutions")

BAD = {
    "no file": (["missing.toml", SOLUTIONS], "missing.toml: cannot be read"),
    "no folder": ([FILE, "missing"], "submissions 'missing': is no folder"),
    "no sandbox": ([FILE, SOLUTIONS, "--on", "process"], "--on 'process': is no sandbox"),
    "an unknown submission": ([FILE, SOLUTIONS, "--only", "ann"], "--only 'ann': is no submission. There are: model."),
    "results exist": ([FILE, SOLUTIONS, "--out", "."], "--out '.': exists"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused(
    case: tuple[list[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("testbed", ["grade", *case[0]]) == UsageError.exit_code
    assert case[1] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_given_files_that_are_missing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text((COURSE / "assignment2.toml").read_text())
    assert call("testbed", ["grade", str(tmp_path / "a.toml"), SOLUTIONS]) == UsageError.exit_code
    assert "given 'given'" in capsys.readouterr().err
