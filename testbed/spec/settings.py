"""What a person types, as values of a spec: KEY=VALUE settings, and the name of a run's folder."""

from __future__ import annotations

import copy
import re
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from testbed.spec.errors import refuse
from testbed.spec.experiment import set_key


def with_settings(values: dict[str, Any], settings: Iterable[str], where: str = "--set") -> dict[str, Any]:
    """A copy of `values` with each KEY=VALUE laid over it; dotted keys reach into tables."""
    values = copy.deepcopy(values)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise refuse(where, setting, "must be KEY=VALUE", f"Write e.g. {where} optimizer.lr=0.1.")
        set_key(values, key.strip(), _toml_value(text.strip()))
    return values


def _toml_value(text: str) -> Any:
    """`0.1`, `true`, `[1, 2]` as TOML reads them; anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def run_name(mode: str, nodes: int | str) -> str:
    """`ring/bucket:5MiB` on 4 nodes -> `ring_bucket_5mib-n4`."""
    slug = re.sub(r"[^a-z0-9.]+", "_", mode.lower()).strip("_.") or "run"
    return f"{slug}-n{nodes}"


def fresh_folder(parent: Path, name: str) -> Path:
    """parent/<name>-<time>, with a number behind it when two start in one second."""
    base = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    taken = (base.with_name(f"{base.name}-{number}") for number in range(2, 1000))
    return base if not base.exists() else next(path for path in taken if not path.exists())
