"""The name of a clone's Compose project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from testbed.control.substrates.content import ROOT
from testbed.control.substrates.project import VARIABLE, project_name


def test_clones_have_different_names_where_compose_alone_would_give_them_one(tmp_path: Path) -> None:
    """Compose removes `/` and dots, and changes capitals."""
    folders = [tmp_path / path for path in ("a/bc", "ab/c", "a.b/c", "A/bc", "clone", "other/clone")]
    names = [project_name(folder) for folder in folders]
    assert len(set(names)) == len(folders)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) for name in names)
    assert names[4].startswith("testbed-clone-")


def test_two_paths_of_one_folder_have_one_name(tmp_path: Path) -> None:
    (tmp_path / "clone").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "clone")
    assert project_name(tmp_path / "link") == project_name(tmp_path / "clone")


def test_the_module_prints_the_name_without_packages_unless_the_user_has_set_one(tmp_path: Path) -> None:
    argv = [sys.executable, "-S", "-m", "testbed.control.substrates.project"]
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    run = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60}
    assert subprocess.run(argv, env=env, **run).stdout == f"{project_name(ROOT)}\n"
    assert subprocess.run(argv, env=env | {VARIABLE: "mine"}, **run).stdout == "mine\n"
