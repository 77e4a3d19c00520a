"""The wheel in a virtual environment that has exactly the packages of its extras, started in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email import message_from_string
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import testbed
from testbed.spec.errors import UsageError

ROOT = Path(__file__).parents[2]
RUN = ("run", "--data", "synthetic", "--model", "lenet5", "--nodes", "2", "--batch", "8", "--steps", "3")


@dataclass(frozen=True)
class Installed:
    """One virtual environment, and the folder that commands start in."""

    bin: Path
    folder: Path

    def testbed(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TESTBED_", "PYTHON"))}
        env = clean | {"TESTBED_SHARE": "1", "DOCKER_HOST": f"unix://{self.folder}/no-engine.sock"} | more
        argv = [self.bin / "testbed", *arguments]
        return subprocess.run(argv, cwd=self.folder, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "testbed", source / "testbed", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, out], cwd=source, capture_output=True, timeout=120, check=True)
    return next(out.iterdir())


def required(wheel: Path, extras: Sequence[str]) -> set[str]:
    """The names of all distributions that pip would install for the wheel with these extras, itself left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = message_from_string(archive.read(name).decode()).get_all("Requires-Dist", [])
    found: set[str] = set()
    waiting = [(Requirement(line), tuple(extras)) for line in lines]
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.name in found or not (
            requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in (*extras, ""))
        ):
            continue
        found.add(requirement.name)
        needs = distribution(requirement.name).requires or []
        waiting += [(Requirement(line), tuple(requirement.extras)) for line in needs]
    return found


@pytest.fixture(scope="module")
def install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Installed]:
    """`install("rank")` is an environment with the wheel and that extra, its packages linked from this one's."""

    def make(*extras: str) -> Installed:
        home = tmp_path_factory.mktemp("-".join(["venv", *extras]))
        venv.create(home)
        pip = [sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--no-index", wheel], capture_output=True, timeout=120, check=True)
        packages = next(home.glob("lib/python*/site-packages"))
        for name in required(wheel, extras):
            borrowed = distribution(name)
            for top in {file.parts[0] for file in borrowed.files or []} - {"..", "__pycache__"}:
                if not (packages / top).exists():
                    (packages / top).symlink_to(borrowed.locate_file(top))
        return Installed(home / "bin", tmp_path_factory.mktemp("empty"))

    return make


@pytest.fixture(scope="module")
def bare(install: Callable[..., Installed]) -> Installed:
    return install()


@pytest.mark.gloo
def test_with_rank_and_report_a_run_and_its_page_work_in_an_empty_folder(install: Callable[..., Installed]) -> None:
    here = install("rank", "report")
    doctor = here.testbed("doctor")
    assert doctor.returncode == 0, doctor.stderr
    assert "yes  torch: " in doctor.stdout
    ran = here.testbed(*RUN, "--on", "process", "--mode", "ring")
    assert ran.returncode == 0, ran.stderr
    assert "| ring" in ran.stdout
    reported = here.testbed("report", "runs/adhoc")
    assert reported.returncode == 0, reported.stderr
    assert "<svg" in (here.folder / "runs/adhoc/report.html").read_text()
    refused = here.testbed(*RUN, "--on", "compose")
    assert refused.returncode == UsageError.exit_code
    assert "pip install 'testbed[compose]'" in refused.stderr


def test_the_bare_wheel_plans(bare: Installed) -> None:
    for arguments in (("--help",), ("modes",), ("doctor",), ("data", "list"), ("clean",)):
        done = bare.testbed(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    assert bare.testbed("version").stdout == f"{testbed.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ((*RUN, "--on", "process"), "rank"),
        ((*RUN, "--on", "netns"), "rank"),
        ((*RUN, "--on", "compose"), "compose"),
        ((*RUN, "--on", "hosts"), "hosts"),
        (("report", "runs"), "report"),
    ],
)
def test_the_bare_wheel_names_the_missing_extra(bare: Installed, arguments: Sequence[str], extra: str) -> None:
    hosts = (f'[[nodes]]\nname = "node{k}"\naddress = "192.0.2.{k}"\n' for k in (1, 2))
    (bare.folder / "hosts.toml").write_text("".join(hosts))
    done = bare.testbed(*arguments, TESTBED_INVENTORY="hosts.toml")
    assert done.returncode == UsageError.exit_code, done.stderr
    assert done.stderr.count("\n") == 1, "one sentence, no traceback"
    assert f"Install it with: pip install 'testbed[{extra}]'" in done.stderr


def test_with_its_extra_compose_says_that_it_needs_an_engine(install: Callable[..., Installed]) -> None:
    done = install("compose").testbed(*RUN, "--on", "compose")
    assert done.returncode == UsageError.exit_code
    assert "no Docker engine answers" in done.stderr


def test_the_wheel_holds_its_types_page_and_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"testbed/py.typed", "testbed/report/page.html.j2"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith("tests")]
