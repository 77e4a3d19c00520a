"""One rank of the collective benchmark: a script that needs nothing but the testbed package, so any node can run it.

collective_worker.py FOLDER REPEATS ELEMENTS ring,gather    times become FOLDER/<rank>.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from testbed.rank.group import join, leave
from testbed.rank.sync.algorithms import MEANS


def main(folder: Path, repeats: int, elements: int, names: list[str]) -> None:
    """Time each algorithm in turn, so that a slow moment hits all of them; the first round is dropped."""
    torch.set_num_threads(1)
    environment = os.environ
    group = join(int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"], 29500, 120)
    times: dict[str, list[float]] = {name: [] for name in names}
    buffer = torch.randn(elements)
    for repeat in range(repeats + 1):
        for name in names:
            dist.barrier()
            begun = time.monotonic()
            MEANS[name](buffer, group)
            if repeat:
                times[name].append(time.monotonic() - begun)
    (folder / f"{group.rank}.json").write_text(json.dumps(times))
    leave(group)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(","))
