"""A stranger at a port of the run: 200 connections with garbage, while the ranks meet or while they train."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from testbed.rank.watchdog import KEY
from tests.soak.book import Outcome
from tests.soak.runs import SMALL, drop, scratch, testbed

CONNECTIONS = 200
PATIENCE = 120.0  # seconds for the ranks to come up
WHEN = [("rendezvous", "train")] * 3 + [("heartbeat", "train"), ("rendezvous", "meet"), ("heartbeat", "meet")]


def garbage() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    for seed, (port, phase) in enumerate(WHEN):
        name = f"{CONNECTIONS} connections to the {port} while ranks {phase}, seed {seed}"
        yield name, lambda p=port, w=phase, s=seed: _disturb(p, w, s)


def _disturb(port: str, phase: str, seed: int) -> Outcome:
    folder = scratch()
    stranger = Stranger(folder / "r" / "rank0.jsonl", random.Random(f"garbage {seed}"))
    thrower = threading.Thread(target=stranger.throw, args=(port, phase))
    thrower.start()
    try:
        flags = [*SMALL, "--nodes", "3", "--on", "process", "--steps", "400", "--set", f"port={stranger.rendezvous}"]
        run = testbed(*flags, out=folder / "r")
        thrower.join(PATIENCE)
        left = run.left()
        in_time = stranger.early == (CONNECTIONS if phase == "meet" else 0)
        ok = run.code == 0 and run.status == "ok" and stranger.made == CONNECTIONS and in_time and not left
        outcome = {"ok": ok, "connections": stranger.made, "early": stranger.early, "left": len(left)}
        return outcome | {"code": run.code} | ({} if ok else {"said": run.said[-800:], "what": left})
    finally:
        drop(folder)


class Stranger:
    """Knows where the ranks meet; `early`: how many of the connections it made came before the first step."""

    def __init__(self, records: Path, rng: random.Random) -> None:
        self.records, self.rng = records, rng
        self.made = self.early = 0
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.rendezvous: int = free.getsockname()[1]

    def throw(self, port: str, phase: str) -> None:
        """Some bytes each; some hang up at once, some say nothing, some stay."""
        self._await(lambda: phase == "meet" or self._trains())
        self._await(lambda: _listens(self.rendezvous))
        number = self.rendezvous if port == "rendezvous" else _heartbeat_port(self.rendezvous)
        with contextlib.ExitStack() as stay:
            for _ in range(CONNECTIONS):
                connection = socket.create_connection(("127.0.0.1", number), timeout=5)
                self.made += 1
                self.early += not self._trains()
                with contextlib.suppress(OSError):
                    connection.sendall(self.rng.randbytes(self.rng.choice((0, 1, 3, 16, 300, 5000))))
                if self.rng.random() < 0.3:
                    stay.enter_context(connection)
                else:
                    connection.close()
            time.sleep(0.5)

    def _await(self, there: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not there() and time.monotonic() < end:
            time.sleep(0.005)

    def _trains(self) -> bool:
        return self.records.exists() and '"kind":"step"' in self.records.read_text()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False


def _heartbeat_port(rendezvous: int) -> int:
    """A stranger would try all ports; we look it up."""
    patience = timedelta(seconds=PATIENCE)
    store = dist.TCPStore("127.0.0.1", rendezvous, is_master=False, timeout=patience, wait_for_workers=False)
    return int(json.loads(store.get(KEY))["port"])
