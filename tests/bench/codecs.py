"""Codecs: bytes on the wire against 2(N-1)/N S, and accuracy against full precision, paired by seed.

Runs experiments/codecs-bytes.toml (namespaces, VGG-11) and experiments/codecs.toml (processes, LeNet-5), and skips
runs that are finished, so it resumes. Each commit has a folder of its own. Runs of a tree with uncommitted changes are
never reused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from rich.console import Console

from testbed.control.runs.progress import Plain
from testbed.control.runs.select import choose
from testbed.control.runs.sweep import run_all
from testbed.results.conclude import Summary
from testbed.results.folder import runs_dir
from testbed.spec.experiment import Experiment
from tests.bench.figures import MEASURED, Figure
from tests.support.provenance import ROOT, code_commit, current

BYTES = {"fp16": (0.48, 0.52), "bf16": (0.48, 0.52), "int8": (0.23, 0.27), "topk": (0.0, 0.05), "powersgd": (0.0, 0.05)}
WITHOUT_ACCURACY_LIMIT = "topk"


def measure() -> Iterator[Figure]:
    for summary in _sweep("codecs-bytes", on="netns"):
        if summary.spec.mode.codec:
            yield byte_ratio(summary)
    yield from accuracy_differences(_sweep("codecs", on="process"))


def _sweep(name: str, on: str) -> list[Summary]:
    specs = Experiment.read(ROOT / "experiments" / f"{name}.toml").runs()
    progress = Plain(Console(markup=False, highlight=False, soft_wrap=True))
    commit = code_commit(*MEASURED)
    root, fresh = runs_dir() / f"bench-{commit}", not current(commit, commit)
    summaries, errors = run_all(specs, choose(on, specs[0]), root, progress, fresh)
    if errors:
        raise errors[0]
    return summaries


def byte_ratio(summary: Summary) -> Figure:
    """Compare rank 0's bytes per step, counted by the kernel, with what an exact all-reduce must send."""
    n, codec = summary.spec.world, summary.spec.mode.codec or ""
    sent, low_high = summary.sent_per_step[0], BYTES[codec]
    if sent is None or not summary.gradient_bytes:
        raise SystemExit(f"{summary.spec.name}: no bytes were counted, a ratio needs them. Use --on netns")
    return Figure(
        name=f"bytes a step, {summary.spec.mode} / 2(N-1)/N S",
        value=sent / (2 * (n - 1) / n * summary.gradient_bytes),
        low=low_high[0],
        high=low_high[1],
        detail=f"{sent / 1e6:.2f} MB, {summary.seconds_per_step:.3f} s/iter, {summary.counter}",
    )


def accuracy_differences(summaries: Sequence[Summary]) -> Iterator[Figure]:
    """Yield the accuracy of each mode with a codec minus that of full precision with the same seed, in points."""
    percent = {(str(s.spec.mode), s.spec.seed): _percent(s) for s in summaries}
    exact = next(str(s.spec.mode) for s in summaries if s.spec.mode.codec is None)
    seeds = sorted({seed for _, seed in percent})
    for mode in dict.fromkeys(str(s.spec.mode) for s in summaries if s.spec.mode.codec):
        differences = [percent[mode, seed] - percent[exact, seed] for seed in seeds]
        limit = None if WITHOUT_ACCURACY_LIMIT in mode else allowed_difference(differences)
        each = ", ".join(f"{difference:+.2f}" for difference in differences)
        means = [statistics.fmean(percent[which, seed] for seed in seeds) for which in (mode, exact)]
        yield Figure(
            name=f"accuracy, {mode} less {exact}, points",
            value=statistics.fmean(differences),
            low=None if limit is None else -limit,
            high=limit,
            detail=f"{means[0]:.1f} % against {means[1]:.1f} %; by seed {each}",
        )


def _percent(summary: Summary) -> float:
    if summary.test_accuracy is None:
        raise SystemExit(f"{summary.spec.name}: no test accuracy, a comparison needs it. Do not set evaluate=never")
    return 100 * summary.test_accuracy


def allowed_difference(differences: Sequence[float]) -> float:
    """Return one point, or two standard errors of the paired difference if that is more."""
    return max(1.0, 2 * statistics.stdev(differences) / math.sqrt(len(differences)))
