"""docker/engine.sh, base.sh and image.sh without a terminal: what they ask for, and what they say that they do.

The scripts are copies in a folder of the test. The commands that they call are scripts there too, which record their
arguments.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "sh", "env", "awk", "sed", "cat", "dirname", "timeout", "mktemp", "rm", "tail", "sleep")
BOOKWORM = 'case "$1" in indextargets) echo "http://mirror.invalid/debian bookworm" ;; esac'
BASE = "testbed-base:bookworm"


class Machine:
    """A clone's docker/ and the commands that its scripts find."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands = folder / "bin"
        self.commands.mkdir()
        self.log = folder / "log"
        self.log.touch()
        (folder / "docker").mkdir()
        for name in ("engine.sh", "base.sh", "image.sh"):
            shutil.copy(ROOT / "docker" / name, folder / "docker" / name)
        for tool in TOOLS:
            (self.commands / tool).symlink_to(str(shutil.which(tool)))

    def add(self, name: str, body: str = "") -> None:
        """Add a command that records its arguments and then runs `body`; a path with a slash is in the clone."""
        path = self.folder / name if "/" in name else self.commands / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.log}"\n{body}\n')
        path.chmod(0o755)

    def add_engine(self, *images: str, compose: str = "2.16.0") -> None:
        """Add an engine with these images and without a registry, and what else image.sh needs."""
        known = f"compose*version*) echo {compose} ;; " + "".join(f"*inspect*{image}*) exit 0 ;; " for image in images)
        self.add("docker", f'case "$*" in {known} *inspect*|pull*) exit 1 ;; esac')
        self.add("python3", "echo c0ffee")
        self.add("docker/wheels.sh")

    def run(self, name: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script of docker/ without a terminal."""
        command = [str(self.folder / "docker" / name), *argv]
        null, env = subprocess.DEVNULL, {"PATH": str(self.commands), "TMPDIR": str(self.folder)} | variables
        return subprocess.run(command, env=env, stdin=null, capture_output=True, text=True, timeout=60)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_terminal_engine_names_the_packages_and_the_command_that_installs_them(machine: Machine) -> None:
    done = machine.run("engine.sh")
    assert done.returncode == 2 and "make engine ARGS=-y" in done.stderr
    assert "missing packages: docker.io iptables docker-compose docker-buildx." in done.stderr


def test_engine_with_y_installs_without_a_question(machine: Machine) -> None:
    machine.add("apt-get")  # prints no source, so the script cannot write one for this machine's own apt
    done = machine.run("engine.sh", "-y", ENGINE_FOLDER=str(machine.folder))
    assert done.returncode == 2 and "There is no terminal" not in done.stderr
    if os.geteuid() != 0:
        assert "sudo make engine ARGS=-y" in done.stderr
    else:
        assert "no apt source for bookworm" in done.stderr or " install -y " in machine.log.read_text()


def test_engine_names_only_what_is_missing(machine: Machine) -> None:
    for name in ("docker", "dockerd"):
        machine.add(name)
    done = machine.run("engine.sh")
    assert done.returncode == 2 and "missing packages: iptables." in done.stderr


def test_without_a_terminal_image_names_the_package_and_the_command_and_makes_no_base(machine: Machine) -> None:
    machine.add_engine()
    machine.add("apt-get", BOOKWORM)
    done = machine.run("image.sh")
    assert done.returncode == 2 and "debootstrap" in done.stderr and "make image ARGS=-y" in done.stderr
    assert "making" not in done.stderr.replace(f"making {BASE} needs root", "")
    assert not re.search(r"^docker .*build", machine.log.read_text(), re.MULTILINE)


def test_a_base_that_exists_is_used_and_nothing_says_that_one_is_made(machine: Machine) -> None:
    machine.add_engine(BASE)
    done = machine.run("image.sh")
    assert done.returncode == 0, done.stderr
    assert "debian:bookworm-slim cannot be pulled" in done.stderr and "making" not in done.stderr
    assert re.search(r"^docker .*build", machine.log.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("version", "accepted"), [("2.14.1", False), ("v2.15.1", False), ("v2.16.0", True), ("5.0.1", True)]
)
def test_a_compose_that_would_give_all_clones_one_project_is_refused(
    machine: Machine, version: str, accepted: bool
) -> None:
    machine.add_engine(BASE, compose=version)
    done = machine.run("image.sh")
    assert done.returncode == (0 if accepted else 2), done.stderr
    assert (f"Compose {version} is too old. Install 2.16 or later." in done.stderr) is not accepted


def test_image_with_y_installs_what_the_base_needs(machine: Machine) -> None:
    machine.add_engine()
    machine.add("apt-get", BOOKWORM)
    done = machine.run("image.sh", "-y")
    if os.geteuid() != 0:
        assert "sudo make image ARGS=-y" in done.stderr
        return
    installed = [line for line in machine.log.read_text().splitlines() if " install " in line]
    assert len(installed) == 1 and installed[0].endswith("debootstrap")
    assert done.returncode == 2, "this apt-get installs nothing"
    assert f"making {BASE} with debootstrap" in done.stderr and "debootstrap failed" in done.stderr


@pytest.mark.parametrize(
    ("target", "arguments", "command"),
    [
        ("engine", "-y", "docker/engine.sh -y"),
        ("image", "-y", "docker/image.sh -y"),
        ("image", "--detach", "docker/image.sh"),
        ("up", "-y --detach", "docker/image.sh -y"),
    ],
)
def test_make_passes_y_to_the_script(target: str, arguments: str, command: str) -> None:
    done = subprocess.run(["make", "-n", target, f"ARGS={arguments}"], cwd=ROOT, capture_output=True, text=True)
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert any(line.endswith(command) for line in lines), done
    assert not any("compose up" in line and " -y" in line for line in lines)
