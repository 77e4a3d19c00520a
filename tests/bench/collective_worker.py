"""One rank of the collective benchmark: a script that needs nothing but the testbed package, so any node can run it."""

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

ELEMENTS = 9_231_114  # float32, VGG-11's gradient
NAMES = ("ring", "allreduce", "gather")


def main(out: Path, repeats: int) -> None:
    """Time each algorithm in turn, so that a slow moment hits all of them; the first round is dropped."""
    torch.set_num_threads(1)
    environment = os.environ
    group = join(int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"], 29500, 120)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    buffer = torch.randn(ELEMENTS)
    for repeat in range(repeats + 1):
        for name in NAMES:
            dist.barrier()
            begun = time.monotonic()
            MEANS[name](buffer, group)
            if repeat:
                times[name].append(time.monotonic() - begun)
    out.write_text(json.dumps(times))
    leave(group)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
