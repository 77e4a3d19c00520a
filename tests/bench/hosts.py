"""Real hosts, by stand-ins: what a deploy costs, and what SSH and a second engine cost a step. Needs an engine."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.figures import Figure, spread
from tests.hosts.nodes import ROOT, Nodes

REPEATS = 3
STEP = ["--mode", "ring", "--batch", "64", "--steps", "8", "--data", "synthetic"]
OWN = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # what hosts use, as nothing is set there
SETTINGS = ["--set", "node.cpus=0.4", "--set", "evaluate=never", "--set", "probe=false"]


def measure() -> Iterator[Figure]:
    subprocess.run([ROOT / "docker" / "image.sh"], check=True)
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        nodes = Nodes(Path(name) / "hosts")
        try:
            nodes.folder.mkdir()
            nodes.up()
            yield from _deploy(nodes)
            yield _step(nodes)
        finally:
            nodes.down()


def _deploy(nodes: Nodes) -> Iterator[Figure]:
    """First to one host, then to all four, each with nothing packed before; then once more."""
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
    begun = time.monotonic()
    done = nodes.fab(*argv, timeout=900)
    if done.returncode:
        raise RuntimeError(f"fab {argv}: {done.stdout}{done.stderr}")
    return time.monotonic() - begun


def _step(nodes: Nodes) -> Figure:
    """The same spec, turn by turn; also TCP's congestion control is the machine's own in both places."""
    seconds: dict[str, list[float]] = {"hosts": [], "compose": []}
    for number in range(REPEATS):
        out = nodes.folder / f"compose{number}"
        command = [sys.executable, "-m", "testbed.control", "run", *STEP, *SETTINGS, "--on", "compose"]
        command += ["--set", f"node.congestion={OWN.read_text().strip()}"]
        compose = subprocess.run([*command, "--out", out, "--json"], capture_output=True, text=True, check=True)
        hosts = nodes.fab("run", *STEP, *SETTINGS, "--json", timeout=600)
        for place, text in (("compose", compose.stdout), ("hosts", hosts.stdout)):
            seconds[place].append(json.loads(text)["runs"][0]["seconds_per_step"])
    return Figure(
        name="step, hosts / compose, VGG-11, ring, unshaped, 0.4 cores",
        value=statistics.median(seconds["hosts"]) / statistics.median(seconds["compose"]),
        high=1.10,
        detail=f"hosts {spread(seconds['hosts'])}, compose {spread(seconds['compose'])}",
    )
