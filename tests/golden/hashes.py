"""Final parameter hashes of many modes on N ranks: `hashes.py N FOLDER MODE...`. Run in a worktree: its code trains.

torch is imported once; each rank of each mode is a fork of this process that becomes `python -m testbed.rank`.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import runpy
import socket
import sys
from pathlib import Path

import torch  # noqa: F401 - before the fork, so that no rank pays for it
from names import RANK_MODULE, find

SPEC = {
    "model": "lenet5",
    "data": {"name": "synthetic", "subset": 96, "test_subset": 12},
    "batch": 24,
    "steps": 4,
    "seed": 7,
    "warmup": 1,
    "evaluate": "never",
    "probe": False,
    "optimizer": {"lr": 0.05, "clip": 1.0, "schedule": "cosine", "warmup": 2},
}
HASH = re.compile(r'"kind":"hash".*?([0-9a-f]{64})')


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def become_rank(rank: int, world: int, port: int, folder: Path) -> None:
    """Replace the program of this fork; never returns."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    own = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    sys.argv = [RANK_MODULE, "--folder", str(folder)]
    try:
        runpy.run_module(RANK_MODULE, run_name="__main__")
    finally:
        sys.stderr.flush()
        os._exit(99)  # the module ends the process itself


def train(mode: str, nodes: int, folder: Path) -> str:
    """The last hash of every rank, shortened; what went wrong instead of it where a rank failed."""
    spec = find("RunSpec").load(SPEC | {"mode": mode, "nodes": nodes}, mode)
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(spec.to_json())
    port, children = free_port(), {}
    for rank in range(spec.world):
        child = os.fork()
        if child == 0:
            become_rank(rank, spec.world, port, folder)
        children[rank] = child
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children.values()]
    if any(codes):
        return f"exit codes {codes}"
    found = [HASH.findall((folder / f"rank{rank}.jsonl").read_text()) for rank in range(spec.world)]
    return " ".join(dict.fromkeys(hashes[-1][:32] if hashes else "none" for hashes in found))


if __name__ == "__main__":
    count, place, *modes = sys.argv[1:]
    package = importlib.import_module(RANK_MODULE)
    for module in pkgutil.walk_packages(package.__path__, f"{RANK_MODULE}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for number, name in enumerate(modes):
        print(f"n={count} {name}: {train(name, int(count), Path(place) / str(number))}", flush=True)
