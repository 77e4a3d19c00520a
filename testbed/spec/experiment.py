"""Experiment: a TOML file with a base run and the axes it is swept over, and KEY=VALUE settings.

`testbed sweep` makes its runs from an Experiment, always the same list in the same order. `testbed run` and the
environment of a container make one run from KEY=VALUE settings. Both merge values by dotted keys: "link.rate".
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from testbed.spec import words
from testbed.spec.base import Spec
from testbed.spec.errors import SpecError, refuse
from testbed.spec.run import FOLDER_NAME, RunSpec

MAX_FILE_BYTES = 1 << 20  # far more than an experiment or an inventory needs
MAX_RUNS = 10_000


class Experiment(Spec):
    """The question (`title`), the run that all share (`base`), what varies (`axes`, `cells`), how often (`repeats`)."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description=FOLDER_NAME.format(64), examples=["quick"]
    )
    title: str = Field(examples=["What does a ring cost?"])
    takes: str = Field(default="", examples=["2 minutes"])  # how long it takes on two cores; shown to the user
    base: dict[str, Any] = Field(default={}, examples=[{"model": "lenet5"}])
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default={}, examples=[{"mode": ["ring", "ddp"]}])
    # runs in addition to the product of the axes, such as a baseline
    cells: list[dict[str, Any]] = Field(default=[], examples=[[{"mode": "single"}]])
    repeats: int = Field(default=1, ge=1, le=1000)
    # published figures for the same question, which the report compares with
    published: dict[str, Any] = Field(default={}, examples=[{"source": "a paper"}])

    @classmethod
    def read(cls, path: Path) -> Experiment:
        """Read a file; its stem is the experiment's name."""
        return cls.load({"name": path.stem} | read_toml(path), str(path))

    def runs(self) -> list[RunSpec]:
        """One RunSpec per cell: `cells` first, then the product of the axes, the first axis slowest.

        Repeats are interleaved: all cells once, then all cells again. SpecError if there are too many runs or two
        would have the same name.
        """
        swept = bool(self.axes or not self.cells)
        sizes = [len(values) for values in self.axes.values()]  # checked before the product is made
        if (len(self.cells) + swept * math.prod(sizes)) * self.repeats > MAX_RUNS:
            rule = f"axes, cells and repeats together give more than {MAX_RUNS} runs"
            raise refuse("axes", sizes, rule, "Remove values or cells, or repeat fewer times.")
        product = itertools.product(*self.axes.values()) if swept else []
        cells = [*self.cells, *(dict(zip(self.axes, values, strict=True)) for values in product)]
        specs = [self._run(cell, repeat) for repeat in range(self.repeats) for cell in cells]
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise refuse("axes", twice, "two runs would have the same name", "Remove the repeated value.")
        return specs

    def _run(self, cell: dict[str, Any], repeat: int) -> RunSpec:
        values: dict[str, Any] = merge({}, self.base)
        for key, value in cell.items():
            set_key(values, key, value)
        name = "-".join(_name_part(key, value) for key, value in cell.items()) or "base"
        values |= {"experiment": self.name, "name": name + (f"-r{repeat}" if self.repeats > 1 else "")}
        return RunSpec.load(values, f"experiment {self.name}, run {name}")


def _name_part(key: str, value: Any) -> str:
    """A cell's part of the run's name: `ring_bucket_5MiB` for a mode, `rate_200mbit` for any other axis."""
    if isinstance(value, list) and any(isinstance(each, list) for each in value):  # [[0, 1], [2, 3]] -> 0-1_2-3
        value = "_".join("-".join(map(str, each)) if isinstance(each, list) else str(each) for each in value)
    text = re.sub(r"[^A-Za-z0-9.-]+", "_", str(value)).strip("_.") or "none"
    return text if key == "mode" else f"{key.split('.')[-1]}_{text}"


def run_name(mode: str, nodes: int | str) -> str:
    """The default name of a single run: `ring/bucket:5MiB` on 4 nodes -> `ring_bucket_5mib-n4`."""
    slug = re.sub(r"[^a-z0-9.]+", "_", mode.lower()).strip("_.") or "run"
    return f"{slug}-n{nodes}"


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict; SpecError if it is missing, too large or damaged."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise SpecError(f"{path}: {size} bytes, and at most {MAX_FILE_BYTES} are read. Write a smaller file.")
        if not path.is_file():
            raise SpecError(f"{path}: cannot be read (not a regular file). Give the path of a TOML file.")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}). Give the path of a TOML file.") from None
    except (ValueError, RecursionError) as error:  # syntax, encoding, a number or a nesting that is too large
        raise SpecError(f"{path}: not TOML ({str(error)[:200]}). Correct the file.") from None


def spec_from_flags(flags: Mapping[str, Any], settings: Iterable[str] = ()) -> RunSpec:
    """Return the spec that flags, whose values may be text, and KEY=VALUE settings describe. None: flag not given.

    Raises SpecError.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    tables = {name: value for name, value in given.items() if isinstance(value, Mapping)}  # e.g. data={"subset": 512}
    keys = {words.FLAGS.get(name, name): value for name, value in given.items() if name not in tables}
    values = with_settings(merge(tables, keys), settings)
    values.setdefault("name", run_name(str(values.get("mode", "ring")), values.get("nodes", 4)))
    return RunSpec.load(values, where="")


def with_settings(values: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """A copy of `values` with each KEY=VALUE set. Raises SpecError."""
    values = copy.deepcopy(values)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            way_out = f"Write e.g. {words.setting('optimizer.lr', 0.1)}."
            raise refuse(words.name_of_settings(), setting, "must be KEY=VALUE", way_out)
        set_key(values, key.strip(), _toml_value(text.strip()))
    return values


def _toml_value(text: str) -> Any:
    """`0.1`, `true`, `[1, 2]` as TOML reads them; anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with `changes` applied; tables are merged, and keys of `changes` may be dotted."""
    result = {key: merge({}, value) if isinstance(value, dict) else value for key, value in base.items()}
    for key, value in changes.items():
        if isinstance(value, dict):
            set_key(result, key, merge(_table(result, key), value))
        else:
            set_key(result, key, value)
    return result


def _table(values: dict[str, Any], key: str) -> dict[str, Any]:
    for name in key.split("."):
        inner = values.get(name, {})
        values = inner if isinstance(inner, dict) else {}
    return values


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """values['a']['b'] = value for the key 'a.b'; SpecError if 'a' holds something other than a table."""
    *tables, last = key.split(".")
    for name in tables:
        inner = values.setdefault(name, {})
        if not isinstance(inner, dict):
            raise refuse("key", key, f"{name!r} holds {inner!r}, not a table", "Set it in one place only.")
        values = inner
    values[last] = value
