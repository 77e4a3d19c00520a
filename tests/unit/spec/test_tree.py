"""What of a folder is copied for every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.spec.errors import UsageError
from testbed.spec.tree import check_tree, walk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in {"main.py": 10, "data/a": 3000, "data/b": 3000, ".git/x": 10**6, "src/__pycache__/y": 9}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    return tmp_path


def test_what_nobody_needs_is_left_out(folder: Path) -> None:
    assert sorted(relative for _, relative in walk(folder, [])) == ["data", "data/a", "data/b", "main.py", "src"]
    assert sorted(relative for _, relative in walk(folder, ["data", "*.py"])) == ["src"]
    assert "data/a" not in [relative for _, relative in walk(folder, ["data/a"])]


def test_a_folder_that_is_too_large_is_refused_with_its_size(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"6\.0 kB in 3 files \(data 6\.0 kB.*at most 5\.0 kB.*--exclude data"):
        check_tree(folder, max_bytes=5000)
    with pytest.raises(UsageError, match="in 3 files"):
        check_tree(folder, max_files=2)
    check_tree(folder, ["data"], max_bytes=5000)
