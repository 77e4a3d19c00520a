"""Progress: what a person sees while a run goes on. On a terminal one live line per rank, else a line now and then."""

from __future__ import annotations

import time
from collections import deque
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from testbed.spec.errors import one_line, strip_control_chars
from testbed.spec.run import RunSpec

# What all commands print with, and the options they share.


class Screen(Console):
    """A console that may be given strangers' words: names, reasons and titles come from files."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(strip_control_chars(each) if isinstance(each, str) else each for each in objects), **options)


console = Screen(markup=False, highlight=False, soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]


EVERY = 5.0  # seconds between lines where the output is no terminal
WINDOW = 5  # steps over which speed is averaged


class Progress(Protocol):
    """What the life of a run reports; the calls never fail and never block."""

    def headline(self, text: str) -> None: ...
    def stage(self, text: str) -> None: ...
    def link(self, event: dict[str, Any]) -> None: ...
    def begin(self, spec: RunSpec) -> None: ...
    def step(self, rank: int, record: dict[str, Any]) -> None: ...
    def end(self) -> None: ...


class Silent:
    """For --json and for tests."""

    def headline(self, text: str) -> None: ...
    def stage(self, text: str) -> None: ...
    def link(self, event: dict[str, Any]) -> None: ...
    def begin(self, spec: RunSpec) -> None: ...
    def step(self, rank: int, record: dict[str, Any]) -> None: ...
    def end(self) -> None: ...


class Speed:
    """Seconds per iteration and MB/s of one rank over its last steps."""

    def __init__(self) -> None:
        self.records: deque[dict[str, Any]] = deque(maxlen=WINDOW + 1)

    def seconds(self) -> float:
        return float(sum(r["total"] for r in self.records)) / len(self.records)

    def megabytes(self) -> float | None:
        """Sent plus received per second of wall clock; None where two attempts' counters would be compared."""
        if len(self.records) < 2:
            return None
        first, last = self.records[0], self.records[-1]
        counted = all(record[key] is not None for record in (first, last) for key in ("sent", "received"))
        if not counted or first.get("attempt") != last.get("attempt"):
            return None
        moved = last["sent"] + last["received"] - first["sent"] - first["received"]
        passed: float = last["at"] + last["total"] - first["at"] - first["total"]
        return moved / 1e6 / passed if passed > 0 else None


class Plain:
    """Lines for logs and pipes; rank 0 speaks for all."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = 0
        self.tested = False  # once it is trained
        self.world = 1
        self.speeds: list[Speed] = []
        self.said = 0.0

    def headline(self, text: str) -> None:
        self.console.print(one_line(text))

    def stage(self, text: str) -> None:
        self.console.print(f"  {text}")

    def link(self, event: dict[str, Any]) -> None:
        """A round of the probe is over; on a fast network nobody needs to see that."""
        if event["step"] == 1:
            self.said = time.monotonic()
        elif time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            self.stage(f"probe: round {event['step']} of {event['of']}")

    def begin(self, spec: RunSpec) -> None:
        self.world = spec.world
        self.total = spec.steps or 0
        self.tested = spec.evaluate != "never"
        self.speeds = [Speed() for _ in range(spec.world)]
        self.stage(
            f"training: {spec.model} on {spec.data.name}, {spec.world} rank{'s' * (spec.world > 1)}, mode {spec.mode}"
        )

    def step(self, rank: int, record: dict[str, Any]) -> None:
        self.speeds[rank].records.append(record)
        if rank == 0:
            self.show(record)

    def show(self, record: dict[str, Any]) -> None:
        if time.monotonic() - self.said >= EVERY or record["step"] + 1 == self.total:
            self.said = time.monotonic()
            self.stage(f"rank 0: {self.told(0, record)}")

    def told(self, rank: int, record: dict[str, Any]) -> str:
        text = describe(record, self.total, self.speeds[rank])
        return f"{text}; now it is tested" if self.tested and record["step"] + 1 == self.total else text

    def end(self) -> None: ...


class Terminal(Plain):
    """A table that is redrawn in place, one line per rank."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.live: Live | None = None
        self.rows: dict[int, str] = {}

    def headline(self, text: str) -> None:
        self.end()
        super().headline(text)

    def begin(self, spec: RunSpec) -> None:
        self.end()
        super().begin(spec)
        self.rows = {rank: "starting" for rank in range(spec.world)}
        self.live = Live(self._table(), console=self.console, refresh_per_second=4, transient=True)
        self.live.start()

    def step(self, rank: int, record: dict[str, Any]) -> None:
        self.speeds[rank].records.append(record)
        self.rows[rank] = self.told(rank, record)
        if self.live:
            self.live.update(self._table())

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for rank, text in self.rows.items():
            table.add_row(f"  rank {rank}", text)
        return table

    def end(self) -> None:
        if self.live:
            self.live.stop()
            self.live = None


def describe(record: dict[str, Any], total: int, speed: Speed) -> str:
    """'step 7/12  loss 2.301  0.912 s/iter  81 MB/s'."""
    of = f"/{total}" if total else f" (epoch {record['epoch']})"
    rate = speed.megabytes()
    moved = f"  {rate:.1f} MB/s in and out" if rate is not None else ""
    return f"step {record['step'] + 1}{of}  loss {record['loss']:.4f}  {speed.seconds():.3f} s/iter{moved}"


def open_progress(console: Console, quiet: bool) -> Progress:
    """The kind that fits where the output goes."""
    if quiet:
        return Silent()
    return Terminal(console) if console.is_terminal else Plain(console)
