"""The content hash covers what is in the image or builds it, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from testbed.control.substrates.clone import (
    BUILD_FILES,
    VARIABLE,
    content_hash,
    copied_paths,
    image_files,
    project_name,
)
from testbed.spec.errors import Unavailable

ROOT = Path(__file__).parents[4]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("testbed", "docker"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    return tmp_path


def changed(root: Path, name: str) -> bool:
    """Return True if the hash changes with this file."""
    before = content_hash(root)
    (root / name).parent.mkdir(exist_ok=True)
    with (root / name).open("a") as file:
        file.write("\n# another word\n")
    return content_hash(root) != before


@pytest.mark.parametrize(
    "name",
    [
        "testbed/report/findings.py",
        "testbed/report/page.css",
        "testbed/control/cli/main.py",
        "testbed/control/substrates/compose.py",
        "testbed/rank/__pycache__/train.cpython-311.pyc",
        "testbed/rank/.train.py.swp",
        "docker/render.py",
        "docker/image.sh",
    ],
)
def test_a_file_outside_the_image_does_not_change_the_hash(clone: Path, name: str) -> None:
    assert not changed(clone, name)


@pytest.mark.parametrize(
    "name",
    [
        "testbed/__init__.py",
        "testbed/spec/run.py",
        "testbed/net/shaping.py",
        "testbed/data/fetch.py",
        "testbed/rank/sync/schedules.py",
        "testbed/rank/table.json",
        "docker/entrypoint.py",
        *BUILD_FILES,
    ],
)
def test_a_file_of_the_image_or_of_its_build_changes_the_hash(clone: Path, name: str) -> None:
    assert changed(clone, name)


def test_the_image_has_what_a_rank_needs() -> None:
    rooms = [f"testbed/{room}" for room in ("spec", "results", "net", "data", "rank", "attach")]
    assert copied_paths(ROOT) == ["testbed/__init__.py", *rooms, "docker/entrypoint.py"]


def test_every_copy_into_the_image_is_seen_by_the_hash() -> None:
    """One source and its target on a line, no flags, no ADD; the wheels are those of packages.txt."""
    lines = re.findall(r"^\s*(?:COPY|ADD)\b.*", DOCKERFILE, re.MULTILINE | re.IGNORECASE)
    assert [line.split()[:-1] for line in lines] == [["COPY", name] for name in copied_paths(ROOT)]
    assert set(re.findall(r"source=([^,\s]+)", DOCKERFILE)) <= {"wheels", *BUILD_FILES}


def test_the_files_of_the_image_need_no_others(tmp_path: Path) -> None:
    """As in the container: the process of the entrypoint that fetches a data set."""
    for path in image_files(ROOT):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    argv = [sys.executable, "-S", "docker/entrypoint.py", "--fetch", "synthetic"]  # -S: no editable installs
    packages = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *packages])}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "synthetic: generated on the fly, nothing to fetch\n", done.stderr


def test_without_the_files_of_a_clone_it_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"has no folder docker/.+Use the `testbed` of a clone"):
        content_hash(tmp_path)


def test_a_python_without_packages_can_compute_it() -> None:
    """docker/image.sh runs it before a virtual environment exists."""
    argv = [sys.executable, "-S", "-m", "testbed.control.substrates.clone", "image"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{content_hash(ROOT)}\n"


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
    argv = [sys.executable, "-S", "-m", "testbed.control.substrates.clone", "project"]
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    run = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60}
    assert subprocess.run(argv, env=env, **run).stdout == f"{project_name(ROOT)}\n"
    assert subprocess.run(argv, env=env | {VARIABLE: "mine"}, **run).stdout == "mine\n"
