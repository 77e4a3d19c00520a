"""`docker compose up` and `testbed run --on compose` leave the same files with the same keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docker.cluster import Cluster
from tests.support.command import run_command

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]
BUSY = 5  # exit code if the machine was too busy for the probe, which changes no file and no key


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


def contents(folder: Path) -> dict[str, Any]:
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


def test_a_run_with_and_without_a_controller_leaves_the_same_files_and_keys(image: str, tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    cluster = Cluster(tmp_path / "up")
    try:
        printed = cluster.up(RATE="100mbit", STEPS="5", BATCH="16", SET="")
        assert set(cluster.codes().values()) <= {0, BUSY}, printed
    finally:
        cluster.down()
    (without,) = cluster.folders()
    flags = ["--nodes", "4", "--rate", "100mbit", "--steps", "5", "--batch", "16", "--model", "lenet5"]
    more = ["--data", "synthetic", "--set", "node.cpus=0.4", "--on", "compose", "--out", "runs/r"]
    done = run_command("run", *flags, *more, cwd=tmp_path)
    assert done.returncode in (0, BUSY), done.stderr
    assert contents(without) == contents(tmp_path / "runs/r")
