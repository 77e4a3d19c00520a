"""Our loop in mode `single` against a bare PyTorch loop, and the time to fetch a batch against a step. One thread."""

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

ROUNDS, STEPS = 4, 3  # rounds are interleaved; the first step of each round is dropped


def measure() -> Iterator[Figure]:
    """In a process of its own: torch's thread count is set once."""
    out = subprocess.run(
        [sys.executable, "-m", "tests.bench.loop"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
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


def _work() -> None:
    import torch

    from testbed.rank.counters import open_counter
    from testbed.rank.group import alone
    from testbed.rank.recorder import Recorder
    from testbed.rank.train import Trainer
    from testbed.spec.run import RunSpec

    torch.set_num_threads(1)
    steps = ROUNDS * STEPS
    spec = RunSpec.load({"mode": "single", "batch": 64, "steps": steps}, "bench")
    with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder) / "rank0.jsonl") as recorder:
        trainer = Trainer(spec, alone(), recorder, open_counter("lo"))
        module = trainer.sync.attach(trainer.model, trainer.optimizer)
        batches = trainer.batches.epoch(0)
        bare_step = _bare(spec.seed, next(trainer.batches.epoch(0)))
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


def _bare(seed: int, batch):  # type: ignore[no-untyped-def]
    """Listing 2 of any textbook, on one batch that is ready in memory."""
    import torch

    from testbed.rank.models import vgg11

    torch.manual_seed(seed)
    model = vgg11(10, 3)
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


if __name__ == "__main__":
    _work()
