"""The place `fake`: runs without ranks and without a network, for tests of what stands above the substrates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from testbed.control.runs import run, select
from testbed.control.substrates.fake import FakeSubstrate
from testbed.net.probe import Flow, Measurement, receipt_of
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

RATE = 200_000_000
Play = Callable[[RunFolder, int], int | None]  # a rank's life: write records, give the exit code


def receipt(measured: float, nodes: int = 2) -> Receipt:
    """Every link was to have 200mbit and measured `measured` bit/s on the wire."""
    size = round(measured * efficiency(1500) / 8)
    pairs = [(src, dst) for src in range(nodes) for dst in range(nodes) if src != dst]
    flows = [Flow(src, dst, size, 1.0) for src, dst in [*pairs, (None, 0)]]
    return receipt_of(Measurement(flows, 1500, ["cubic"] * nodes, 4.0), [RATE] * nodes)


GOOD, BAD, WORSE = receipt(RATE), receipt(0.9 * RATE), receipt(0.8 * RATE)


def write(folder: RunFolder, rank: int, *records: Record) -> None:
    folder.records(rank).write_text("".join(encode(record) + "\n" for record in records))


def well(folder: RunFolder, rank: int) -> int:
    """A rank that trains all its steps and ends."""
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


def ends_with(code: int, message: str) -> Play:
    """A rank that fails before its first step."""

    def play(folder: RunFolder, rank: int) -> int:
        write(folder, rank, Error(code=code, message=message))
        return code

    return play


def ends_well_while_waiting(folder: RunFolder, **facts: str) -> Callable[[select.Place], AbstractContextManager[None]]:
    """In the place of `alone`: whoever has the machine ends this run, which had failed, well before we get it."""

    @contextmanager
    def alone(_: select.Place) -> Iterator[None]:
        ended = Summary.read(folder).model_copy(update={"status": "ok", "reason": "", **facts})
        folder.summary.write_text(ended.model_dump_json(by_alias=True))
        yield

    return alone


class FakePlace:
    """Makes `fake` a place like any other; `play` is what its ranks do, `receipts` what its probes find, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.play: Play = well
        self.receipts: Iterator[Receipt | type[BaseException]] = iter(())
        self.made: list[FakeSubstrate] = []
        self.place = select.Place("fake", "for tests", True)
        kind = select.Kind(self._make, lambda plans: None, "nothing at all")
        monkeypatch.setattr(select, "KINDS", {**select.KINDS, "fake": kind, "other": kind})
        monkeypatch.setattr(run, "probe", self._probe)

    @property
    def calls(self) -> list[object]:
        """The names of all that was asked of the last substrate, in order."""
        return [call[0] for call in self.made[-1].calls]

    def _make(self, plans: Sequence[object], folder: Path) -> FakeSubstrate:
        def script(node: int, argv: Sequence[str], log: Path) -> int | None:
            return self.play(RunFolder(Path(argv[argv.index("--folder") + 1])), node)

        self.made.append(FakeSubstrate(len(plans), script))
        return self.made[-1]

    def _probe(self, *_: object) -> Receipt:
        found = next(self.receipts)
        if isinstance(found, Receipt):
            return found
        raise found
