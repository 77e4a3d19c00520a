"""What a person sees of a deploy: a bar per host on a terminal, a line per transfer elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn


class Lines:
    """For logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun: dict[tuple[str, str], float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to put away."""

    def say(self, text: str) -> None:
        self._console.print(f"  {text}")

    def begin(self, host: str, what: str, size: int) -> Callable[[int], None]:
        self._begun[host, what] = time.monotonic()
        self.say(f"{host}: sending {what}, {size / 1e6:.0f} MB")
        return lambda count: None

    def end(self, host: str, what: str) -> None:
        self.say(f"{host}: {what}, {time.monotonic() - self._begun[host, what]:.1f} s")


class Terminal(Lines):
    """Bars that are redrawn in place."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (TextColumn("  {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, host: str, what: str, size: int) -> Callable[[int], None]:
        task = self._tasks[host, what] = self._progress.add_task(f"{host} {what}", total=size)

        def advance(count: int) -> None:
            self._progress.advance(task, count)
            if self._progress.tasks[task].finished:
                self._progress.update(task, description=f"{host} {what}, unpacking")

        return advance

    def end(self, host: str, what: str) -> None:
        self._progress.update(self._tasks[host, what], description=f"{host} {what}, done")


def open_bars(console: Console) -> Lines:
    """The kind that fits where the output goes."""
    return Terminal(console) if console.is_terminal else Lines(console)
