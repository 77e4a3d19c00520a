"""Tests of the instrument: what the report says, checked with runs whose answer is known.

recorder     what recording costs a step
control      whether the compute time of an overlapping mode equals that of the control, and whether the parts of a
             step add up
straggler    whether the report names a straggler and its cause
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from testbed.report.load import read_run
from testbed.report.waiting import stragglers
from testbed.results.folder import RunFolder
from tests.bench.figures import Figure, spread
from tests.bench.shaped_network import CONTROL, DDP, PIPELINE, TrainedCase, case, shaped_network, step_seconds, train

RATE = "500mbit"
REPEATS = 4
MAX_RECORDER_RATIO = 1.02
MAX_CONTROL_ERROR = 0.10
MAX_SUM_ERROR = 0.05
STRAGGLER_RUNS = 5  # of each cause
STRAGGLERS = {"CPU": "overrides.node2.cpus=0.2", "link": "overrides.node2.link.rate=125mbit"}
SMALL = ["--model", "vgg11", "--data", "synthetic", "--nodes", "4", "--batch", "64", "--steps", "6", "--on", "netns"]
SMALL += ["--rate", RATE, "--set", "node.cpus=0.4", "--set", "evaluate=never"]


def recorder() -> Iterator[Figure]:
    """The same steps with every phase, buffer and stall recorded, and with sums only, in turn."""
    cases = [(mode, spans) for _ in range(REPEATS) for mode in (DDP, PIPELINE) for spans in (True, False)]
    with shaped_network(RATE) as (substrate, _, folder):
        trained = train(substrate, folder, [case(mode, 8, spans=spans) for mode, spans in cases])
    for mode in (DDP, PIPELINE):
        times: dict[bool, list[float]] = {True: [], False: []}
        for (which, spans), each in zip(cases, trained, strict=True):
            times[spans] += step_seconds(each) if which == mode else []
        yield Figure(
            name=f"step of {mode} with the recorder / with sums only, {RATE}",
            value=statistics.median(times[True]) / statistics.median(times[False]),
            high=MAX_RECORDER_RATIO,
            detail=f"with {spread(times[True])}, without {spread(times[False])}",
        )


def control() -> Iterator[Figure]:
    """Overlapping modes against the same ranks without synchronisation, with and without a CPU quota."""
    for cpus in (None, 0.4):
        modes = [CONTROL, DDP, PIPELINE] * 2
        with shaped_network(RATE, cpus=cpus) as (substrate, _, folder):
            trained = train(substrate, folder, [case(mode, 8) for mode in modes])
        where = f"{RATE}, {f'{cpus} cores a rank' if cpus else 'no quota'}"
        for mode in (DDP, PIPELINE):
            for column, what in (("work", "processor time of computing"), ("compute", "compute by the clock")):
                times = {name: _column(trained, modes, name, column) for name in (mode, CONTROL)}
                yield Figure(
                    name=f"{what}, {mode} / control, {where}",
                    value=statistics.median(times[mode]) / statistics.median(times[CONTROL]),
                    low=1 - MAX_CONTROL_ERROR,
                    high=1 + MAX_CONTROL_ERROR,
                    detail=f"{spread(times[mode])} against {spread(times[CONTROL])}",
                )
            yield from _sums(trained, modes, mode, where)


def _sums(trained: list[TrainedCase], modes: list[str], mode: str, where: str) -> Iterator[Figure]:
    """Do times that are measured in different places add up?"""
    parts = ("compute", "copies", "blocked", "rest")
    mean = {name: statistics.fmean(_column(trained, modes, mode, name)) for name in (*parts, "total", "hidden", "busy")}
    yield Figure(
        name=f"compute + copies + exposed + rest / step, {mode}, {where}",
        value=sum(mean[name] for name in parts) / mean["total"],
        low=1 - MAX_SUM_ERROR,
        high=1 + MAX_SUM_ERROR,
        detail=f"{' + '.join(f'{mean[name]:.3f}' for name in parts)}, {mean['total']:.3f} s",
    )
    yield Figure(
        name=f"exposed + hidden / communication, {mode}, {where}",
        value=(mean["blocked"] + mean["hidden"]) / mean["busy"],
        low=1 - MAX_SUM_ERROR,
        high=1 + MAX_SUM_ERROR,
        detail=f"{mean['blocked']:.3f} + {mean['hidden']:.3f}, {mean['busy']:.3f} s",
    )


def _column(trained: list[TrainedCase], modes: list[str], mode: str, column: str) -> list[float]:
    """Return a column of all steps of a mode, as the mean over ranks."""
    of_mode = [each for each, which in zip(trained, modes, strict=True) if which == mode]
    return [
        statistics.fmean(row)
        for each in of_mode
        for row in zip(*(getattr(steps, column).tolist() for steps in each.steps), strict=True)
    ]


def straggler() -> Iterator[Figure]:
    """Rank 2 has half the CPU share, or a quarter of the rate: is it named, alone and with the right cause?"""
    for cause, setting in STRAGGLERS.items():
        named = [_named_stragglers(setting, (DDP, "ring")[number % 2]) for number in range(STRAGGLER_RUNS)]
        yield Figure(
            name=f"rank 2 named for its {cause}, of {STRAGGLER_RUNS} runs",
            value=named.count([(2, cause)]),
            low=STRAGGLER_RUNS,
            detail=str(named),
        )


def _named_stragglers(setting: str, mode: str) -> list[tuple[int, str]]:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "run"
        argv = [sys.executable, "-m", "testbed.control", "run", *SMALL, "--mode", mode, "--set", setting]
        done = subprocess.run([*argv, "--out", str(out)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return [(each.rank, each.cause) for each in stragglers(read_run(RunFolder(out)))]
