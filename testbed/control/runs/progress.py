"""The console, and the progress of a run: one live line per rank on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from testbed.spec.errors import one_line, strip_control_chars
from testbed.spec.run import RunSpec
from testbed.spec.script import command_line

EVERY_S = 5.0  # between two lines where the output is not a terminal
WINDOW_STEPS = 5  # the speed is averaged over so many steps


class Screen(Console):
    """A console that removes control characters: names, reasons and titles may come from files of other users."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(strip_control_chars(each) if isinstance(each, str) else each for each in objects), **options)


console = Screen(markup=False, highlight=False, soft_wrap=True)


class Progress(Protocol):
    """Receives the progress of a run. The calls do not fail and do not block."""

    def headline(self, text: str) -> None: ...
    def stage(self, text: str) -> None: ...
    def link(self, event: dict[str, Any]) -> None: ...
    def begin(self, spec: RunSpec) -> None: ...
    def step(self, rank: int, record: dict[str, Any]) -> None: ...
    def end(self) -> None: ...


class Silent:
    """Progress that is not shown: for --json and for tests."""

    def headline(self, text: str) -> None: ...
    def stage(self, text: str) -> None: ...
    def link(self, event: dict[str, Any]) -> None: ...
    def begin(self, spec: RunSpec) -> None: ...
    def step(self, rank: int, record: dict[str, Any]) -> None: ...
    def end(self) -> None: ...


class Speed:
    """Seconds per iteration and MB/s of one rank over its last steps."""

    def __init__(self, slower: float = 1.0) -> None:
        self.slower = slower  # time dilation: records have times that are longer by this factor
        self.records: deque[dict[str, Any]] = deque(maxlen=WINDOW_STEPS + 1)

    def seconds_per_step(self) -> float:
        """Return the mean time of a step."""
        return float(sum(r["total"] for r in self.records)) / len(self.records) / self.slower

    def megabytes_per_s(self) -> float | None:
        """Return MB sent and received per second; None if not counted, or if the counters are of two attempts."""
        if len(self.records) < 2:
            return None
        first, last = self.records[0], self.records[-1]
        counted = all(record[key] is not None for record in (first, last) for key in ("sent", "received"))
        if not counted or first.get("attempt") != last.get("attempt"):
            return None
        moved = last["sent"] + last["received"] - first["sent"] - first["received"]
        passed: float = (last["at"] + last["total"] - first["at"] - first["total"]) / self.slower
        return moved / 1e6 / passed if passed > 0 else None


class Plain:
    """Progress as lines, for logs and pipes; only rank 0 is shown."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = 0
        self.evaluates = False  # after training
        self.learns = True  # False: the loss has no meaning
        self.slower = 1.0  # time dilation
        self.world = 1
        self.speeds: list[Speed] = []
        self.printed_at = 0.0

    def headline(self, text: str) -> None:
        self.console.print(one_line(text))

    def stage(self, text: str) -> None:
        self.console.print(f"  {text}")

    def link(self, event: dict[str, Any]) -> None:
        """Handle the end of a round of the probe. It is printed only if the last line is older than EVERY_S."""
        if event["step"] == 1:
            self.printed_at = time.monotonic()
        elif time.monotonic() - self.printed_at >= EVERY_S:
            self.printed_at = time.monotonic()
            self.stage(f"probe: round {event['step']} of {event['of']}")

    def begin(self, spec: RunSpec) -> None:
        self.world = spec.world
        self.total = spec.steps or 0
        self.evaluates = spec.evaluate != "never" and spec.script is None
        self.learns, self.slower = not spec.emulated, spec.dilation or 1.0
        self.speeds = [Speed(self.slower) for _ in range(spec.world)]
        data = "emulated compute" if spec.emulated else spec.data.name
        what = f"{spec.model} on {data}" if spec.script is None else command_line(spec.script.argv)
        self.stage(f"training: {what}, {spec.world} rank{'s' * (spec.world > 1)}, mode {spec.mode}")

    def step(self, rank: int, record: dict[str, Any]) -> None:
        self.speeds[rank].records.append(record)
        if rank == 0:
            self.show(record)

    def show(self, record: dict[str, Any]) -> None:
        if time.monotonic() - self.printed_at >= EVERY_S or record["step"] + 1 == self.total:
            self.printed_at = time.monotonic()
            self.stage(f"rank 0: {self.describe(0, record)}")

    def describe(self, rank: int, record: dict[str, Any]) -> str:
        text = format_step(record, self.total, self.speeds[rank], self.learns)
        return f"{text}; now evaluating" if self.evaluates and record["step"] + 1 == self.total else text

    def end(self) -> None: ...


class Terminal(Plain):
    """Progress as a table that is redrawn in place, one line per rank."""

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
        self.rows[rank] = self.describe(rank, record)
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


def format_step(record: dict[str, Any], total: int, speed: Speed, learns: bool = True) -> str:
    """Return e.g. 'step 7/12  loss 2.3010  0.912 s/iter  81.0 MB/s in and out'."""
    of = f"/{total}" if total else f" (epoch {record['epoch']})"
    rate = speed.megabytes_per_s()
    moved = f"  {rate:.1f} MB/s in and out" if rate is not None else ""
    loss = f"  loss {record['loss']:.4f}" if learns else ""
    return f"step {record['step'] + 1}{of}{loss}  {speed.seconds_per_step():.3f} s/iter{moved}"


def open_progress(console: Console, quiet: bool) -> Progress:
    """Return a display that shows nothing if `quiet`, a live table on a terminal, else lines."""
    if quiet:
        return Silent()
    return Terminal(console) if console.is_terminal else Plain(console)
