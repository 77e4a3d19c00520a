"""Whole steps of five models on a shaped network: `ring/pipeline` against torch's DDP, with the best settings of DDP.

models-MODEL-RATIO    one model at one ratio of wire time to compute time, C/(F+B). The control is timed first, and the
                      rate is computed from it. A short search finds DDP's two best bucket sizes, with and without
                      gradient_as_bucket_view. Then the control, DDP's default, DDP's two best and the pipeline run in
                      turn. At ratio 1.0 the control, DDP's best and the pipeline run once more beside one niced
                      busy process a core. If the search finds another F+B, it is repeated at another rate
sizes-MODEL-RATIO     the bucket size that the ranks choose against 0.5 to 8 MiB
transport             the pipeline's transport alone against Gloo's all_reduce, and against `ring`, which sends by Gloo
first-layers          the pipeline with equal buckets, and with two choices of smaller last ones, on 4 and on 8 nodes
thread-class          the pipeline with other scheduling classes of its thread, quiet and beside niced load

A step is left out if other processes, or the machine below a virtual one, took more than DISTURBED_SHARE of the cores'
time during it; the figures say how many. Four ranks, one thread each, each pinned to a core, no CPU quota.

    python -m tests.bench.models    from results/bench.json: fit the time of a segment (SEGMENT_S in
                                    testbed/results/theory.py). `make docs` writes the tables and draws the plot
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import operator
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed.control.machine.affinity import usable_cores
from testbed.control.substrates.base import Substrate
from testbed.net.tcp import efficiency
from testbed.spec.models import MODELS
from testbed.spec.units import parse_rate, parse_size
from tests.bench.figures import Figure, spread
from tests.bench.shaped_network import (
    BUCKET_VIEW,
    CONTROL,
    DDP,
    LAST_BUCKETS,
    LONG_SLICES,
    NODES,
    SCHED_OTHER,
    TrainedCase,
    case,
    run_worker,
    shaped_network,
    step_seconds,
    train,
)
from tests.bench.step import CORES, MAX_RATIO_ERROR, CoreSampler, CoreTimes, rate_for
from tests.support.provenance import ROOT

OURS = "ring/pipeline"  # the ranks choose the size of the buckets
SETTINGS = [f"ddp/bucket:{size}MiB{view}" for size in (1, 2, 5, 10, 25) for view in ("", BUCKET_VIEW)]


NICED = """import os, pathlib, sys
os.nice(19)
os.sched_setaffinity(0, [int(sys.argv[1])])
group = pathlib.Path("/proc/self/autogroup")
if group.exists():
    group.write_text("19")
print("ready", flush=True)
while True:
    pass
"""


class Model(NamedTuple):
    """What is trained, and its limits."""

    batch: int  # samples a rank
    batch_at_half: int  # at ratio 0.5, where as many samples need twice the rate: at most about 1 Gbit
    best: dict[float, float]  # DDP's best / pipeline, at least, by ratio
    bound: dict[float, float]  # pipeline / max(C, F+B), at most, by ratio
    data: str = "synthetic"


MODELS_TIMED = {  # so many samples that a step of the control takes 0.4 to 1.5 s on two cores
    "vgg11": Model(64, 128, {0.5: 1.05, 1.0: 1.15, 2.0: 1.05}, {0.5: 1.25, 1.0: 1.25, 2.0: 1.15}),
    "resnet18": Model(16, 32, {0.5: 1.05, 1.0: 1.15, 2.0: 1.05}, {0.5: 1.25, 1.0: 1.18, 2.0: 1.15}),
    "mobilenet_v2": Model(96, 192, {0.5: 1.05, 1.0: 1.15, 2.0: 1.05}, {0.5: 1.25, 1.0: 1.18, 2.0: 1.15}),
    "gpt": Model(12, 16, {0.5: 1.0, 1.0: 1.08, 2.0: 1.05}, {0.5: 1.25, 2.0: 1.15}, "text"),
    "vit_tiny": Model(16, 16, {0.5: 1.0, 1.0: 1.08, 2.0: 1.05}, {0.5: 1.25, 2.0: 1.15}),
}
RATIOS = (0.5, 1.0, 2.0)
CORE_SECONDS, BESIDE = "core-seconds per GB above the control", " beside niced load"  # in names of figures
BESIDE_LOAD = 1.0  # DDP's best beside niced load / pipeline beside the same load, at least
SEARCH_STEPS, STEPS, LOAD_STEPS = 4, 7, 6  # of one case, with its warm-up
CANDIDATES = 2  # of the search, which are timed in the final rounds
REPEATS = 3
DISTURBED_SHARE = 0.05  # of the cores' time in a step
DISTURBED_S = 0.05  # and at least so much: the kernel counts in ticks of 0.01 s


class Times(NamedTuple):
    """The steps of one mode."""

    seconds: list[float]  # of each step, mean over ranks, without disturbed steps
    left_out: int  # disturbed steps
    sent: float  # bytes per rank and step
    busy: float  # core-seconds of a step, all ranks and the kernel, median
    chosen: str  # the mode with its bucket size
    others: float = 0.0  # core-seconds of other processes in a step, median of all steps

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def parts() -> dict[str, functools.partial[Iterator[Figure]]]:
    """Every point, by the name of its part."""
    points = [(model, ratio) for ratio in (1.0, 0.5, 2.0) for model in MODELS_TIMED]
    return {f"models-{model}-{ratio}": functools.partial(measure, model, ratio) for model, ratio in points}


def measure(model: str, ratio: float) -> Iterator[Figure]:
    """Yield the figures of one point."""
    batch = batch_at(model, ratio)
    point = _time_point(model, batch, ratio, _control_seconds(model, batch))
    for mode, times in point.search.items():
        yield Figure(name=f"step of {mode} in the short search", value=times.median, detail=spread(times.seconds))
    wire = _least_bits(model) / parse_rate(point.rate)
    yield from point_figures(MODELS_TIMED[model], ratio, batch, wire, point.rate, point.final, point.loaded)


class Point(NamedTuple):
    """The steps of all modes at one rate."""

    rate: str
    search: dict[str, Times]
    final: dict[str, Times]
    loaded: dict[str, Times]  # beside niced load, at ratio 1


def _time_point(model: str, batch: int, ratio: float, compute: float, again: bool = True) -> Point:
    """Search for DDP's best settings, then time them beside the control, DDP's default and the pipeline.

    `compute`: F+B in seconds, for the rate. If it is another one at that rate, the search is repeated once at another.
    """
    rate = rate_for(ratio, compute, _least_bits(model))
    with shaped_network(rate) as (substrate, receipt, folder):
        print(f"  {receipt.sentence()}", flush=True)

        def run(modes: Sequence[str], steps: int, own: Sequence[int] = (), search: bool = False) -> dict[str, Times]:
            values = _values(model, batch) | {"link": {"rate": rate}}
            return time_modes(substrate, folder, modes, steps, own, search, **values)

        search = run([CONTROL, *SETTINGS, CONTROL], SEARCH_STEPS, search=True)
        found = search.pop(CONTROL).median
        if not again or abs(compute / found - 1) <= MAX_RATIO_ERROR:
            candidates = sorted(search, key=lambda mode: search[mode].median)[:CANDIDATES]
            final = run([CONTROL, DDP, *candidates, OURS] * REPEATS, STEPS)
            if ratio != 1.0:
                return Point(rate, search, final, {})
            best = min((DDP, *candidates), key=lambda mode: final[mode].median)
            with niced_load() as own:
                return Point(rate, search, final, run([CONTROL, best, OURS] * REPEATS, LOAD_STEPS, own))
    print(f"  F+B is {found:.3f} s at this rate, not {compute:.3f} s: once more at another rate", flush=True)
    return _time_point(model, batch, ratio, found, again=False)


def batch_at(model: str, ratio: float) -> int:
    """Samples a rank."""
    timed = MODELS_TIMED[model]
    return timed.batch_at_half if ratio < 1 else timed.batch


def gradient_bytes(model: str) -> int:
    """The size of a gradient in float32."""
    return 4 * MODELS[model].parameters


def _least_bits(model: str, nodes: int = NODES) -> float:
    """What a rank must send on the wire in a step of an exact mode, headers included."""
    return 2 * (nodes - 1) / nodes * gradient_bytes(model) * 8 / efficiency()


def _values(model: str, batch: int, nodes: int = NODES) -> dict[str, Any]:
    of_model = {"model": model, "data": {"name": MODELS_TIMED[model].data}, "batch_per_rank": batch}
    return of_model | {"spans": False, "nodes": nodes}


@functools.cache
def _control_seconds(model: str, batch: int, nodes: int = NODES) -> float:
    """Return F+B for the choice of the rate. Each point times it again beside its modes."""
    with shaped_network("1gbit", nodes) as (substrate, _, folder):
        return time_modes(substrate, folder, [CONTROL], STEPS, **_values(model, batch, nodes))[CONTROL].median


def time_modes(
    substrate: Substrate,
    folder: Path,
    modes: Sequence[str],
    steps: int,
    own: Sequence[int] = (),
    search: bool = False,
    **values: Any,
) -> dict[str, Times]:
    """Train the modes in this order; a mode may come several times. `own`: processes that are meant to be there.

    `search`: a mode with disturbed steps alone is timed by them. It has few, and is timed again if it may be the best.
    """
    with CoreSampler(own) as sampler:
        trained = train(substrate, folder, [case(mode, steps, **values) for mode in modes])
    found: dict[str, list[TrainedCase]] = {}
    for mode, each in zip(modes, trained, strict=True):
        found.setdefault(mode, []).append(each)
    return {mode: _times(mode, cases, sampler, search) for mode, cases in found.items()}


def _times(mode: str, cases: Sequence[TrainedCase], sampler: CoreSampler, search: bool) -> Times:
    kept: list[tuple[float, float]] = []  # seconds and busy core-seconds of each step
    left_out: list[tuple[float, float]] = []
    others = []
    for each in cases:
        for number, seconds in enumerate(step_seconds(each)):
            begin = statistics.fmean(float(steps.at[number]) for steps in each.steps)
            cores = sampler.between(begin, begin + seconds)
            others.append(by_others(cores, each.used[number]))
            into = left_out if is_disturbed(seconds, others[-1]) else kept
            into.append((seconds, cores.busy - cores.own))
    if not kept and search:
        kept = left_out
    if not kept:
        raise SystemExit(f"{mode}: other processes disturbed every step. Measure it again on a quiet machine.")
    seconds_of, busy = zip(*kept, strict=True)
    sent, middle = statistics.fmean(each.sent for each in cases), statistics.median(others)
    return Times(list(seconds_of), len(left_out), sent, statistics.median(busy), cases[0].mode, middle)


def by_others(cores: CoreTimes, used: float) -> float:
    """Core-seconds that others took than the ranks (`used`: their processor time) and the bench's own load."""
    return cores.programs + cores.kernel + cores.stolen - cores.own - used


def is_disturbed(seconds: float, others: float) -> bool:
    """True if others took too much of a step."""
    return others > max(DISTURBED_S, DISTURBED_SHARE * CORES * seconds)


@contextlib.contextmanager
def niced_load() -> Iterator[list[int]]:
    """Run one busy process a core with the lowest priority; yield their pids.

    Where Linux groups the processes of a session (sched_autogroup), the group needs the lowest priority, too: a nice
    value counts inside its group alone, and the ranks are in groups of their own.
    """
    cores = sorted(usable_cores())
    started = [
        subprocess.Popen([sys.executable, "-c", NICED, str(core)], start_new_session=True, stdout=subprocess.PIPE)
        for core in cores
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()  # it has the lowest priority now
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def point_figures(
    model: Model,
    ratio: float,
    batch: int,
    wire: float,
    rate: str,
    final: dict[str, Times],
    loaded: dict[str, Times],
) -> Iterator[Figure]:
    control, ours = final[CONTROL], final[OURS]
    best = min((mode for mode in final if mode.startswith(DDP)), key=lambda mode: final[mode].median)
    where = f"{rate}, {batch} samples a rank"
    detail = f"{where}; C {wire:.3f} s, F+B {spread(control.seconds)}"
    yield Figure(name="C/(F+B)", value=wire / control.median, detail=detail)
    for name, mode in (("control", CONTROL), ("DDP's default", DDP), ("DDP's best", best), ("pipeline", OURS)):
        times = final[mode]
        detail = f"{times.chosen or mode}: {spread(times.seconds)}"
        yield Figure(name=f"step of {name}, s", value=times.median, detail=detail)
    yield Figure(name="DDP's default / pipeline", value=final[DDP].median / ours.median)
    yield Figure(name="DDP's best / pipeline", value=final[best].median / ours.median, low=model.best[ratio])
    bound = max(wire, control.median)
    yield Figure(name="pipeline / max(C, F+B)", value=ours.median / bound, high=model.bound.get(ratio))
    yield from _core_seconds(final, best)
    if loaded:
        yield Figure(name="step of control beside niced load, s", value=loaded[CONTROL].median)
        yield from _core_seconds(loaded, best, BESIDE)
        theirs, mine = loaded[best], loaded[OURS]
        detail = f"{spread(theirs.seconds)} against {spread(mine.seconds)}"
        name = "DDP's best / pipeline, both beside niced load"
        yield Figure(name=name, value=theirs.median / mine.median, low=BESIDE_LOAD, detail=detail)
    everything = [*final.values(), *loaded.values()]
    left_out = sum(times.left_out for times in everything)
    counted = left_out + sum(len(times.seconds) for times in everything)
    taken = ", ".join(f"{times.others:.3f}" for times in everything)
    yield Figure(
        name="disturbed steps left out", value=left_out, detail=f"of {counted}; by others, core-s a step: {taken}"
    )


def _core_seconds(timed: dict[str, Times], best: str, where: str = "") -> Iterator[Figure]:
    """Yield what DDP's best and the pipeline need above the control that was timed beside them."""
    control = timed[CONTROL]
    for name, mode in (("DDP's best", best), ("pipeline", OURS)):
        sent = NODES * timed[mode].sent / 1e9
        detail = f"{timed[mode].busy:.3f} core-seconds a step, control {control.busy:.3f}, {sent:.3f} GB"
        value = (timed[mode].busy - control.busy) / sent
        yield Figure(name=f"{CORE_SECONDS}, {name}{where}", value=value, detail=detail)


# --- the pipeline alone: sizes of buckets, last buckets, scheduling classes -------------------------------------------

SIZES = ("512KiB", "1MiB", "2MiB", "4MiB", "8MiB")
ALL_RATIOS = ("vgg11", "gpt")  # models whose sizes are compared at all ratios; others at 1.0
PIPELINE_STEPS, PIPELINE_REPEATS = 7, 2
MAX_SIZE_RATIO = 1.03


def time_in_turn(
    model: str, ratio: float, modes: Sequence[str], nodes: int = NODES, beside_load: bool = False
) -> tuple[str, dict[str, Times]]:
    """Time these modes in turn where C/(F+B) is about `ratio`; return the rate, too."""
    batch = batch_at(model, ratio)
    rate = rate_for(ratio, _control_seconds(model, batch, nodes), _least_bits(model, nodes))
    values, load = _values(model, batch, nodes) | {"link": {"rate": rate}}, contextlib.nullcontext(list[int]())
    with shaped_network(rate, nodes) as (substrate, _, folder), niced_load() if beside_load else load as own:
        return rate, time_modes(substrate, folder, modes * PIPELINE_REPEATS, PIPELINE_STEPS, own, **values)


def size_parts() -> dict[str, functools.partial[Iterator[Figure]]]:
    """The points at which sizes are compared, by the name of their part."""
    points = [(model, ratio) for model in MODELS_TIMED for ratio in (RATIOS if model in ALL_RATIOS else (1.0,))]
    return {f"sizes-{model}-{ratio}": functools.partial(sizes, model, ratio) for model, ratio in points}


def sizes(model: str, ratio: float) -> Iterator[Figure]:
    """`ring/pipeline` against the pipeline with sizes from 0.5 to 8 MiB, in turn."""
    given = [f"ring/bucket:{size}/pipeline" for size in SIZES]
    rate, found = time_in_turn(model, ratio, [OURS, *given])
    for mode in given:
        yield Figure(name=f"step of {mode}, s", value=found[mode].median, detail=spread(found[mode].seconds))
    ours, best = found[OURS], min(found[mode].median for mode in given)
    yield Figure(name=f"step of {OURS}, s", value=ours.median, detail=f"{ours.chosen}: {spread(ours.seconds)}, {rate}")
    yield Figure(name=f"{OURS} / the best size", value=ours.median / best, high=MAX_SIZE_RATIO)


def first_layers() -> Iterator[Figure]:
    """The last buckets, which hold the first layers, in several sizes; at C/(F+B) of about 1."""
    for model, nodes in itertools.product(("vgg11", "gpt"), (NODES, 2 * NODES)):
        rate, found = time_in_turn(model, 1.0, [OURS + suffix for suffix in LAST_BUCKETS], nodes)
        for mode, times in found.items():
            yield Figure(
                name=f"step of {mode}, {model}, N = {nodes}, s",
                value=times.median,
                detail=f"{times.chosen}: {spread(times.seconds)}, {rate}",
            )


def thread_class() -> Iterator[Figure]:
    """The pipeline's thread as SCHED_BATCH and as SCHED_OTHER with two lengths of its slices; at C/(F+B) of about 1."""
    for model, beside_load in itertools.product(("resnet18", "vgg11"), (False, True)):
        modes = [OURS, OURS + SCHED_OTHER, OURS + LONG_SLICES]
        rate, found = time_in_turn(model, 1.0, modes, beside_load=beside_load)
        where = f"{model}, {'beside niced load' if beside_load else 'quiet'}"
        for mode, times in found.items():
            detail = f"{spread(times.seconds)}, {rate}"
            yield Figure(name=f"step of {mode}, {where}, s", value=times.median, detail=detail)


# --- transport: without training -------------------------------------------------------------------------------------

TRANSPORT_ELEMENTS = 11_173_962  # float32: 44.7 MB, ResNet-18's gradient
TRANSPORT_REPEATS = 10
TRANSPORT_MODE = "ring/bucket:2MiB/pipeline"
MAX_WIRE_RATIO, MAX_CORE_S_PER_GB = 1.03, 1.0


def transport() -> Iterator[Figure]:
    """At 1 Gbit and unshaped, in turn with Gloo's all_reduce, and with `ring`: would it be faster on our transport?"""
    sent = 2 * (NODES - 1) / NODES * 4 * TRANSPORT_ELEMENTS  # bytes per rank
    for rate in ("1gbit", None):
        where = rate or "unshaped"
        with shaped_network(rate) as (substrate, _, folder):
            arguments = ("transport", str(TRANSPORT_REPEATS), str(TRANSPORT_ELEMENTS), TRANSPORT_MODE)
            run_worker(substrate, folder, *arguments)
            ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NODES)]
        seconds, used = {}, {}
        for name in ranks[0]:
            repeats = list(zip(*(rank[name] for rank in ranks), strict=True))
            seconds[name] = [max(time for time, _ in repeat) for repeat in repeats]
            used[name] = [statistics.fmean(cpu for _, cpu in repeat) / (sent / 1e9) for repeat in repeats]
        ours, gloo, ring = (statistics.median(seconds[name]) for name in ("pipeline", "gloo", "ring"))
        detail = f"{spread(seconds['pipeline'])} against {spread(seconds['gloo'])}"
        high = None if rate else 1.0
        yield Figure(
            name=f"transport / Gloo's all_reduce, 44.7 MB, {where}", value=ours / gloo, high=high, detail=detail
        )
        yield Figure(name=f"transport / ring, 44.7 MB, {where}", value=ours / ring, detail=spread(seconds["ring"]))
        if rate:
            wire = sent * 8 / efficiency() / parse_rate(rate)
            name = f"transport / wire time, 44.7 MB, {where}"
            yield Figure(name=name, value=ours / wire, high=MAX_WIRE_RATIO, detail=f"wire {wire:.3f} s")
        for name, whose, high in (
            ("pipeline", "pipeline's threads", MAX_CORE_S_PER_GB),
            ("gloo", "gloo's threads", None),
            ("ring", "ring, of all threads", None),
        ):
            yield Figure(
                name=f"core-seconds per GB sent of {whose}, {where}",
                value=statistics.median(used[name]),
                high=high,
                detail=spread(used[name]),
            )


# --- the table and the plot ------------------------------------------------------------------------------------------

PLOT = ROOT / "results" / "models.svg"
HEADER = (
    "model, samples a rank, rate",
    "C/(F+B)",
    "control, s",
    "`ddp`, s",
    "DDP's best, s",
    "`ring/pipeline`, s",
    "`ddp` / pipeline",
    "DDP's best / pipeline",
    "pipeline / max(C, F+B)",
    "core-s per GB, DDP's best; pipeline",
    "beside niced load: DDP's best / pipeline",
    "core-s per GB there, DDP's best; pipeline",
)
COLOURS = ("#0068a8", "#b84c00", "#00795c", "#a43c84", "#926600")


def table(kept: dict[str, Any]) -> list[str]:
    """The rows of the table in Markdown, from results/bench.json; points that are not measured are left out."""
    rows = [HEADER, ("---", *["---:"] * (len(HEADER) - 1))]
    for model in MODELS_TIMED:
        for ratio in RATIOS:
            part = kept.get(f"models-{model}-{ratio}")
            if part:
                rows.append(_row(model, {figure["name"]: figure for figure in part["figures"]}))
    return [f"| {' | '.join(row)} |" for row in rows]


def _row(model: str, figures: dict[str, Any]) -> tuple[str, ...]:
    def ratio(name: str) -> str:
        figure = figures.get(name)
        if figure is None:
            return "-"
        limit = figure["low"] or figure["high"]
        missed = "" if figure["met"] else ", missed"
        return f"{figure['value']:.2f}" + (f" (limit {limit:.2f}{missed})" if limit else "")

    def step(name: str) -> str:
        figure = figures[f"step of {name}, s"]
        mode = figure["detail"].partition(": ")[0].removesuffix("/pipeline")
        size = mode.partition("bucket:")[2] or "default"
        return f"{figure['value']:.3f}" + (f" ({size})" if name in ("DDP's best", "pipeline") else "")

    rate, samples, *_ = figures["C/(F+B)"]["detail"].partition(";")[0].split(", ")

    def cores(where: str = "") -> str:
        names = [f"{CORE_SECONDS}, {name}{where}" for name in ("DDP's best", "pipeline")]
        return "; ".join(f"{figures[name]['value']:.1f}" for name in names) if names[0] in figures else "-"

    return (
        f"{model}, {samples.split()[0]}, {rate}",
        ratio("C/(F+B)"),
        *(step(name) for name in ("control", "DDP's default", "DDP's best", "pipeline")),
        *(ratio(f"{name} / pipeline") for name in ("DDP's default", "DDP's best")),
        ratio("pipeline / max(C, F+B)"),
        cores(),
        ratio("DDP's best / pipeline, both beside niced load"),
        cores(BESIDE),
    )


def plot(kept: dict[str, Any]) -> None:
    """Draw the gain over DDP's best against C/(F+B), a line a model. Equal figures give an equal file."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = PLOT.name
    figure, axes = plt.subplots(figsize=(6, 4))
    for model, colour in zip(MODELS_TIMED, COLOURS, strict=True):
        points = [kept[name] for ratio in RATIOS if (name := f"models-{model}-{ratio}") in kept]
        values = [{each["name"]: each["value"] for each in point["figures"]} for point in points]
        line = sorted((each["C/(F+B)"], each["DDP's best / pipeline"]) for each in values)
        if line:
            axes.plot(*zip(*line, strict=True), "o-", color=colour, label=model)
    axes.axhline(1.0, color="#6c737d", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RATIOS, [f"{ratio:g}" for ratio in RATIOS])
    title = "DDP with its best settings against ring/pipeline, N = 4"
    axes.set(xlabel="C/(F+B): wire time / compute time", ylabel="step of DDP / step of the pipeline", title=title)
    axes.legend()
    figure.savefig(PLOT, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


SIZES_HEADER = ("model, samples a rank, rate", "C/(F+B)", *SIZES, "chosen", "chosen / best")


def sizes_table(kept: dict[str, Any]) -> list[str]:
    """The seconds of a step with each size in Markdown, a row for each part `sizes-...` that is measured."""
    rows = [SIZES_HEADER, ("---", *["---:"] * (len(SIZES_HEADER) - 1))]
    for name in (name for name in size_parts() if name in kept):
        _, model, ratio = name.split("-")
        figures = {figure["name"]: figure for figure in kept[name]["figures"]}
        times = [f"{figures[f'step of ring/bucket:{size}/pipeline, s']['value']:.3f}" for size in SIZES]
        ours, verdict = figures[f"step of {OURS}, s"], figures[f"{OURS} / the best size"]
        chosen = f"{ours['value']:.3f} ({_size_of(ours['detail'].partition(': ')[0])})"
        missed = "" if verdict["met"] else ", missed"
        against = f"{verdict['value']:.2f} (limit {verdict['high']:.2f}{missed})"
        where = f"{model}, {batch_at(model, float(ratio))}, {ours['detail'].rpartition(', ')[2]}"
        rows.append((where, f"about {ratio}", *times, chosen, against))
    return [f"| {' | '.join(row)} |" for row in rows]


def _size_of(mode: str) -> str:
    return mode.removeprefix("ring/bucket:").removesuffix("/pipeline")


def fitted_segment_s(kept: dict[str, Any]) -> dict[str, float]:
    """SEGMENT_S (testbed/results/theory.py) of each part `sizes-...`, and of all, by least squares over the sizes.

    With buckets of b bytes a step takes a + SEGMENT_S 2(N-1) S/b + 2(N-1)/N b/B; a differs from part to part.
    """
    found, products, squares = {}, 0.0, 0.0
    for part in (part for part in size_parts() if part in kept):
        figures = {figure["name"]: figure for figure in kept[part]["figures"]}
        rate = parse_rate(figures[f"step of {OURS}, s"]["detail"].rpartition(", ")[2]) / 8
        buckets = [parse_size(size) for size in SIZES]
        segments = [2 * (NODES - 1) * gradient_bytes(part.split("-")[1]) / size for size in buckets]
        steps = [figures[f"step of ring/bucket:{size}/pipeline, s"]["value"] for size in SIZES]
        rest = [step - 2 * (NODES - 1) / NODES * size / rate for step, size in zip(steps, buckets, strict=True)]
        apart = [each - statistics.fmean(segments) for each in segments]
        product, square = sum(map(operator.mul, apart, rest)), sum(each * each for each in apart)
        found[part], products, squares = product / square, products + product, squares + square
    return found | ({"all": products / squares} if found else {})


if __name__ == "__main__":
    measured = json.loads((ROOT / "results" / "bench.json").read_text())
    for name, value in fitted_segment_s(measured).items():
        print(f"SEGMENT_S, {name}: {1e3 * value:.2f} ms")
