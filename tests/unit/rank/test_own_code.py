"""A user's Python file: every way in which it can fail is a sentence with the file and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.rank.own_code import call, execute_file
from testbed.spec.errors import SpecError


def write(folder: Path, code: str) -> Path:
    path = folder / "abc-mine.py"
    path.write_text(code)
    return path


def test_a_function_is_called_with_its_arguments(tmp_path: Path) -> None:
    path = write(tmp_path, "def add(a, b):\n    return a + b\n")
    assert call(path, "add", (2, 3), "model 'x'", "mine.py") == 5


def test_a_file_is_executed_anew_each_time(tmp_path: Path) -> None:
    path = write(tmp_path, "seen = []\n")
    execute_file(path, "model 'x'").seen.append(1)
    assert execute_file(path, "model 'x'").seen == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nothing_of_that_name\n", "mine.py, line 1: ModuleNotFoundError: No module named 'nothing_of_that"),
        ("1 / 0\n", "mine.py, line 1: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "mine.py, line 2: sys.exit(3) was called"),
        ("def make():\n    return [][0]\n", "mine.py, line 2: IndexError: list index out of range"),
        ("make = 5\n", "mine.py defines no function make. Add it."),
    ],
)
def test_what_fails_is_named_with_its_line(tmp_path: Path, code: str, reason: str) -> None:
    with pytest.raises(SpecError) as refusal:
        call(write(tmp_path, code), "make", (), "model 'mine.py:make'", "mine.py")
    assert str(refusal.value).startswith(f"model 'mine.py:make': {reason}")
