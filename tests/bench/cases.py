"""Short trainings in turn, on one network, with the real loop: a case in, every rank's steps out."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.control.substrates.base import Substrate
from testbed.report.steps import Steps
from testbed.spec.records import read
from tests.bench.shaped import work

NODES = 4
BATCH = 64  # images a rank
WARMUP = 2  # steps of each case that do not count
CONTROL, DDP, PIPELINE = "none", "ddp", "ring/bucket:2MiB/pipeline"
PATIENT = " with a patient thread"  # after a mode: Gloo's has the class that the pipeline gives it
DEADLINE = 300.0  # seconds of any one wait

Ranks = list[Steps]  # what each rank recorded of one case


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
    found = []
    for path in (folder / f"{number}.rank{rank}.jsonl" for rank in range(NODES)):
        rows = [record for record in read(path) if record["kind"] == "step"]
        found.append(Steps.of(rows, path.name).between(WARMUP, len(rows)))
        path.unlink()
    return found


def seconds(ranks: Ranks) -> list[float]:
    """Of each step, mean over ranks."""
    return [statistics.fmean(row) for row in zip(*(steps.total.tolist() for steps in ranks), strict=True)]


def sent(ranks: Ranks) -> float:
    """Bytes per rank and step, as the interface counted them."""
    return statistics.fmean(float(steps.sent[-1] - steps.sent[0]) / (len(steps.sent) - 1) for steps in ranks)
