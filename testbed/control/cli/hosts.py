"""The commands of `fab`: each asks all hosts, prints one table and one line per trouble, and gives an exit code."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from testbed.control.cli.progress import console
from testbed.control.runs.commands import (
    build_spec,
    exit_code,
    print_results,
    run_file,
    run_once,
)
from testbed.control.runs.select import Hosts, check_shaping, on_hosts
from testbed.control.substrates.hosts import (
    deploy as hosts_deploy,
)
from testbed.control.substrates.hosts import (
    doctor as hosts_doctor,
)
from testbed.control.substrates.hosts import (
    runs as hosts_runs,
)
from testbed.control.substrates.hosts.group import connected, run_on_all
from testbed.results.table import format_table
from testbed.spec.datasets import data_dir, is_complete
from testbed.spec.errors import SpecError, TestbedError, UsageError, refuse
from testbed.spec.inventory import Inventory, read_inventory, the_one
from testbed.spec.run import RunSpec

# What a person sees of a deploy: a bar per host on a terminal, a line per transfer elsewhere.


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


DATA = "cifar10"
BAD = UsageError.exit_code


@dataclass(frozen=True)
class Asked:
    """What holds for every task of one command line."""

    inventory: Inventory
    accept_new: bool
    data: Sequence[str]  # every --data on the line

    @classmethod
    def of(cls, argv: Sequence[str], inventory: str | None, accept_new: bool, nodes: str | None) -> Self:
        """Tasks know only their own flags, but the hosts are the same for all of them, wherever they were named."""
        given = [*on_line(argv, "--inventory"), *([inventory] if inventory else [])]
        path = the_one("--inventory", given)
        found = read_inventory(Path(path) if path else None)
        nodes = the_one("--nodes", [*on_line(argv, "--nodes"), *([nodes] if nodes is not None else [])])
        if nodes is not None:
            if not nodes.isdecimal() or int(nodes) == 0:
                raise refuse("nodes", nodes, "must be a whole number of hosts", f"Use 1 to {len(found.nodes)}.")
            found = found.first(int(nodes))
        return cls(found, accept_new or "--accept-new" in argv, on_line(argv, "--data"))


def on_line(argv: Sequence[str], flag: str) -> list[str]:
    """Every value that a flag has on a command line."""
    after = [value for name, value in itertools.pairwise(argv) if name == flag]
    return [*after, *(word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}="))]


def doctor(asked: Asked) -> int:
    with connected(asked.inventory.nodes, asked.accept_new) as outcomes:
        rows = hosts_doctor.examine(outcomes)
    console.print(format_table(hosts_doctor.HEADER, [row.line() for row in rows]))
    return _troubles(trouble for row in rows for trouble in row.troubles)


def deploy(asked: Asked, data: str | None) -> int:
    names = [name for each in _data_of(asked, data) for name in hosts_deploy.sendable(each)]
    hosts_deploy.check_data(names)
    with connected(asked.inventory.nodes, asked.accept_new) as outcomes, open_bars(console) as bars:
        rows = hosts_deploy.deploy(outcomes, names, bars)
    header = ("host", "image", *names, "seconds")
    cells = [(r.host, r.image or "-", *(r.data.get(n, "-") for n in names), f"{r.seconds:.1f}") for r in rows]
    console.print(format_table(header, cells))
    return _troubles(row.error for row in rows if row.error)


def _data_of(asked: Asked, own: str | None) -> list[str]:
    """What was asked for here, else what a run on the same line asks for, else the usual set if it is here."""
    said = [own] if own else list(dict.fromkeys(asked.data))
    if said:
        return said
    if is_complete(DATA, data_dir()):
        return [DATA]
    console.print(f"data {DATA} is not here, so it is not sent; `testbed data get {DATA}` fetches it")
    return []


def run(asked: Asked, flags: dict[str, Any], settings: list[str], out: Path | None, as_json: bool) -> int:
    on = flags.pop("on")
    if on is not None:
        raise SpecError(f"--on {on!r}: fab is for real hosts. `testbed run --on {on}` is for other places.")
    flags["nodes"] = str(len(asked.inventory.nodes))
    flags["data.name"] = flags["data.name"] or DATA
    spec = build_spec(flags, settings)
    place = _place(asked, [spec])
    check_shaping(spec, place, "hosts")
    return run_once(spec, place, out, as_json)


def sweep(asked: Asked, file: Path, settings: list[str], fresh: bool, as_json: bool) -> int:
    return run_file(file, settings, lambda specs: _place(asked, specs), fresh, as_json)


def _place(asked: Asked, specs: list[RunSpec]) -> Hosts:
    largest = max(specs, key=lambda spec: spec.world)
    return on_hosts(asked.inventory, largest, asked.accept_new)


def status(asked: Asked) -> int:
    with _runs(asked) as (runs, troubles):
        rows = [_line(found.id, part) for found in runs for part in found.parts]
    console.print(format_table(("run", "rank", "host", "state", "steps", "code"), rows) if rows else "no run of ours")
    return _troubles(troubles)


def _line(run: str, part: hosts_runs.Part) -> tuple[str, ...]:
    code = "-" if part.code is None else str(part.code)
    rank = "-" if part.rank is None else f"rank {part.rank}"
    return run, rank, part.host.name, part.state, str(part.step + 1), code


def logs(asked: Asked, run: str | None, lines: str) -> int:
    if not lines.isdecimal():
        raise refuse("lines", lines, "must be a whole number", "Write e.g. --lines 40.")
    with _runs(asked, run) as (runs, troubles):
        for name, part in ((found.id, part) for found in runs for part in found.parts):
            console.print(f"== {name}, rank {part.rank} on {part.host} ({part.state})")
            with _told(troubles):
                console.print(hosts_runs.last_lines(part, int(lines)), end="")
    return _troubles(troubles)


def collect(asked: Asked, run: str | None) -> int:
    summaries = []
    with _runs(asked, run) as (runs, troubles):
        if not runs:
            console.print("nothing to collect")
        for found in runs:
            with _told(troubles):
                summary, folder, failures = hosts_runs.collect(found)
                print_results([summary], folder, as_json=False)
                summaries.append(summary)
                troubles += failures
    return _troubles(troubles) or exit_code(summaries)


def stop(asked: Asked, run: str | None) -> int:
    with _runs(asked, run) as (runs, troubles):
        for found in (found for found in runs if found.running):
            with _told(troubles):
                hosts_runs.stop(found)
                console.print(f"stopped {found.id}; `fab collect` brings what it has measured")
    return _troubles(troubles)


def clean(asked: Asked, everything: bool) -> int:
    with connected(asked.inventory.nodes, asked.accept_new) as outcomes:
        there = [outcome.host for outcome in outcomes if outcome.error is None]
        removed = run_on_all(there, lambda host: hosts_runs.clean(host, everything))
    for outcome in removed:
        if outcome.error is None:
            console.print(f"{outcome.host}: removed {', '.join(outcome.value or ()) or 'nothing, nothing was left'}")
    hosts_deploy.remove_archives()
    errors = [outcome.error for outcome in outcomes] + [outcome.error for outcome in removed]
    return _troubles(error for error in errors if error)


@contextmanager
def _runs(asked: Asked, only: str | None = None) -> Iterator[tuple[list[hosts_runs.Found], list[TestbedError]]]:
    """What lies on the hosts that answer, and the troubles of the others, a list to which more may come."""
    hosts_runs.check_name(only)
    with connected(asked.inventory.nodes, asked.accept_new) as outcomes:
        runs, troubles = hosts_runs.find([outcome.host for outcome in outcomes if outcome.error is None], only)
        yield runs, [*(outcome.error for outcome in outcomes if outcome.error is not None), *troubles]


@contextmanager
def _told(troubles: list[TestbedError]) -> Iterator[None]:
    """One run's failure is told with the others, and stops no other run."""
    try:
        yield
    except TestbedError as error:
        troubles.append(error)


def _troubles(sentences: Iterable[object]) -> int:
    """One line each; the exit code they make."""
    found = [str(sentence) for sentence in sentences]
    for sentence in found:
        console.print(f"trouble: {sentence}")
    return BAD if found else 0
