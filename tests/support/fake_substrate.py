"""The substrate `fake`: runs without processes and without a network, for tests of the code above the substrates."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from testbed.control.runs.locks import Lock
from testbed.control.runs.select import SubstrateChoice, SubstrateType
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.fake import FakeSubstrate
from testbed.net.probe import Flow, Measurement, receipt_of
from testbed.net.shaping import Shaping
from testbed.net.tcp import efficiency
from testbed.results.conclude import Summary
from testbed.results.folder import RunFolder
from testbed.results.receipt import Receipt
from testbed.results.records import (
    End,
    Error,
    Hash,
    Record,
    Start,
    Step,
    encode,
)
from testbed.spec.errors import NetworkInvalid
from testbed.spec.fabric import Fabric
from testbed.spec.run import RunSpec

RATE = 200_000_000
PROBE = "testbed.net.probe"
RankScript = Callable[[RunFolder, int], int | None]  # what a rank does: write records, return the exit code


def measured(rate: float, nodes: int = 2) -> Measurement:
    """Return what a probe prints if every link carries `rate` bit/s on the wire."""
    size = round(rate * efficiency(1500) / 8)
    pairs = [(src, dst) for src in range(nodes) for dst in range(nodes) if src != dst]
    flows = [Flow(src, dst, size, 1.0) for src, dst in [*pairs, (None, 0)]]
    return Measurement(flows, 1500, ["cubic"] * nodes, 4.0)


# Receipts of links for which 200mbit was requested, and the measurements that give them.
MEASURED = [
    (receipt_of(found, Fabric.of([RATE] * 2)), found) for found in (measured(RATE * share) for share in (1, 0.9, 0.8))
]
GOOD, BAD, WORSE = (receipt for receipt, _ in MEASURED)


def write(folder: RunFolder, rank: int, *records: Record) -> None:
    folder.records(rank).write_text("".join(encode(record) + "\n" for record in records))


def succeeds(folder: RunFolder, rank: int) -> int:
    """A rank that trains all its steps."""
    spec = folder.read_spec()
    size = {"parameters": 10, "gradient_bytes": 40, "tensors": 2}
    start = Start(rank=rank, world=spec.world, unix=0.0, deadline=60.0, counter="interface eth0", **size)
    times = dict.fromkeys(("at", "data", "forward", "backward", "sync", "update"), 0.0)
    steps = [
        Step(step=k, epoch=0, total=1.0, loss=2.0, images=4, sent=100 * k, received=100 * k, **times)
        for k in range(spec.steps or 0)
    ]
    end = End(steps=len(steps), seconds=1.0, sent=100, received=100)
    write(folder, rank, start, *steps, Hash(step=len(steps), parameters="same", agree=True), end)
    return 0


def fails_with(code: int, message: str) -> RankScript:
    """A rank that fails before its first step."""

    def play(folder: RunFolder, rank: int) -> int:
        write(folder, rank, Error(code=code, message=message))
        return code

    return play


def finishes_while_waiting(folder: RunFolder, **facts: str) -> Lock:
    """In place of machine_lock: while we wait, the holder of the lock finishes this run, which had failed."""

    @contextmanager
    def lock(choice: SubstrateChoice, report: Callable[[str], None]) -> Iterator[None]:
        ended = Summary.read(folder).model_copy(update={"status": "ok", "reason": "", **facts})
        folder.summary.write_text(ended.model_dump_json(by_alias=True))
        yield

    return lock


class FakeRuns:
    """The substrate `fake`. `play` is what its ranks do; `receipts` is what its probes measure, in turn.

    Node 0 plays the probe: it prints the result that gives the receipt, fails, or raises.
    """

    def __init__(self) -> None:
        self.play: RankScript = succeeds
        self.receipts: Iterator[Receipt | type[BaseException]] = iter(())
        self.samples: Iterator[Receipt | type[BaseException]] = itertools.repeat(GOOD)  # of probes after training
        self.shapings: Iterator[Shaping] = itertools.repeat(Shaping())  # of its nodes: before training, then after it
        self.made: list[FakeSubstrate] = []
        self.checks: list[Sequence[NodePlan]] = []  # plans that were checked
        self.type = self.named("fake")
        self.choice = SubstrateChoice(self.type, "for tests")

    def named(self, name: str, **facts: Any) -> SubstrateType:
        """The same substrate under another name."""

        def make(spec: RunSpec, folder: Path) -> FakeSubstrate:
            self.made.append(FakeSubstrate(spec.world, self._script, lambda node: next(self.shapings)))
            self.made[-1].name = name
            return self.made[-1]

        return SubstrateType(name=name, description="no nodes at all", make=make, check=self.checks.append, **facts)

    @property
    def calls(self) -> list[object]:
        """The names of all calls of the last substrate, in order; the start of a probe is left out."""
        calls = self.made[-1].calls
        return [call[0] for call in calls if not (call[0] == "start" and PROBE in call[2])]  # type: ignore[operator]

    def _script(self, node: int, argv: Sequence[str], log: Path) -> int | None:
        if PROBE in argv:
            return self._probe(log, self.samples if "--sample" in argv else self.receipts) if node == 0 else 0
        return self.play(RunFolder(Path(argv[argv.index("--folder") + 1])), node)

    def _probe(self, log: Path, receipts: Iterator[Receipt | type[BaseException]]) -> int:
        found = next(receipts)
        if isinstance(found, Receipt):
            result = next(measured for expected, measured in MEASURED if expected == found)
            log.write_text(json.dumps({"event": "result", **asdict(result)}) + "\n")
            return 0
        if issubclass(found, NetworkInvalid):
            log.write_text(json.dumps({"event": "error", "sentence": "node1 cannot be reached"}) + "\n")
            return 1
        raise found
