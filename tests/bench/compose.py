"""Containers: what they cost over namespaces, how soon they train, how soon they are rebuilt. Needs an engine."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from testbed.control.substrates.compose import ComposeSubstrate
from tests.bench.collective import run_at, two_way
from tests.bench.figures import Figure, spread
from tests.bench.start import process_start

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 3
STEP = ["--mode", "ring", "--rate", "500mbit", "--batch", "64", "--steps", "8", "--data", "synthetic"]
SETTINGS = ["--set", "node.cpus=0.4", "--set", "evaluate=never"]


def measure() -> Iterator[Figure]:
    subprocess.run([ROOT / "docker" / "image.sh"], check=True)
    yield from _against_namespaces()
    yield _first_step()
    yield two_way("200mbit", run_at("200mbit", ComposeSubstrate), "compose")
    yield _rebuild()


def _against_namespaces() -> Iterator[Figure]:
    """The same spec, turn by turn."""
    seconds: dict[str, list[float]] = {"netns": [], "compose": []}
    rates: dict[str, list[float]] = {"netns": [], "compose": []}
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        for number in range(REPEATS):
            for place in seconds:
                folder = Path(name) / f"{place}{number}"
                command = [sys.executable, "-m", "testbed.control", "run", *STEP, *SETTINGS]
                out = subprocess.run(
                    [*command, "--on", place, "--out", folder, "--json"], capture_output=True, text=True
                )
                seconds[place].append(json.loads(out.stdout)["runs"][0]["seconds_per_step"])
                links = json.loads((folder / "receipt.json").read_text())["links"]
                rates[place].append(statistics.median(link["measured"] for link in links))
    ratio = {key: statistics.median(values) for key, values in seconds.items()}
    yield Figure(
        name="step, compose / netns, VGG-11, ring, 500 Mbit, 0.4 cores",
        value=ratio["compose"] / ratio["netns"],
        high=1.05,
        detail=f"compose {spread(seconds['compose'])}, netns {spread(seconds['netns'])}",
    )
    got = {key: statistics.median(values) / 1e6 for key, values in rates.items()}
    yield Figure(
        name="receipt, compose against netns, relative difference",
        value=abs(got["compose"] / got["netns"] - 1),
        high=0.02,
        detail=f"compose {got['compose']:.1f}, netns {got['netns']:.1f} Mbit/s on the wire",
    )


def _first_step() -> Figure:
    """`docker compose up` with the image present against the same run in plain processes."""
    ups, processes = [], []
    with tempfile.TemporaryDirectory() as name:
        for number in range(REPEATS):
            ups.append(_up())
            processes.append(process_start(Path(name) / f"run{number}"))
    return Figure(
        name="docker compose up to first step / process",
        value=statistics.median(ups) / statistics.median(processes),
        high=2.0,
        detail=f"compose {spread(ups)}, process {spread(processes)}",
    )


def _up() -> float:
    quick = {"MODE": "ring", "MODEL": "lenet5", "DATA": "synthetic", "BATCH": "4", "STEPS": "3"}
    environment = os.environ | quick | {"SET": "probe=false evaluate=never"}
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(ROOT / "compose.yaml", name)
        for folder in ("runs", "data"):
            (Path(name) / folder).mkdir()
        try:
            begun = time.monotonic()
            subprocess.run(
                ["docker", "compose", "up", "--no-build"], cwd=name, env=environment, check=True, capture_output=True
            )
            (records,) = Path(name).glob("runs/compose/*/rank0.jsonl")
            first = next(r for r in map(json.loads, records.read_text().splitlines()) if r["kind"] == "step")
            return float(first["at"] + first["total"] - begun)
        finally:
            subprocess.run(["docker", "compose", "down"], cwd=name, env=environment, check=True, capture_output=True)


def _rebuild() -> Figure:
    """A copy of the sources, built without a cache, then with one line changed."""
    with tempfile.TemporaryDirectory() as name:
        for item in ("testbed", "docker", "wheels", "requirements.txt", "compose.yaml", ".dockerignore"):
            source = ROOT / item
            (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(name) / item)
        full = _build(Path(name), "--no-cache")
        with (Path(name) / "testbed" / "__init__.py").open("a") as file:
            file.write(f"\n# {time.time()}\n")
        changed = _build(Path(name))
    detail = f"full {full:.1f} s, after one line {changed:.1f} s"
    return Figure(name="rebuild after a one-line change / full build", value=changed / full, high=0.1, detail=detail)


def _build(context: Path, *flags: str) -> float:
    base = subprocess.run(
        [ROOT / "docker" / "base.sh", "-y"], check=True, capture_output=True, text=True
    ).stdout.strip()
    command = ["docker", "buildx", "build", "--load", "--file", "docker/Dockerfile", "--build-arg", f"BASE={base}"]
    begun = time.monotonic()
    subprocess.run([*command, "--tag", "testbed:bench", *flags, "."], cwd=context, check=True, capture_output=True)
    return time.monotonic() - begun
