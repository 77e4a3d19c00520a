"""SIGKILL during the write of a checkpoint: the last complete checkpoint can still be loaded.

Only the writer runs, in a child process, without a training loop.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from testbed.rank.checkpoint import Checkpoints
from testbed.rank.group import single_rank_group
from testbed.rank.optim import Optimizer
from testbed.rank.sync.synchronizer import NoSync, Synchronizer
from testbed.rank.train import Tally
from testbed.results.timeline import Timeline
from testbed.spec.mode import SyncMode
from testbed.spec.run import OptimizerSpec, RunSpec
from tests.soak.outcomes import Cases, Outcome
from tests.soak.runs import make_scratch, remove


class TrainerStub:
    """What a checkpoint saves of a trainer: 8 MB whose values are all the number of the step, so a torn write shows."""

    def __init__(self) -> None:
        self.model: nn.Module = nn.Linear(1024, 1024)
        self.optimizer = Optimizer(OptimizerSpec(), self.model, 8, 10**6)
        self.sync: Synchronizer = NoSync(SyncMode.parse("single"), single_rank_group(), Timeline(detailed=False))
        self.sync.attach(self.model, self.optimizer)
        self.seen = Tally()

    def fill(self, step: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)


def open_checkpoints(folder: Path) -> Checkpoints:
    spec = RunSpec.load({"mode": "single", "checkpoint": 1, "batch": 8}, "soak")
    return Checkpoints(spec, folder, single_rank_group(), resume=True)


def torn(count: int = 50) -> Cases:
    for seed in range(count):
        yield f"kill {seed}", partial(_kill_writer, seed)


def _kill_writer(seed: int) -> Outcome:
    """Kill writers until one dies between the begin and the end of a write."""
    rng = random.Random(f"torn {seed}")
    for tries in range(1, 100):
        folder = make_scratch()
        try:
            written, in_write = _start_and_kill(folder / "c", rng)
            if in_write:
                loaded, intact = _load(folder / "c")
                return {"ok": intact and loaded >= written, "written": written, "loaded": loaded, "tries": tries}
        finally:
            remove(folder)
    return {"ok": False, "tries": tries}


def _start_and_kill(folder: Path, rng: random.Random) -> tuple[int, bool]:
    """Kill a writer at a random moment after a write began.

    Return the last step that was written completely, and whether the kill came during a write.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _write_forever(folder, writing)
    os.close(writing)
    marks = [(time.monotonic(), _mark(reading)) for _ in range(2 * rng.randrange(2, 6) + 1)]
    lengths = [end - begin for (begin, _), (end, _) in zip(marks[0::2], marks[1::2], strict=False)]
    time.sleep(rng.uniform(0, 1.1 * max(lengths)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    seen = [mark for _, mark in marks if mark]
    while mark := _mark(reading):
        seen.append(mark)
    os.close(reading)
    written = max((step for step, ended in seen if ended), default=0)
    return written, not seen[-1][1]


def _mark(reading: int) -> tuple[int, bool] | None:
    """Read one message of the writer: the step, and whether its write has ended. None if the writer is gone."""
    data = os.read(reading, 5)
    return (int.from_bytes(data[:4]), bool(data[4])) if data else None


def _write_forever(folder: Path, writing: int) -> None:
    try:
        trainer, checkpoints = TrainerStub(), open_checkpoints(folder)
        for step in range(1, 10**6):
            trainer.fill(step)
            os.write(writing, step.to_bytes(4) + b"\0")
            checkpoints.write(trainer, step)
            os.write(writing, step.to_bytes(4) + b"\1")
    finally:
        os._exit(1)


def _load(folder: Path) -> tuple[int, bool]:
    """Load the last checkpoint: its step, and whether all values are right.

    In a child process, because torch's threads do not survive the next fork of this one.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            trainer, checkpoints = TrainerStub(), open_checkpoints(folder)
            step = checkpoints.agree(trainer)
            checkpoints.load(trainer, step)
            intact = all(bool((p == step).all()) for p in trainer.model.parameters())
            os.write(writing, step.to_bytes(4) + bytes([intact]))
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    answer = os.read(reading, 5)
    os.close(reading)
    return int.from_bytes(answer[:4]), bool(answer[4:] == b"\1")
