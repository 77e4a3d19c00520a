"""One rank of the step benchmark: meet once, then train each case for a few steps with the real loop.

step_worker.py FOLDER    FOLDER/cases.json is a list of runs; their records become FOLDER/<case>.rank<N>.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from testbed.rank.counters import open_counter
from testbed.rank.group import Group, join, leave
from testbed.rank.recorder import Recorder
from testbed.rank.sync.pipeline import use_sched_batch_in_gloo
from testbed.rank.train import Trainer
from testbed.spec.run import RunSpec


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    environment, cases = os.environ, json.loads((folder / "cases.json").read_text())
    rank, size, address = int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"]
    group = join(rank, size, address, 29500, cases[0]["deadline"])
    for number, case in enumerate(cases):
        own = Group(rank, size, dist.PrefixStore(f"case{number}", group.store), case["deadline"])
        use_sched_batch_in_gloo(case.pop("patient"))
        with Recorder(folder / f"{number}.rank{rank}.jsonl") as recorder:
            dist.barrier()
            spec = RunSpec.load(case, f"case {number}")
            Trainer(spec, own, recorder, open_counter(environment["GLOO_SOCKET_IFNAME"])).run()
    leave(group)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
