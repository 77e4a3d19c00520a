"""Execute a user's Python file: an algorithm of the methods folder, a model or a data set."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from testbed.spec.errors import SpecError, one_line


def execute_file(path: Path, what: str, shown: str = "") -> ModuleType:
    """Execute a file and return it as a new module; its state is not shared with other callers. Raises SpecError.

    The error message begins with `what` and shows the path as `shown`.
    """
    spec = importlib.util.spec_from_file_location(f"own.{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"{path} does not end in .py"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise SpecError(f"{what}: {describe_error(path, error, shown)}. Fix the file.") from None
    return module


def call(path: Path, function: str, arguments: tuple[Any, ...], what: str, shown: str) -> Any:
    """Execute a file, call a function of it and return the result. Raises SpecError if the file or the call fails."""
    found: Callable[..., Any] | None = getattr(execute_file(path, what, shown), function, None)
    if not callable(found):
        raise SpecError(f"{what}: {shown} defines no function {function}. Add it.")
    try:
        return found(*arguments)
    except (Exception, SystemExit) as error:
        raise SpecError(f"{what}: {describe_error(path, error, shown)}. Fix the file.") from None


def describe_error(path: Path, error: BaseException, shown: str = "") -> str:
    """Return where in a user's file an error was raised, and the error: "methods/x.py, line 3: TypeError: ..."."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f", line {frame.lineno}" for frame in reversed(frames) if frame.filename == str(path)), "")
    said = f"sys.exit({error.code!r}) was called" if isinstance(error, SystemExit) else ""
    return f"{shown or path}{line}: {said or one_line(f'{type(error).__name__}: {error}')}"
