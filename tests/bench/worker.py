"""One rank of a benchmark: a script that needs only the testbed package, so that any node can run it.

worker.py FOLDER train                                    FOLDER/cases.json lists runs; each is trained for a few steps
                                                          with the real loop, records go to FOLDER/<case>.rank<N>.jsonl
worker.py FOLDER transport REPEATS ELEMENTS MODE          the pipeline's transport against Gloo's all_reduce, the same
worker.py FOLDER collectives REPEATS ELEMENTS ring,...    algorithms are timed, seconds go to FOLDER/<rank>.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testbed.rank.counters import open_counter
from testbed.rank.group import Group, join, leave
from testbed.rank.recorder import Recorder
from testbed.rank.sync import ddp
from testbed.rank.sync.algorithms import MEANS
from testbed.rank.sync.pipeline import Pipeline
from testbed.rank.train import Trainer
from testbed.results.records import Record, Step
from testbed.results.timeline import Timeline
from testbed.spec.mode import SyncMode
from testbed.spec.run import DEFAULT_PORT, RunSpec

WRAPPED = ddp.Wrapped
GLOO_THREAD = "gloo_tcp_loop"  # the name of Gloo's thread that reads and writes its sockets


def train(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    group = _join(cases[0]["deadline"])
    for number, case in enumerate(cases):
        own = Group(group.rank, group.size, dist.PrefixStore(f"case{number}", group.store), case["deadline"])
        use_sched_batch_in_gloo(case.pop("sched_batch"))
        ddp.Wrapped = partial(WRAPPED, gradient_as_bucket_view=case.pop("bucket_view"))  # type: ignore[misc,assignment]
        with ProcessorTimes(folder / f"{number}.rank{group.rank}.jsonl") as recorder:
            dist.barrier()
            spec = RunSpec.load(case, f"case {number}")
            Trainer(spec, own, recorder, open_counter(os.environ["GLOO_SOCKET_IFNAME"])).run()
    leave(group)


class ProcessorTimes(Recorder):
    """Adds the processor time of the whole process to every step."""

    def write(self, record: Record) -> None:
        super().write(replace(record, used=time.process_time()) if isinstance(record, Step) else record)


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


class NoUpdate:
    """In place of an optimizer: the pipeline only averages."""

    clips = False

    def own_shards(self, shards: list[Tensor]) -> None:
        self.shards = shards

    def step_shard(self, number: int, gradient: Tensor) -> None:
        self.shards[number].copy_(gradient)


def time_transport(folder: Path, repeats: int, elements: int, mode: str) -> None:
    """Time the pipeline's transport and Gloo's all_reduce in turn, with the processor time of all threads but this one.

    The pipeline gets all gradients at once and copies its shard of the mean in place of an update.
    """
    group = _join(120)
    model = nn.ParameterList([nn.Parameter(torch.randn(elements))])
    pipeline = Pipeline(SyncMode.parse(mode), group, Timeline(detailed=False))
    pipeline.attach(model, NoUpdate())  # type: ignore[arg-type]
    buffer = torch.randn(elements)

    def by_pipeline() -> None:
        pipeline.readiness.start()
        pipeline.readiness.finish()  # launches all buckets
        pipeline.flush()

    found: dict[str, list[tuple[float, float]]] = {"pipeline": [], "gloo": []}
    for repeat in range(repeats + 1):
        for name, average in (("pipeline", by_pipeline), ("gloo", partial(dist.all_reduce, buffer))):
            dist.barrier()
            begun, used = time.monotonic(), time.process_time() - time.thread_time()
            average()
            seconds = time.monotonic() - begun
            if repeat:
                found[name].append((seconds, time.process_time() - time.thread_time() - used))
    pipeline.close()
    (folder / f"{group.rank}.json").write_text(json.dumps(found))
    leave(group)


def _join(deadline_s: float) -> Group:
    torch.set_num_threads(1)
    environment = os.environ
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return join(rank, size, environment["MASTER_ADDR"], DEFAULT_PORT, deadline_s)


def main(folder: Path, task: str, *arguments: str) -> None:
    if task == "train":
        train(folder)
    elif task == "transport":
        repeats, elements, mode = arguments
        time_transport(folder, int(repeats), int(elements), mode)
    else:
        repeats, elements, names = arguments
        time_collectives(folder, int(repeats), int(elements), names.split(","))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
