"""Folders of runs of a user's own script: records computed from a few numbers, as the observer would write them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.results import theory
from testbed.results.conclude import Summary, conclude
from testbed.results.folder import RunFolder, write_whole
from testbed.spec.run import SCHEMA, RunSpec
from testbed.spec.units import covered_length
from tests.support.synthetic import EFFICIENCY, receipt

GRADIENT_BYTES = 4_000_000
ARGV = ["python", "main.py", "--rank", "{rank}", "--world", "{world}"]
Sent = tuple[str, int]  # name of a collective as Step.comm has it, and its size in bytes
DDP = (("all_reduce main.py:31", 1_000_000), ("all_reduce main.py:31", 3_000_000))
GATHER_SCATTER = (("gather main.py:40", GRADIENT_BYTES), ("scatter main.py:44", GRADIENT_BYTES))


@dataclass
class Script:
    """What a script does in every step. Times are seconds."""

    collectives: tuple[Sent, ...] = DDP
    overlap: bool = True  # collectives begin in the middle of backward, else after it
    compute: float = 0.1
    rest: float = 0.0  # at the end of a step, in no phase
    images: int = 16
    last_images: int | None = None  # of the last step, if they differ
    threads: int = 1
    steps: int = 12
    more_steps: dict[int, int] = field(default_factory=dict)  # rank -> steps beyond `steps`
    slow: dict[int, float] = field(default_factory=dict)  # rank -> factor on compute
    sampled: tuple[int, ...] = ()  # steps in which samples took as long as computing
    differ: bool = False  # parameters differ between ranks
    overhead: float = 1.05  # time of communication over its lower bound
    loss: float = 2.3
    unseen: tuple[str, ...] = ()
    wrappers: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    more: tuple[dict[str, Any], ...] = ()  # further records of every rank


def make_script_run(folder: Path, does: Script | None = None, **values: Any) -> Summary:
    """Create the folder of a finished run of a script. `values` are those of its spec."""
    does = does or Script()
    request = {"argv": ARGV, "folder": "/home/user/training"}
    defaults = {"name": folder.name, "mode": "script", "script": request, "batch_per_rank": 1, "nodes": 4}
    spec = RunSpec.load(defaults | {"link": {"rate": "200mbit"}} | values, "synthetic")
    run = RunFolder(folder)
    run.create(spec)
    for rank in range(spec.world):
        lines = _records(does, spec, rank)
        run.records(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if spec.link.rate:
        write_whole(run.receipt, json.dumps(receipt(spec)))
    return conclude(run, spec, status="ok", substrate="netns", network="network: synthetic")


def plant_sum(folder: Path, site: str) -> None:
    """Add samples to the records of four ranks: the optimizer gets the sum of their gradients."""
    local = [[1.0, 2.0], [3.0, -1.0], [0.5, 0.5], [-2.0, 4.0]]
    total = [sum(column) for column in zip(*local, strict=True)]
    detail = {"optimizer": 0, "site": site}
    for rank, own in enumerate(local):
        sample = {"kind": "gradients", "passes": 1, "names": ["0 2"], "local": [own], "given": [total]}
        with RunFolder(folder).records(rank).open("a") as file:
            for step in (0, 1, 3, 7):
                file.write(json.dumps(sample | {"step": step, "detail": detail}) + "\n")


def _records(script: Script, spec: RunSpec, rank: int) -> list[dict[str, Any]]:
    start = {
        **{"kind": "start", "rank": rank, "world": spec.world, "unix": 0.0, "counter": "interface eth0"},
        **{"parameters": GRADIENT_BYTES // 4, "gradient_bytes": GRADIENT_BYTES, "tensors": 4, "deadline": 300.0},
        **{
            "environment": {"torch": "2.13.0", "cpu": "synthetic", "cores": 2},
            "schema": SCHEMA,
        },
    }
    setup = {"kind": "setup", "rank": rank, "world": spec.world, "backend": "gloo", "wrappers": script.wrappers}
    setup |= {"optimizers": ["SGD"], "threads": script.threads, "changed": list(script.changed)}
    steps = _steps(script, spec, rank)
    number = len(steps)
    parameters = [
        {"kind": "parameters", "step": step, "moment": "step", "hash": f"{step} {rank if script.differ else 0}"}
        for step in (1, 3, 7)
        if step < number
    ]
    unseen = [{"kind": "unseen", "seam": seam, "error": "ValueError: made to fail"} for seam in script.unseen]
    calls = {"kind": "calls", "first": 0, "last": number - 1, "rows": _rows(script, steps)}
    last = steps[-1]
    end = {"kind": "end", "steps": number, "seconds": 9.0, "sent": last["sent"], "received": last["received"]}
    return [start, setup, *steps, *parameters, *unseen, *script.more, calls, end]


def _steps(script: Script, spec: RunSpec, rank: int) -> list[dict[str, Any]]:
    rate = (spec.link.rate or 10**9) / 8 * EFFICIENCY
    one_by_one = [(name, float(k), 1.0, size) for k, (name, size) in enumerate(script.collectives)]
    together = [(name, 0.0, 1.0, size) for name, size in script.collectives]
    comm = together if script.overlap else one_by_one
    loads = [theory.observed_load(comm, each, spec.world) or theory.Load() for each in range(spec.world)]
    wire = max(load.seconds(rate, 0.0) for load in loads) * script.overhead
    computing = [script.compute * script.slow.get(each, 1.0) for each in range(spec.world)]
    begin = [(0.6 if script.overlap else 1.0) * seconds for seconds in computing]
    steps, now, number = [], 1000.0, script.steps + script.more_steps.get(rank, 0)
    for step in range(number):
        own, begun, last = computing[rank], begin[rank], max(begin) + wire
        sampling = own if step in script.sampled else 0.0
        end = max(last, own) if script.collectives else own
        each = (end - begun) / max(1, len(script.collectives))
        offsets = [begun + (0.0 if script.overlap else k * each) for k in range(len(script.collectives))]
        lasts = [end - at if script.overlap else each for at in offsets]
        made = [
            [name, at, seconds, size]
            for (name, size), at, seconds in zip(script.collectives, offsets, lasts, strict=True)
        ]
        blocked, update = end - own, 0.01
        forward, backward = 0.3 * own, 0.7 * own + (blocked if script.overlap else 0.0)
        sync = update + (0.0 if script.overlap else blocked)
        busy = covered_length([(at, at + seconds) for _, at, seconds, _ in made])
        total = end + update + script.rest + sampling
        images = script.images if script.last_images is None or step + 1 < number else script.last_images
        sent = round((step + 1) * loads[rank].sent / EFFICIENCY)
        steps.append(
            {
                **{"kind": "step", "step": step, "epoch": 0, "at": now, "data": 0.0, "forward": forward},
                **{"backward": backward, "sync": sync, "update": update, "total": total, "observing": sampling},
                **{"loss": script.loss - 0.05 * step, "images": images, "sent": sent},
                **{"received": round((step + 1) * loads[rank].received / EFFICIENCY), "cpu": None},
                **{"blocked": blocked, "busy": busy, "hidden": max(0.0, busy - blocked), "comm": made},
                **{"stalls": [[own, blocked]] if blocked else []},
                "phases": [
                    *(["forward", 0.0, forward], ["backward", forward, backward]),
                    *(["sync", forward + backward, sync], ["update", forward + backward + sync - update, update]),
                ],
            }
        )
        now += total
    return steps


def _rows(script: Script, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls record: one row per line of the script."""
    rows: dict[str, dict[str, Any]] = {}
    phase, by = ("backward", "DistributedDataParallel") if script.wrappers else ("sync", "")
    for step in steps:
        for name, _, seconds, size in step["comm"]:
            found = theory.Observed.parse(name)
            row = rows.setdefault(name, {"operation": found.operation, "site": found.site, "phase": phase, "by": by})
            row["detail"] = {"root": found.root} if found.root else {}
            row["count"] = row.get("count", 0) + 1
            row["bytes"] = row.get("bytes", 0) + size
            row["seconds"] = row.get("seconds", 0.0) + seconds
            row["blocked"] = row.get("blocked", 0.0) + step["blocked"] / len(step["comm"])
    return list(rows.values())
