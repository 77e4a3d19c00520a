"""The files of a run folder and the keys in them, to compare two run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def keys_of(value: Any) -> Any:
    """The keys of a JSON value, recursively; the elements of a list are merged."""
    if isinstance(value, dict):
        return {key: keys_of(inner) for key, inner in value.items()}
    if isinstance(value, list):
        merged: dict[str, Any] = {}
        for keys in map(keys_of, value):
            merged |= keys if isinstance(keys, dict) else {}
        return merged
    return {}


def keys_by_file(folder: Path) -> dict[str, Any]:
    """Each file's keys: of JSON files recursively, of records by kind; None for other files."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            found[name] = keys_of(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            records = [json.loads(line) for line in path.read_text().splitlines()]
            kinds = {record["kind"] for record in records}
            found[name] = {kind: keys_of([r for r in records if r["kind"] == kind]) for kind in kinds}
        else:
            found[name] = None
    return found
