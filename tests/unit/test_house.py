"""House rules that a machine can check: functions that fit on a screen, test modules with names of their own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "testbed"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_IN_FUNCTION = 60


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_function_is_short(path: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, functions)]
    sizes = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in found}
    assert {name: size for name, size in sizes.items() if size > MOST_IN_FUNCTION} == {}
