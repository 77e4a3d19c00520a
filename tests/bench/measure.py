"""`make measure`: measure what is missing at the present commit: all experiments, then all parts of the bench.

    make measure                    everything that is missing; continues where it was stopped
    make measure ARGS="r3 growth"   some experiments and parts
    make measure ARGS=--list        only say what is missing and how long it takes
    make measure ARGS="--repeats 3 r1"   each run three times, in turn; a result with fewer repeats counts as missing

An experiment is run on namespaces, or as processes if it shapes nothing, in runs/measure-COMMIT; in a user-mode
kernel if it needs delay or loss that this machine's kernel lacks. Its data set is fetched if it is missing. When all
of its runs are there, their records are written to results/sweeps/NAME.tar.xz, with commit, load and machine. Before
each experiment and part it waits until the machine is quiet, and a run that other processes disturbed is made once
more; those that are disturbed again are missing. A tree with uncommitted changes is refused, because a result belongs
to a commit. Afterwards `make docs` writes the tables.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.control import api
from testbed.control.cli.main import interrupt_on_signals
from testbed.control.runs.select import SUBSTRATES, node_plans
from testbed.control.substrates.base import NodePlan
from testbed.data.fetch import fetch
from testbed.results.conclude import Summary
from testbed.results.folder import EXPERIMENT, RunFolder
from testbed.spec.datasets import data_dir
from testbed.spec.errors import Unavailable
from testbed.spec.experiment import Experiment
from testbed.spec.run import RunSpec
from tests.bench.__main__ import FOR_A_CHANGE, PARTS, minutes_of
from tests.bench.figures import MEASURED
from tests.support.provenance import DIRTY, ROOT, code_commit, current, machine
from tests.support.quiet import busy_shares

SWEEPS = ROOT / "results" / "sweeps"
BENCH = ROOT / "results" / "bench.json"
FACTS = "measured.json"  # the first file of an archive: commit, load, minutes, substrate
CELLS = ("base", "axes", "cells")  # of an experiment
MAX_RESULTS_BYTES = 10_000_000  # all of results/
DECIMALS = 6  # of numbers in an archive: microseconds
UNTIMED_DECIMALS = 3  # of numbers other than losses, in runs whose times do not matter
LOSSES = {"loss", "train_loss"}
INTERVALS = {"phases", "comm", "stalls", "copying"}  # of a step
QUIET_SHARE = 0.10  # of all processors' time in use, by others or stolen by the host, while nothing is measured
SAMPLE_S = 5.0
SAY_EVERY_S, QUIET_TIMEOUT_S = 600.0, 7200.0
QUIET_SAMPLES = 3  # in a row


@dataclass(frozen=True)
class Item:
    """An experiment or a part of the bench."""

    name: str
    minutes: float | None  # None: it was never timed
    missing: bool
    measure: Callable[[], bool]  # returns False if it is still missing


def main() -> int:
    """Measure the items that are missing. Return exit code 1 if one is still missing at the end."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make measure", description=__doc__, formatter_class=form)
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments or parts of the bench; none means all")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument(
        "--now",
        action="store_true",
        help="do not wait until the machine is quiet and accept disturbed runs, if times do not matter",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="how often each run of an experiment is made"
    )
    options = parser.parse_args()
    every = items(options.repeats, options.now)
    known = list(dict.fromkeys(item.name for item in every))  # `codecs` is an experiment and a part
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"unknown name {unknown[0]!r}; known: {', '.join(known)}")
    missing = [item for item in every if item.missing and item.name in (options.names or known)]
    print(plan(missing), flush=True)
    if options.list:
        return 0
    if code_commit(*MEASURED, "experiments").endswith(DIRTY):
        raise SystemExit("uncommitted changes: a result belongs to a commit. Commit or stash them, then run it again.")
    still = []
    for number, item in enumerate(missing, start=1):
        if not options.now:
            wait_until_quiet()
        print(f"[{number}/{len(missing)}] {item.name}, {_duration(item)}; then {total(missing[number:])}", flush=True)
        if not item.measure():
            still.append(item.name)
    if still:
        print(f"still missing: {', '.join(still)}. Read why above, then run make measure again.")
    return 1 if still else 0


# --- what is missing --------------------------------------------------------------------------------------------------


def items(repeats: int = 1, now: bool = False) -> list[Item]:
    stored = json.loads(BENCH.read_text()) if BENCH.is_file() else {}
    bench_commit = code_commit(*MEASURED)
    parts = [_part(name, stored.get(name, {}), bench_commit) for name in PARTS if name not in FOR_A_CHANGE]
    return [*(_experiment(path, repeats, now) for path in experiment_files()), *parts]


def experiment_files() -> list[Path]:
    """All experiments but the one that `testbed tune` writes."""
    return [path for path in sorted((ROOT / "experiments").glob("*.toml")) if path.name != "tuned.toml"]


def _experiment(path: Path, repeats: int = 1, now: bool = False) -> Item:
    experiment = Experiment.read(path)
    takes = re.search(r"\d+", experiment.takes)
    archive, commit = SWEEPS / f"{path.stem}.tar.xz", experiment_commit(path)
    stored = facts(archive)
    missing = not current(stored.get("commit", ""), commit) or stored.get("repeats", 1) < repeats
    missing = missing or archived_cells(archive) != cells(experiment)
    minutes = float(takes[0]) * repeats if takes else None
    return Item(path.stem, minutes, missing, lambda: sweep(path, archive, repeats, now))


def _part(name: str, stored: dict[str, Any], commit: str) -> Item:
    return Item(name, minutes_of(name, stored), not current(stored.get("commit", ""), commit), lambda: _bench(name))


def experiment_commit(path: Path) -> str:
    return code_commit("testbed", f"experiments/{path.name}", "requirements*.txt")


def facts(archive: Path) -> dict[str, Any]:
    """What an archive says of its measurement; empty if there is none."""
    return _first_files(archive).get(FACTS, {})


def archived_cells(archive: Path) -> dict[str, Any]:
    """The cells that an archive has the runs of: another rate, e.g. by --set, is another experiment."""
    stored = _first_files(archive).get(EXPERIMENT, {})
    return {key: stored.get(key) for key in CELLS}


def cells(experiment: Experiment) -> dict[str, Any]:
    """What determines the runs of an experiment, but how often each is made."""
    found = json.loads(experiment.model_dump_json())
    return {key: found[key] for key in CELLS}


def _first_files(archive: Path) -> dict[str, dict[str, Any]]:
    """The two files at the beginning of an archive, by name; those that are missing are left out."""
    found: dict[str, dict[str, Any]] = {}
    if archive.is_file():
        with tarfile.open(archive) as tar:
            for entry in itertools.islice(tar, 2):
                name, content = Path(entry.name).name, tar.extractfile(entry)
                if content and name in (FACTS, EXPERIMENT):
                    found[name] = json.load(content)
    return found


def plan(missing: Sequence[Item]) -> str:
    lines = [f"  {item.name:<16} {_duration(item)}" for item in missing]
    return "\n".join([*lines, f"missing at this commit: {len(missing)}, {total(missing)}"])


def total(items: Sequence[Item]) -> str:
    """How long these items take together: `about 75 minutes and 2 that were never timed`."""
    minutes, unknown = sum(item.minutes or 0.0 for item in items), sum(item.minutes is None for item in items)
    return f"about {minutes:.0f} minutes" + (f" and {unknown} that were never timed" if unknown else "")


def _duration(item: Item) -> str:
    return "never timed" if item.minutes is None else f"about {max(1.0, item.minutes):.0f} minutes"


# --- a quiet machine --------------------------------------------------------------------------------------------------


def wait_until_quiet(shares: Iterator[float] | None = None) -> None:
    """Wait until the processors were in use for less than QUIET_SHARE in QUIET_SAMPLES samples in a row.

    Exits if that takes longer than QUIET_TIMEOUT_S. The share in use is printed every SAY_EVERY_S.
    """
    shares, quiet = shares or busy_shares(SAMPLE_S), 0
    for number in range(round(QUIET_TIMEOUT_S / SAMPLE_S)):
        share = next(shares)
        quiet = quiet + 1 if share < QUIET_SHARE else 0
        if quiet == QUIET_SAMPLES:
            return
        in_use = f"{share:.0%} of the processors are in use, at most {QUIET_SHARE:.0%} may be"
        if not quiet and number % round(SAY_EVERY_S / SAMPLE_S) == 0:
            print(f"waiting: {in_use}", flush=True)
    raise SystemExit(f"after {QUIET_TIMEOUT_S / 60:g} minutes {in_use}. End other work, or use --now.")


# --- measure ----------------------------------------------------------------------------------------------------------


def _bench(name: str) -> bool:
    """Run a part in a process of its own. A missed limit is a result too."""
    subprocess.run([sys.executable, "-m", "tests.bench", "--resume", name], cwd=ROOT, check=False)
    stored = json.loads(BENCH.read_text()) if BENCH.is_file() else {}
    return current(stored.get(name, {}).get("commit", ""), code_commit(*MEASURED))


def sweep(path: Path, archive: Path, repeats: int = 1, now: bool = False) -> bool:
    """Run what is missing of an experiment; write its archive if all runs are there, undisturbed unless `now`."""
    commit, load = experiment_commit(path), os.getloadavg()[0]
    os.environ["TESTBED_RUNS"] = str(ROOT / "runs" / f"measure-{commit}")
    experiment = Experiment.read(path)
    experiment = experiment.model_copy(update={"repeats": max(repeats, experiment.repeats)})
    try:
        on = substrate_for(experiment.runs())
        for name in {spec.data.name for spec in experiment.runs() if not spec.emulated}:
            fetch(name, data_dir(), print)
        runs = api.sweep(experiment, on=on)
        if not now and (found := disturbed(runs)):
            print(f"{path.stem}: once more, because other processes ran beside: {', '.join(found)}", flush=True)
            for run in runs:
                if run.folder.name in found:
                    shutil.rmtree(run.folder)
            wait_until_quiet()
            runs = api.sweep(experiment, on=on)
    except Unavailable as error:  # e.g. delay and loss, which not every kernel has, or a data set
        print(f"{path.stem}: cannot be measured here: {error}", flush=True)
        return False
    if len(runs) < len(experiment.runs()) or not all(_as_wanted(run.summary) for run in runs):
        print(f"{path.stem}: not written, {len(runs.errors)} runs failed", flush=True)
        return False
    if not now and (found := disturbed(runs)):
        print(f"{path.stem}: not written, because other processes ran beside: {', '.join(found)}", flush=True)
        return False
    if experiment_commit(path) != commit:
        print(f"{path.stem}: not written, because the code changed meanwhile", flush=True)
        return False
    measured = {
        "commit": commit,
        "machine": machine(),
        "load": round(load, 2),
        "repeats": experiment.repeats,
        "minutes": round(sum(_seconds(run.folder) for run in runs) / 60, 1),
        "substrate": on,
    }
    pack(runs.folder, [run.folder for run in runs], archive, measured)
    print(f"{path.stem}: {archive.stat().st_size / 1e6:.2f} MB in {archive.relative_to(ROOT)}", flush=True)
    size = sum(file.stat().st_size for file in (ROOT / "results").rglob("*") if file.is_file())
    if size > MAX_RESULTS_BYTES:
        print(f"results/: {size / 1e6:.1f} MB, at most {MAX_RESULTS_BYTES / 1e6:.0f} are kept. Remove an archive.")
        return False
    return True


def disturbed(runs: Iterable[api.Run]) -> list[str]:
    """The names of the runs beside which other processes used more of a machine than a table allows without a note."""
    return sorted(run.folder.name for run in runs if any(machine.is_busy for machine in run.summary.machines))


def substrate_for(specs: Sequence[RunSpec]) -> str:
    """The substrate that an experiment is measured on. Raises Unavailable if delay or loss are possible on none."""
    if not any(map(_shaped, specs)):
        return "process"
    distant = next((plans for plans in map(node_plans, specs) if any(map(_needs_netem, plans))), None)
    if distant is None:
        return "netns"
    try:
        SUBSTRATES["netns"].check(distant)
    except Unavailable as refused:
        try:
            SUBSTRATES["uml"].check(distant)
        except Unavailable as also:
            raise Unavailable(f"{refused}. {also}") from None
        return "uml"
    return "netns"


def _needs_netem(plan: NodePlan) -> bool:
    return any(link is not None and link.needs_netem for link in (plan.link, plan.uplink))


def _seconds(run: Path) -> float:
    """How long a run took, also one that was made before this command."""
    folder = RunFolder(run)
    return folder.summary.stat().st_mtime - folder.spec.stat().st_mtime


def _shaped(spec: RunSpec) -> bool:
    return bool(spec.limiting_rates or spec.node.cpus or spec.overrides or spec.faults)


def _as_wanted(summary: Summary) -> bool:
    """A run with faults may fail: that is its result."""
    return summary.status == "ok" or bool(summary.spec.faults and summary.status == "failed")


# --- archives ---------------------------------------------------------------------------------------------------------


def pack(folder: Path, runs: Sequence[Path], archive: Path, measured: dict[str, Any]) -> None:
    """Write what a report reads of these run folders. Equal runs give an equal file."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    temporary = archive.with_name(f"{archive.name}.tmp")
    with tarfile.open(temporary, "w:xz", preset=9) as tar:
        _add(tar, f"{folder.name}/{FACTS}", json.dumps(measured, indent=1) + "\n")
        _add(tar, f"{folder.name}/{EXPERIMENT}", (folder / EXPERIMENT).read_text())
        for run in sorted(runs):
            spec = Summary.read(RunFolder(run)).spec
            for path in sorted(file for file in run.iterdir() if file.suffix in (".json", ".jsonl", ".txt")):
                if not path.name.endswith(".trace.json"):
                    text = path.read_text()
                    text = "".join(_records(text, spec)) if path.suffix == ".jsonl" else text
                    _add(tar, f"{folder.name}/{run.name}/{path.name}", text)
    temporary.replace(archive)


def _add(tar: tarfile.TarFile, name: str, text: str) -> None:
    content, entry = text.encode(), tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))


def _records(text: str, spec: RunSpec) -> Iterator[str]:
    """Records with rounded numbers. Where times do not matter, intervals and all hashes but the last are left out."""
    records = [json.loads(line) for line in text.splitlines()]
    decimals = DECIMALS
    if spec.epochs and not spec.probe and not spec.faults:
        last = max((k for k, each in enumerate(records) if each["kind"] == "hash"), default=0)
        records = [each for k, each in enumerate(records) if each["kind"] != "hash" or k == last]
        records = [each | {name: [] for name in INTERVALS & each.keys()} for each in records]
        decimals = UNTIMED_DECIMALS
    for each in records:
        exact = {name: round(each[name], DECIMALS) for name in LOSSES & each.keys()}
        yield json.dumps(_rounded(each, decimals) | exact, separators=(",", ":")) + "\n"


def _rounded(value: Any, decimals: int) -> Any:
    if isinstance(value, float):
        return round(value, decimals)
    if isinstance(value, dict):
        return {key: _rounded(each, decimals) for key, each in value.items()}
    return [_rounded(each, decimals) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    interrupt_on_signals()
    sys.exit(main())
