"""Garbage on a port of a run: 200 connections of another program, while the ranks connect or while they train."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from testbed.rank.watchdog import STORE_KEY
from tests.soak.outcomes import Cases, Outcome
from tests.soak.runs import SMALL, make_scratch, remove, run_testbed

CONNECTIONS = 200
START_TIMEOUT_S = 120.0  # for the ranks to start
TARGETS = [("rendezvous", "train")] * 3 + [
    ("heartbeat", "train"),
    ("rendezvous", "meet"),
    ("heartbeat", "meet"),
]


def garbage() -> Cases:
    for seed, (port, phase) in enumerate(TARGETS):
        name = f"{CONNECTIONS} connections to the {port} while ranks {phase}, seed {seed}"
        yield name, partial(garbage_case, port, phase, seed)


def garbage_case(port: str, phase: str, seed: int) -> Outcome:
    folder = make_scratch()
    stranger = Stranger(folder / "r" / "rank0.jsonl", random.Random(f"garbage {seed}"))
    thread = threading.Thread(target=stranger.connect, args=(port, phase))
    thread.start()
    try:
        flags = [*SMALL, "--nodes", "3", "--on", "process", "--steps", "400", "--set", f"port={stranger.rendezvous}"]
        flags += ["--mode", "ring/pipeline"] if port == "ring" else []
        run = run_testbed(*flags, out=folder / "r")
        thread.join(START_TIMEOUT_S)
        left = run.left()
        in_time = stranger.early == (CONNECTIONS if phase == "meet" else 0)
        closed = stranger.refused == (CONNECTIONS if port == "ring" else 0)  # no rank listens on the ring's port then
        ok = run.code == 0 and run.status == "ok" and stranger.made == CONNECTIONS and in_time and closed and not left
        outcome = {"ok": ok, "connections": stranger.made, "early": stranger.early, "left": len(left)}
        outcome |= {"refused": stranger.refused}
        return outcome | {"code": run.code} | ({} if ok else {"said": run.output[-800:], "what": left})
    finally:
        remove(folder)


class Stranger:
    """Opens connections to a run. `made` is their number, `early` the number of those before the first step.

    `refused`: those that nothing listened to.
    """

    def __init__(self, records: Path, rng: random.Random) -> None:
        self.records, self.rng = records, rng
        self.made = self.early = self.refused = 0
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.rendezvous: int = free.getsockname()[1]

    def connect(self, port: str, phase: str) -> None:
        """Send some bytes, or none, on each connection; close most of them at once and keep the others open."""
        self._wait_until(lambda: phase == "meet" or self._is_training())
        self._wait_until(lambda: _is_listening(self.rendezvous))
        number = self.rendezvous if port == "rendezvous" else PUBLISHED[port](_store(self.rendezvous))
        with contextlib.ExitStack() as kept_open:
            for _ in range(CONNECTIONS):
                self.made += 1
                self.early += not self._is_training()
                try:
                    connection = socket.create_connection(("127.0.0.1", number), timeout=5)
                except ConnectionRefusedError:
                    self.refused += 1
                    continue
                with contextlib.suppress(OSError):
                    connection.sendall(self.rng.randbytes(self.rng.choice((0, 1, 3, 16, 300, 5000))))
                if self.rng.random() < 0.3:
                    kept_open.enter_context(connection)
                else:
                    connection.close()
            time.sleep(0.5)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while not condition() and time.monotonic() < end:
            time.sleep(0.005)

    def _is_training(self) -> bool:
        return self.records.exists() and '"kind":"step"' in self.records.read_text()


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False


def _store(rendezvous: int) -> dist.TCPStore:
    timeout = timedelta(seconds=START_TIMEOUT_S)
    return dist.TCPStore("127.0.0.1", rendezvous, is_master=False, timeout=timeout, wait_for_workers=False)


def _heartbeat_port(store: dist.TCPStore) -> int:
    return int(json.loads(store.get(STORE_KEY))["port"])


def _ring_port(store: dist.TCPStore) -> int:
    """Where rank 0 listened for its left neighbour when the last mode was attached."""
    number = store.add("ring/0", 0)
    return int(json.loads(store.get(f"ring/0/{number}"))["port"])


PUBLISHED: dict[str, Callable[[dist.TCPStore], int]] = {  # another program would find these ports by a scan
    "heartbeat": _heartbeat_port,
    "ring": _ring_port,
}
