"""The image with a script's packages. Real builds: tests/docker/test_exec_docker.py."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from testbed.control.substrates.clone import ROOT
from testbed.control.substrates.layer import DOCKERFILE, kept_layers, pip_error


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            [
                "ERROR: Cannot install torch==2.1.0 because these package versions have conflicting dependencies.",
                "ERROR: ResolutionImpossible: for help visit https://example.invalid",
            ],
            "Cannot install torch==2.1.0 beside the packages of the image, which keep their versions",
        ),
        (
            ["ERROR: Could not find a version", "noise", "ERROR: No matching distribution found for x"],
            "No matching distribution found for x",
        ),
        (["0.4 ERROR: Invalid requirement: '=='"], "Invalid requirement: '=='"),
        (["no word of an error"], ""),
    ],
)
def test_pip_is_quoted_with_one_sentence(lines: list[str], sentence: str) -> None:
    assert pip_error(lines) == sentence


def test_the_build_uses_the_wheels_alone() -> None:
    assert "--no-index --find-links /layer/wheels" in DOCKERFILE


def test_wheels_of_a_file_are_those_that_the_image_lacks_and_pip(tmp_path: Path) -> None:
    """docker/wheels.sh with a Python that makes files instead of a download; wheels/ is up to date."""
    (tmp_path / "docker").mkdir()
    for name in ("wheels.sh", "torch.sh", "packages.txt"):
        shutil.copy(ROOT / "docker" / name, tmp_path / "docker" / name)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "numpy-2.whl").touch()
    digest = subprocess.run(["sha256sum"], input=(tmp_path / "docker/packages.txt").read_bytes(), capture_output=True)
    (tmp_path / "wheels" / ".ready").write_bytes(digest.stdout)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/log\nwhile [ $# -gt 0 ]; do [ "$1" = --dest ] && to=$2; shift; done\n'
        '[ -z "$to" ] || { mkdir -p "$to"; touch "$to/numpy-2.whl" "$to/tqdm-4.whl" "$to/pip-26.whl"; }\n'
    )
    python.chmod(0o755)
    (tmp_path / "r.txt").write_text("tqdm\nnumpy\n")
    argv = [str(tmp_path / "docker/wheels.sh"), "r.txt", str(tmp_path / "out")]
    subprocess.run(argv, cwd=tmp_path, env=os.environ | {"PYTHON": str(python)}, check=True, capture_output=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["pip.whl", "tqdm-4.whl"]
    command = (tmp_path / "log").read_text().splitlines()[-2]
    assert "--constraint docker/packages.txt" in command and f"--requirement {tmp_path}/r.txt" in command
    assert "--python-version 3.11" in command and "--only-binary :all:" in command


def test_wheels_are_removed_with_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    wheels = tmp_path / "testbed" / "wheels-0123"
    wheels.mkdir(parents=True)
    assert kept_layers(everything=False) == []
    (found,) = kept_layers(everything=True)
    assert str(found) == f"folder {wheels}" and "--requirements makes it again" in found.why()
    found.remove()
    assert not wheels.exists()
