"""Folders that a script has written to: of any depth, with links, without permissions."""

from __future__ import annotations

import os
from pathlib import Path

from testbed.spec.file_tree import entries_below, remove_tree
from tests.support.deep import make_deep_folder


def test_entries_are_sorted_and_links_are_not_followed(tmp_path: Path) -> None:
    for name in ("a", "b", ".git"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    found = [os.path.relpath(entry.path, tmp_path) for entry in entries_below(tmp_path, leave_out=(".g*",))]
    assert found[:3] == ["a", "b", "link"] and sorted(found[3:]) == ["a/file", "b/file"]
    assert list(entries_below(tmp_path / "missing")) == []


def test_a_folder_of_any_depth_is_listed_and_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    make_deep_folder(top)
    assert [entry.name for entry in entries_below(top)][-1] == "file"
    remove_tree(top)
    assert not top.exists()


def test_what_links_lead_to_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o500)
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "top" / "closed").mkdir(mode=0)
    remove_tree(tmp_path / "top")
    assert not (tmp_path / "top").exists()
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o500
    remove_tree(tmp_path / "top")  # again: nothing to do
