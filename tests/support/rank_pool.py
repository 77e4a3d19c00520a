"""RankPool: N real processes in one Gloo group on loopback that run one case after another.

A process needs seconds to import torch, so a pool is started once and used for many cases. A case is one line of JSON
on the stdin of every rank; its answer is one line on stdout and, for arrays, an .npz file. Every wait has a deadline.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from testbed.results.folder import RunFolder
from testbed.spec.own_files import METHODS_VARIABLE
from tests.support.forked import fork

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parents[1] / "gloo" / "worker.py"
START_TIMEOUT_S = 200.0  # long enough to import torch on a busy machine


def free_port() -> int:
    """Return a port of loopback that is not in use now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank on loopback, with torchrun's variables."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


class RankPool:
    """A case that fails on any rank breaks the pool, because its group may be in the middle of a message."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.broken = False
        self._numbers = itertools.count()
        port = free_port()
        self._workers = [_Worker(rank, size, port, folder) for rank in range(size)]
        self._answers(time.monotonic() + START_TIMEOUT_S)

    def run(self, kind: str, timeout: float = 150.0, **case: Any) -> list[dict[str, Any]]:
        """Run one case on all ranks. Return their answers in rank order."""
        name = f"{next(self._numbers):03d}-{kind}"
        for worker in self._workers:
            worker.send({"kind": kind, "name": name, "folder": str(self.folder), **case})
        return self._answers(time.monotonic() + timeout)

    def _answers(self, deadline: float) -> list[dict[str, Any]]:
        answers = [worker.answer(deadline) for worker in self._workers]
        failures = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if "error" in a]
        if failures:
            self.broken = True
            raise AssertionError("\n".join(failures))
        return answers

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process of a pool, and the thread that reads its answers."""

    def __init__(self, rank: int, size: int, port: int, folder: Path) -> None:
        self._log = folder / f"worker{rank}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER)],
                cwd=ROOT,
                env=rank_environment(rank, size, port),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put("")

    def send(self, case: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()

    def answer(self, deadline: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            return {"error": f"no answer before the deadline; the log ends with:\n{self._tail()}"}
        return json.loads(line) if line else {"error": f"the process ended; the log ends with:\n{self._tail()}"}

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()


class RankRun:
    """`python -m testbed.rank` as N forked processes on loopback; a context manager that leaves none behind.

    With a run folder, as the controller starts them; without one, as a launcher does: their runs are in `runs`.
    `own` gives single ranks other variables.
    """

    def __init__(
        self,
        folder: Path | None,
        size: int,
        *,
        runs: Path | None = None,
        own: dict[int, dict[str, str]] | None = None,
        **environment: str,
    ) -> None:
        port = free_port()
        argv = ["-m", "testbed.rank", *(["--folder", str(folder)] if folder else [])]
        where = folder or runs
        assert where is not None
        where.mkdir(exist_ok=True)
        environment |= {"TESTBED_RUNS": str(runs)} if runs else {}
        environment |= {METHODS_VARIABLE: str(RunFolder(folder).methods)} if folder else {}
        self.logs = [where / (f"rank{rank}.log" if folder else f"output{rank}.txt") for rank in range(size)]
        self.processes = []
        for rank, path in enumerate(self.logs):
            env = rank_environment(rank, size, port) | environment | (own or {}).get(rank, {})
            self.processes.append(fork(argv, env, ROOT, path))

    def __enter__(self) -> RankRun:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)

    def wait(self, timeout: float, ranks: Sequence[int] | None = None) -> list[int]:
        """Return the exit codes of these ranks (default: all). Raises if one still runs after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        chosen = range(len(self.processes)) if ranks is None else ranks
        return [self.processes[rank].wait(max(0.1, deadline - time.monotonic())) for rank in chosen]

    def log_of(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")
