"""A user's script under `testbed exec`: what observing it costs, and whether what is said about it is right.

attach-cost       a small script (script.py) on two ranks with the observer and without it, in turn: steps of about 100,
                  20 and 10 ms, with DDP and with gather and scatter by hand. Losses must be bit-equal. Steps in which
                  the observer samples gradients, parameters or batches are left out of the ratio and shown apart.
attach-ddp        a plain DDP script against our own loop in mode `ddp`, in turn, on the same network. The parts of its
                  step must add up to the step by the script's own clock, and agree with the data that DDP logs itself
attach-instead    a gather/scatter script with --instead against the same script edited by hand for that mode, in turn
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed.attach.sampling import is_sampled
from testbed.control.machine.affinity import usable_cores
from testbed.net.tcp import efficiency
from testbed.report.load import Steps
from testbed.results.observations import Calls, Swap
from testbed.results.records import Record, Step, read
from testbed.spec.units import parse_rate
from tests.bench.figures import Figure, spread
from tests.support.observed import run_ranks

SCRIPT = Path(__file__).with_name("script.py")
RANKS = 2  # one for each core

# --- attach-cost -----------------------------------------------------------------------------------------------------

MAX_RATIOS = {100: 1.02, 20: 1.10, 10: 1.20}  # by milliseconds of a step without the observer
STEPS = {100: 40, 20: 100, 10: 150}
STYLES = {"ddp": "DDP", "gather": "gather and scatter"}
PAIRS = 8  # in the order with, without, without, with, ...; the median of their ratios counts, as the machine drifts
CALIBRATION = (16, 512)  # images a step; the step's length is a line through both
WARMUP = 10
END_OF_OUTPUT = 4000  # characters shown of a rank that ended badly, e.g. with the stacks of its threads


class Timed(NamedTuple):
    """What a script printed: the losses of rank 0, all digits, and two times of each step, mean over ranks."""

    losses: list[str]
    seconds: list[float]
    cpu: list[float] = []  # seconds of processor time
    codes: tuple[int, ...] = ()  # exit codes of the ranks


def cost() -> Iterator[Figure]:
    for style in STYLES:
        line = [_middle(_run_alone(style, batch, 40, attached=False)) for batch in CALIBRATION]
        for milliseconds in MAX_RATIOS:
            batch = batch_for(milliseconds / 1e3, line)
            runs: dict[bool, list[Timed]] = {True: [], False: []}
            for pair in range(PAIRS):
                for attached in (pair % 2 == 0, pair % 2 == 1):
                    runs[attached].append(_run_alone(style, batch, STEPS[milliseconds], attached))
            yield from cost_figures(style, milliseconds, runs[True], runs[False])


def _run_alone(style: str, batch: int, steps: int, attached: bool) -> Timed:
    """Run the script on cores of this machine, without the controller."""
    variables = {"STYLE": style, "MODEL": "mlp", "BATCH": str(batch), "STEPS": str(steps), "PYTHONFAULTHANDLER": "1"}
    cores = usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(
            Path(folder),
            str(SCRIPT),
            ranks=RANKS,
            attached=attached,
            started=True,
            variables=variables,
            cores=[cores[rank % len(cores)] for rank in range(RANKS)],
        )
    for rank in ranks:
        if rank.unseen:
            raise SystemExit(f"the script was not seen ({rank.unseen}): {rank.output}")
        if rank.code:
            print(f"  attached {attached}, exit code {rank.code}: {rank.output[-END_OF_OUTPUT:]}", flush=True)
    return printed([rank.output for rank in ranks])._replace(codes=tuple(rank.code for rank in ranks))


def printed(outputs: Sequence[str]) -> Timed:
    """Read the line of JSON in every rank's output."""
    ranks = [json.loads(next(line for line in each.splitlines() if line.startswith("{"))) for each in outputs]
    return Timed(ranks[0]["losses"], *(_differences([rank[key] for rank in ranks]) for key in ("ends", "cpu")))


def _differences(ranks: Sequence[Sequence[float]]) -> list[float]:
    """What passes from one time to the next, mean over ranks."""
    rows = ([b - a for a, b in itertools.pairwise(own)] for own in ranks)
    return [statistics.fmean(row) for row in zip(*rows, strict=True)]


def batch_for(seconds: float, line: Sequence[float]) -> int:
    """The images a step that take about these seconds, by the seconds of the two sizes in CALIBRATION."""
    small, large = CALIBRATION
    slope = (line[1] - line[0]) / (large - small)
    return max(1, round(small + (seconds - line[0]) / slope)) if slope > 0 else small


def with_samples(number: int) -> bool:
    """True for a step in which the observer samples: gradients and batches in one, parameters in the next."""
    return is_sampled(number) or (number > 0 and is_sampled(number - 1))


def _counted(run: Timed, sampled: bool = False, column: str = "seconds") -> list[float]:
    numbered = list(enumerate(getattr(run, column)))[WARMUP:]
    return [seconds for number, seconds in numbered if with_samples(number) is sampled]


def _middle(run: Timed) -> float:
    return statistics.median(_counted(run))


def cost_figures(style: str, milliseconds: int, attached: Sequence[Timed], alone: Sequence[Timed]) -> Iterator[Figure]:
    """Compare runs with the observer with runs without it."""
    name = f"{STYLES[style]}, steps of {milliseconds} ms"
    with_it, without = ([s for run in runs for s in _counted(run)] for runs in (attached, alone))
    pairs = [_middle(a) / _middle(b) for a, b in zip(attached, alone, strict=True)]
    yield Figure(
        name=f"step with the observer / without, {name}",
        value=statistics.median(pairs),
        high=MAX_RATIOS[milliseconds],
        detail=f"with {spread(with_it)}, without {spread(without)}; by pair {_listed(pairs)}",
    )
    used, needed = ([s for run in runs for s in _counted(run, column="cpu")] for runs in (attached, alone))
    yield Figure(
        name=f"processor time of a step with the observer / without, {name}",
        value=statistics.median(used) / statistics.median(needed),
        detail=f"with {spread(used)}, without {spread(needed)}, all threads of a rank",
    )
    sampled, others = ([s for run in runs for s in _counted(run, sampled=True)] for runs in (attached, alone))
    yield Figure(
        name=f"step with samples / without the observer, {name}",
        value=statistics.median(sampled) / statistics.median(others),
        detail=f"with {spread(sampled)}, without {spread(others)}",
    )
    different = sum(a.losses != b.losses for a, b in zip(attached, alone, strict=True))
    digits = f"{len(attached)} pairs of runs, {len(alone[0].losses)} losses each, all digits"
    yield Figure(name=f"pairs whose losses differ, {name}", value=different, high=0, detail=digits)
    codes, own = ([code for run in runs for code in run.codes] for runs in (attached, alone))
    yield Figure(  # without a limit: a rank of a plain script may be aborted when torch's threads end, too
        name=f"ranks with the observer that end with another code than 0, {name}",
        value=sum(code != 0 for code in codes),
        detail=f"of {len(codes)}; without it {sum(code != 0 for code in own)} of {len(own)}",
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


# --- runs on a shaped network ----------------------------------------------------------------------------------------

RATE, BATCH_PER_RANK, NET_STEPS = "500mbit", 8, 20
NET_WARMUP = 6  # --instead: its mode works from step 5 on
NETWORK = ["--nodes", str(RANKS), "--rate", RATE, "--on", "netns", "--json"]
NET_PAIRS = 3


class Run(NamedTuple):
    """One run on the shaped network."""

    records: list[list[Record]]  # by rank
    output: Timed | None  # what the script printed; None for our own loop

    @property
    def periods(self) -> list[float]:
        """Seconds from the begin of a step to that of the next, mean over ranks, of steps without samples."""
        begins = [[record.at for record in own if isinstance(record, Step)] for own in self.records]
        return [
            mean
            for number, mean in enumerate(_differences(begins))
            if number >= NET_WARMUP and not with_samples(number)
        ]


def _run_net(folder: Path, *words: str) -> Run:
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    command, *rest = words
    argv = [sys.executable, "-m", "testbed.control", command, *NETWORK, "--out", str(out), *rest]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    records = [list(read(out / f"rank{rank}.jsonl")) for rank in range(RANKS)]
    logs = [(out / f"rank{rank}.log").read_text() for rank in range(RANKS)]
    return Run(records, printed(logs) if command == "exec" else None)


def _run_script(folder: Path, style: str, *flags: str) -> Run:
    variables = {"STYLE": style, "MODEL": "vgg11", "BATCH": str(BATCH_PER_RANK), "STEPS": str(NET_STEPS)}
    given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    shutil.copy(SCRIPT, folder)
    return _run_net(folder, "exec", *flags, *given, "--", sys.executable, SCRIPT.name)


def _run_loop(folder: Path, mode: str) -> Run:
    flags = ["--mode", mode, "--model", "vgg11", "--data", "synthetic", "--steps", str(NET_STEPS)]
    own = ["--set", f"batch_per_rank={BATCH_PER_RANK}", "--set", "evaluate=never"]
    return _run_net(folder, "run", *flags, *own)


def ratio_of_periods(name: str, ours: Sequence[Run], others: Sequence[Run], error: float) -> Figure:
    """Compare the step of two kinds of runs that were made in turn."""
    left, right = ([s for run in runs for s in run.periods] for runs in (ours, others))
    medians = [statistics.median(a.periods) / statistics.median(b.periods) for a, b in zip(ours, others, strict=True)]
    return Figure(
        name=name,
        value=statistics.median(left) / statistics.median(right),
        low=1 - error,
        high=1 + error,
        detail=f"{spread(left)} against {spread(right)}; by pair {_listed(medians)}",
    )


# --- attach-ddp ------------------------------------------------------------------------------------------------------

MAX_DDP_ERROR, MAX_SUM_ERROR = 0.03, 0.05
PARTS = ("compute", "copies", "blocked", "rest")


def ddp() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scripts, loops = [], []
        for _ in range(NET_PAIRS):
            scripts.append(_run_script(folder, "ddp"))
            loops.append(_run_loop(folder, "ddp"))
        alone = _run_script(folder, "none")
    what = f"VGG-11, {RATE}, N = {RANKS}"
    yield ratio_of_periods(f"step of a DDP script / our loop with ddp, {what}", scripts, loops, MAX_DDP_ERROR)
    yield from sums(scripts)
    yield from logged(scripts)
    yield from from_outside(scripts, alone)


def _columns(runs: Sequence[Run], names: Sequence[str]) -> dict[str, float]:
    """Mean of these columns over the counted steps of all ranks."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for run in runs:
        for own in run.records:
            steps = Steps.of([record for record in own if isinstance(record, Step)], "bench")
            steps = steps.only(lambda number: number >= NET_WARMUP and not with_samples(number))
            for name in names:
                found[name] += getattr(steps, name).tolist()
    return {name: statistics.fmean(values) for name, values in found.items()}


def sums(scripts: Sequence[Run]) -> Iterator[Figure]:
    """Do the parts add up? The step is that of the script's own clock."""
    mean = _columns(scripts, (*PARTS, "hidden", "busy"))
    own = statistics.fmean(
        seconds
        for run in scripts
        if run.output
        for number, seconds in enumerate(run.output.seconds)
        if number >= NET_WARMUP and not with_samples(number)
    )
    yield Figure(
        name="compute + copies + exposed + rest / step by the script's clock",
        value=sum(mean[part] for part in PARTS) / own,
        low=1 - MAX_SUM_ERROR,
        high=1 + MAX_SUM_ERROR,
        detail=f"{' + '.join(f'{mean[part]:.3f}' for part in PARTS)}, {own:.3f} s",
    )
    yield Figure(
        name="exposed + hidden / busy",
        value=(mean["blocked"] + mean["hidden"]) / mean["busy"],
        low=1 - MAX_SUM_ERROR,
        high=1 + MAX_SUM_ERROR,
        detail=f"{mean['blocked']:.3f} + {mean['hidden']:.3f}, {mean['busy']:.3f} s",
    )


def logged(scripts: Sequence[Run]) -> Iterator[Figure]:
    """The observer's times of a backward pass against those that DDP's reducer logs, in C++ by clocks of its own."""
    rows = [row for run in scripts for own in run.records for row in _ddp_rows(own)]
    for name in ("compute", "comm", "overlap"):
        yield _agreement(f"{name} of backward", [(row["observer"][name], row["ddp"][name]) for row in rows])
    exposed = [(row["observer"]["exposed"], row["ddp"]["comm"] - row["ddp"]["overlap"]) for row in rows]
    yield _agreement("exposed", exposed)


def _ddp_rows(records: Sequence[Record]) -> list[Mapping[str, Any]]:
    calls = [record for record in records if isinstance(record, Calls)]
    return [row for row in calls[-1].detail.get("ddp", []) if row["step"]]  # the first backward makes the buckets


def _agreement(name: str, pairs: Sequence[tuple[float, float]]) -> Figure:
    ours, theirs = ([pair[k] for pair in pairs] for k in (0, 1))
    return Figure(
        name=f"{name}, observer / DDP's own log",
        value=statistics.median(ours) / statistics.median(theirs),
        low=1 - MAX_SUM_ERROR,
        high=1 + MAX_SUM_ERROR,
        detail=f"{spread(ours)} against {spread(theirs)}",
    )


def from_outside(scripts: Sequence[Run], alone: Run) -> Iterator[Figure]:
    """The sums close nearly by construction, so exposed and busy are also held against what needs no observer."""
    mean = _columns(scripts, ("blocked", "copies", "busy"))
    with_sync = statistics.median(s for run in scripts if run.output for s in _net_seconds(run.output))
    without = statistics.median(_net_seconds(alone.output)) if alone.output else math.nan
    yield Figure(
        name="exposed + copies / what the script's step takes longer than without synchronisation",
        value=(mean["blocked"] + mean["copies"]) / (with_sync - without),
        detail=f"{mean['blocked']:.3f} + {mean['copies']:.3f}; {with_sync:.3f} - {without:.3f} s, no observer in these",
    )
    sent = statistics.fmean(size for run in scripts for own in run.records for size in _bytes_per_step(own))
    wire = sent * 8 / (parse_rate(RATE) * efficiency())
    yield Figure(
        name="busy / wire time of the bytes that the interface counted",
        value=mean["busy"] / wire,
        detail=f"{mean['busy']:.3f} s, {sent / 1e6:.2f} MB at {RATE}: {wire:.3f} s",
    )


def _net_seconds(output: Timed) -> list[float]:
    numbered = enumerate(output.seconds)
    return [seconds for number, seconds in numbered if number >= NET_WARMUP and not with_samples(number)]


def _bytes_per_step(records: Sequence[Record]) -> list[float]:
    sent = [record.sent for record in records if isinstance(record, Step)][NET_WARMUP:]
    return [b - a for a, b in itertools.pairwise(sent) if a is not None and b is not None]


# --- attach-instead --------------------------------------------------------------------------------------------------

INSTEAD = "ring/bucket:2MiB"
MAX_INSTEAD_ERROR, MAX_LOSS_ERROR = 0.10, 1e-3


def instead() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        swapped, by_hand = [], []
        for _ in range(NET_PAIRS):
            swapped.append(_run_script(Path(name), "gather", "--instead", INSTEAD))
            by_hand.append(_run_script(Path(name), INSTEAD))
    if not all(any(isinstance(record, Swap) for record in run.records[0]) for run in swapped):
        raise SystemExit(f"--instead {INSTEAD}: nothing was swapped")
    what = f"{INSTEAD}, VGG-11, {RATE}, N = {RANKS}"
    name = f"step of a gather/scatter script with --instead / the script edited by hand, {what}"
    yield ratio_of_periods(name, swapped, by_hand, MAX_INSTEAD_ERROR)
    pairs = [(a.output.losses, b.output.losses) for a, b in zip(swapped, by_hand, strict=True) if a.output and b.output]
    yield Figure(
        name=f"largest relative difference of losses, --instead and edited by hand, {NET_STEPS} steps",
        value=max(largest_difference(*pair) for pair in pairs),
        high=MAX_LOSS_ERROR,
        detail=f"{len(pairs)} pairs of runs",
    )


def largest_difference(found: Sequence[str], expected: Sequence[str]) -> float:
    """The largest relative difference of two lists of losses."""
    rows = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(found, expected, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in rows)
