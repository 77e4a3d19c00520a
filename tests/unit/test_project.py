"""The files in the root of the repository agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import testbed
from testbed.control.substrates.clone import project_name
from testbed.spec.errors import Interrupted
from testbed.spec.experiment import Experiment

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAX_README_WORDS = 900
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


def project(requirement: str) -> str:
    """'numpy' of 'numpy>=2' or 'numpy==2.4.6'."""
    return re.split(r"[=<>\[ ]", requirement, maxsplit=1)[0].lower()


def pins(name: str) -> set[str]:
    return {line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")}


def test_one_version_everywhere() -> None:
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == testbed.__version__
    assert re.search(r"^## \[(\d.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == testbed.__version__
    assert f"VERSION: {testbed.__version__}\n" in (ROOT / "compose.yaml").read_text()


def test_the_release_has_one_date() -> None:
    released = re.search(r"^date-released: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert f"## [{testbed.__version__}] - {released}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_every_required_package_is_pinned() -> None:
    required = [*PYPROJECT["project"]["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]
    pinned = {project(pin) for pin in pins("requirements.txt")}
    assert {project(each) for each in required} - pinned == {"testbed"}


def test_torch_is_one_pair_in_the_extra_and_in_the_pins() -> None:
    assert {each for each in EXTRAS["rank"] if each.startswith("torch")} <= pins("requirements.txt")


def test_nobody_who_reports_needs_an_engine_or_torch() -> None:
    """Each optional package is in the extras of those who use it, and not in the bare package."""
    where = {
        package: {name for name, needs in EXTRAS.items() if package in map(project, needs)}
        for package in ("torch", "docker", "fabric", "matplotlib", "jinja2")
    }
    assert where == {
        "torch": {"rank"},
        "docker": {"compose", "hosts"},
        "fabric": {"hosts"},
        "matplotlib": {"report"},
        "jinja2": {"compose", "report"},
    }
    assert not set(where) & set(map(project, PYPROJECT["project"]["dependencies"]))


def test_a_commit_is_checked_by_the_commands_of_make_check() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert hooks == commands


def test_continuous_integration_runs_what_a_person_runs() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"run: (.+)$", workflow, re.MULTILINE) == ["sudo .ci/run"]


def test_the_guide_for_contributors_names_files_that_exist() -> None:
    named = re.findall(r"`((?:testbed|tests|docker|experiments)/[^`*]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_entrypoint_of_the_image_ends_as_an_interrupted_run() -> None:
    """It needs the code before it imports testbed."""
    text = (ROOT / "docker" / "entrypoint.py").read_text()
    assert int(re.search(r"^INTERRUPTED = (\d+)", text, re.MULTILINE)[1]) == Interrupted.exit_code


def test_make_up_uses_the_project_of_its_own_clone_wherever_it_is_called(tmp_path: Path) -> None:
    """This `docker` prints the project's name, and PWD, which compose.yaml needs."""
    names = "os.environ['COMPOSE_PROJECT_NAME'], os.environ['PWD']"
    script = f"#!{sys.executable}\nimport os, sys\nprint({names}, *sys.argv[1:])\n"  # a shell would set PWD
    (tmp_path / "docker").write_text(script)
    (tmp_path / "docker").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PWD": str(tmp_path)}
    env.pop("COMPOSE_PROJECT_NAME", None)
    argv = ["make", "--silent", "-C", str(ROOT), "--assume-old=image", "up", "ARGS=--wait"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{project_name(ROOT)} {ROOT} compose up --wait\n", done.stderr


def test_plain_compose_without_the_variable_that_names_the_project_is_refused_with_the_way_out() -> None:
    """cron and systemd do not set PWD; all clones would be one project."""
    (name,) = re.findall(r"^name: (.+)$", (ROOT / "compose.yaml").read_text(), re.MULTILINE)
    assert re.fullmatch(r"testbed-\$\{PWD:\?[^}]*`make up`[^}]*\}", name)


TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
def test_relative_links_lead_to_files_of_the_repository(text: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = set(listed.splitlines())
    targets = re.findall(r"\]\(([^)\s]+)\)", text.read_text())
    paths = {target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:", target)} - {""}
    found = {path: os.path.relpath(text.parent / path, ROOT) for path in paths}
    folders = {str(parent) for name in tracked for parent in Path(name).parents}
    assert {path for path, name in found.items() if name not in tracked | folders} == set()


def test_the_readme_is_short() -> None:
    """Words outside of tables and comments; what takes longer to explain is in docs/."""
    lines = (ROOT / "README.md").read_text().splitlines()
    words = re.findall(r"[^\W_]+", "\n".join(line for line in lines if not line.startswith(("|", "<!--"))))
    assert len(words) <= MAX_README_WORDS


def test_experiments_of_the_readme_use_data_that_make_data_fetches() -> None:
    text, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    named = set(re.findall(r"experiments/[\w-]+\.toml", text))
    fetched = set(re.findall(r"testbed data get (\w+)", makefile))
    used = {spec.data.name for name in named for spec in Experiment.read(ROOT / name).runs()}
    assert named and used <= fetched | {"synthetic"}
