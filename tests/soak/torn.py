"""SIGKILL inside a checkpoint write, the writer alone: what was complete before stays loadable."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from testbed.rank.checkpoint import Checkpoints
from testbed.rank.group import alone
from testbed.rank.optim import Optimizer
from testbed.rank.recorder import Timeline
from testbed.rank.sync.synchronizer import NoSync
from testbed.rank.train import Tally
from testbed.spec.mode import SyncMode
from testbed.spec.run import OptimizerSpec, RunSpec
from tests.soak.book import Outcome
from tests.soak.runs import drop, scratch


class Trained:
    """A model of 8 MB whose parameters all hold the number of the step: half a write would show."""

    def __init__(self) -> None:
        self.model = nn.Linear(1024, 1024)
        self.optimizer = Optimizer(OptimizerSpec(), self.model, 8, 10**6)
        self.sync = NoSync(SyncMode.parse("single"), alone(), Timeline(detailed=False))
        self.sync.attach(self.model, self.optimizer)
        self.seen = Tally()

    def become(self, step: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)


def keeper(folder: Path) -> Checkpoints:
    spec = RunSpec.load({"mode": "single", "checkpoint": 1, "batch": 8}, "soak")
    return Checkpoints(spec, folder, alone(), resume=True)


def torn(count: int = 50) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    for seed in range(count):
        yield f"kill {seed}", lambda s=seed: _kill_a_writer(s)


def _kill_a_writer(seed: int) -> Outcome:
    """Again until the blow falls between the begin of a write and its end."""
    rng = random.Random(f"torn {seed}")
    for tries in range(1, 100):
        folder = scratch()
        try:
            written, inside = _strike(folder / "c", rng)
            if inside:
                found, right = _load(folder / "c")
                return {"ok": right and found >= written, "written": written, "loaded": found, "tries": tries}
        finally:
            drop(folder)
    return {"ok": False, "tries": tries}


def _strike(folder: Path, rng: random.Random) -> tuple[int, bool]:
    """Kill a writer a random part of a write after it began one: the last whole step, and whether it was in a write."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _write_for_ever(folder, writing)
    os.close(writing)
    marks = [(time.monotonic(), _mark(reading)) for _ in range(2 * rng.randrange(2, 6) + 1)]
    lengths = [end - begin for (begin, _), (end, _) in zip(marks[0::2], marks[1::2], strict=False)]
    time.sleep(rng.uniform(0, 1.1 * max(lengths)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    words = [mark for _, mark in marks]
    while word := _mark(reading):
        words.append(word)
    os.close(reading)
    written = max((step for step, ended in words if ended), default=0)
    return written, not words[-1][1]


def _mark(reading: int) -> tuple[int, bool] | None:
    """(step, whether its write has ended); None at the end."""
    data = os.read(reading, 5)
    return (int.from_bytes(data[:4]), bool(data[4])) if data else None


def _write_for_ever(folder: Path, writing: int) -> None:
    try:
        trained, checkpoints = Trained(), keeper(folder)
        for step in range(1, 10**6):
            trained.become(step)
            os.write(writing, step.to_bytes(4) + b"\0")
            checkpoints.write(trained, step)
            os.write(writing, step.to_bytes(4) + b"\1")
    finally:
        os._exit(1)


def _load(folder: Path) -> tuple[int, bool]:
    """In a child, too: torch's own threads would not survive the next fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            trained, checkpoints = Trained(), keeper(folder)
            step = checkpoints.agree(trained)
            checkpoints.load(trained, step)
            right = all(bool((p == step).all()) for p in trained.model.parameters())
            os.write(writing, step.to_bytes(4) + bytes([right]))
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    told = os.read(reading, 5)
    os.close(reading)
    return int.from_bytes(told[:4]), bool(told[4:] == b"\1")
