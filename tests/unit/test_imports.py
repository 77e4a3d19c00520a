"""The import rule: imports between the folders of testbed/ point one way.

So the image needs no control/, a machine without torch can plan and report, and spec/ needs nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import testbed
from testbed.control.substrates.clone import copied_paths

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "testbed"
ENTRYPOINT = "entrypoint"  # docker/entrypoint.py, which runs first in the image; treated as a folder
ALLOWED = {  # folder: folders of testbed/ that it may import
    "spec": {"spec"},
    "results": {"results", "spec"},
    "net": {"net", "spec", "results"},
    "data": {"data", "spec"},
    "rank": {"rank", "spec", "results", "net", "data"},
    "attach": {"attach", "spec", "results", "net", "rank", "data"},
    ENTRYPOINT: {ENTRYPOINT, "rank", "spec", "results", "net", "data"},
    # report only in REPORT_CALLERS, predict only in PREDICT_CALLERS
    "control": {"control", "spec", "results", "net", "data", "report", "predict"},
    "report": {"report", "spec", "results"},
    "predict": {"predict", "spec", "results", "report"},
}
TORCH, SCREEN, PLOTS = {"torch", "torchvision"}, {"typer", "rich"}, {"matplotlib"}
REMOTE = {"docker", "fabric", "paramiko"}
BANNED = {  # folder: packages that it must not import
    "spec": TORCH | SCREEN | REMOTE | PLOTS,
    "results": TORCH | SCREEN | REMOTE | PLOTS,
    "net": TORCH | SCREEN | REMOTE | PLOTS,
    "data": TORCH | SCREEN | REMOTE | PLOTS,
    "rank": SCREEN | REMOTE | PLOTS,
    "attach": SCREEN | REMOTE | PLOTS,
    ENTRYPOINT: TORCH | SCREEN | REMOTE | PLOTS,
    "control": TORCH,
    "report": TORCH | REMOTE,
    "predict": TORCH | REMOTE | SCREEN,
}
CONTROL = {  # part of control/: other parts that it may import
    "machine": {"substrates"},  # one layer: the doctor and the clean-up import the substrates
    "substrates": {"machine"},
    "runs": {"machine", "substrates"},
    "tuning": {"machine", "substrates", "runs"},
    "grading": {"machine", "substrates", "runs", "tuning"},
    "api": {"machine", "substrates", "runs", "tuning"},
    "cli": {"machine", "substrates", "runs", "tuning", "grading", "api"},
    "__main__": {"cli"},
    "__init__": set(),
}
REPORT_CALLERS = {
    "api.py",
    "cli/report.py",
    "runs/scripts.py",
}  # in control/; inside functions, because matplotlib is slow to import
PREDICT_CALLERS = {"cli/predict.py"}  # in control/; inside functions as well


def imported(source: str, package: str) -> Iterator[str]:
    """Yield the full names of everything that the source imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def offences(folder: str, source: str, package: str) -> list[str]:
    """Return the imports that the folder is not allowed."""
    found = []
    for name in imported(source, package):
        first, *rest = name.split(".")
        if first == "testbed":
            wrong = rest and not rest[0].startswith("__") and rest[0] not in ALLOWED[folder]
        else:
            wrong = first in BANNED[folder]
        if wrong:
            found.append(name)
    return found


def modules(folder: str) -> list[Path]:
    return [ROOT / "docker/entrypoint.py"] if folder == ENTRYPOINT else sorted((PACKAGE / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    assert modules(folder)
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in modules(folder)
        if (wrong := offences(folder, path.read_text(), ".".join(path.relative_to(ROOT).parent.parts)))
    }
    assert found == {}


def test_every_folder_has_a_rule() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders | {ENTRYPOINT} == set(ALLOWED)


def test_the_image_has_the_folders_that_its_code_may_import_and_no_others() -> None:
    copied = {Path(name).name for name in copied_paths(ROOT) if (ROOT / name).is_dir()} | {ENTRYPOINT}
    assert copied == {needed for folder in copied for needed in ALLOWED[folder]}


@pytest.mark.parametrize("part", CONTROL)
def test_imports_inside_control_point_one_way(part: str) -> None:
    control = PACKAGE / "control"
    paths = [control / f"{part}.py"] if (control / f"{part}.py").is_file() else sorted((control / part).rglob("*.py"))
    assert paths
    found = {
        (str(path.relative_to(control)), name.split(".")[2])
        for path in paths
        for name in imported(path.read_text(), ".".join(path.relative_to(ROOT).parent.parts))
        if name.startswith("testbed.control.")
    }
    assert [each for each in sorted(found) if each[1] not in CONTROL[part] | {part}] == []


def test_every_part_of_control_has_a_rule() -> None:
    parts = {path.stem for path in (PACKAGE / "control").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert parts == set(CONTROL)


@pytest.mark.parametrize(("folder", "allowed"), [("report", REPORT_CALLERS), ("predict", PREDICT_CALLERS)])
def test_only_the_commands_that_need_them_import_report_and_predict(folder: str, allowed: set[str]) -> None:
    callers = {
        str(path.relative_to(PACKAGE / "control"))
        for path in modules("control")
        if any(name.startswith(f"testbed.{folder}") for name in imported(path.read_text(), "testbed.control"))
    }
    assert callers == allowed


def test_the_package_itself_imports_none_of_its_folders() -> None:
    """The API is imported when it is used."""
    code = "import sys, testbed; print([name for name in sys.modules if name.startswith('testbed.')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        testbed.nothing  # noqa: B018


def test_rank_and_control_do_not_import_each_other() -> None:
    assert "control" not in ALLOWED["rank"] and "rank" not in ALLOWED["control"]


@pytest.mark.parametrize(
    ("folder", "source", "offence"),
    [
        ("spec", "import torch.nn", "torch.nn"),
        ("spec", "from testbed.net import tcp", "testbed.net.tcp"),
        ("spec", "def f():\n    from testbed import rank", "testbed.rank"),
        ("spec", "from ..rank import train", "testbed.rank.train"),
        ("net", "import testbed.rank.data", "testbed.rank.data"),
        ("data", "from testbed.net import tcp", "testbed.net.tcp"),
        ("rank", "from testbed.control.cli.main import main", "testbed.control.cli.main.main"),
        ("results", "from testbed.net import tcp", "testbed.net.tcp"),
        (ENTRYPOINT, "def f():\n    from testbed.control.cli.main import main", "testbed.control.cli.main.main"),
        (ENTRYPOINT, "from testbed.report import findings", "testbed.report.findings"),
        ("rank", "from rich.console import Console", "rich.console.Console"),
        ("control", "if True:\n    import torch as t", "torch"),
        ("control", "from testbed.rank import train", "testbed.rank.train"),
        ("report", "from testbed.net.tcp import wire_rate", "testbed.net.tcp.wire_rate"),
    ],
)
def test_the_check_finds_a_forbidden_import(folder: str, source: str, offence: str) -> None:
    assert offences(folder, source, f"testbed.{folder}") == [offence]


def test_the_check_accepts_allowed_imports() -> None:
    source = "import json\nfrom testbed import __version__\nfrom testbed.spec.run import RunSpec\nfrom . import wire"
    assert all(offences(folder, source, f"testbed.{folder}") == [] for folder in ALLOWED)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("testbed.control.cli.main", {"torch", "docker", "fabric", "testbed.rank", "matplotlib", "testbed.report"}),
        ("testbed.control.api", {"torch", "torchvision", "testbed.rank", "matplotlib", "testbed.report"}),
        ("testbed.report.page", {"torch", "docker", "fabric", "testbed.rank", "testbed.control", "testbed.net"}),
        ("testbed.results.conclude", {"torch", "typer", "rich", "docker", "fabric", "testbed.net"}),
        ("testbed.rank.run", {"torchvision", "docker", "fabric", "rich", "testbed.control", "testbed.report"}),
        ("testbed.attach.observer", {"pydantic", "torchvision", "rich", "testbed.control", "testbed.results.records"}),
        ("testbed.attach.launch", {"torch", "rich", "testbed.control", "testbed.report"}),
        ("testbed.net.probe", {"torch", "numpy", "testbed.rank", "testbed.control"}),
        ("testbed.data.fetch", {"torch", "PIL", "rich", "testbed.net", "testbed.rank", "testbed.control"}),
    ],
)
def test_a_fresh_interpreter_does_not_load_what_is_forbidden(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
