"""Whole training steps on a shaped network: `pipeline` against torch's DDP, bytes of all modes, and where time goes.

step-POINT    `pipeline` against DDP. A point is a rate, or a ratio of wire time to compute time (C/(F+B) = 1.0). For a
              ratio, the control is timed first and the rate is computed from it; again if the ratio comes out wrong.
              A short search finds the best bucket sizes; then DDP, DDP at its best, the pipeline at its best and the
              control run in turn, three times. Four ranks, one thread each, no CPU quota.
bytes         bytes of every exact mode at the interfaces against what an all-reduce must send
profile       what all cores did in a step. It has no limits: it explains the figures of step-POINT

C is the wire time of one all-reduce at the rate's TCP goodput. F+B is the step of the control: the same ranks without
synchronisation.
"""

from __future__ import annotations

import functools
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from testbed.net.tcp import efficiency
from testbed.spec.mode import ALGORITHMS
from testbed.spec.units import parse_rate
from tests.bench.figures import Figure, spread
from tests.bench.shaped_network import (
    CONTROL,
    DDP,
    NODES,
    PIPELINE,
    SCHED_BATCH,
    TrainedCase,
    case,
    shaped_network,
    step_seconds,
    train,
)

GRADIENT_BYTES = 9_231_114 * 4  # VGG-11
LEAST_BYTES = 2 * (NODES - 1) / NODES * GRADIENT_BYTES  # that an exact mode sends per rank and step
LEAST_BITS_ON_WIRE = LEAST_BYTES * 8 / efficiency()  # with headers
CORES = os.cpu_count() or 1

# --- step-POINT: pipeline against DDP --------------------------------------------------------------------------------

DDP_SIZES = ("1MiB", "2MiB", "5MiB", "10MiB")
OUR_SIZES = ("1MiB", "2MiB")
MAX_RATIO_ERROR = 0.05  # relative error of C/(F+B) above which a point is timed again


class ModeTimes(NamedTuple):
    """The steps of one mode at one rate."""

    seconds: list[float]  # per step, mean over ranks
    sent: float  # bytes per rank and step

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class PointTimes(NamedTuple):
    """The steps of all modes at one rate, and the best mode of each kind."""

    rate: str
    ours: str
    ddp: str
    search: dict[str, ModeTimes]  # by mode, in the short search
    final: dict[str, ModeTimes]

    @property
    def compute(self) -> float:
        return self.final[CONTROL].median

    @property
    def wire(self) -> float:
        return LEAST_BITS_ON_WIRE / parse_rate(self.rate)

    @property
    def ratio(self) -> float:
        return self.wire / self.compute


class Plan(NamedTuple):
    """How many steps and repeats a point takes, and its limits."""

    search: int  # steps of the search
    steps: int
    repeats: int
    default: float = 1.0  # DDP's default / pipeline, at least
    best: float = 1.0  # DDP's best / pipeline, at least
    bound: float | None = None  # pipeline / max(C, F+B), at most
    sched_batch: bool = False  # also time DDP with SCHED_BATCH, to see how much of the difference it explains


PLANS = {  # a rate, or C/(F+B)
    "50mbit": Plan(0, 6, 1),
    "100mbit": Plan(0, 6, 1),
    "2.0": Plan(8, 12, 3, default=1.10, bound=1.15),
    "1.0": Plan(8, 12, 3, default=1.35, best=1.10, bound=1.25, sched_batch=True),
    "0.67": Plan(8, 12, 3, default=1.25),
    "0.5": Plan(8, 12, 3, bound=1.15),
    "1gbit": Plan(8, 12, 3),
}


def measure_at(point: str) -> Iterator[Figure]:
    """Yield all figures of one point. A rate that misses the requested ratio is shown without limits."""
    plan = PLANS[point]
    if point.endswith("bit"):
        yield from _point_figures(_time_point(point, plan), plan)
        return
    requested = float(point)
    times = _time_point(rate_for(requested, _control_seconds()), plan)
    if abs(times.ratio / requested - 1) > MAX_RATIO_ERROR:
        control = spread(times.final[CONTROL].seconds)
        yield Figure(
            name=f"C/(F+B) at {times.rate}, where {point} was requested",
            value=times.ratio,
            detail=f"timed again at another rate; F+B {control}",
        )
        times = _time_point(rate_for(requested, times.compute), plan)
    yield from _point_figures(times, plan)


def _time_point(rate: str, plan: Plan) -> PointTimes:
    """Search for the best bucket sizes, then time them."""
    with shaped_network(rate) as (substrate, receipt, folder):
        print(f"  {receipt.sentence()}", flush=True)

        def time_modes(modes: list[str], steps: int, repeats: int) -> dict[str, ModeTimes]:
            trained = train(substrate, folder, [case(mode, steps, spans=False) for mode in modes * repeats])
            times: dict[str, ModeTimes] = {}
            for mode, each in zip(modes * repeats, trained, strict=True):
                before = times[mode].seconds if mode in times else []
                times[mode] = ModeTimes(before + step_seconds(each), each.sent)
            return times

        search: dict[str, ModeTimes] = {}
        ours, ddp = PIPELINE, "ddp/bucket:2MiB"  # where the wire dominates, bucket sizes hardly matter
        if plan.search:
            ring = [f"ring/bucket:{size}/pipeline" for size in OUR_SIZES]
            search = time_modes([*ring, *(f"ddp/bucket:{size}" for size in DDP_SIZES)], plan.search, 1)
            ours, ddp = _fastest(search, "ring"), _fastest(search, "ddp")
        sched_batch = [DDP + SCHED_BATCH, ddp + SCHED_BATCH] if plan.sched_batch else []
        final = time_modes([CONTROL, DDP, ddp, ours, *sched_batch], plan.steps, plan.repeats)
        return PointTimes(rate, ours, ddp, search, final)


def rate_for(ratio: float, compute: float, bits: float = LEAST_BITS_ON_WIRE) -> str:
    """Return the rate at which the wire time of so many bits is `ratio` times the compute time."""
    return f"{round(bits / (ratio * compute) / 1e6)}mbit"


@functools.cache
def _control_seconds() -> float:
    """Return F+B for the choice of rates. Each point times it again beside its modes."""
    with shaped_network("1gbit") as (substrate, _, folder):
        (trained,) = train(substrate, folder, [case(CONTROL, 10)])
    return statistics.median(step_seconds(trained))


def _fastest(times: dict[str, ModeTimes], prefix: str) -> str:
    return min((mode for mode in times if mode.startswith(prefix)), key=lambda mode: times[mode].median)


def _point_figures(times: PointTimes, plan: Plan) -> Iterator[Figure]:
    rate, ours, final = times.rate, times.ours, times.final
    for mode, of_mode in times.search.items():
        detail = spread(of_mode.seconds)
        yield Figure(name=f"step of {mode} in the short search, {rate}", value=of_mode.median, detail=detail)
    where = f"{rate}, C/(F+B) = {times.ratio:.2f}"
    yield Figure(
        name=f"DDP's default / {ours}, {where}",
        value=final[DDP].median / final[ours].median,
        low=plan.default,
        detail=f"{ours} {spread(final[ours].seconds)}, ddp {spread(final[DDP].seconds)}",
    )
    best = min((DDP, times.ddp), key=lambda mode: final[mode].median)
    yield Figure(
        name=f"DDP's best / {ours}, {where}",
        value=final[best].median / final[ours].median,
        low=plan.best,
        detail=f"{best} {spread(final[best].seconds)}",
    )
    for mode in (mode for mode in final if mode.endswith(SCHED_BATCH)):
        ratio = final[mode].median / final[ours].median
        yield Figure(name=f"{mode} / {ours}, {where}", value=ratio, detail=spread(final[mode].seconds))
    yield Figure(
        name=f"{ours} / max(C, F+B), {where}",
        value=final[ours].median / max(times.wire, times.compute),
        high=plan.bound,
        detail=f"C {times.wire:.3f} s, F+B {spread(final[CONTROL].seconds)}",
    )
    yield _byte_figure(f"bytes of {ours} / least, {rate}", final[ours].sent, "interface counters")


# --- bytes -----------------------------------------------------------------------------------------------------------

MIN_BYTES, MAX_BYTES = 0.97, 1.07  # over LEAST_BYTES; fewer bytes mean that the counter is wrong
BYTES_RATE = "1gbit"
SCHEDULED = ("ring/bucket:2MiB/overlap", "allreduce/bucket:2MiB/overlap", PIPELINE)


def count_bytes() -> Iterator[Figure]:
    """In every algorithm 2(N-1) S cross the network in a step, so the mean over ranks is 2(N-1)/N S for all modes."""
    modes = [*(name for name in ALGORITHMS if name not in ("single", CONTROL)), *SCHEDULED]
    with shaped_network(BYTES_RATE) as (substrate, _, folder):
        trained = train(substrate, folder, [case(mode, 6, batch_per_rank=8) for mode in modes])
    for mode, each in zip(modes, trained, strict=True):
        yield _byte_figure(f"bytes of {mode} / least", each.sent, f"{BYTES_RATE}, mean over ranks")


def _byte_figure(name: str, sent: float, detail: str) -> Figure:
    """Compare the bytes per rank and step of an exact mode with what it must send."""
    return Figure(name=name, value=sent / LEAST_BYTES, low=MIN_BYTES, high=MAX_BYTES, detail=detail)


# --- profile: where a step goes --------------------------------------------------------------------------------------

PROFILE_RATE = "350mbit"  # wire time and compute time are about equal here on two cores
PROFILE_REPEATS, PROFILE_STEPS = 3, 10
PROFILE_MODES = (CONTROL, DDP, DDP + SCHED_BATCH, PIPELINE)
SAMPLE_PERIOD_S = 0.02
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CoreTimes(NamedTuple):
    """Seconds of all cores since boot by what they did, and the number of context switches."""

    programs: float
    kernel: float
    packets: float  # hard and soft interrupts
    idle: float
    switches: float
    stolen: float  # taken by the machine below a virtual one
    own: float  # of the processes that the sampler was given

    @classmethod
    def now(cls, own: Sequence[int] = ()) -> Self:
        lines = (line.partition(" ") for line in Path("/proc/stat").read_text().splitlines())
        fields = {name: rest.split() for name, _, rest in lines}
        user, nice, system, idle, iowait, irq, softirq, steal, *_ = (int(t) / TICKS_PER_S for t in fields["cpu"])
        switches, of_own = int(fields["ctxt"][0]), sum(map(processor_seconds, own))
        return cls(user + nice, system, irq + softirq, idle + iowait, switches, steal, of_own)

    @property
    def busy(self) -> float:
        return self.programs + self.kernel + self.packets


def processor_seconds(pid: int) -> float:
    """The processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class CoreSampler:
    """Samples the core times in a thread while it is entered, with those of the processes `own`."""

    def __init__(self, own: Sequence[int] = ()) -> None:
        self.own = own

    def __enter__(self) -> Self:
        self.samples: list[tuple[float, CoreTimes]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_PERIOD_S):
            self.samples.append((time.monotonic(), CoreTimes.now(self.own)))

    def between(self, begin: float, end: float) -> CoreTimes:
        at = [sample[0] for sample in self.samples]
        columns = zip(*(sample[1] for sample in self.samples), strict=True)
        return CoreTimes(*(float(np.diff(np.interp([begin, end], at, column))[0]) for column in columns))


def profile() -> Iterator[Figure]:
    modes = PROFILE_MODES * PROFILE_REPEATS
    with shaped_network(PROFILE_RATE) as (substrate, _, folder), CoreSampler() as sampler:
        trained = train(substrate, folder, [case(mode, PROFILE_STEPS) for mode in modes])
    for mode in PROFILE_MODES:
        repeats = [each for each, which in zip(trained, modes, strict=True) if which == mode]
        yield _profile_figure(mode, repeats, sampler)


def _profile_figure(mode: str, repeats: list[TrainedCase], sampler: CoreSampler) -> Figure:
    per_step = [_core_times_per_step(trained, sampler) for trained in repeats]
    cores = CoreTimes(*(statistics.median(column) for column in zip(*per_step, strict=True)))
    loop = {
        name: statistics.median(
            float(value) for trained in repeats for steps in trained.steps for value in getattr(steps, name)
        )
        for name in ("total", "cpu", "blocked", "busy")
    }
    return Figure(
        name=f"core-seconds of a step, all four ranks, {mode}, {PROFILE_RATE}",
        value=cores.busy,
        detail=f"programs {cores.programs:.2f}, kernel {cores.kernel:.2f}, packets {cores.packets:.2f}, "
        f"idle {cores.idle:.2f}, {cores.switches:.0f} switches; step {loop['total']:.3f} s, of it the loop computes "
        f"{loop['cpu']:.3f} and is blocked {loop['blocked']:.3f}, something is on the wire {loop['busy']:.3f}",
    )


def _core_times_per_step(trained: TrainedCase, sampler: CoreSampler) -> CoreTimes:
    """From the moment when all ranks are in their steps until the first rank has ended its last."""
    begin = max(float(steps.at[0]) for steps in trained.steps)
    end = min(float(steps.at[-1] + steps.total[-1]) for steps in trained.steps)
    return CoreTimes(*(value / len(trained.steps[0].at) for value in sampler.between(begin, end)))
