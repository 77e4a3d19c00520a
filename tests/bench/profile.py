"""Where a step goes: what all cores did in it, how often they changed threads, how long the wire and the loop waited.

No limits: it explains what the parts `step-...` find. Medians of three repeats in turn.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from tests.bench.cases import CONTROL, DDP, NODES, PATIENT, PIPELINE, Ranks, case, train
from tests.bench.figures import Figure
from tests.bench.shaped import network

RATE = "350mbit"  # about where wire and compute are equal on two cores
REPEATS, STEPS = 3, 10
PERIOD = 0.02  # seconds between two looks
MODES = (CONTROL, DDP, DDP + PATIENT, PIPELINE)
TICKS = os.sysconf("SC_CLK_TCK")


class Cores(NamedTuple):
    """Seconds of all cores since the machine started, and changes from one thread to another."""

    programs: float
    kernel: float
    packets: float
    idle: float
    switches: float

    @classmethod
    def now(cls) -> Self:
        lines = {name: rest.split() for name, _, rest in (x.partition(" ") for x in _stat())}
        user, nice, system, idle, iowait, irq, softirq, *_ = (int(ticks) / TICKS for ticks in lines["cpu"])
        return cls(user + nice, system, irq + softirq, idle + iowait, int(lines["ctxt"][0]))


def _stat() -> list[str]:
    return Path("/proc/stat").read_text().splitlines()


class Watch:
    """Looks at the cores all the time, from a thread."""

    def __enter__(self) -> Self:
        self.seen: list[tuple[float, Cores]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(PERIOD):
            self.seen.append((time.monotonic(), Cores.now()))

    def between(self, begin: float, end: float) -> Cores:
        first, last = (min(self.seen, key=lambda each: abs(each[0] - at))[1] for at in (begin, end))
        return Cores(*(b - a for a, b in zip(first, last, strict=True)))


def measure() -> Iterator[Figure]:
    modes = MODES * REPEATS
    with network(RATE, NODES) as (substrate, _, folder), Watch() as watch:
        found = train(substrate, folder, [case(mode, STEPS) for mode in modes])
    for mode in MODES:
        yield _figure(mode, [ranks for ranks, each in zip(found, modes, strict=True) if each == mode], watch)


def _figure(mode: str, repeats: list[Ranks], watch: Watch) -> Figure:
    spent = [_per_step(ranks, watch) for ranks in repeats]
    cores = Cores(*(statistics.median(column) for column in zip(*spent, strict=True)))
    loop = {
        name: statistics.median(
            float(value) for ranks in repeats for steps in ranks.steps for value in getattr(steps, name)
        )
        for name in ("total", "cpu", "blocked", "busy")
    }
    return Figure(
        name=f"core-seconds of a step, all four ranks, {mode}, {RATE}",
        value=cores.programs + cores.kernel + cores.packets,
        detail=f"programs {cores.programs:.2f}, kernel {cores.kernel:.2f}, packets {cores.packets:.2f}, "
        f"idle {cores.idle:.2f}, {cores.switches:.0f} switches; step {loop['total']:.3f} s, of it the loop computes "
        f"{loop['cpu']:.3f} and is blocked {loop['blocked']:.3f}, something is on the wire {loop['busy']:.3f}",
    )


def _per_step(ranks: Ranks, watch: Watch) -> Cores:
    """From when all ranks are in their steps to when the first has done its last."""
    begin = max(float(steps.at[0]) for steps in ranks.steps)
    end = min(float(steps.at[-1] + steps.total[-1]) for steps in ranks.steps)
    return Cores(*(value / len(ranks.steps[0].at) for value in watch.between(begin, end)))
