"""From the command to the first step: a 4-rank `process` run against torchrun with a script that does the least."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.figures import Figure, spread

REPEATS = 4
MINIMAL = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(10, 10)
model(torch.randn(4, 10)).sum().backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(repr(time.monotonic()))
dist.destroy_process_group()
"""


def measure() -> Iterator[Figure]:
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "minimal.py"
        script.write_text(MINIMAL)
        for number in range(REPEATS):
            ours.append(process_start(Path(name) / f"run{number}"))
            theirs.append(_torchrun(script, Path(name) / f"done{number}"))
    yield Figure(
        name="command to first step, process, 4 ranks, no probe / torchrun with a minimal script",
        value=statistics.median(ours) / statistics.median(theirs),
        high=1.2,
        detail=f"ours {spread(ours)}, torchrun {spread(theirs)}",
    )


def process_start(folder: Path) -> float:
    """The end of rank 0's first step, on the clock that all processes of a machine share."""
    flags = ["--mode", "ring", "--model", "lenet5", "--data", "synthetic", "--batch", "4", "--steps", "3"]
    settings = ["--set", "evaluate=never", "--set", "probe=false", "--on", "process", "--json"]
    begun = time.monotonic()
    command = [sys.executable, "-m", "testbed.control", "run", *flags, *settings, "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    records = [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]
    first = next(r for r in records if r["kind"] == "step")
    return float(first["at"] + first["total"] - begun)


def _torchrun(script: Path, done: Path) -> float:
    begun = time.monotonic()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*torchrun, str(script), str(done)], check=True, capture_output=True, env=environment)
    return float(done.read_text()) - begun
