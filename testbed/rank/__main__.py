"""One rank: `python -m testbed.rank --folder RUN`, with torchrun's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

from testbed.rank.group import alone, join, leave
from testbed.rank.recorder import Recorder
from testbed.rank.traffic import open_counter
from testbed.rank.train import Trainer
from testbed.spec.errors import Interrupted, RankFailed, SpecError, TestbedError
from testbed.spec.folder import RunFolder
from testbed.spec.records import Error
from testbed.spec.run import RunSpec


def main() -> int:
    """Read the spec, join the group, train; the exit code is the error's own (spec/errors.py)."""
    parser = argparse.ArgumentParser(prog="testbed.rank", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="run folder with spec.json; records go there")
    folder = RunFolder(parser.parse_args().folder)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    rank = _number("RANK", 0)
    try:
        spec = folder.read_spec()
    except TestbedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    with Recorder(folder.records(rank)) as recorder:
        try:
            _train(spec, rank, recorder)
        except Exception as error:
            return _fail(error, rank, recorder)
    return 0


def _train(spec: RunSpec, rank: int, recorder: Recorder) -> None:
    size = _number("WORLD_SIZE", spec.world)
    if size != spec.world:
        raise SpecError(f"WORLD_SIZE {size}: the spec is for {spec.world} ranks. Start that many, or change nodes.")
    torch.set_num_threads(spec.threads)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT", 29500)
    group = join(rank, size, address, port, spec.deadline) if size > 1 else alone()
    Trainer(spec, group, recorder, open_counter(interface)).run()
    leave(group)


def _fail(error: Exception, rank: int, recorder: Recorder) -> int:
    """Write down why, once for people and once for scripts."""
    if isinstance(error, TestbedError):
        message, code = str(error), error.exit_code
    elif isinstance(error, RuntimeError) and _is_lost_peer(error):
        message, code = f"rank {rank} lost a peer: {error}", RankFailed.exit_code
    else:
        traceback.print_exc()
        message, code = f"{type(error).__name__}: {error}", TestbedError.exit_code
    print(message, file=sys.stderr, flush=True)
    recorder.write(Error(code=code, message=message))
    return code


def _is_lost_peer(error: RuntimeError) -> bool:
    """Gloo and the store raise plain RuntimeErrors whose texts are all they tell."""
    text = str(error).lower()
    return any(sign in text for sign in ("gloo", "connection", "timed out", "timeout", "socket", "broken pipe"))


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Interrupted(f"stopped by {signal.Signals(signum).name}")


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if text and not text.isdigit():
        raise SystemExit(f"{variable} {text!r}: must be a number.")
    return int(text) if text else default


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a Gloo thread that still waits for a dead peer must not keep the process
