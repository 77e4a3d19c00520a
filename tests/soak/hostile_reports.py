"""A stranger's finished runs, to be reported, compared and traced: every file of theirs may lie, links lead out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.control.cli import main
from testbed.results.conclude import summarise
from testbed.results.folder import EXPERIMENT, RunFolder, write_whole
from testbed.spec.experiment import Experiment
from testbed.spec.run import RunSpec
from tests.soak.nasty import NASTY, mangle, place

OUTSIDE = "outside"  # a folder beside the stranger's, in which nothing may appear
KEPT = "kept"  # a file in it, of which no byte may change; never one of the machine's own, this runs as root
STEPS = 4
FAULT = "pause:rank1@step2+1s"
PLOT = "given-timeline"  # how one of the report's files begins; see `_links`


def report(folder: Path, rng: random.Random) -> Callable[[], object]:
    """`testbed report` of a run, or of the folder it lies in."""
    run = _mangled(folder / "given", rng)
    named = rng.choice((run.path, run.path.parent))
    return _command("report", str(named), *rng.choice(([], ["--json"])))


def compare(folder: Path, rng: random.Random) -> Callable[[], object]:
    """`testbed compare` with a good one, on either side."""
    sides = [str(_finished(folder / "good").path), str(_mangled(folder / "given", rng).path)]
    return _command("compare", *rng.sample(sides, 2), *rng.choice(([], ["--json"])))


def trace(folder: Path, rng: random.Random) -> Callable[[], object]:
    return _command("trace", str(_mangled(folder / "given", rng).path))


def _command(*words: str) -> Callable[[], object]:
    return lambda: main.app([*words], standalone_mode=False)


def _finished(folder: Path) -> RunFolder:
    """A run as a sweep leaves it, with a fault that it got over, a profile and the question beside it."""
    from tests.support.fake_substrate import GOOD, well

    base = {"model": "lenet5", "data": {"name": "synthetic"}, "nodes": 2, "batch": 8, "steps": STEPS, "warmup": 0}
    values = base | {"faults": [FAULT], "experiment": "given", "name": "ring"}
    spec = RunSpec.load(values, "soak")
    run = RunFolder(folder / "ring")
    run.create(spec)
    for rank in range(spec.world):
        well(run, rank)
        run.shares(rank).write_text(json.dumps({"forward": 0.2, "backward": 0.5, "sync": 0.3}))
    GOOD.write(run.receipt)
    events = [{"event": "injected", "at": 1.0, "begun": 1.0, "fault": FAULT, "rank": 1, "step": 2}]
    events += [{"event": "over", "at": 2.0, "fault": FAULT, "rank": 1}]
    events += [{"event": "ended", "at": 3.0, "rank": rank, "code": 0} for rank in range(spec.world)]
    run.faults.write_text("".join(json.dumps(event) + "\n" for event in events))
    write_whole(run.summary, summarise(run, spec, status="ok", substrate="netns").model_dump_json(by_alias=True))
    question = Experiment(name="given", title="Which?", base=base)
    (folder / EXPERIMENT).write_text(question.model_dump_json())
    return run


def _mangled(folder: Path, rng: random.Random) -> RunFolder:
    """One to three of its files falsified, sometimes links planted."""
    run = _finished(folder)
    files = [run.spec, run.summary, run.receipt, run.faults, run.records(0), run.records(1), run.shares(0)]
    for path in rng.sample([*files, folder / EXPERIMENT], rng.randrange(0, 4)):
        data = path.read_bytes()
        falsified = _falsify(data, rng) if rng.random() < 0.6 else mangle(data, rng)
        path.unlink()
        place(path, falsified, rng)
    if rng.random() < 0.4:
        _link(run, rng)
    return run


def _falsify(data: bytes, rng: random.Random) -> bytes:
    """JSON, or lines of it, in which one value is another."""
    lines = [data] if data.startswith(b"{\n") else data.splitlines()
    at = rng.randrange(len(lines))
    value = json.loads(lines[at])
    _replace(value, rng)
    lines[at] = json.dumps(value).encode("utf-8", "surrogatepass")
    return b"\n".join(lines) + b"\n"


def _replace(value: Any, rng: random.Random) -> None:
    """At any depth."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    deeper = isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7
    if deeper:
        _replace(value[key], rng)
    else:
        value[key] = rng.choice(NASTY)


def _link(run: RunFolder, rng: random.Random) -> None:
    """Out of the folder, where something is read or written."""
    outside = run.path.parents[2] / OUTSIDE
    above = run.path.parent
    spots = [above / "report", above / "report.html", run.path / "trace.json", run.path / "report"]
    spots += [above / "report" / name for name in ("report.md", "summary.json", f"{PLOT}.svg", f"{PLOT}.png")]
    spots += [run.summary, run.receipt, run.faults, run.records(0), run.shares(1), run.spec, above / EXPERIMENT]
    spots += [run.path / "rank0.attempt1.jsonl", above / "another"]
    spot = rng.choice(spots)
    spot.parent.mkdir(exist_ok=True)
    spot.unlink(missing_ok=True)
    spot.symlink_to(rng.choice((outside, outside / "stray", outside / KEPT, Path("/dev/zero"))))
