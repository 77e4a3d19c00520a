"""One rank: `python -m testbed.rank --folder RUN`, with torchrun's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

import torch

from testbed.rank import oom, watchdog
from testbed.rank.checkpoint import Checkpoints
from testbed.rank.counters import open_counter
from testbed.rank.group import alone, join, leave, naming
from testbed.rank.outcome import Ending
from testbed.rank.recorder import Recorder
from testbed.rank.train import Trainer
from testbed.results.folder import RunFolder
from testbed.spec.errors import SpecError, TestbedError
from testbed.spec.run import RunSpec


def main() -> int:
    """Read the spec, join the group, train; the exit code is the error's own (spec/errors.py)."""
    parser = argparse.ArgumentParser(prog="testbed.rank", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="run folder with spec.json; records go there")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint that all ranks have")
    options = parser.parse_args()
    folder = RunFolder(options.folder)
    watchdog.raise_interrupted()
    try:
        rank = _number("RANK", 0)
        spec = folder.read_spec()
    except TestbedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.resume:
        folder.set_records_aside(rank)
    with Recorder(folder.records(rank), folder.attempts(rank) if options.resume else {}) as recorder:
        ending = Ending(rank, recorder)
        watchdog.insist(lambda error: os._exit(ending.because(error)))
        try:
            _train(spec, rank, recorder, ending, folder, options.resume)
        except Exception as error:
            watchdog.ignore()
            return ending.because(error)
    return 0


def _train(
    spec: RunSpec, rank: int, recorder: Recorder, ending: Ending, folder: RunFolder, resume: bool = False
) -> None:
    size = _number("WORLD_SIZE", spec.world)
    if size != spec.world:
        raise SpecError(f"WORLD_SIZE {size}: the spec is for {spec.world} ranks. Start that many, or change nodes.")
    if rank >= size:
        raise SpecError(f"RANK {rank}: ranks count from 0 to {size - 1}. Start each of them once.")
    torch.set_num_threads(spec.threads)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT", 29500)
    together = (rank, size, address, port, spec.start_deadline, lambda lost: os._exit(ending.because(lost)))
    group = join(*together) if size > 1 else alone()
    with naming(group):
        keeper = Checkpoints(spec, folder.checkpoints, group, resume) if spec.checkpoint or resume else None
        oom.wake(spec)
        Trainer(spec, group, recorder, open_counter(interface), keeper).run()
        leave(group)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if text and not text.isdigit():
        raise SpecError(f"{variable} {text!r}: must be a number. Set it as torchrun does.")
    return int(text) if text else default


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # on a full disk
            stream.flush()
    os._exit(code)  # a Gloo thread that still waits for a dead peer must not keep the process
