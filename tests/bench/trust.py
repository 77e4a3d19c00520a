"""What the report says, held against runs whose answer is known: what recording costs, whether compute is that of the
control, whether a straggler is named."""

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
from tests.bench.cases import CONTROL, DDP, NODES, PIPELINE, Ranks, case, seconds, train
from tests.bench.figures import Figure, spread
from tests.bench.shaped import network

RATE = "500mbit"
REPEATS = 4
MOST_RECORDER = 1.02
MOST_CONTROL = 0.10
MOST_SUMS = 0.05
EACH = 5  # runs with a straggler of each kind
STRAGGLERS = {"CPU": "overrides.node2.cpus=0.2", "link": "overrides.node2.link.rate=125mbit"}
SMALL = ["--model", "vgg11", "--data", "synthetic", "--nodes", "4", "--batch", "64", "--steps", "6", "--on", "netns"]
SMALL += ["--rate", RATE, "--set", "node.cpus=0.4", "--set", "evaluate=never"]


def recorder() -> Iterator[Figure]:
    """The same steps with every phase, buffer and stall written down, and with sums only, in turns."""
    cases = [(mode, spans) for _ in range(REPEATS) for mode in (DDP, PIPELINE) for spans in (True, False)]
    with network(RATE, NODES) as (substrate, _, folder):
        found = train(substrate, folder, [case(mode, 8, spans=spans) for mode, spans in cases])
    for mode in (DDP, PIPELINE):
        times: dict[bool, list[float]] = {True: [], False: []}
        for (which, spans), ranks in zip(cases, found, strict=True):
            times[spans] += seconds(ranks) if which == mode else []
        yield Figure(
            name=f"step of {mode} with the recorder / with sums only, {RATE}",
            value=statistics.median(times[True]) / statistics.median(times[False]),
            high=MOST_RECORDER,
            detail=f"with {spread(times[True])}, without {spread(times[False])}",
        )


def control() -> Iterator[Figure]:
    """Modes that overlap against the same ranks that synchronise nothing, with the whole machine and with a quota."""
    for cpus in (None, 0.4):
        modes = [CONTROL, DDP, PIPELINE] * 2
        with network(RATE, NODES, cpus=cpus) as (substrate, _, folder):
            found = train(substrate, folder, [case(mode, 8) for mode in modes])
        where = f"{RATE}, {f'{cpus} cores a rank' if cpus else 'no quota'}"
        for mode in (DDP, PIPELINE):
            for column, what in (("cpu", "processor time of the loop"), ("compute", "compute by the clock")):
                times = {name: _pooled(found, modes, name, column) for name in (mode, CONTROL)}
                yield Figure(
                    name=f"{what}, {mode} / control, {where}",
                    value=statistics.median(times[mode]) / statistics.median(times[CONTROL]),
                    low=1 - MOST_CONTROL,
                    high=1 + MOST_CONTROL,
                    detail=f"{spread(times[mode])} against {spread(times[CONTROL])}",
                )
            yield from _sums(found, modes, mode, where)


def _sums(found: list[Ranks], modes: list[str], mode: str, where: str) -> Iterator[Figure]:
    """Does what was timed in different places add up?"""
    names = ("compute", "blocked", "rest", "total", "hidden", "busy")
    mean = {name: statistics.fmean(_pooled(found, modes, mode, name)) for name in names}
    yield Figure(
        name=f"compute + exposed + rest / step, {mode}, {where}",
        value=(mean["compute"] + mean["blocked"] + mean["rest"]) / mean["total"],
        low=1 - MOST_SUMS,
        high=1 + MOST_SUMS,
        detail=f"{mean['compute']:.3f} + {mean['blocked']:.3f} + {mean['rest']:.3f}, {mean['total']:.3f} s",
    )
    yield Figure(
        name=f"exposed + hidden / communication, {mode}, {where}",
        value=(mean["blocked"] + mean["hidden"]) / mean["busy"],
        low=1 - MOST_SUMS,
        high=1 + MOST_SUMS,
        detail=f"{mean['blocked']:.3f} + {mean['hidden']:.3f}, {mean['busy']:.3f} s",
    )


def _pooled(found: list[Ranks], modes: list[str], mode: str, column: str) -> list[float]:
    """A column of a mode's steps, mean over ranks, all repeats."""
    of_mode = [ranks for ranks, which in zip(found, modes, strict=True) if which == mode]
    return [
        statistics.fmean(row)
        for ranks in of_mode
        for row in zip(*(getattr(steps, column).tolist() for steps in ranks.steps), strict=True)
    ]


def straggler() -> Iterator[Figure]:
    """Rank 2 has half the CPU, or a quarter of the rate: how often is it named, for the right cause and alone?"""
    for cause, setting in STRAGGLERS.items():
        said = [_blamed(setting, (DDP, "ring")[number % 2]) for number in range(EACH)]
        right = said.count([(2, cause)])
        yield Figure(name=f"rank 2 named for its {cause}, of {EACH} runs", value=right, low=EACH, detail=str(said))


def _blamed(setting: str, mode: str) -> list[tuple[int, str]]:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "run"
        argv = [sys.executable, "-m", "testbed.control", "run", *SMALL, "--mode", mode, "--set", setting]
        done = subprocess.run([*argv, "--out", str(out)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return [(each.rank, each.cause) for each in stragglers(read_run(RunFolder(out)))]
