"""A user's own algorithms: a file NAME.py in the methods folder with a `mean_(buffer, group)` makes the mode NAME.

This module maps files to modes. The file of a run's mode is one of the user's own files (own_files.py): the controller
copies it into the run folder, where the ranks find it. Nothing here executes a file.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from testbed.spec.errors import one_line
from testbed.spec.own_files import OwnFile, bound_names

_NAME = re.compile(r"[a-z][A-Za-z0-9_.]*", re.ASCII)
SIGNATURE = "mean_(buffer, group)"
METHODS_VARIABLE = "TESTBED_METHODS"
METHODS = "methods"  # the default folder; the copy in the run folder is in a folder of the same name


def methods_dir() -> Path:
    """Return the folder of the user's own algorithms: TESTBED_METHODS, else ./methods.

    A controller sets TESTBED_METHODS of a rank to the folder of the run's copy.
    """
    return Path(os.environ.get(METHODS_VARIABLE, METHODS))


@dataclass(frozen=True)
class Method:
    """One file in the methods folder. `name_problem` says why no mode can have its name; empty if a mode can."""

    name: str
    path: Path
    name_problem: str = ""

    @property
    def problem(self) -> str:
        """Why no run can use the file; empty if no problem is found. The file is parsed, not executed."""
        return self.name_problem or _code_problem(self.path)


def own_methods(built_in: Collection[str]) -> list[Method]:
    """Return all methods in the folder, including unusable ones. A file whose name begins with _ or . is no method."""
    files = sorted(path for path in methods_dir().glob("*.py") if path.name[0] not in "_.")
    return [Method(name := mode_name(path.stem), path, _name_problem(name, path, built_in)) for path in files]


def mode_name(stem: str) -> str:
    """Return the name of a mode as tables print it: `my-way` for `my_way`."""
    return stem.replace("_", "-")


def method_path(name: str) -> Path:
    """Return the path of the file of the mode `name`."""
    return methods_dir() / f"{name.replace('-', '_')}.py"


def own_method(name: str) -> OwnFile:
    """Return the file of the mode `name` as one of a run's own files.

    The copy keeps the file's name, because ranks find the mode's file by its name. Messages of ranks show `path`,
    without the run folder, because a user has to correct the original file and not the copy.
    """
    path = method_path(name)
    return OwnFile(f"{METHODS}/{path.name}", "mean_", source=path)


def _name_problem(name: str, path: Path, built_in: Collection[str]) -> str:
    if name in built_in:
        return f"{name} is a built-in mode. Rename the file"
    if not _NAME.fullmatch(path.stem):
        return "a name begins with a lower-case letter and has letters, digits and _ only. Rename the file"
    return ""


def _code_problem(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}. Fix the file"
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read ({one_line(str(error))}). Fix the file"
    definition = next((d for d in reversed(tree.body) if isinstance(d, ast.FunctionDef) and d.name == "mean_"), None)
    if definition is not None:
        return "" if _takes_two(definition.args) else f"its mean_ does not take two arguments. Write {SIGNATURE}"
    if bound_names(tree) & {"mean_", "*"}:
        return ""  # mean_ is assigned or imported: it is checked when a rank executes the file
    return f"defines no {SIGNATURE}. Add it"


def _takes_two(arguments: ast.arguments) -> bool:
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    named = len(arguments.kwonlyargs) - sum(default is not None for default in arguments.kw_defaults)
    return required <= 2 and not named and (positional >= 2 or arguments.vararg is not None)
