"""What the testbed adds to plain PyTorch and to the steps that it times.

loop     a step of our loop in mode `single` against a bare PyTorch loop, and the time to fetch a batch; one thread
start    from the command to the first step: four ranks with `--on process` against torchrun with a minimal script
waiting  the seconds of `make run` after set-up, in namespaces, against the sum of all steps that it times
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from testbed.results.folder import RunFolder, find_runs
from testbed.results.records import Step, read
from tests.bench.figures import Figure, spread
from tests.support.provenance import ROOT

ROUNDS, STEPS = 4, 3  # rounds of the two loops alternate; the first step of each round is not counted
STARTS = 4
MINIMAL_SCRIPT = """
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

# --- loop ------------------------------------------------------------------------------------------------------------


def loop() -> Iterator[Figure]:
    """Measured in a separate process, because torch's number of threads is set once per process."""
    out = subprocess.run(
        [sys.executable, "-m", "tests.bench.overhead"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    times = json.loads(out.stdout.splitlines()[-1])
    ours, bare, fetch = times["ours"], times["bare"], times["fetch"]
    yield Figure(
        name="step of our loop (single) / bare PyTorch loop, VGG-11, batch 64",
        value=statistics.median(ours) / statistics.median(bare),
        high=1.05,
        detail=f"ours {spread(ours)}, bare {spread(bare)}",
    )
    yield Figure(
        name="time to fetch a batch / step",
        value=statistics.median(fetch) / statistics.median(ours),
        high=0.03,
        detail=f"fetch {spread(fetch)}",
    )


def time_loops() -> None:
    """Time both loops in this process and print the seconds as JSON."""
    import torch

    from testbed.rank.counters import open_counter
    from testbed.rank.group import single_rank_group
    from testbed.rank.recorder import Recorder
    from testbed.rank.train import Trainer
    from testbed.spec.run import RunSpec

    torch.set_num_threads(1)
    spec = RunSpec.load({"mode": "single", "batch": 64, "steps": ROUNDS * STEPS}, "bench")
    with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder) / "rank0.jsonl") as recorder:
        trainer = Trainer(spec, single_rank_group(), recorder, open_counter("lo"))
        module = trainer.sync.attach(trainer.model, trainer.optimizer)
        batches = trainer.batches.epoch(0)
        bare_step = _bare_loop(spec.seed, next(trainer.batches.epoch(0)))
        times: dict[str, list[float]] = {"ours": [], "bare": [], "fetch": []}
        for turn in range(ROUNDS):
            for number in range(STEPS):
                begun = time.monotonic()
                record = trainer._step(module, batches, turn * STEPS + number, 0)
                recorder.write(record)
                if number:
                    times["ours"].append(time.monotonic() - begun)
                    times["fetch"].append(record.data)
            for number in range(STEPS):
                seconds = bare_step()
                if number:
                    times["bare"].append(seconds)
    print(json.dumps(times))


def _bare_loop(seed: int, batch: Any) -> Callable[[], float]:
    """Return a function that does one textbook step on a batch in memory and returns its seconds."""
    import torch

    from testbed.rank.models import vgg11

    torch.manual_seed(seed)
    model = vgg11(10, (3, 32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    images, labels = batch

    def step() -> float:
        begun = time.monotonic()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        return time.monotonic() - begun

    return step


# --- start -----------------------------------------------------------------------------------------------------------


def start() -> Iterator[Figure]:
    ours, torchrun = [], []
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "minimal.py"
        script.write_text(MINIMAL_SCRIPT)
        for number in range(STARTS):
            ours.append(process_start(Path(name) / f"run{number}"))
            torchrun.append(_torchrun_start(script, Path(name) / f"done{number}"))
    yield Figure(
        name="command to first step, process, 4 ranks, no probe / torchrun with a minimal script",
        value=statistics.median(ours) / statistics.median(torchrun),
        high=1.2,
        detail=f"ours {spread(ours)}, torchrun {spread(torchrun)}",
    )


def process_start(folder: Path) -> float:
    """Return the seconds from the command to the end of rank 0's first step; processes share the monotonic clock."""
    flags = ["--mode", "ring", "--model", "lenet5", "--data", "synthetic", "--batch", "4", "--steps", "3"]
    settings = ["--set", "evaluate=never", "--set", "probe=false", "--on", "process", "--json"]
    begun = time.monotonic()
    command = [sys.executable, "-m", "testbed.control", "run", *flags, *settings, "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return first_step_end(folder / "rank0.jsonl") - begun


def first_step_end(records: Path) -> float:
    """Return the end of the first step in a rank's records, on the monotonic clock."""
    first = next(r for r in map(json.loads, records.read_text().splitlines()) if r["kind"] == "step")
    return float(first["at"] + first["total"])


def _torchrun_start(script: Path, done: Path) -> float:
    begun = time.monotonic()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*torchrun, str(script), str(done)], check=True, capture_output=True, env=environment)
    return float(done.read_text()) - begun


# --- waiting ---------------------------------------------------------------------------------------------------------


def waiting() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as runs:
        begun = time.monotonic()
        argv = [sys.executable, "-m", "testbed.control", "sweep", "experiments/quick.toml", "--on", "netns"]
        done = subprocess.run(argv, cwd=ROOT, env=os.environ | {"TESTBED_RUNS": runs}, capture_output=True, text=True)
        seconds = time.monotonic() - begun
        if done.returncode != 0:
            raise SystemExit(done.stdout + done.stderr)
        records = [record for run in find_runs(Path(runs)) for record in read(RunFolder(run).records(0))]
    timed = sum(record.total for record in records if isinstance(record, Step))
    yield Figure(
        name="make run after set-up / all its timed steps, netns",
        value=seconds / timed,
        high=1.35,
        detail=f"{seconds:.0f} s, steps {timed:.0f} s",
    )


if __name__ == "__main__":
    time_loops()
