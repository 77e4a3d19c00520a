"""A shaped network of equal nodes, worker scripts on its nodes, and short trainings on it.

with shaped_network("500mbit") as (substrate, receipt, folder):
    runs = train(substrate, folder, [case("ddp", 8), case("ring", 8)])
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from testbed.control.runs.run import probe
from testbed.control.substrates.base import NodePlan, Process, Substrate
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.report.load import Steps
from testbed.results.receipt import Receipt
from testbed.results.records import End, Start, Step, read
from testbed.spec.fabric import Racks, rack_numbers
from testbed.spec.link import Link

NODES = 4
BATCH_PER_RANK = 64
WARMUP = 2  # steps at the beginning of each case that are not counted
CONTROL, DDP, PIPELINE = "none", "ddp", "ring/bucket:2MiB/pipeline"
# Suffixes of a mode
SCHED_BATCH = " with SCHED_BATCH"  # Gloo's thread gets the scheduling class of the pipeline's thread
BUCKET_VIEW = " with bucket views"  # DDP's gradient_as_bucket_view=True
SCHED_OTHER = " with SCHED_OTHER"  # the pipeline's thread has the default scheduling class instead of SCHED_BATCH
LONG_SLICES = " with SCHED_OTHER and slices of 20 ms"
LAST_BUCKETS = {  # the last buckets of the pipeline, smaller than the usual size; the second is spec/mode.py's
    " with equal buckets": (),
    " with last buckets 1/8, 1/4, 1/2": (8, 4, 2),
    " with last buckets 1/32, 1/16, 1/8, 1/4, 1/2": (32, 16, 8, 4, 2),
}
OPTIONS: dict[str, dict[str, Any]] = {  # by suffix: what worker.py changes in such a case
    "": {},
    SCHED_BATCH: {"sched_batch": True},
    BUCKET_VIEW: {"bucket_view": True},
    SCHED_OTHER: {"slice_s": 0.0},
    LONG_SLICES: {"slice_s": 0.02},
    **{suffix: {"last_buckets": divisors} for suffix, divisors in LAST_BUCKETS.items()},
}
DEADLINE_S = 300.0  # the deadline of each communication
PROBES = 2  # the second one if the first is invalid, as in a run

SubstrateFactory = Callable[[Sequence[NodePlan], Path], Substrate]


@contextmanager
def shaped_network(
    rate: str | None,
    nodes: int = NODES,
    make: SubstrateFactory = NetnsSubstrate,
    cpus: float | None = None,
    racks: Racks = (),
    uplink: str | None = None,
    **link_keys: str,
) -> Iterator[tuple[Substrate, Receipt, Path]]:
    """Yield the substrate, the receipt of its probe, and a folder that all nodes can write to; unshaped without a rate.

    `uplink`: the rate of each rack's uplink.
    Exits where the probe measures a wrong rate twice.
    """
    link = Link.load(({"rate": rate} if rate else {}) | link_keys, "bench")
    node = NodePlan(name="", link=link, congestion="cubic", cpus=cpus, threads=1)
    trunk = Link.load({"rate": uplink}, "bench") if uplink else None
    plans = [replace(node, name=f"node{k}", rack=r, uplink=trunk) for k, r in enumerate(rack_numbers(racks, nodes))]
    with tempfile.TemporaryDirectory() as name, make(plans, Path(name) / "run") as substrate:
        folder = Path(name) / "run"
        folder.mkdir()
        Path(name).chmod(0o755)
        substrate.prepare_folder(folder)
        receipts = (probe(substrate, plans, lambda event: None) for _ in range(PROBES))
        receipt = next((each for each in receipts if each.valid()), None)
        if receipt is None:
            raise SystemExit(
                f"{rate} was requested, and {PROBES} probes measured another rate, so nothing is timed."
                " Is the machine busy? Try again when it is idle."
            )
        yield substrate, receipt, folder


def run_worker(substrate: Substrate, folder: Path, *arguments: str, timeout_s: float = 300) -> None:
    """Run `worker.py FOLDER ...` on every node, as the ranks of one group, and wait until all have ended."""
    worker = Path(shutil.copy(Path(__file__).with_name("worker.py"), folder))
    size = str(len(substrate.nodes))
    common = {"WORLD_SIZE": size, "MASTER_ADDR": substrate.nodes[0].address, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank, node in enumerate(substrate.nodes):
        argv = [substrate.python, str(worker), str(folder), *arguments]
        own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": node.interface}
        processes.append(substrate.start(rank, argv, common | own, folder / f"{rank}.log"))
    for rank, process in enumerate(processes):
        wait_for(process, folder / f"{rank}.log", timeout_s)


def wait_for(process: Process, log: Path, timeout_s: float) -> None:
    """Wait until the process has ended. Exits with its log if it failed."""
    if process.wait(timeout_s) != 0:
        raise SystemExit(log.read_text())


# --- short trainings -------------------------------------------------------------------------------------------------


class TrainedCase(NamedTuple):
    """What the ranks recorded in one case."""

    steps: list[Steps]  # per rank, without the warm-up
    sent: float  # bytes per rank and step as counted at the interface, over all steps and until the last byte was sent
    used: list[float] = []  # seconds of processor time of each step, all ranks and all their threads
    mode: str = ""  # with the bucket size that the ranks chose, if the case leaves it open


def case(mode: str, steps: int, **values: Any) -> dict[str, Any]:
    """Return the request of a short training: VGG-11 on synthetic images, `values` laid over the defaults."""
    few = {"model": "vgg11", "nodes": NODES, "batch_per_rank": BATCH_PER_RANK, "steps": steps, "deadline": DEADLINE_S}
    mode, with_, option = mode.partition(" with ")
    how = {"mode": mode, "options": OPTIONS[with_ + option]}
    return few | how | {"data": {"name": "synthetic"}, "evaluate": "never"} | values


def train(substrate: Substrate, folder: Path, cases: Sequence[dict[str, Any]]) -> list[TrainedCase]:
    """Train the cases one after the other in one process group, with the real loop."""
    (folder / "cases.json").write_text(json.dumps(cases))
    run_worker(substrate, folder, "train", timeout_s=1800)
    return [_read_case(folder, number, len(substrate.nodes)) for number in range(len(cases))]


def _read_case(folder: Path, number: int, nodes: int) -> TrainedCase:
    steps, sent, used, mode = [], [], [], ""
    for path in (folder / f"{number}.rank{rank}.jsonl" for rank in range(nodes)):
        lines = list(read(path))
        rows, end = [line for line in lines if isinstance(line, Step)], lines[-1]
        assert isinstance(end, End)
        steps.append(Steps.of(rows, path.name).only(lambda number: number >= WARMUP))
        sent.append(((end.sent or 0) - (end.before or 0)) / end.steps)
        used.append([(b.used or 0) - (a.used or 0) for a, b in itertools.pairwise(rows)][WARMUP - 1 :])
        mode = next(line.mode for line in lines if isinstance(line, Start))
        path.unlink()
    return TrainedCase(steps, statistics.fmean(sent), [sum(row) for row in zip(*used, strict=True)], mode)


def step_seconds(trained: TrainedCase) -> list[float]:
    """Return the seconds of each step, as the mean over ranks."""
    return [statistics.fmean(row) for row in zip(*(steps.total.tolist() for steps in trained.steps), strict=True)]
