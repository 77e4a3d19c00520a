"""A stranger at the rendezvous: 200 connections with garbage while a run trains."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.soak.book import Outcome
from tests.soak.runs import SMALL, drop, scratch, testbed

CONNECTIONS = 200


def garbage(count: int = 3) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    for seed in range(count):
        yield f"{CONNECTIONS} connections, seed {seed}", lambda s=seed: _disturb(s)


def _disturb(seed: int) -> Outcome:
    folder, rng = scratch(), random.Random(f"garbage {seed}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made: list[int] = []
    stranger = threading.Thread(target=_throw, args=(folder / "r" / "rank0.jsonl", port, rng, made))
    stranger.start()
    try:
        flags = [*SMALL, "--nodes", "3", "--on", "process", "--steps", "400", "--set", f"port={port}"]
        run = testbed(*flags, out=folder / "r")
        stranger.join(60)
        left = run.left()
        ok = run.code == 0 and sum(made) == CONNECTIONS and not left
        return {"ok": ok, "connections": sum(made), "left": len(left), "code": run.code, "said": "" if ok else run.said}
    finally:
        drop(folder)


def _throw(records: Path, port: int, rng: random.Random, made: list[int]) -> None:
    """When the ranks train: some bytes each; some hang up at once, some say nothing, some stay."""
    end = time.monotonic() + 120
    while not (records.exists() and '"kind":"step"' in records.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    with contextlib.ExitStack() as stay:
        for _ in range(CONNECTIONS):
            connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            made.append(1)
            with contextlib.suppress(OSError):
                connection.sendall(rng.randbytes(rng.choice((0, 1, 3, 16, 300, 5000))))
            if rng.random() < 0.3:
                stay.enter_context(connection)
            else:
                connection.close()
        time.sleep(0.5)
