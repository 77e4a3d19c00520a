"""What containers and real hosts cost. Needs a Docker engine that answers.

compose    a step and a receipt against namespaces, `docker compose up` to the first step, a rebuild of the image
hosts      `fab deploy`, and a step over SSH against Compose; the hosts are containers with an engine of their own
"""

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
from tests.bench.collectives import collectives_at, two_way
from tests.bench.figures import Figure, spread
from tests.bench.overhead import first_step_end, process_start
from tests.hosts.nodes import Nodes
from tests.support.provenance import ROOT

REPEATS = 3
RUN = [sys.executable, "-m", "testbed.control", "run"]
STEP = ["--mode", "ring", "--batch", "64", "--steps", "8", "--data", "synthetic"]
STEP += ["--set", "node.cpus=0.4", "--set", "evaluate=never"]
QUICK = {"MODE": "ring", "MODEL": "lenet5", "DATA": "synthetic", "BATCH": "4", "STEPS": "3"}
QUICK |= {"SET": "probe=false evaluate=never"}
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # of this machine; on hosts it is not changed


def build_image() -> None:
    subprocess.run([ROOT / "docker" / "image.sh"], check=True)


# --- compose ---------------------------------------------------------------------------------------------------------


def compose() -> Iterator[Figure]:
    build_image()
    yield from _compose_against_netns()
    yield _first_step()
    yield two_way("200mbit", collectives_at("200mbit", ComposeSubstrate), "compose")
    yield _rebuild()


def _compose_against_netns() -> Iterator[Figure]:
    """The same spec on both substrates in turn."""
    seconds: dict[str, list[float]] = {"netns": [], "compose": []}
    rates: dict[str, list[float]] = {"netns": [], "compose": []}
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        for number in range(REPEATS):
            for substrate in seconds:
                folder = Path(name) / f"{substrate}{number}"
                command = [*RUN, *STEP, "--rate", "500mbit", "--on", substrate, "--out", str(folder), "--json"]
                done = subprocess.run(command, capture_output=True, text=True)
                seconds[substrate].append(json.loads(done.stdout)["runs"][0]["seconds_per_step"])
                links = json.loads((folder / "receipt.json").read_text())["links"]
                rates[substrate].append(statistics.median(link["measured"] for link in links))
    yield Figure(
        name="step, compose / netns, VGG-11, ring, 500 Mbit, 0.4 cores",
        value=statistics.median(seconds["compose"]) / statistics.median(seconds["netns"]),
        high=1.05,
        detail=f"compose {spread(seconds['compose'])}, netns {spread(seconds['netns'])}",
    )
    measured = {key: statistics.median(values) / 1e6 for key, values in rates.items()}
    yield Figure(
        name="receipt, compose against netns, relative difference",
        value=abs(measured["compose"] / measured["netns"] - 1),
        high=0.02,
        detail=f"compose {measured['compose']:.1f}, netns {measured['netns']:.1f} Mbit/s on the wire",
    )


def _first_step() -> Figure:
    """`docker compose up` with the image present against the same run in plain processes."""
    ups, processes = [], []
    with tempfile.TemporaryDirectory() as name:
        for number in range(REPEATS):
            ups.append(_compose_up())
            processes.append(process_start(Path(name) / f"run{number}"))
    return Figure(
        name="docker compose up to first step / process",
        value=statistics.median(ups) / statistics.median(processes),
        high=2.0,
        detail=f"compose {spread(ups)}, process {spread(processes)}",
    )


def _compose_up() -> float:
    """Return the seconds from `docker compose up` to the end of rank 0's first step."""
    with tempfile.TemporaryDirectory() as name:
        environment = os.environ | QUICK | {"PWD": name}  # which names the project
        shutil.copy(ROOT / "compose.yaml", name)
        for folder in ("runs", "data"):
            (Path(name) / folder).mkdir()
        try:
            begun = time.monotonic()
            up = ["docker", "compose", "up", "--no-build"]
            subprocess.run(up, cwd=name, env=environment, check=True, capture_output=True)
            (records,) = Path(name).glob("runs/compose/*/rank0.jsonl")
            return first_step_end(records) - begun
        finally:
            subprocess.run(["docker", "compose", "down"], cwd=name, env=environment, check=True, capture_output=True)


def _rebuild() -> Figure:
    """Build a copy of the sources without a cache, then again with one line changed."""
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
    """Return the seconds of one build."""
    base_image = subprocess.run([ROOT / "docker" / "base.sh", "-y"], check=True, capture_output=True, text=True)
    base = base_image.stdout.strip()
    command = ["docker", "buildx", "build", "--load", "--file", "docker/Dockerfile", "--build-arg", f"BASE={base}"]
    begun = time.monotonic()
    subprocess.run([*command, "--tag", "testbed:bench", *flags, "."], cwd=context, check=True, capture_output=True)
    return time.monotonic() - begun


# --- hosts -----------------------------------------------------------------------------------------------------------


def hosts() -> Iterator[Figure]:
    build_image()
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        nodes = Nodes(Path(name) / "hosts")
        try:
            nodes.folder.mkdir()
            nodes.up()
            yield from _deploy(nodes)
            yield _hosts_against_compose(nodes)
        finally:
            nodes.down()


def _deploy(nodes: Nodes) -> Iterator[Figure]:
    """Deploy to one host, remove it, deploy to all four; each starts without a packed image. Then deploy again."""
    one = _fab(nodes, "deploy", "--data", "synthetic", "--nodes", "1")
    _fab(nodes, "clean")
    four = _fab(nodes, "deploy", "--data", "synthetic")
    again = statistics.median(_fab(nodes, "deploy", "--data", "synthetic") for _ in range(REPEATS))
    yield Figure(
        name="fab deploy, all there / first, 4 hosts",
        value=again / four,
        high=0.05,
        detail=f"again {again:.1f} s, first {four:.1f} s",
    )
    yield Figure(
        name="first deploy, 4 hosts / (4 x 1 host)",
        value=four / (4 * one),
        high=0.8,
        detail=f"4 hosts {four:.1f} s, 1 host {one:.1f} s",
    )


def _fab(nodes: Nodes, *argv: str) -> float:
    """Return the seconds of one fab command."""
    begun = time.monotonic()
    done = nodes.fab(*argv, timeout=900)
    if done.returncode:
        raise RuntimeError(f"fab {argv}: {done.stdout}{done.stderr}")
    return time.monotonic() - begun


def _hosts_against_compose(nodes: Nodes) -> Figure:
    """The same spec on both substrates in turn, with the machine's own congestion control on both."""
    seconds: dict[str, list[float]] = {"hosts": [], "compose": []}
    step = [*STEP, "--set", "probe=false"]
    for number in range(REPEATS):
        own = ["--set", f"node.congestion={CONGESTION.read_text().strip()}"]
        out = str(nodes.folder / f"compose{number}")
        command = [*RUN, *step, "--on", "compose", *own, "--out", out, "--json"]
        on_compose = subprocess.run(command, capture_output=True, text=True, check=True)
        on_hosts = nodes.fab("run", *step, "--json", timeout=600)
        for substrate, text in (("compose", on_compose.stdout), ("hosts", on_hosts.stdout)):
            seconds[substrate].append(json.loads(text)["runs"][0]["seconds_per_step"])
    return Figure(
        name="step, hosts / compose, VGG-11, ring, unshaped, 0.4 cores",
        value=statistics.median(seconds["hosts"]) / statistics.median(seconds["compose"]),
        high=1.10,
        detail=f"hosts {spread(seconds['hosts'])}, compose {spread(seconds['compose'])}",
    )
