"""A user's own files: `file.py:function` for a model or a data set, `text:FILE` for text, methods/NAME.py for a mode.

`emulated:FILE` is one too: a profile whose times are replayed instead of a model's compute.

The spec keeps the name as it was written, and the SHA-256 of the file in `files`. The controller copies the file into
the run folder, where every rank reads it. So the folder shows what was trained.

A method is a file NAME.py in the methods folder with a `mean_(buffer, group)`. It makes the mode NAME. Nothing here
executes a file.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from testbed.spec.errors import SpecError, one_line, refuse

TEXT_PREFIX = "text:"
REAL, EMULATED = "real", "emulated"  # what a run computes
MAX_CODE_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 30
_CODE = re.compile(r"(?P<path>[^\0:]+\.py):(?P<function>[A-Za-z_]\w*)", re.ASCII)


@dataclass(frozen=True)
class OwnFile:
    """The file that a name of the spec refers to. `function` is empty for text and profiles.

    `path` is its path in the spec. If the controller reads the file from another path, that is `source`, and the copy
    in the run folder has `path` as its relative path.
    """

    path: str
    function: str = ""
    source: Path | None = None

    @property
    def max_bytes(self) -> int:
        return MAX_CODE_BYTES if self.function else MAX_TEXT_BYTES

    @property
    def place(self) -> Path:
        """The path from which the controller reads the file."""
        return self.source or Path(self.path)

    def copied_to(self, folder: Path, digest: str) -> Path:
        """Return the path of the copy in `folder`."""
        return folder / (self.path if self.source else file_name(self.path, digest))


def own_code(name: str) -> OwnFile | None:
    """Return the file and the function of `file.py:function`; None for any other name."""
    found = _CODE.fullmatch(name)
    return OwnFile(found["path"], found["function"]) if found else None


def own_text(name: str) -> OwnFile | None:
    """Return the file of `text:FILE`; None for any other name."""
    path = name.removeprefix(TEXT_PREFIX)
    return OwnFile(path) if path and path != name and "\0" not in path else None


def own_profile(compute: str) -> OwnFile | None:
    """Return the file of `emulated:FILE`; None for `real`, and for `emulated`, whose profile is not recorded yet.

    Raises SpecError for any other text.
    """
    kind, _, path = compute.partition(":")
    if compute in (REAL, EMULATED):
        return None
    if kind != EMULATED or not path or "\0" in path:
        way_out = f"Use {REAL}, {EMULATED}, or {EMULATED}:FILE with a profile of `testbed profile`."
        raise refuse("compute", compute, "unknown", way_out)
    return OwnFile(path)


def looks_like_code(name: str) -> bool:
    """Return True if an unknown name was probably meant as `file.py:function`."""
    return ".py" in name


def file_name(path: str, digest: str) -> str:
    """Return the name of the copy in the run folder. Two files of the same name get different names."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(path).name)[-80:]
    return f"{digest[:12]}-{safe}"


def read(key: str, name: str, file: OwnFile) -> bytes:
    """Return the content of a file. Raises SpecError if the file cannot be used; the message has `key` and `name`."""
    path = file.place
    try:
        if not path.is_file():
            raise refuse(key, name, f"there is no file {path}", "Write its path from this folder.")
        if path.stat().st_size > file.max_bytes:
            rule = f"{path} has {path.stat().st_size} bytes, and the limit is {file.max_bytes}"
            raise refuse(key, name, rule, "Use a smaller file.")
        content = path.read_bytes()
    except OSError as error:
        raise refuse(key, name, f"{path} cannot be read ({error.strerror})", "Change its mode.") from None
    if file.function and (problem := _code_problem(content, file.function)):
        raise refuse(key, name, f"{path}{problem}", "Fix the file.")
    if not file.function and not content:
        raise refuse(key, name, f"{path} is empty", "Use a file with text.")
    return content


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of a file, as `files` in a spec has it."""
    return hashlib.sha256(content).hexdigest()


def copy_of(folder: Path, file: OwnFile, digest: str) -> Path:
    """Return the path of a file's copy in `folder`. Raises SpecError if its SHA-256 is not the recorded one."""
    copy = file.copied_to(folder, digest)
    try:
        content = copy.read_bytes()
    except OSError as error:
        raise SpecError(f"{copy}: cannot be read ({error.strerror}). Start a new run.") from None
    if digest_of(content) != digest:
        raise SpecError(f"{copy}: is not the file {file.path} that the spec was made with. Start a new run.")
    return copy


def _code_problem(content: bytes, function: str) -> str:
    try:
        tree = ast.parse(content)
    except SyntaxError as error:
        return f", line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError) as error:
        return f": {one_line(str(error))}"
    names = _definitions(tree)
    if {function, "*"} & (names | bound_names(tree)):
        return ""
    return f" defines no {function}; it has {', '.join(sorted(names)) or 'no function'}"


def _definitions(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def bound_names(tree: ast.Module) -> set[str]:
    """Return the names that a file assigns or imports anywhere, and "*" if it imports all names of a module."""
    nodes = list(ast.walk(tree))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imports = [alias for node in nodes if isinstance(node, ast.ImportFrom | ast.Import) for alias in node.names]
    return stored | {alias.asname or alias.name for alias in imports}


# --- methods ---------------------------------------------------------------------------------------------------------

_METHOD_NAME = re.compile(r"[a-z][A-Za-z0-9_.]*", re.ASCII)
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
        return self.name_problem or _method_problem(self.path)


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
    if not _METHOD_NAME.fullmatch(path.stem):
        return "a name begins with a lower-case letter and has letters, digits and _ only. Rename the file"
    return ""


def _method_problem(path: Path) -> str:
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
