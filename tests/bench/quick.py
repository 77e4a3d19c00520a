"""`make bench ARGS=quick`: in 10 minutes, whether this tree is slower than the committed figures. For a pull request.

1. `loop` and `start`: ratios to plain PyTorch inside one run, each with its limit.
2. The runs of `make run` (experiments/quick.toml) against those in results/sweeps/quick.tar.xz, as `testbed compare`
   does it: a ratio of steps for each mode, with its 95 % interval.

Another machine, or the same one on another day, computes faster or slower. The control `none` shows by how much: a
mode may be slower by this factor, and by THRESHOLD. (What makes the control slower too, `loop` finds.) A mode that is
slower is run once more, and counts if it is slower again. The exit code is 1 if a limit is missed, a mode is slower
or a run is missing; 2 if this machine cannot measure, or there is nothing to compare with. Runs are kept in
runs/bench-quick, nothing in results/.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testbed.control import api
from testbed.report.compare import Change, Comparison, compare
from testbed.results.table import format_table
from testbed.spec.errors import Interrupted, UsageError
from testbed.spec.experiment import Experiment
from testbed.spec.mode import CONTROL
from tests.bench import overhead
from tests.bench.__main__ import reason
from tests.bench.figures import Figure
from tests.bench.measure import SWEEPS, facts
from tests.support.provenance import ROOT

EXPERIMENT = ROOT / "experiments" / "quick.toml"
ARCHIVE = SWEEPS / "quick.tar.xz"
RUNS = ROOT / "runs" / "bench-quick"
PARTS = {"loop": overhead.loop, "start": overhead.start}
THRESHOLD = 0.1  # by which a step may be longer, beyond what the control shows


def main() -> int:
    """Measure, compare and print. See above for the exit code."""
    try:
        return _measure_and_compare()
    except Interrupted:
        raise
    except (SystemExit, Exception) as error:  # e.g. no network namespaces here: that is no regression
        print(f"quick: not measured: {reason(error)}")
        return 2


def _measure_and_compare() -> int:
    if not ARCHIVE.is_file():
        print(f"{ARCHIVE.relative_to(ROOT)} is missing. Measure it on a quiet machine: make measure ARGS=quick")
        return 2
    missed = [figure.name for name in PARTS for figure in _figures(name) if not figure.met]
    experiment = Experiment.read(EXPERIMENT)
    found = _compared(experiment, "first")
    slow = slower(found.changes)
    if slow and not found.lost:
        print(f"run once more, because slower: {', '.join(slow)}", flush=True)
        again = experiment.model_copy(update={"axes": {"mode": [*_modes(experiment, slow), CONTROL]}})
        slow = [name for name in slower(_compared(again, "second").changes) if name in slow]
    for what, names in (("limit missed", missed), ("lost", found.lost), ("slower", slow)):
        for name in names:
            print(f"{what}: {name}")
    print(f"quick: {'WORSE than' if missed or slow or found.lost else 'not worse than'} the committed figures")
    return 1 if missed or slow or found.lost else 0


def _figures(name: str) -> list[Figure]:
    print(f"{name} ...", flush=True)
    figures = list(PARTS[name]())
    for figure in figures:
        print(f"  {figure}", flush=True)
    return figures


def _compared(experiment: Experiment, folder: str) -> Comparison:
    """Make the runs and compare them with the committed ones. SystemExit: they have no spec in common."""
    os.environ["TESTBED_RUNS"] = str(RUNS / folder)
    kept = facts(ARCHIVE)
    runs = api.sweep(experiment, on=kept["substrate"], fresh=True)
    with tempfile.TemporaryDirectory() as temporary, tarfile.open(ARCHIVE) as tar:
        tar.extractall(temporary, filter="data")
        try:
            found = compare(Path(temporary) / experiment.name, runs.folder, THRESHOLD)
        except UsageError as error:
            raise SystemExit(f"{error} Measure the committed figures again: make measure ARGS=quick") from None
    print(f"A: commit {kept['commit']}, load {kept['load']:g} before; B: this tree")
    for line in found.differences:
        print(f"differs: {line}")
    header = ("mode", "A s/iter", "B s/iter", "B / A", "95 % interval", "may be")
    may_be = f"{(1 + THRESHOLD) * _factor(found.changes)[0]:.3f}"
    rows = [
        (c.name, f"{c.before:.3f}", f"{c.after:.3f}", f"{c.ratio:.3f}", f"{c.low:.3f} to {c.high:.3f}", may_be)
        for c in found.changes
    ]
    print(f"{format_table(header, rows)}\n", flush=True)
    return found


def slower(changes: Sequence[Change]) -> list[str]:
    """Return the names of the modes that are slower by more than the control and THRESHOLD explain."""
    factor, high = _factor(changes)
    others = [change for change in changes if not _is_control(change)]
    return [_name(each) for each in others if each.ratio > (1 + THRESHOLD) * factor and each.low > high]


def _factor(changes: Sequence[Change]) -> tuple[float, float]:
    """How much slower computing alone is here, and the upper bound of that; a faster machine counts as an equal one."""
    control = [change for change in changes if _is_control(change)]
    return max([1.0, *(each.ratio for each in control)]), max([1.0, *(each.high for each in control)])


def _is_control(change: Change) -> bool:
    return _name(change) == CONTROL


def _name(change: Change) -> str:
    """Return the name of the run in B. That in A has another one if it was repeated."""
    return change.name.rpartition(" -> ")[2].partition(" on ")[0]


def _modes(experiment: Experiment, names: Sequence[str]) -> list[str]:
    return [str(spec.mode) for spec in experiment.runs() if spec.name in names]
