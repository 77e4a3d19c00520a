"""The import rule: code of one room imports only what DESIGN lets it, so that each side can be shipped alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import testbed
from testbed.control.substrates.content import copied_paths

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "testbed"
ENTRYPOINT = "entrypoint"  # docker/entrypoint.py: the first that runs in the image, a room of one module
ROOMS = {  # room: rooms of ours it may import
    "spec": {"spec"},
    "results": {"results", "spec"},
    "net": {"net", "spec", "results"},
    "data": {"data", "spec"},
    "rank": {"rank", "spec", "results", "net", "data"},
    ENTRYPOINT: {ENTRYPOINT, "rank", "spec", "results", "net", "data"},
    "control": {"control", "spec", "results", "net", "data", "report"},  # report only when called
    "report": {"report", "spec", "results"},
}
TORCH, SCREEN, REMOTE, PLOTS = {"torch", "torchvision"}, {"typer", "rich"}, {"fabric", "paramiko"}, {"matplotlib"}
BANNED = {  # room: packages it must do without
    "spec": TORCH | SCREEN | REMOTE | PLOTS,
    "results": TORCH | SCREEN | REMOTE | PLOTS,
    "net": TORCH | SCREEN | REMOTE | PLOTS,
    "data": TORCH | SCREEN | REMOTE | PLOTS,
    "rank": SCREEN | REMOTE | PLOTS,
    ENTRYPOINT: TORCH | SCREEN | REMOTE | PLOTS,
    "control": TORCH,
    "report": TORCH | REMOTE,
}


def imported(source: str, package: str) -> Iterator[str]:
    """Full names of all modules that the source imports, at any depth and in any function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def offences(room: str, source: str, package: str) -> list[str]:
    """Imports that the room is not allowed."""
    found = []
    for name in imported(source, package):
        first, *rest = name.split(".")
        if first == "testbed":
            wrong = rest and not rest[0].startswith("__") and rest[0] not in ROOMS[room]
        else:
            wrong = first in BANNED[room]
        if wrong:
            found.append(name)
    return found


def modules(room: str) -> list[Path]:
    return [ROOT / "docker/entrypoint.py"] if room == ENTRYPOINT else sorted((PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    assert modules(room)
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in modules(room)
        if (wrong := offences(room, path.read_text(), ".".join(path.relative_to(ROOT).parent.parts)))
    }
    assert found == {}


def test_no_room_is_without_a_rule() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms | {ENTRYPOINT} == set(ROOMS)


def test_the_image_carries_what_its_code_may_import_and_no_other_room() -> None:
    there = {Path(name).name for name in copied_paths(ROOT) if (ROOT / name).is_dir()} | {ENTRYPOINT}
    assert there == {needed for room in there for needed in ROOMS[room]}


def test_two_modules_of_control_call_the_report_and_no_other() -> None:
    callers = {
        str(path.relative_to(PACKAGE / "control"))
        for path in modules("control")
        if any(name.startswith("testbed.report") for name in imported(path.read_text(), "testbed.control"))
    }
    assert callers == {"api.py", "cli/report.py"}


def test_the_package_itself_imports_none_of_its_rooms() -> None:
    """The API is resolved when it is used; the import for type checkers does not run."""
    code = "import sys, testbed; print([name for name in sys.modules if name.startswith('testbed.')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        testbed.nothing  # noqa: B018


def test_rank_and_control_are_strangers() -> None:
    assert "control" not in ROOMS["rank"] and "rank" not in ROOMS["control"]


@pytest.mark.parametrize(
    ("room", "source", "offence"),
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
        ("report", "from testbed.net.tcp import burst", "testbed.net.tcp.burst"),
    ],
)
def test_the_check_itself_sees_an_offence(room: str, source: str, offence: str) -> None:
    assert offences(room, source, f"testbed.{room}") == [offence]


def test_the_check_lets_through_what_is_allowed() -> None:
    source = "import json\nfrom testbed import __version__\nfrom testbed.spec.run import RunSpec\nfrom . import wire"
    assert all(offences(room, source, f"testbed.{room}") == [] for room in ROOMS)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("testbed.control.cli.main", {"torch", "torchvision", "testbed.rank", "matplotlib", "testbed.report"}),
        ("testbed.report.page", {"torch", "fabric", "testbed.rank", "testbed.control", "testbed.net"}),
        ("testbed.results.conclude", {"torch", "typer", "rich", "fabric", "testbed.net"}),
        ("testbed.net.probe", {"torch", "numpy", "testbed.rank", "testbed.control"}),
        ("testbed.data.fetch", {"torch", "PIL", "rich", "testbed.net", "testbed.rank", "testbed.control"}),
    ],
)
def test_a_fresh_interpreter_really_loads_no_stranger(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
