"""`testbed hosts ...`: real hosts by SSH. Every command contacts all hosts of the inventory in parallel, prints one
table and one line per problem, and exits with code 2 if there was a problem. fabfile.py makes a task of each command.

Modules of substrates/hosts are imported inside functions, because they import Fabric, which is slow.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from testbed.control import api
from testbed.control.cli import options as opt
from testbed.control.cli.report import exit_code, finish_sweep, print_results, print_run
from testbed.control.runs.progress import console
from testbed.control.runs.select import HOSTS
from testbed.results.table import format_table
from testbed.spec.datasets import data_dir, is_complete
from testbed.spec.errors import SpecError, TestbedError, UsageError, refuse, require_extra
from testbed.spec.inventory import DEFAULT, VARIABLE, Inventory, read_inventory

if TYPE_CHECKING:
    from testbed.control.substrates.hosts.runs import RankOnHost, RunOnHosts

DEFAULT_DATA = "cifar10"
app = typer.Typer(
    no_args_is_help=True,
    help=f"Run on real hosts by SSH. They are listed in {DEFAULT}, or ${VARIABLE}, or --inventory.\n\n"
    "`fab` runs several of these commands in one line.",
)
InventoryFile = Annotated[
    Path | None, typer.Option("--inventory", help=f"the hosts [default: ${VARIABLE}, else {DEFAULT}]")
]
AcceptNew = Annotated[
    bool, typer.Option("--accept-new", help="trust unknown host keys; changed keys are always refused")
]
FirstNodes = Annotated[str | None, typer.Option("--nodes", help="use only the first N hosts of the inventory")]
OneRun = Annotated[str | None, typer.Option("--run", help="the name of one run, from `status` [default: all runs]")]


@dataclass(frozen=True)
class HostsOptions:
    """The inventory of a command, and whether unknown host keys are trusted."""

    inventory: Inventory
    accept_new: bool

    @classmethod
    def read(cls, inventory: Path | None, accept_new: bool, nodes: str | None = None) -> Self:
        """Read the inventory; with `nodes`, only its first N hosts. Raises SpecError or Unavailable."""
        require_extra("real hosts", "hosts", "fabric", "paramiko")
        found = read_inventory(inventory)
        if nodes is not None:
            if not nodes.isdecimal() or int(nodes) == 0:
                raise refuse("nodes", nodes, "must be a whole number of hosts", f"Use 1 to {len(found.nodes)}.")
            found = found.first(int(nodes))
        return cls(found, accept_new)


@app.command()
def doctor(inventory: InventoryFile = None, nodes: FirstNodes = None, accept_new: AcceptNew = False) -> None:
    """Check every host. Print a row per host: key, engine, disk, clock, interface, ports, image."""
    hosts = HostsOptions.read(inventory, accept_new, nodes)
    from testbed.control.substrates.hosts.doctor import HEADER, examine
    from testbed.control.substrates.hosts.ssh import connected

    with connected(hosts.inventory.nodes, hosts.accept_new) as outcomes:
        rows = examine(outcomes)
    console.print(format_table(HEADER, [row.line() for row in rows]))
    raise typer.Exit(_print_problems(problem for row in rows for problem in row.problems))


@app.command()
def deploy(
    inventory: InventoryFile = None,
    nodes: FirstNodes = None,
    data: Annotated[
        list[str] | None, typer.Option(help=f"data sets to send [default: {DEFAULT_DATA}, if this machine has it]")
    ] = None,
    accept_new: AcceptNew = False,
) -> None:
    """Send the image and the data to the hosts that lack them."""
    hosts = HostsOptions.read(inventory, accept_new, nodes)
    from testbed.control.substrates.hosts import deploy as deployment
    from testbed.control.substrates.hosts.ssh import connected

    wanted = list(dict.fromkeys(data or ()))
    if not wanted and is_complete(DEFAULT_DATA, data_dir()):
        wanted = [DEFAULT_DATA]
    elif not wanted:
        console.print(
            f"data {DEFAULT_DATA} is missing here, so it is not sent; `testbed data get {DEFAULT_DATA}` fetches it"
        )
    names = [name for each in wanted for name in deployment.sendable(each)]
    deployment.check_data(names)
    with connected(hosts.inventory.nodes, hosts.accept_new) as outcomes, open_transfer_progress(console) as progress:
        rows = deployment.deploy(outcomes, names, progress)
    header = ("host", "image", *names, "seconds")
    cells = [(r.host, r.image or "-", *(r.data.get(n, "-") for n in names), f"{r.seconds:.1f}") for r in rows]
    console.print(format_table(header, cells))
    raise typer.Exit(_print_problems(row.error for row in rows if row.error))


@app.command()
def run(
    context: typer.Context,
    mode: opt.Mode = "ring",
    nodes: FirstNodes = None,
    model: opt.Model = "vgg11",
    data: opt.Data = None,
    batch: opt.Batch = None,
    batch_per_rank: opt.BatchPerRank = None,
    steps: opt.Steps = None,
    seed: opt.Seed = "0",
    settings: opt.Set = None,
    fault: opt.Faults = None,
    retries: opt.Retries = "0",
    out: opt.Out = None,
    rate: Annotated[str | None, typer.Option(help="refused: the network of real hosts is measured, not shaped")] = None,
    on: Annotated[str | None, typer.Option(help="refused: `testbed run --on` is for other substrates")] = None,
    inventory: InventoryFile = None,
    accept_new: AcceptNew = False,
    as_json: opt.Json = False,
) -> None:
    """Train once, one rank per host, and print what it cost."""
    if on is not None:
        raise SpecError(f"--on {on!r}: these commands are for real hosts. Use `testbed run --on {on}`.")
    hosts = HostsOptions.read(inventory, accept_new, nodes)
    made = api.run(
        on=HOSTS,
        inventory=hosts.inventory,
        accept_new=accept_new,
        out=out,
        quiet=as_json,
        settings=settings or [],
        # without `nodes`: HostsOptions.read has selected the hosts by it
        **{name: value for name, value in opt.spec_options(context).items() if name != "nodes"},
    )
    print_run(made, as_json)
    raise typer.Exit(exit_code([made.summary]))


@app.command()
def sweep(
    file: opt.ExperimentFile,
    settings: opt.Set = None,
    fresh: opt.Fresh = False,
    inventory: InventoryFile = None,
    accept_new: AcceptNew = False,
    as_json: opt.Json = False,
) -> None:
    """Make every run of an experiment file. Finished runs are skipped."""
    hosts = HostsOptions.read(inventory, accept_new)
    made = api.sweep(
        file,
        on=HOSTS,
        inventory=hosts.inventory,
        accept_new=accept_new,
        fresh=fresh,
        quiet=as_json,
        settings=settings or [],
    )
    raise typer.Exit(finish_sweep(made, as_json))


@app.command()
def status(inventory: InventoryFile = None, accept_new: AcceptNew = False) -> None:
    """List your runs on the hosts, finished and unfinished."""
    with _runs(HostsOptions.read(inventory, accept_new)) as (runs, problems):
        rows = [_status_row(found.id, on_host) for found in runs for on_host in found.ranks]
    console.print(format_table(("run", "rank", "host", "state", "steps", "code"), rows) if rows else "no runs")
    raise typer.Exit(_print_problems(problems))


def _status_row(run: str, on_host: RankOnHost) -> tuple[str, ...]:
    code = "-" if on_host.code is None else str(on_host.code)
    rank = "-" if on_host.rank is None else f"rank {on_host.rank}"
    return run, rank, on_host.host.name, on_host.state, str(on_host.step + 1), code


@app.command()
def logs(
    run: OneRun = None,
    lines: Annotated[str, typer.Option(help="number of lines from the end of each log")] = "40",
    inventory: InventoryFile = None,
    accept_new: AcceptNew = False,
) -> None:
    """Print the last lines of every rank's log, from the hosts."""
    if not lines.isdecimal():
        raise refuse("lines", lines, "must be a whole number", "Write e.g. --lines 40.")
    with _runs(HostsOptions.read(inventory, accept_new), run) as (runs, problems):
        from testbed.control.substrates.hosts.runs import last_lines

        for name, on_host in ((found.id, on_host) for found in runs for on_host in found.ranks):
            console.print(f"== {name}, rank {on_host.rank} on {on_host.host} ({on_host.state})")
            with _keep_errors(problems):
                console.print(last_lines(on_host, int(lines)), end="")
    raise typer.Exit(_print_problems(problems))


@app.command()
def collect(run: OneRun = None, inventory: InventoryFile = None, accept_new: AcceptNew = False) -> None:
    """Copy results from the hosts to this machine. Use it for runs whose connection was lost."""
    summaries = []
    with _runs(HostsOptions.read(inventory, accept_new), run) as (runs, problems):
        from testbed.control.substrates.hosts.runs import collect as collect_run

        if not runs:
            console.print("nothing to collect")
        for found in runs:
            with _keep_errors(problems):
                summary, folder, failures = collect_run(found)
                print_results([summary], folder, as_json=False)
                summaries.append(summary)
                problems += failures
    raise typer.Exit(_print_problems(problems) or exit_code(summaries))


@app.command()
def stop(run: OneRun = None, inventory: InventoryFile = None, accept_new: AcceptNew = False) -> None:
    """Stop all ranks on the hosts. Their files stay for `collect`."""
    with _runs(HostsOptions.read(inventory, accept_new), run) as (runs, problems):
        from testbed.control.substrates.hosts.runs import stop as stop_run

        for found in (found for found in runs if found.running):
            with _keep_errors(problems):
                stop_run(found)
                console.print(f"stopped {found.id}; `fab collect` copies its results")
    raise typer.Exit(_print_problems(problems))


@app.command()
def clean(
    everything: Annotated[
        bool, typer.Option("--all", help="also remove running ranks, and results that were not collected")
    ] = False,
    inventory: InventoryFile = None,
    accept_new: AcceptNew = False,
) -> None:
    """Remove your testbed containers, files and images from the hosts."""
    hosts = HostsOptions.read(inventory, accept_new)
    from testbed.control.substrates.hosts.deploy import remove_archives
    from testbed.control.substrates.hosts.runs import clean as clean_host
    from testbed.control.substrates.hosts.ssh import connected, run_on_all

    with connected(hosts.inventory.nodes, hosts.accept_new) as outcomes:
        reached = [outcome.host for outcome in outcomes if outcome.error is None]
        removed = run_on_all(reached, lambda host: clean_host(host, everything))
    for outcome in removed:
        if outcome.error is None:
            console.print(f"{outcome.host}: removed {', '.join(outcome.value or ()) or 'nothing'}")
    remove_archives()
    errors = [outcome.error for outcome in outcomes] + [outcome.error for outcome in removed]
    raise typer.Exit(_print_problems(error for error in errors if error))


@contextmanager
def _runs(hosts: HostsOptions, only: str | None = None) -> Iterator[tuple[list[RunOnHosts], list[TestbedError]]]:
    """Yield our runs on the hosts that answer, and the problems of the other hosts. The caller may add problems."""
    from testbed.control.substrates.hosts.runs import check_name, find
    from testbed.control.substrates.hosts.ssh import connected

    check_name(only)
    with connected(hosts.inventory.nodes, hosts.accept_new) as outcomes:
        runs, problems = find([outcome.host for outcome in outcomes if outcome.error is None], only)
        yield runs, [*(outcome.error for outcome in outcomes if outcome.error is not None), *problems]


@contextmanager
def _keep_errors(problems: list[TestbedError]) -> Iterator[None]:
    """Add an error of the `with` block to the list instead of raising it, so that the next runs are handled."""
    try:
        yield
    except TestbedError as error:
        problems.append(error)


def _print_problems(sentences: Iterable[object]) -> int:
    """Print one line per problem and return the exit code."""
    found = [str(sentence) for sentence in sentences]
    for sentence in found:
        console.print(f"problem: {sentence}")
    return UsageError.exit_code if found else 0


# A command line of `fab` with several tasks


def line_options(argv: Sequence[str], task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a task takes from other tasks of a `fab` command line.

    Invoke passes an option only to the task before it. --inventory, --nodes and --accept-new apply to all tasks.
    Raises SpecError if one of these options has two values. Without its own --data, `deploy` sends the data of the
    other tasks.
    """
    found: dict[str, Any] = {"accept_new": "--accept-new" in argv}
    for name in ("inventory", "nodes"):
        values = list(dict.fromkeys(values_on_line(argv, f"--{name}")))
        if len(values) > 1:
            raise refuse(
                f"--{name}",
                values,
                "applies to all tasks of the command line, so it can have one value",
                "Give it once.",
            )
        found[name] = values[0] if values else None
    if task == "deploy" and not options["data"]:
        found["data"] = values_on_line(argv, "--data")
    return {name: value for name, value in found.items() if name in options}


def values_on_line(argv: Sequence[str], flag: str) -> list[str]:
    """Return every value that a flag has on a command line."""
    after = [value for name, value in itertools.pairwise(argv) if name == flag]
    return [*after, *(word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}="))]


# Progress of a deploy


class TransferLines:
    """Progress of a deploy as lines, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun: dict[tuple[str, str], float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing: lines need no end."""

    def message(self, text: str) -> None:
        self._console.print(f"  {text}")

    def begin(self, host: str, what: str, size: int) -> Callable[[int], None]:
        """Show that a transfer begins. Return a function; call it with the bytes of each chunk that was sent."""
        self._begun[host, what] = time.monotonic()
        self.message(f"{host}: sending {what}, {size / 1e6:.0f} MB")
        return lambda count: None

    def end(self, host: str, what: str) -> None:
        self.message(f"{host}: {what}, {time.monotonic() - self._begun[host, what]:.1f} s")


class TransferBars(TransferLines):
    """Progress of a deploy as bars that are redrawn in place."""

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


def open_transfer_progress(console: Console) -> TransferLines:
    """Return bars for a terminal, else lines."""
    return TransferBars(console) if console.is_terminal else TransferLines(console)
