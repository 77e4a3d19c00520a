"""Short trainings in turn, on one network, with the real loop: a case in, every rank's steps out."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed.control.substrates.base import Substrate
from testbed.report.load import Steps
from testbed.results.records import End, Step, read
from tests.bench.shaped import work

NODES = 4
BATCH = 64  # images a rank
WARMUP = 2  # steps of each case that do not count
CONTROL, DDP, PIPELINE = "none", "ddp", "ring/bucket:2MiB/pipeline"
PATIENT = " with a patient thread"  # after a mode: Gloo's has the class that the pipeline gives it
DEADLINE = 300.0  # seconds of any one wait


class Ranks(NamedTuple):
    """What the ranks recorded of one case."""

    steps: list[Steps]  # of each rank, those that count
    sent: float  # bytes per rank and step, as the interface counted them: of all steps, the last one's rest included


def case(mode: str, steps: int, **values: Any) -> dict[str, Any]:
    """VGG-11 on made-up images: what is in them costs nothing and changes nothing here."""
    few = {"model": "vgg11", "nodes": NODES, "batch_per_rank": BATCH, "steps": steps, "data": {"name": "synthetic"}}
    how = {"mode": mode.removesuffix(PATIENT), "patient": mode.endswith(PATIENT), "deadline": DEADLINE}
    return few | how | {"evaluate": "never"} | values


def train(substrate: Substrate, folder: Path, cases: Sequence[dict[str, Any]]) -> list[Ranks]:
    """The ranks meet once and train the cases one after the other; the steps that count."""
    (folder / "cases.json").write_text(json.dumps(cases))
    work(substrate, folder, Path(__file__).with_name("step_worker.py"), seconds=1800)
    return [_ranks(folder, number) for number in range(len(cases))]


def _ranks(folder: Path, number: int) -> Ranks:
    steps, sent = [], []
    for path in (folder / f"{number}.rank{rank}.jsonl" for rank in range(NODES)):
        lines = list(read(path))
        rows, end = [line for line in lines if isinstance(line, Step)], lines[-1]
        assert isinstance(end, End)
        steps.append(Steps.of(rows, path.name).between(WARMUP, len(rows)))
        sent.append(((end.sent or 0) - (end.before or 0)) / end.steps)
        path.unlink()
    return Ranks(steps, statistics.fmean(sent))


def seconds(ranks: Ranks) -> list[float]:
    """Of each step, mean over ranks."""
    return [statistics.fmean(row) for row in zip(*(steps.total.tolist() for steps in ranks.steps), strict=True)]
