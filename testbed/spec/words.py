"""How a message names a setting or a folder. This depends on the place where the message is read.

The rate of the link is `--rate` on the command line, `RATE=` in the environment of a container and `link.rate = ` in a
file. Code that names a setting in a message calls `setting`, `name_of` or `refuse_setting`, and does not need to know
the place. The place is set once per process (`set_place`). `reading` replaces it in a `with` block, e.g. while a file
is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Any

from testbed.spec.errors import SpecError, UsageError, one_line, quote

# Short names for keys of a spec: flags of `testbed run`, keywords of testbed.run, and in upper case the variables of
# `docker compose up`. Every other flag has the name of its key.
FLAGS = {"rate": "link.rate", "data": "data.name", "fault": "faults", "congestion": "node.congestion"}
# Options of `testbed run` that are keys of a spec, and `out`, the run folder. Every other key is set with --set.
OPTIONS = (
    *("mode", "nodes", "rate", "model", "data", "batch", "batch_per_rank", "steps", "seed", "fault", "retries"),
    *("keep_going", "out"),
)
# Variables that describe a run without a controller; in lower case they are flags. Every other key is set with SET.
VARIABLES = ("MODE", "NODES", "RATE", "MODEL", "DATA", "BATCH", "STEPS", "SEED", "CONGESTION", "KEEP_GOING")

SWITCHES = ("keep_going",)  # options of `testbed run` that set their key to true and take no value
NOT_IN_COMPOSE = ("batch_per_rank",)  # compose.yaml always sets BATCH, which excludes it

_SHORT = {key: flag for flag, key in FLAGS.items()}
_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+-]+", re.ASCII)  # text that needs no quotes in a shell


class Place(Enum):
    """Where a message is read, and so how the reader sets a key."""

    COMMAND_LINE = "the command line"
    COMPOSE = "docker compose up"  # variables; ./runs and ./data are mounted into the container
    LAUNCHER = "torchrun or srun"  # variables
    PYTHON = "testbed.run and the like"
    FILE = "a file"


_place_of_process = Place.COMMAND_LINE
_place_inside: ContextVar[Place | None] = ContextVar("place", default=None)


def set_place(place: Place) -> None:
    """Set the place for all threads of this process."""
    global _place_of_process
    _place_of_process = place


@contextmanager
def reading(place: Place) -> Iterator[None]:
    """Replace the place in the `with` block, in this thread."""
    token = _place_inside.set(place)
    try:
        yield
    finally:
        _place_inside.reset(token)


def current_place() -> Place:
    return _place_inside.get() or _place_of_process


def name_of(key: str) -> str:
    """Return what the reader writes before the value of a key: "--rate", "RATE", "link.rate"; "--set warmup"."""
    place = current_place()
    short = _SHORT.get(key, key)
    if place is Place.FILE:
        return key
    if place is Place.PYTHON:
        return short
    if place is Place.COMMAND_LINE:
        return f"--{short.replace('_', '-')}" if short in OPTIONS else f"--set {key}"
    if place is Place.LAUNCHER and key == "nodes":
        return "WORLD_SIZE"
    return short.upper() if short.upper() in VARIABLES else f"SET={key}"


def name_of_settings() -> str:
    """Return what the reader writes before a KEY=VALUE."""
    return {Place.COMPOSE: "SET", Place.LAUNCHER: "SET", Place.PYTHON: "settings"}.get(current_place(), "--set")


def can_set(key: str) -> bool:
    """Return True if the reader can set this key, so that a way out may name it."""
    return current_place() is not Place.COMPOSE or key not in NOT_IN_COMPOSE


def setting(key: str, value: Any) -> str:
    """Return what the reader writes to set a key: "--nodes 2", "NODES=2", "nodes = 2"; "--set warmup=0"."""
    if value is True and key in SWITCHES and current_place() is Place.COMMAND_LINE:
        return name_of(key)
    return _joined(key, _written(value))


def refuse_setting(key: str, value: Any, rule: str, way_out: str, kind: type[UsageError] = SpecError) -> UsageError:
    """Return the exception for a value of a key: "--batch 10: must be divisible by the 4 ranks. Use 8 or 12."."""
    return kind(f"{_joined(key, quote(value))}: {rule}. {way_out}")


def _joined(key: str, text: str) -> str:
    name = name_of(key)
    if current_place() is Place.FILE:
        return f"{name} = {text}"
    return f"{name} {text}" if name.startswith("--") and " " not in name else f"{name}={text}"


def _written(value: Any) -> str:
    """Return a value as the reader writes it. Except in Python, lists and tables are TOML: --set and SET accept it."""
    if current_place() is Place.PYTHON:
        return quote(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_written(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(quote(each) if isinstance(each, str) else _written(each) for each in value)}]"
    if current_place() is not Place.FILE and isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return quote(value)


# variable that has the path in the container: the folder on the host
MOUNTS = {"TESTBED_RUNS": "./runs", "TESTBED_DATA": "./data"}


def shown_path(path: Path | str) -> str:
    """Return a path as the reader knows it: under `docker compose up`, ./data for /data in the container."""
    if _place_of_process is Place.COMPOSE:
        for variable, outside in MOUNTS.items():
            inside = os.environ.get(variable)
            if inside and Path(path).is_relative_to(inside):
                rest = Path(path).relative_to(inside)
                return f"{outside}/{rest}" if rest.parts else outside
    return one_line(str(path))
