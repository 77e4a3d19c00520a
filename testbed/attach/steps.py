"""Record the steps of a script and the time of their phases.

A step ends when the last optimizer of a round has updated: two optimizers that take turns (a GAN) make one step. A
round is known when one of its optimizers updates again. So if a script has several optimizers, the record of the first
step is sent then, and also that of the first step of an optimizer that replaces others. An evaluation between two steps
belongs to neither.

The phases of a step (`Phases`) are data, forward, backward, sync, update. No event marks the begin of a forward pass or
of synchronisation, so the next event decides to which phase such an interval belongs. Phases do not overlap, except
that `update` is a part of `sync`, as in the testbed's own loop. Time in no phase is the rest of the step.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from testbed.attach.events import Collective, Part, call_site
from testbed.rank.counters import Counter
from testbed.results.timeline import COMPUTING, Moment, Observed, Timeline
from testbed.spec.units import Interval

REST = ""  # between the update and the next batch
AFTER = "after"  # backward has ended; synchronisation or the next micro-batch follows


class Phases:
    """Records phases in a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.trained = False  # a backward pass has begun in this step
        self._enter(REST, timeline.moment())

    def start(self) -> None:
        """Begin a step now."""
        self.timeline.start()
        self.trained = False
        self._enter(REST, self.timeline.moment())

    def data_began(self) -> None:
        """Begin phase data. A forward pass without backward before it is no phase, and its waits are sync."""
        for since, until in self.waits:
            self.timeline.was_in_phase("sync", Moment(since, 0.0, 0.0), Moment(until, 0.0, 0.0))
        self._enter("data", self.timeline.moment())

    def data_ended(self) -> None:
        self._close("data", "forward")

    def data_exhausted(self) -> None:
        self._close("data", REST)

    def backward_began(self) -> None:
        """Begin phase backward. The time since the batch, or the last update or backward pass, was the forward pass."""
        now, self.trained = self.timeline.moment(), True
        self.timeline.was_in_phase("forward", self.since, now)
        self._enter("backward", now)

    def backward_ended(self) -> None:
        self._close("backward", AFTER)

    def update_began(self) -> None:
        now = self.timeline.moment()
        if self.state == AFTER:
            self.timeline.was_in_phase("sync", self.since, now)
        self._enter("update", now)

    def update_ended(self) -> None:
        """End phase update. If the optimizer's step had a closure, its forward and backward passes are other phases."""
        now = self.timeline.moment()
        self.timeline.was_in_phase("update", self.since, now)
        self.timeline.was_in_phase("sync", self.since, now)
        self._enter(REST, now)

    def was_blocked(self, since: float, until: float) -> None:
        """Record that the script waited for communication. The wait must be in a phase, so that the phases add up."""
        self.timeline.was_blocked(since, until)
        if self.state == "update":  # the wait is sync; computing before and after it is update
            now = self.timeline.moment()
            self.timeline.was_in_phase("update", self.since, now._replace(at=since))
            self.timeline.was_in_phase("sync", self.since, now)
            self._enter("update", now)
        elif self.state not in COMPUTING or self.state == "forward":
            self.waits.append((since, until))

    def _close(self, name: str, following: str) -> None:
        now = self.timeline.moment()
        if self.state == name:
            self.timeline.was_in_phase(name, self.since, now)
        self._enter(following, now)

    def _enter(self, state: str, now: Moment) -> None:
        self.state, self.since = state, now
        self.waits: list[Interval] = []  # since then; they are in no phase until a later event decides
        self.timeline.current = state


SCHEDSTAT = "/proc/thread-self/schedstat"  # nanoseconds on a processor; nanoseconds waiting for one; time slices
DONE_TIMEOUT_S = 60.0  # for the slowest rank to end its last step
EACH_CALLS = 50  # steps between two calls records
LOGGED_STEPS = 10  # first steps, in which DDP logs its own times; after them it logs every hundredth
LOGGED_EACH = 100
# fields of a step that add up over its parts; lists, with the position of the time offset in each row
SUMMED = (
    *("data", "forward", "backward", "sync", "update", "cpu", "process", "kernel", "images", "observing"),
    *("blocked", "busy", "hidden", "copies", "copies_cpu"),
)
OFFSETS = {"phases": 1, "comm": 1, "stalls": 0, "copying": 0}
LOGGED = {  # keys of times in ns in DDP's logging data: names in the testbed's records
    "backward_compute_time": "compute",
    "backward_comm_time": "comm",
    "backward_compute_comm_overlap_time": "overlap",
}


class Steps(Part):
    """Writes start, setup, step and calls records. `send` sends one record."""

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None],
        counter: Counter,
        limit: int | None,
        deadline: float,
        changed: list[str],
        schema: int,
        observing: Callable[[], float] = lambda: 0.0,  # seconds of samples since the last call
    ) -> None:
        self.observing = observing
        self.send, self.counter = send, counter
        self.limit, self.deadline, self.changed, self.schema = limit, deadline, changed, schema
        self.timeline = Timeline()
        self.phases = Phases(self.timeline)
        self.number = 0
        self.started = False
        self.sizes: dict[int, tuple[int, int]] = {}  # by id of a parameter that the first step trains: numbers, bytes
        self.optimizers: list[str] = []  # types of those of the first step
        self.order: list[int] = []  # ids of the optimizers of the last complete round; the last one ends a step
        self.round: list[int] = []  # ids of the optimizers that have updated in this round
        self.made = 0  # number of optimizers
        self.held: list[dict[str, Any]] = []  # the parts of a step whose end is not known yet
        self.wrappers: dict[str, dict[str, Any]] = {}
        self.ddp: Any = None  # the first DistributedDataParallel
        self.logged: list[dict[str, Any]] = []  # times from DDP's logging data beside the observer's
        self.backward: dict[str, float] = {}  # the observer's times of the last backward pass that reduced gradients
        self.rows: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}  # name in steps, row of calls
        self.passes: dict[int, list[int]] = {}  # by id of a loader's sampler: passes, id of the present iterator
        self.iterator: Any = None  # the iterator that gave the last training batch
        self.batches: dict[int, tuple[Any, int]] = {}  # by id of a sampler: iterator, images that no backward has used
        self.evaluation: str | None = None  # the line of an evaluation that has begun
        self._fresh()

    def _fresh(self) -> None:
        self.losses: list[Any] = []
        self.unscaled: tuple[Any, Any] = (None, None)  # result and loss of the last GradScaler.scale
        self.images = 0
        self.evaluated = ""  # the line of an evaluation before this step

    # events

    def group_made(self) -> None:
        self._begin_again()

    def wrapped(self, kind: str, module: Any, options: dict[str, Any]) -> None:
        self.wrappers[kind] = options
        if self.ddp is None and kind == "DistributedDataParallel":
            self.ddp = module
        self._begin_again()

    def optimizer_made(self, optimizer: Any) -> None:
        self.made += 1

    def _begin_again(self) -> None:
        """Begin the first step again: the time before it belongs to no step."""
        if not self._begun and not self.phases.trained:
            self.phases.start()

    @property
    def _begun(self) -> bool:
        """True if an optimizer has updated."""
        return self.number > 0 or bool(self.held)

    def data_began(self, loader: Any) -> None:
        if not torch.is_grad_enabled():
            self.evaluation_began()
            return
        self._evaluation_ended()
        if not self._begun and not self.phases.trained and self.iterator is None:
            self.phases.start()
        self.phases.data_began()

    def data_ended(self, loader: Any, batch: Any) -> None:
        if torch.is_grad_enabled():
            self.phases.data_ended()
            self.iterator = loader
            key = id(getattr(loader, "_index_sampler", None))
            iterator, images = self.batches.get(key, (None, 0))  # a batch of an earlier iterator was not trained on
            self.batches[key] = (loader, _images(batch) + (images if iterator is loader else 0))

    def data_exhausted(self, loader: Any) -> None:
        if torch.is_grad_enabled():
            self.phases.data_exhausted()
        key = id(getattr(loader, "_index_sampler", None))
        if key in self.passes:
            self.passes[key][1] = 0  # the next batch begins a pass, even of the same iterator (persistent workers)

    def evaluation_began(self) -> None:
        if self.evaluation is None:
            self.evaluation = call_site()

    def evaluation_ended(self) -> None:
        self._evaluation_ended()

    def _evaluation_ended(self) -> None:
        if self.evaluation is not None and self._begun and not self.phases.trained:
            self.phases.start()
            self.evaluated = self.evaluation
        self.evaluation = None

    def scaled(self, result: Any, loss: Any) -> None:
        self.unscaled = (result, loss)

    def backward_began(self, loss: Any) -> None:
        self.phases.backward_began()
        value = loss[0] if isinstance(loss, list | tuple) and loss else loss
        if value is self.unscaled[0]:
            value = self.unscaled[1]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            self.losses.append(value.detach())
        self.images += sum(images for _, images in self.batches.values())
        self.batches.clear()
        if self.iterator is not None:
            self._count_pass(self.iterator)
        if self.ddp is not None and self.backward:
            self._compare_with_ddp()

    def _count_pass(self, iterator: Any) -> None:
        """Count a pass over the data when a backward pass uses a batch of an iterator for the first time."""
        known = self.passes.setdefault(id(getattr(iterator, "_index_sampler", None)), [0, 0])
        if known[1] != id(iterator):
            known[0], known[1] = known[0] + 1, id(iterator)

    def backward_ended(self, reduced: list[Collective]) -> None:
        """Record how long DDP waited at the end of backward: from its last launch until all collectives had ended.

        DDP waits in C++, so the wait is computed from the times of its collectives. After it DDP copies gradients.
        """
        if reduced:
            used = time.thread_time()
            last = max(collective.launched for collective in reduced)
            until = max(last, *(collective.ended or last for collective in reduced))
            self.phases.was_blocked(last, until)
            self.timeline.copied((until, used))
            self._share_blocked(reduced, last)
            first = min(collective.begun for collective in reduced)
            self.backward = {
                "step": self.number,
                "computed": last,
                "comm": self.timeline.clock() - first,
                "overlap": last - first,
                "exposed": until - last,
            }
        self.phases.backward_ended()

    def update_began(self, optimizer: Any) -> None:
        self.phases.update_began()
        key = id(optimizer)
        if key in self.round:  # the optimizers of the round have changed, so the last one of `order` has not ended it
            self.order, self.round = self.round, []
            self._send_held()
        if not self.started:
            self._measure(optimizer)
        self.round.append(key)

    def update_ended(self, optimizer: Any) -> None:
        self.phases.update_ended()
        key = id(optimizer)
        ends = key in self.order[-1:]
        if not ends and key in self.order:
            return
        self.held.append(self._take())
        if ends:
            self.round = []
        if ends or (self.made <= 1 and not self.order) or self.number + 1 == self.limit:
            self._send_held()
        self.phases.start()

    def collective_began(self, collective: Collective) -> None:
        name, row = self._row(collective)
        size, detail = collective.size, row["detail"]
        row["count"] += 1
        row["bytes"] += size
        if not detail["smallest"] <= size <= detail["largest"]:
            detail["smallest"], detail["largest"] = min(size, detail["smallest"]), max(size, detail["largest"])
        collective.row = row
        collective.token = self.timeline.begin_comm(name, size, collective.begun)

    def collective_ended(self, collective: Collective) -> None:
        token, collective.token = collective.token, -1
        if token >= 0 and collective.ended is not None:
            self.timeline.end_comm(token, collective.ended)
            collective.row["seconds"] += collective.ended - collective.begun

    def waited(self, since: float, until: float, collectives: list[Collective]) -> None:
        """Record the part of a wait that overlaps the collectives as blocked, and the copying of results as copies."""
        used = time.thread_time()
        if not collectives:
            self.phases.was_blocked(since, until)
            return
        begun, ended = collectives[0].begun, collectives[0].ended or until
        for collective in collectives[1:]:
            begun, ended = min(begun, collective.begun), max(ended, collective.ended or until)
        begun, ended = max(since, begun), min(until, ended)
        if ended > begun:
            self.phases.was_blocked(begun, ended)
            self._share_blocked(collectives, begun)
        if collectives[0].operation in ("gather", "scatter", "all_gather"):
            self.timeline.copied((max(since, min(ended, until)), used))

    def _share_blocked(self, collectives: list[Collective], since: float) -> None:
        """Divide the wait among the rows of the collectives, in the order in which these ended."""
        if len(collectives) > 1:
            collectives = sorted(collectives, key=lambda each: each.ended or 0.0)
        for collective in collectives:
            ended = collective.ended or since
            if ended > since:
                collective.row["blocked"] += ended - since
                since = ended

    def ends(self) -> None:
        self._send_held()
        self._send_calls()

    # records

    def _row(self, collective: Collective) -> tuple[str, dict[str, Any]]:
        """Return the name of a collective in step records, and its row of the calls record."""
        detail = collective.detail
        ranks = tuple(detail["ranks"]) if "ranks" in detail else ()
        root = detail.get("root", 0)
        key = (
            collective.operation,
            collective.site,
            root,
            ranks,
            collective.phase,
            collective.by,
            detail.get("reduce"),
        )
        if key not in self.rows:
            name = str(Observed(collective.operation, collective.site, root, ranks))
            self.rows[key] = (
                name,
                {
                    "operation": collective.operation,
                    "site": collective.site,
                    "phase": collective.phase,
                    "count": 0,
                    "bytes": 0,
                    "seconds": 0.0,
                    "blocked": 0.0,
                    "by": collective.by,
                    "detail": {**detail, "smallest": collective.size, "largest": collective.size},
                },
            )
        return self.rows[key]

    def _compare_with_ddp(self) -> None:
        """Keep DDP's own times of the last backward pass beside the observer's. DDP logs them in the next forward."""
        ours, self.backward = self.backward, {}
        step = int(ours["step"])
        if step >= LOGGED_STEPS and step % LOGGED_EACH:
            return
        data = self.ddp._get_ddp_logging_data()
        theirs = {name: data[key] / 1e9 for key, name in LOGGED.items() if data.get(key)}
        if len(theirs) == len(LOGGED):
            # DDP counts computing from the end of forward, before the loss. It logs that moment by the time of day.
            begun = data["backward_compute_time_start"] / 1e9 - (time.time() - self.timeline.clock())
            ours["compute"] = ours.pop("computed") - begun
            self.logged.append({"step": step, "observer": ours, "ddp": theirs, "iteration": data.get("iteration")})

    def _measure(self, optimizer: Any) -> None:
        """Note the sizes of the parameters that an optimizer trains."""
        if type(optimizer).__name__ not in self.optimizers:
            self.optimizers.append(type(optimizer).__name__)
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.sizes |= {id(p): (p.numel(), p.numel() * p.element_size()) for p in trained}

    def _start(self) -> None:
        """Send start and setup. Sizes are those of all optimizers that have updated in the first step."""
        self.started = True
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        start = {
            "kind": "start",
            "rank": rank,
            "world": world,
            "unix": time.time(),
            "parameters": sum(numbers for numbers, _ in self.sizes.values()),
            "gradient_bytes": sum(size for _, size in self.sizes.values()),
            "tensors": len(self.sizes),
            "deadline": self.deadline,
            "counter": self.counter.name,
            "environment": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "kernel": platform.release(),
                "cores": os.cpu_count(),
                "own cores": sorted(os.sched_getaffinity(0)),
                "load": os.getloadavg()[0],
                "threads": torch.get_num_threads(),
                "host": platform.node(),
            },
            "schema": self.schema,
        }
        self.send(start)
        backend = dist.get_backend() if dist.is_initialized() else ""
        setup = {"kind": "setup", "rank": rank, "world": world, "backend": backend, "wrappers": self.wrappers}
        setup |= {
            "optimizers": list(dict.fromkeys(self.optimizers)),
            "threads": torch.get_num_threads(),
            "changed": self.changed,
        }
        self.send(setup)

    def _take(self) -> dict[str, Any]:
        """Return the fields of the step, or of the part of the first step, that ends now."""
        fields = self.timeline.take()
        sent, received = self.counter.read()
        epoch = max((passes for passes, _ in self.passes.values()), default=1) - 1
        fields |= {"kind": "step", "epoch": epoch, "losses": [float(each) for each in self.losses]}
        fields |= {"images": self.images, "sent": sent, "received": received, "observing": self.observing()}
        fields |= {"evaluated": self.evaluated} if self.evaluated else {}
        self._fresh()
        return fields | _processor_time()

    def _send_held(self) -> None:
        parts, self.held = self.held, []
        if parts:
            self._send_step(parts)

    def _send_step(self, parts: list[dict[str, Any]]) -> None:
        """Send the record of a step. Raise SystemExit after the last requested step, when all ranks have made it."""
        if not self.started:
            self._start()
        fields = _joined(parts) if len(parts) > 1 else parts[0]
        losses = fields.pop("losses")
        self.send(fields | {"step": self.number, "loss": sum(losses) / len(losses) if losses else 0.0})
        self.number += 1
        if self.number % EACH_CALLS == 0:
            self._send_calls()
        if self.limit is not None and self.number >= self.limit:
            self._send_calls()
            self.send({"kind": "limit", "steps": self.number})
            leave_together("done", DONE_TIMEOUT_S)
            raise SystemExit(0)

    def _send_calls(self) -> None:
        if self.number:
            calls = {
                "kind": "calls",
                "first": 0,
                "last": self.number - 1,
                "rows": [row for _, row in self.rows.values()],
            }
            self.send(calls | {"detail": {"ddp": self.logged[-LOGGED_STEPS:]} if self.logged else {}})


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of one step that consists of consecutive parts."""
    begun, last = parts[0]["at"], parts[-1]
    made = parts[0] | last | {name: sum(part[name] for part in parts) for name in SUMMED}
    for name, place in OFFSETS.items():
        made[name] = [
            (*row[:place], row[place] + part["at"] - begun, *row[place + 1 :]) for part in parts for row in part[name]
        ]
    losses = [loss for part in parts for loss in part["losses"]]
    return made | {"at": begun, "total": last["at"] + last["total"] - begun, "losses": losses}


def _processor_time() -> dict[str, float | None]:
    """Return the seconds since the start in which this thread waited for a processor; else those in which it had one.

    The file is opened each time, because a script may close all files, and another thread may train.
    """
    try:
        file = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return {"delayed": round(int(os.read(file, 100).split()[1]) / 1e9, 6)}
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return {"used": round(time.process_time(), 6)}


def _images(batch: Any) -> int:
    """Return the size of a batch: the first dimension of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((size for size in map(_images, batch) if size), 0)
    return 0


def leave_together(name: str, timeout_s: float) -> None:
    """Wait until all ranks call this, e.g. after the last step: a rank that ends earlier breaks others' connections."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    from datetime import timedelta

    store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    store.set(f"testbed/{name}/{rank}", "1")
    try:
        store.wait([f"testbed/{name}/{each}" for each in range(world)], timedelta(seconds=timeout_s))
    except RuntimeError:
        return
    if rank == 0:
        time.sleep(0.5)  # rank 0 has the store, which the others must read before it ends
