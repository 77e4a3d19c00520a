"""House rules that a machine can check: modules one can read in a sitting, functions one can see at once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "testbed"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 300  # of a module
MOST_IN_FUNCTION = 60


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_is_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{path.name} has {lines} lines, at most {MOST_LINES} are read in one sitting"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_function_is_short(path: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, functions)]
    sizes = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in found}
    assert {name: size for name, size in sizes.items() if size > MOST_IN_FUNCTION} == {}


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by their bare names, so two of one name stop the whole run."""
    names = [path.name for path in PACKAGE.parent.joinpath("tests").rglob("test_*.py")]
    assert [name for name in names if names.count(name) > 1] == []
