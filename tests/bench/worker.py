"""One rank of a benchmark: a script that needs only the testbed package, so that any node can run it.

worker.py FOLDER train                                    FOLDER/cases.json lists runs; each is trained for a few steps
                                                          with the real loop, records go to FOLDER/<case>.rank<N>.jsonl
worker.py FOLDER collectives REPEATS ELEMENTS ring,...    algorithms are timed, seconds go to FOLDER/<rank>.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from testbed.rank.counters import open_counter
from testbed.rank.group import Group, join, leave
from testbed.rank.recorder import Recorder
from testbed.rank.sync.algorithms import MEANS
from testbed.rank.train import Trainer
from testbed.spec.run import DEFAULT_PORT, RunSpec

GLOO_THREAD = "gloo_tcp_loop"  # the name of Gloo's thread that reads and writes its sockets


def train(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    group = _join(cases[0]["deadline"])
    for number, case in enumerate(cases):
        own = Group(group.rank, group.size, dist.PrefixStore(f"case{number}", group.store), case["deadline"])
        use_sched_batch_in_gloo(case.pop("sched_batch"))
        with Recorder(folder / f"{number}.rank{group.rank}.jsonl") as recorder:
            dist.barrier()
            spec = RunSpec.load(case, f"case {number}")
            Trainer(spec, own, recorder, open_counter(os.environ["GLOO_SOCKET_IFNAME"])).run()
    leave(group)


def use_sched_batch_in_gloo(enabled: bool) -> None:
    """Set the scheduling class of Gloo's threads: that of the pipeline's thread, or the default again."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == GLOO_THREAD:
            kind = os.SCHED_BATCH if enabled else os.SCHED_OTHER
            os.sched_setscheduler(int(task.name), kind, os.sched_param(0))


def time_collectives(folder: Path, repeats: int, elements: int, names: list[str]) -> None:
    """Time the algorithms in turn, so that a disturbance affects all of them. The first round is not counted."""
    group = _join(120)
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


def _join(deadline_s: float) -> Group:
    torch.set_num_threads(1)
    environment = os.environ
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return join(rank, size, environment["MASTER_ADDR"], DEFAULT_PORT, deadline_s)


def main(folder: Path, task: str, *arguments: str) -> None:
    if task == "train":
        train(folder)
    else:
        repeats, elements, names = arguments
        time_collectives(folder, int(repeats), int(elements), names.split(","))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
