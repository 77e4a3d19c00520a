"""One rank of a benchmark: a script that needs only the testbed package, so that any node can run it.

worker.py FOLDER train                                    FOLDER/cases.json lists runs; each is trained for a few steps
                                                          with the real loop, records go to FOLDER/<case>.rank<N>.jsonl
worker.py FOLDER transport REPEATS ELEMENTS MODE          the pipeline's transport against Gloo's all_reduce and our
                                                          ring over Gloo, the same
worker.py FOLDER collectives REPEATS ELEMENTS ring,... RACKS
                                                          algorithms are timed, seconds go to FOLDER/<rank>.json
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testbed.rank.counters import open_counter
from testbed.rank.group import Group, join, leave
from testbed.rank.recorder import Recorder
from testbed.rank.sync import ddp, transport
from testbed.rank.sync.algorithms import MEANS
from testbed.rank.sync.pipeline import Pipeline
from testbed.rank.train import Trainer
from testbed.results.records import Record, Step
from testbed.results.timeline import Timeline
from testbed.spec import mode as modes
from testbed.spec.fabric import Racks
from testbed.spec.mode import SyncMode
from testbed.spec.run import DEFAULT_PORT, RunSpec

WRAPPED, LAST_BUCKETS, USE_SCHED_BATCH = ddp.Wrapped, modes.LAST_BUCKETS, transport.use_sched_batch
GLOO_THREAD = "gloo_tcp_loop"  # the name of Gloo's thread that reads and writes its sockets


def train(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    group = _join(cases[0]["deadline"])
    for number, case in enumerate(cases):
        own = Group(group.rank, group.size, dist.PrefixStore(f"case{number}", group.store), case["deadline"])
        options = case.pop("options")  # see OPTIONS in shaped_network.py
        use_sched_batch_in_gloo("sched_batch" in options)
        ddp.Wrapped = partial(WRAPPED, gradient_as_bucket_view="bucket_view" in options)  # type: ignore[misc,assignment]
        transport.use_sched_batch = class_of_thread(options.get("slice_s"))
        modes.LAST_BUCKETS = tuple(options.get("last_buckets", LAST_BUCKETS))
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


# sched_setattr and sched_getattr, for which Python has no functions: their numbers, and struct sched_attr
SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
SCHED_ATTR = struct.Struct("IIQiIQQQ")  # size, policy, flags, nice, priority, runtime (the slice), deadline, period


def class_of_thread(slice_s: float | None) -> Callable[[], None]:
    """What the pipeline's thread calls when it begins; None: what it always calls, for SCHED_BATCH.

    With a number it stays SCHED_OTHER, as the thread that starts it, and runs in slices of this length; 0: the usual.
    """
    if slice_s is None:
        return USE_SCHED_BATCH
    if slice_s:
        use_slices(slice_s)  # here, because the pipeline's thread cannot report that this kernel has none
        use_slices(0.0)
    return partial(use_slices, slice_s)


def use_slices(seconds: float) -> None:
    """Have the calling thread run for so long before others of its class get the core; 0: the kernel's usual time.

    Raises RuntimeError if the kernel does not do that.
    """
    libc, (set_attr, get_attr) = ctypes.CDLL(None, use_errno=True), SYSTEM_CALLS[os.uname().machine]
    wanted = round(seconds * 1e9)
    attributes = SCHED_ATTR.pack(SCHED_ATTR.size, os.SCHED_OTHER, 0, 0, 0, wanted, 0, 0)
    found = ctypes.create_string_buffer(SCHED_ATTR.size)
    failed = libc.syscall(set_attr, 0, ctypes.c_char_p(attributes), 0)
    failed = failed or libc.syscall(get_attr, 0, found, SCHED_ATTR.size, 0)
    if failed or (wanted and SCHED_ATTR.unpack(found.raw)[5] != wanted):
        raise RuntimeError(f"slices of {seconds:g} s: this kernel does not set them. Linux 6.12 or later does")


def time_collectives(folder: Path, repeats: int, elements: int, names: list[str], racks: Racks) -> None:
    """Time the algorithms in turn, so that a disturbance affects all of them. The first round is not counted."""
    group = _join(120)
    group.racks = racks
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
    """Time the pipeline's transport, Gloo's all_reduce and our ring over Gloo in turn.

    With the processor time: of the first two that of all threads but this one, which waits; of the ring, which adds in
    this thread, that of all. The pipeline gets all gradients at once and copies its shard of the mean in place of an
    update.
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

    def used(name: str) -> float:
        return time.process_time() - (0.0 if name == "ring" else time.thread_time())

    averages = {"pipeline": by_pipeline, "gloo": partial(dist.all_reduce, buffer)}
    averages["ring"] = partial(MEANS["ring"], buffer, group)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in averages}
    for repeat in range(repeats + 1):
        for name, average in averages.items():
            dist.barrier()
            begun, before = time.monotonic(), used(name)
            average()
            seconds = time.monotonic() - begun
            if repeat:
                found[name].append((seconds, used(name) - before))
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
        repeats, elements, names, racks = arguments
        time_collectives(folder, int(repeats), int(elements), names.split(","), tuple(map(tuple, json.loads(racks))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
