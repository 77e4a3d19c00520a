"""Rules for the source tree that a program can check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

UNIT = Path(__file__).parent
PACKAGE = Path(__file__).parents[2] / "testbed"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 60
TESTED_ELSEWHERE = {  # module without a unit test of its own: why
    "report/figures/axes.py": "drawn by test_page.py",
    "report/figures/modes.py": "drawn by test_page.py",
    "report/figures/style.py": "drawn by test_page.py",
    "control/substrates/base.py": "an interface without code",
    "control/substrates/fake.py": "is itself what tests use",
    "control/cli/options.py": "in test_main.py and test_hosts.py",
    "control/cli/jobs.py": "needs Slurm: tests/slurm; what it prints is found in control/runs/test_jobs.py",
    "control/cli/profile.py": "in test_main.py and tests/gloo/test_emulated_gloo.py",
    "control/cli/report.py": "in test_main.py",
    "attach/inject/sitecustomize.py": "in test_observer.py, which starts scripts with it",
    "control/cli/script.py": "in test_main.py and tests/gloo/test_exec_gloo.py",
    "rank/group.py": "needs several processes: tests/gloo",
}


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_function_is_short(path: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, functions)]
    sizes = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in found}
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=relative)
def test_a_module_is_not_empty(path: Path) -> None:
    """A docstring and imports alone are no content."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    strings = [node for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    assert [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom) and node not in strings]


def test_unit_tests_mirror_the_package() -> None:
    """tests/unit/<path>/test_x.py tests testbed/<path>/x.py; tests of the whole project lie directly in tests/unit."""
    tests = [path.relative_to(UNIT) for path in UNIT.rglob("test_*.py") if path.parent != UNIT]
    assert tests
    modules = {test: PACKAGE / test.with_name(test.name.removeprefix("test_")) for test in tests}
    assert [str(test) for test, module in modules.items() if not module.is_file()] == []


def test_every_module_has_a_unit_test_or_a_reason() -> None:
    modules = [path.relative_to(PACKAGE) for path in MODULES if not path.name.startswith("__")]
    untested = {str(module) for module in modules if not (UNIT / module.with_name(f"test_{module.name}")).is_file()}
    assert untested == set(TESTED_ELSEWHERE)
