"""The steps of a script: where its time goes, by our own records.

A step ends when the last optimizer of a round has updated: two optimizers that take turns (a GAN) make one step. So the
first step is known when its first optimizer comes again.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from testbed.attach.events import Collective, Part
from testbed.rank.counters import Counter
from testbed.results.collectives import Observed
from testbed.results.timeline import Timeline

EACH_CALLS = 50  # steps between two records of the calls so far


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
        self.number = 0
        self.started = False
        self.order: list[int] = []  # optimizers of one round, by id, in the order of their first update
        self.last: int | None = None  # the one that ends a step; None: not known yet
        self.optimizers: list[str] = []
        self.wrappers: dict[str, dict[str, Any]] = {}
        self.rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        self.tokens: dict[int, int] = {}
        self._fresh()

    def _fresh(self) -> None:
        self.since_forward: float | None = None
        self.since_sync: float | None = None
        self.since: float = 0.0  # of the phase that is open
        self.loss = 0.0
        self.losses: list[Any] = []
        self.images = 0
        self.launched: list[Collective] = []  # in the present backward pass

    # events

    def wrapped(self, kind: str, module: Any, options: dict[str, Any]) -> None:
        self.wrappers[kind] = options

    def data_began(self, loader: Any) -> None:
        self.since = self.timeline.clock()

    def data_ended(self, loader: Any, batch: Any) -> None:
        now = self.timeline.clock()
        if not torch.is_grad_enabled():
            return
        self.timeline.was_in_phase("data", self.since, now)
        self.since_forward = now
        self.images += _images(batch)

    def backward_began(self, loss: Any) -> None:
        now = self.timeline.clock()
        self.timeline.was_in_phase("forward", self.since_forward or self.timeline.begun, now)
        self.since, self.launched = now, []
        value = loss[0] if isinstance(loss, list | tuple) else loss
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            self.losses.append(value.detach())

    def backward_ended(self) -> None:
        now = self.timeline.clock()
        self.timeline.was_in_phase("backward", self.since, now)
        ends = [collective.ended or now for collective in self.launched]
        if ends:  # DDP waits at the end of backward, in C++: from the last launch until all have ended
            last = max(collective.begun for collective in self.launched)
            until = min(now, max(ends))
            if until > last:
                self.timeline.was_blocked(last, until)
                self._share_blocked(until - last)
        self.since_sync = self.since_forward = now

    def _share_blocked(self, seconds: float) -> None:
        row = self._row(self.launched[-1])
        row["blocked"] += seconds

    def update_began(self, optimizer: Any) -> None:
        self.since = self.timeline.clock()
        key = id(optimizer)
        if not self.started:
            self._start(optimizer)
        if self.last is None and self.order and key == self.order[0]:  # the round begins again
            self.last = self.order[-1]
        elif key not in self.order:
            self.order.append(key)
            self.optimizers.append(type(optimizer).__name__)

    def update_ended(self, optimizer: Any) -> None:
        now = self.timeline.clock()
        self.timeline.was_in_phase("update", self.since, now)
        self.timeline.was_in_phase("sync", self.since_sync or self.since, now)
        self.since_sync = now
        if self.last is None or id(optimizer) == self.last:
            self._step()

    def collective_began(self, collective: Collective) -> None:
        row = self._row(collective)
        row["count"] += 1
        row["bytes"] += collective.size
        row["detail"] |= collective.detail
        if collective.phase == "backward":
            self.launched.append(collective)
        self.tokens[id(collective)] = self.timeline.begin_comm(str(_observed(collective)), collective.size)

    def collective_ended(self, collective: Collective) -> None:
        token = self.tokens.pop(id(collective), None)
        if token is not None:
            self.timeline.end_comm(token)
            self._row(collective)["seconds"] += (collective.ended or 0.0) - collective.begun

    def waited(self, since: float, until: float, site: str) -> None:
        self.timeline.was_blocked(since, until)
        for row in self.rows.values():
            if row["site"] == site:
                row["blocked"] += until - since
                return

    def ends(self) -> None:
        self._send_calls()

    # records

    def _row(self, collective: Collective) -> dict[str, Any]:
        key = (collective.operation, collective.site, collective.phase, str(_observed(collective)))
        if key not in self.rows:
            self.rows[key] = {
                "operation": collective.operation,
                "site": collective.site,
                "phase": collective.phase,
                "count": 0,
                "bytes": 0,
                "seconds": 0.0,
                "blocked": 0.0,
                "by": "DistributedDataParallel" if collective.phase == "backward" and self.wrappers else "",
                "detail": {},
            }
        return self.rows[key]

    def _start(self, optimizer: Any) -> None:
        self.started = True
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        start = {
            "kind": "start",
            "rank": rank,
            "world": world,
            "unix": time.time(),
            "parameters": sum(p.numel() for p in trained),
            "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
            "tensors": len(trained),
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
        setup |= {"optimizers": [type(optimizer).__name__], "threads": torch.get_num_threads(), "changed": self.changed}
        self.send(setup)

    def _step(self) -> None:
        fields = self.timeline.take()
        sent, received = self.counter.read()
        loss = sum(float(value) for value in self.losses) / len(self.losses) if self.losses else 0.0
        fields |= {"kind": "step", "step": self.number, "epoch": 0, "loss": loss, "images": self.images}
        fields |= {"sent": sent, "received": received, "cpu": None, "observing": self.observing()}
        self.send(fields)
        self.number += 1
        self.timeline.start()
        self._fresh()
        if self.number % EACH_CALLS == 0:
            self._send_calls()
        if self.limit is not None and self.number >= self.limit:
            self._send_calls()
            self.send({"kind": "limit", "steps": self.number})
            _leave_together()
            raise SystemExit(0)

    def _send_calls(self) -> None:
        if self.number:
            self.send({"kind": "calls", "first": 0, "last": self.number - 1, "rows": list(self.rows.values())})


def _observed(collective: Collective) -> Observed:
    """The collective as records name it."""
    detail = collective.detail
    return Observed(collective.operation, collective.site, detail.get("root", 0), tuple(detail.get("ranks", ())))


def _images(batch: Any) -> int:
    """The size of a batch: the first dimension of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((size for size in map(_images, batch) if size), 0)
    return 0


def _leave_together() -> None:
    """Wait until all ranks have done their last step: a rank that ends earlier would break the others' connections."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    from datetime import timedelta

    store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    store.set(f"testbed/done/{rank}", "1")
    try:
        store.wait([f"testbed/done/{each}" for each in range(world)], timedelta(seconds=60))
    except RuntimeError:
        return
    if rank == 0:
        time.sleep(0.5)  # rank 0 has the store: the others must have read it
