"""Synthetic run folders: records computed from a few numbers, so that tests can compute what the report must contain.

A step computes for `compute` seconds and sends its buffers after that or meanwhile. Times have a little seeded noise.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.results import theory
from testbed.results.conclude import Summary, summarise
from testbed.results.folder import RunFolder, write_whole
from testbed.spec.run import SCHEMA, RunSpec
from testbed.spec.units import covered_length

GRADIENT_BYTES = 36_924_456  # VGG-11
EFFICIENCY = 1448 / 1514  # payload per byte on the wire
UNRECORDED: dict[str, Any] = {
    **dict.fromkeys(("blocked", "busy", "hidden", "copies", "copies_cpu", "kernel"), 0.0),
    **{"phases": [], "comm": [], "stalls": [], "copying": []},
}
UPDATE_S = 0.02
CARRIED_S = 0.004  # how long the last buffer of `pipeline` is still sent in the next step
CODEC_SHARE = {"fp16": 0.5, "bf16": 0.5, "int8": 0.25, "topk": 0.02, "powersgd": 0.05}  # of the gradient's bytes


@dataclass
class Conditions:
    """How fast the nodes and links of a synthetic run are, and what it learns."""

    compute: float = 1.0  # seconds of one rank's forward, backward and update
    cpu: float = 0.9  # the loop's processor time as a share of compute
    copies: float = 0.0  # seconds in each step in which backward copies gradients, if the mode sends any
    buckets: int = 4
    slow_cpu: dict[int, float] = field(default_factory=dict)  # rank -> factor on compute
    slow_link: dict[int, float] = field(default_factory=dict)  # rank -> factor on its rate
    noise: float = 0.01
    seed: int = 1
    overhead: float = 1.02  # communication time over its lower bound
    substrate: str = "netns"
    accuracy: float = 0.5
    offsets: list[float] | None = None  # seconds between the ranks' clocks, as on hosts
    loss_rate: float = 0.05
    loss: float | None = None  # of the test; None: computed from the accuracy
    slowed: dict[int, float] = field(default_factory=dict)  # step -> factor on compute, e.g. under a fault
    cpu_model: str = "synthetic"


def make_run(
    folder: Path, conditions: Conditions | None = None, status: str = "ok", reason: str = "", **values: Any
) -> Summary:
    """Create the folder of a finished run. `values` are those of its spec."""
    conditions = conditions or Conditions()
    defaults = {"name": folder.name, "data": {"name": "cifar10"}, "batch": 64, "steps": 12, "nodes": 4}
    spec = RunSpec.load(defaults | values, "synthetic")
    run = RunFolder(folder)
    run.create(spec)
    clock = _Clock(spec, conditions)
    for rank in range(spec.world):
        lines = [
            _start(rank, spec, conditions.cpu_model),
            _hash(0),
            *clock.steps(rank),
            _hash(spec.steps or 0),
            _eval(conditions, spec),
            clock.end(rank),
        ]
        run.records(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if spec.world > 1 and spec.link.rate:
        write_whole(run.receipt, json.dumps(receipt(spec, conditions)))
    network = "network: synthetic" if spec.world > 1 else "one node, no network"
    facts: dict[str, Any] = {"status": status, "reason": reason, "substrate": conditions.substrate, "network": network}
    summary = summarise(run, spec, **facts)
    write_whole(run.summary, summary.model_dump_json(by_alias=True))
    return summary


def make_faulted(
    folder: Path,
    fault: str,
    over: float | None = None,
    conditions: Conditions | None = None,
    finished: bool | None = None,
    **values: Any,
) -> Summary:
    """Create a run with a fault in step 3: it failed 0.3 s later or, with `over`, continued after so many seconds.

    `finished` without `over`: it continued, and the fault lasted to its end.
    """
    finished = bool(over) if finished is None else finished
    status, reason = ("ok", "") if finished else ("failed", "rank 2 was killed")
    made = make_run(folder, conditions, status=status, reason=reason, faults=[fault], **values)
    run, failed_rank, world = RunFolder(folder), int(fault.split("rank")[1][0]), made.spec.world
    steps = [json.loads(line) for line in run.records(0).read_text().splitlines()]
    steps = [line for line in steps if line["kind"] == "step"]
    at, last = steps[3]["at"], steps[-1]["at"] + steps[-1]["total"]
    events: list[dict[str, Any]] = [{"event": "injected", "fault": fault, "rank": failed_rank, "step": 3, "begun": at}]
    others = [rank for rank in range(world) if rank != failed_rank and not finished]
    events += [{"event": "over", "fault": fault, "rank": failed_rank, "at": at + over}] if over else []
    events += [{"event": "saw", "rank": rank, "failed_rank": failed_rank, "at": at + 0.3, "code": 6} for rank in others]
    codes = [0 if finished else -9 if rank == failed_rank else 6 for rank in range(world)]
    ended = last if finished else at + 0.4
    events += [{"event": "ended", "rank": rank, "code": code, "at": ended} for rank, code in enumerate(codes)]
    run.faults.write_text("".join(json.dumps({"at": at, **event}) + "\n" for event in events))
    facts: dict[str, Any] = {"status": status, "reason": reason, "substrate": made.substrate, "network": made.network}
    summary = summarise(run, made.spec, **facts)
    write_whole(run.summary, summary.model_dump_json(by_alias=True))
    return summary


def size_of(spec: RunSpec) -> int:
    """Return S: the bytes that are sent in place of the gradient."""
    return round(GRADIENT_BYTES * CODEC_SHARE[spec.mode.codec]) if spec.mode.codec else GRADIENT_BYTES


def overlaps(spec: RunSpec) -> bool:
    return spec.mode.algorithm == "ddp" or spec.mode.schedule != "after"


def directions(spec: RunSpec) -> tuple[str, ...]:
    """Return the suffixes of buffer names, one per direction, as testbed.rank.sync names them."""
    if spec.mode.schedule == "pipeline":
        return (" reduce", " gather")
    return (" up", " down") if spec.mode.algorithm == "server" else ("",)


class _Clock:
    """Computes the steps of all ranks. The communication of a step ends at the same moment on all of them."""

    def __init__(self, spec: RunSpec, conditions: Conditions) -> None:
        self.spec, self.conditions = spec, conditions
        self.random = random.Random(conditions.seed)
        self.now = 1000.0
        slow = min(conditions.slow_link.values(), default=1.0)
        rate = (spec.link.rate or 10**10) / 8 * EFFICIENCY * slow
        once = theory.bound(spec.mode, spec.world, size_of(spec), rate, 0.0, 1) or 0.0
        self.wire = once * conditions.overhead
        count = 1 if spec.mode.silent else conditions.buckets
        self.names = [f"bucket {k}{direction}" for direction in directions(spec) for k in range(count)]
        self.size = size_of(spec) // count
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(spec.world)]
        self.sent = [0.0] * spec.world
        for step in range(spec.steps or 0):
            self._step(step)

    def _step(self, step: int) -> None:
        spec, conditions = self.spec, self.conditions
        jitter = [1 + conditions.noise * self.random.uniform(-1, 1) for _ in range(spec.world)]
        share = conditions.compute / spec.world if spec.batch else conditions.compute
        share *= conditions.slowed.get(step, 1.0)
        compute = [share * conditions.slow_cpu.get(r, 1.0) * jitter[r] for r in range(spec.world)]
        due = spec.mode.every == 1 or (step + 1) % spec.mode.every == 0
        wire = self.wire * (1 + conditions.noise * self.random.uniform(0, 1)) if due else 0.0
        slowest = max(compute) if wire else 0.0
        for rank in range(spec.world):
            self._rank_step(step, rank, compute[rank], slowest, wire)
        self.now += max(rows[-1]["total"] for rows in self.rows) + 0.001

    def _comm(self, step: int, begin: float, end: float, total: float) -> list[list[Any]]:
        """Buffers are sent one after the other. The last one of `pipeline` is still being sent when the step ends."""
        each = (end - begin) / len(self.names)
        comm = [[name, begin + each * k, each, self.size] for k, name in enumerate(self.names)]
        if self.spec.mode.schedule == "pipeline":
            comm[-1][2] = total - comm[-1][1]
            comm = [*([[f"{self.names[-1]} (cont.)", 0.0, CARRIED_S, self.size]] if step else []), *comm]
        return comm

    def _rank_step(self, step: int, rank: int, compute: float, slowest: float, wire: float) -> None:
        """Compute is 2 % data, 31 % forward and 67 % backward. Then the rank waits for the slowest one and sends."""
        update, overlap = UPDATE_S, overlaps(self.spec)
        copies = 0.0 if self.spec.mode.silent else self.conditions.copies
        work, compute = compute, compute + copies
        data, forward, backward = 0.02 * work, 0.31 * work, 0.67 * work + copies
        begin_comm = data + forward + (0.5 * backward if overlap else backward)
        half = 0.5 if overlap else 1.0
        latest = slowest * (0.02 + 0.31 + half * 0.67) + half * copies
        end_comm = max(latest + wire, begin_comm) if wire else begin_comm
        if overlap and wire:
            end_comm = max(end_comm, compute)
        blocked = max(0.0, end_comm - compute) if wire else 0.0
        stalls = [[compute, blocked]] if blocked else []
        in_backward = blocked if overlap else 0.0
        sync = update + (0.0 if overlap else blocked)
        at_sync = compute + in_backward
        phases = [["data", 0.0, data], ["forward", data, forward], ["backward", data + forward, backward + in_backward]]
        phases += [["sync", at_sync, sync], ["update", at_sync + sync - update, update]]
        share = theory.sent_share(self.spec.mode, self.spec.world, rank) or 0.0
        if wire:
            self.sent[rank] += share * size_of(self.spec) / EFFICIENCY
        offset = self.conditions.offsets[rank] if self.conditions.offsets else 0.0
        total = at_sync + sync + 0.001
        comm = self._comm(step, begin_comm, end_comm, total) if wire else []
        busy = covered_length([(offset, offset + seconds) for _, offset, seconds, _ in comm])
        self.rows[rank].append(
            {
                **{"kind": "step", "step": step, "epoch": 0, "at": self.now + offset, "data": data, "forward": forward},
                **{"backward": backward + in_backward, "sync": sync, "update": update, "total": total},
                **{"loss": 2.3 - self.conditions.loss_rate * step, "images": self.spec.local_batch(rank)},
                **{
                    "sent": round(self.sent[rank]),
                    "received": round(self.sent[rank]),
                    "cpu": self.conditions.cpu * compute,
                },
                **{"copies": copies, "copies_cpu": self.conditions.cpu * copies, "kernel": 0.0},
                **{"blocked": blocked, "busy": busy, "hidden": max(0.0, busy - blocked)},
                **{"phases": phases, "comm": comm, "stalls": stalls},
                **{"copying": [[compute - copies, copies]] if copies else []},
                **({} if self.spec.spans else UNRECORDED),
            }
        )

    def steps(self, rank: int) -> list[dict[str, Any]]:
        return self.rows[rank]

    def end(self, rank: int) -> dict[str, Any]:
        back = 0.5 if len(directions(self.spec)) > 1 else 0.0  # the second direction carries parameters
        payload_bytes = self.sent[rank] * EFFICIENCY
        payload = {"gradients": round(payload_bytes * (1 - back)), "parameters": round(payload_bytes * back)}
        payload |= {"buffers": 5000, "metrics": 200}
        sent = round(self.sent[rank])
        seconds = self.now - 1000.0
        return {
            "kind": "end",
            "steps": self.spec.steps,
            "seconds": seconds,
            "sent": sent,
            "received": sent,
            "before": 0,
            "payload": payload,
        }


def _start(rank: int, spec: RunSpec, cpu: str) -> dict[str, Any]:
    facts = {"parameters": GRADIENT_BYTES // 4, "gradient_bytes": GRADIENT_BYTES, "tensors": 34, "deadline": 60.0}
    environment = {"testbed": "0.1.0", "torch": "2.13.0", "kernel": "6.1", "cpu": cpu, "cores": 2, "load": 0.1}
    return {
        **{"kind": "start", "rank": rank, "world": spec.world, "unix": 0.0, "counter": "interface eth0"},
        **{"environment": environment, "schema": SCHEMA},
        **facts,
    }


def _hash(step: int) -> dict[str, Any]:
    return {"kind": "hash", "step": step, "parameters": "abc", "agree": True}


def _eval(conditions: Conditions, spec: RunSpec) -> dict[str, Any]:
    loss = 2.3 - conditions.accuracy if conditions.loss is None else conditions.loss
    facts = {"loss": loss, "correct": round(1000 * conditions.accuracy), "images": 1000}
    where = {"kind": "eval", "step": spec.steps, "epoch": 0, "scope": "all ranks"}
    return {**where, **facts, "train_loss": 2.3 - conditions.accuracy, "train_accuracy": conditions.accuracy}


def receipt(spec: RunSpec, conditions: Conditions | None = None) -> dict[str, Any]:
    """A receipt in which every link has the requested rate."""
    conditions = conditions or Conditions()
    rate = float(spec.link.rate or 0)

    def link(src: int, dst: int) -> dict[str, Any]:
        requested = round(rate * min(conditions.slow_link.get(src, 1.0), conditions.slow_link.get(dst, 1.0)))
        trip = 2 * (spec.link.delay or 0.0)
        return {
            "way": {"rtt_requested": trip, "rtt": trip + 0.0002} if trip else None,
            "src": src,
            "dst": dst,
            "requested": requested,
            "goodput": requested * EFFICIENCY,
            "measured": requested * 1.002,
            "error": 0.002,
        }

    links = [link(s, d) for s in range(spec.world) for d in range(spec.world) if s != d]
    fan_in = {
        "senders": list(range(1, spec.world)),
        "requested": round(rate),
        "goodput": rate * EFFICIENCY,
        "measured": rate,
        "error": 0.0,
    }
    clock = {"clock": [{"offset": each, "error": 0.0005} for each in conditions.offsets or []]}
    return {
        "schema": SCHEMA,
        "links": links,
        "fan_in": fan_in,
        "mtu": 1500,
        "congestion": ["cubic"],
        "duration": 3.0,
    } | clock
