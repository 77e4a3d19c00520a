"""The `testbed` command. Options become calls of testbed.control.api; errors become one sentence and an exit code."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from testbed import __version__
from testbed.control import api
from testbed.control.cli import grade, hosts, jobs, predict, report, script
from testbed.control.cli import options as opt
from testbed.control.cli import profile as profile_command
from testbed.control.cli.documents import outcome, print_document, print_failure, reset
from testbed.control.cli.options import Json
from testbed.control.cli.report import exit_code, finish_sweep, print_run
from testbed.control.machine import ownership
from testbed.control.machine.doctor import examine
from testbed.control.runs.progress import console, open_progress
from testbed.control.runs.select import SubstrateChoice
from testbed.control.substrates.layer import kept_layers
from testbed.control.tuning.search import conclusion, curve, document, new_search, tune_modes
from testbed.data.fetch import fetch, verify
from testbed.spec.datasets import DATASETS, data_dir, is_complete
from testbed.spec.disk import os_failure
from testbed.spec.errors import Interrupted, TestbedError, UsageError, refuse
from testbed.spec.mode import CODECS, EVERY, algorithms, codecs_of, every_of, legal_modes, unusable_methods
from testbed.spec.run import SCHEMA

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # markup would remove text in brackets, such as [default: 256] and [/CODEC]
    help="Measure what it costs to keep N copies of a model in step: every sync mode, on a network you choose.",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets: list, get, verify.")
app.add_typer(data_app, name="data")
app.add_typer(hosts.app, name="hosts")
app.add_typer(report.app)
app.add_typer(predict.app)
app.add_typer(script.app)
app.add_typer(grade.app)
app.add_typer(jobs.app)
app.add_typer(profile_command.app)

Profile = Annotated[bool, typer.Option("--profile", help="run torch.profiler over the first steps after warm-up")]
WrongCommandLine: Any = typer.BadParameter.__base__  # click's UsageError; newer versions of typer contain click
WITH_EXEC = ("nodes", "rate", "on", "inventory", "settings")  # options that tune and exec have in common
WITH_RESUME = {
    "resume",
    "on",
    "inventory",
    "accept_new",
    "share",
    *opt.OF_SLURM,
    "retries",
    "as_json",
}  # every other option would change the spec


@app.command()
def run(
    context: typer.Context,
    mode: opt.Mode = "ring",
    nodes: opt.Nodes = None,
    rate: opt.Rate = None,
    model: opt.Model = "vgg11",
    data: opt.Data = None,
    batch: opt.Batch = None,
    batch_per_rank: opt.BatchPerRank = None,
    steps: opt.Steps = None,
    seed: opt.Seed = "0",
    on: opt.On = "auto",
    inventory: opt.InventoryFile = None,
    accept_new: opt.AcceptNew = False,
    share: opt.Share = False,
    partition: opt.Partition = "",
    account: opt.Account = "",
    time: opt.Time = "",
    slurm_option: opt.SlurmOption = None,
    python: opt.Python = "",
    dry_run: opt.DryRun = False,
    settings: opt.Set = None,
    profile: Profile = False,
    keep_going: opt.KeepGoing = False,
    fault: opt.Faults = None,
    retries: opt.Retries = "0",
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="continue the unfinished run in this folder, with its own spec")
    ] = None,
    out: opt.Out = None,
    as_json: Json = False,
) -> None:
    """Train once, in one mode, and print what it cost."""
    where: dict[str, Any] = {"on": opt.substrate(context, on), "inventory": inventory, "accept_new": accept_new}
    where |= {"allow_concurrent": share, "slurm": opt.slurm(context)}
    if resume is not None:
        _check_with_resume(context)
    elif dry_run:
        _print_commands(api.prepare(opt.spec_options(context), settings or [], **where)[1])
        return
    if resume is not None:
        made = api.resume(resume, retries=retries, quiet=as_json, **where)
    else:
        made = api.run(**where, quiet=as_json, out=out, settings=settings or [], **opt.spec_options(context))
    print_run(made, as_json)
    raise typer.Exit(exit_code([made.summary]))


@app.command()
def sweep(
    context: typer.Context,
    file: opt.ExperimentFile,
    on: opt.On = "auto",
    inventory: opt.InventoryFile = None,
    accept_new: opt.AcceptNew = False,
    share: opt.Share = False,
    partition: opt.Partition = "",
    account: opt.Account = "",
    time: opt.Time = "",
    slurm_option: opt.SlurmOption = None,
    python: opt.Python = "",
    dry_run: opt.DryRun = False,
    settings: opt.Set = None,
    profile: Profile = False,
    keep_going: opt.KeepGoing = False,
    fresh: opt.Fresh = False,
    as_json: Json = False,
) -> None:
    """Make every run of an experiment file. Finished runs are skipped, so that a sweep can be continued."""
    where: dict[str, Any] = {"on": opt.substrate(context, on), "inventory": inventory, "accept_new": accept_new}
    where |= {"allow_concurrent": share, "slurm": opt.slurm(context)}
    flags = {"profile": profile, "keep_going": keep_going}
    keys = [*(settings or []), *(f"{name}=true" for name, given in flags.items() if given)]
    if dry_run:
        _print_commands(api.prepare_sweep(file, keys, **where)[2])
        return
    made = api.sweep(file, **where, fresh=fresh, quiet=as_json, settings=keys)
    raise typer.Exit(finish_sweep(made, as_json))


@app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] [-- COMMAND...]",
)
def tune(
    context: typer.Context,
    mode: Annotated[str, typer.Option(help="ALGORITHM[/CODEC] whose bucket size and schedule are searched")] = "ring",
    nodes: opt.Nodes = None,
    rate: opt.Rate = None,
    model: opt.Model = "vgg11",
    data: opt.Data = None,
    batch: opt.Batch = None,
    batch_per_rank: opt.BatchPerRank = None,
    steps: Annotated[
        str | None,
        typer.Option(help="steps of each run; the first 2 (of a script 6) are left out [default: 10; of a script 16]"),
    ] = None,
    seed: opt.Seed = "0",
    minutes: Annotated[float, typer.Option(help="start no more runs after this time in minutes")] = 20.0,
    on: opt.On = "auto",
    inventory: opt.InventoryFile = None,
    accept_new: opt.AcceptNew = False,
    share: opt.Share = False,
    partition: opt.Partition = "",
    account: opt.Account = "",
    time: opt.Time = "",
    slurm_option: opt.SlurmOption = None,
    python: opt.Python = "",
    settings: opt.Set = None,
    out: Annotated[Path, typer.Option(help="experiment file to write, with the fastest mode")] = Path(
        "experiments/tuned.toml"
    ),
    as_json: Json = False,
) -> None:
    """Find the fastest bucket size and schedule by short runs.

    The runs train --model. With a command after -- (testbed tune -- python main.py) they run that script instead.
    Then options of `testbed exec` are set as keys: --set script.as_cpu=true, --set script.environment.DEBUG=1.
    """
    keys = {"steps": "16" if context.args else "10"} | opt.spec_options(context)
    if context.args:
        keys |= {"script": script.script_keys(context.args)}
    where: dict[str, Any] = {"on": opt.substrate(context, on), "inventory": inventory, "accept_new": accept_new}
    where |= {"allow_concurrent": share, "slurm": opt.slurm(context)}
    spec, choice = api.prepare(keys, settings or [], **where)
    search = new_search(spec, out, opt.typed(context, WITH_EXEC))
    progress = open_progress(console, quiet=as_json)
    progress.headline(f"on {choice.name}: {choice.reason}")
    failure: TestbedError | None = None
    try:
        tune_modes(search, choice, progress, 60 * minutes)
    except TestbedError as error:
        failure = error
        raise
    finally:  # if the search was interrupted, its results so far are printed
        progress.end()
        if search.race.times and as_json:
            print_document(outcome(failure) | document(search))
        elif search.race.times:
            console.print(f"\n{curve(search)}\n")
            for line in conclusion(search):
                console.print(line)


def _print_commands(choice: SubstrateChoice) -> None:
    """Print the text of --dry-run. Raises UsageError if the substrate submits no job."""
    if not choice.type.dry_run:
        raise refuse("--dry-run with --on", choice.name, "submits no job", "Use it with --on slurm.")
    console.print(choice.type.dry_run)


def _check_with_resume(context: typer.Context) -> None:
    """Raise SpecError for options that would change the spec, because a run is resumed with its own spec."""

    def typed(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    options = {option.name or "": option.opts[0] for option in context.command.params}
    given = [flag for name, flag in options.items() if name not in WITH_RESUME and typed(name)]
    if given:
        rule = "a resumed run keeps its spec and its folder"
        raise refuse("--resume with", ", ".join(given), rule, "Leave these out, or start a new run without --resume.")


@app.command()
def modes(as_json: Json = False) -> None:
    """List every legal mode. A mode is algorithm x granularity x schedule; a codec or every:K can follow."""
    for path, problem in unusable_methods().items():
        print(f"{path} cannot be used: {problem}.", file=sys.stderr)
    rows: list[dict[str, Any]] = [
        {
            "mode": str(mode),
            "does": algorithms()[mode.algorithm].does,
            "codecs": codecs_of(mode),
            "every": every_of(mode),
        }
        for mode in legal_modes()
    ]
    if as_json:
        print_document(rows)
        return
    width = max(len(row["mode"]) for row in rows)
    for row in rows:
        console.print(f"{row['mode'].ljust(width)}  {row['does']}")
    console.print("\nSyntax: algorithm[/granularity][/schedule][/codec][/every:K[@M]]; any bucket size works.\n")
    for codec in CODECS.values():
        takers = ", ".join(dict.fromkeys(row["mode"].split("/")[0] for row in rows if codec.example in row["codecs"]))
        console.print(f"/{codec.example.ljust(width - 1)}  {codec.does}; bytes: {codec.bytes}")
        console.print(f"{' ' * width}  allowed after {takers}")
    for word, does in EVERY.items():
        console.print(f"/{word.ljust(width - 1)}  {does}")
    others = ", ".join(name for name, algorithm in algorithms().items() if algorithm.every_refused)
    console.print(f"{' ' * width}  allowed after any mode except {others}, overlap, pipeline and modes with a codec")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Print what this machine can do. If something is missing, the line names the fix."""
    findings = examine()
    if as_json:
        print_document([vars(finding) for finding in findings])
        return
    for f in findings:
        mark = "yes" if f.ok else "no "
        console.print(f"{mark}  {f.what}: {f.found}" + (f"  -> {f.fix}" if f.fix and not f.ok else ""))


@app.command()
def clean(
    everything: Annotated[bool, typer.Option("--all", help="also remove what this clone uses now")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be removed and why; remove nothing")] = (
        False
    ),
    as_json: Json = False,
) -> None:
    """Remove what killed controllers left. These are processes, namespaces, cgroups and containers, and this clone's
    stopped containers. Nothing is removed that another clone or machine made and may use. Images of --requirements
    stay until newer ones replace them; --all removes them. runs/ and data/ stay."""
    found = ownership.find(everything=True)
    stays = [each for each in found if not each.removable(everything)]
    kept = [each for each in stays if everything or each.other_host or not each.in_use]  # all others are in use now
    if dry_run:
        lines = [f"{each}: {each.why()}" for each in found if each.removable(everything)]
        lines += [f"{each}: {each.why()}" for each in kept_layers(everything)]
    else:
        lines = [str(each) for each in ownership.remove(everything)]
        for layer in kept_layers(everything):
            layer.remove()
            lines.append(str(layer))
    for each in kept:
        print(f"{each} stays: {each.why()}. {each.way_out()}.", file=sys.stderr)
    if as_json:
        print_document(lines)
        return
    for line in lines or ["nothing to remove"]:
        console.print(f"would remove {line}" if dry_run and lines else line)


@data_app.command("get")
def data_get(name: opt.FetchedData) -> None:
    """Fetch a data set if it is missing, and verify its checksums."""
    path = fetch(name, data_dir(), lambda text: console.print(f"  {text}"))
    console.print(f"{name} is in {path}")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the known data sets, and which of them are on this machine."""
    rows = {name: is_complete(name, data_dir()) for name in DATASETS}
    if as_json:
        print_document(rows)
        return
    for name, here in rows.items():
        console.print(f"{name}: {'ready' if here else f'missing; testbed data get {name}'}")


@data_app.command("verify")
def data_verify(name: opt.FetchedData) -> None:
    """Compute the checksums of a data set again, and compare them with the known ones."""
    verify(name, data_dir())
    console.print(f"{name}: all checksums match")


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    if as_json:
        print_document({"version": __version__, "schema": SCHEMA})
        return
    print(__version__)


def main() -> None:
    """Run the console script `testbed`, and exit with its code."""
    sys.exit(call("testbed", sys.argv[1:]))


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that a program cleans up. Call it in its main.

    SIGINT is set as well because background jobs of a shell ignore it.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def call(name: str, argv: Sequence[str]) -> int:
    """Run a command line and return its exit code. A TestbedError is printed as one sentence after `name`.

    With --json a document with the reason is printed as well, unless the command has printed its own.
    """
    interrupt_on_signals()
    warnings = logging.StreamHandler()  # stderr: with --json, stdout is one JSON document
    logging.getLogger("testbed").addHandler(warnings)
    reset()
    error: TestbedError | None = None
    try:
        code = app(list(argv), prog_name=name, standalone_mode=False)
    except WrongCommandLine as wrong:  # an unknown option and the like
        wrong.show()
        code, error = wrong.exit_code, UsageError(wrong.format_message())
    except TestbedError as failure:
        code, error = failure.exit_code, failure
        print(f"{name}: {error}", file=sys.stderr)
    except OSError as failure:  # an error of the machine outside of any run
        error = os_failure(failure, "this machine")
        code = error.exit_code
        print(f"{name}: {error}", file=sys.stderr)
    except (KeyboardInterrupt, typer.Abort):
        code = Interrupted.exit_code
    except SystemExit as end:  # stdout was closed, or the process ends with a text
        code = end.code
        if isinstance(end.code, str):
            code, error = TestbedError.exit_code, TestbedError(end.code)
            print(error, file=sys.stderr)
    except Exception as failure:  # a bug of the testbed; Python prints the traceback
        if "--json" in argv:
            print_failure(TestbedError(f"unexpected error: {type(failure).__name__}: {failure}"))
        raise
    finally:
        logging.getLogger("testbed").removeHandler(warnings)
    if code == Interrupted.exit_code and error is None:
        error = Interrupted("interrupted")
        print(f"{name}: {error}", file=sys.stderr)
    if error is not None and "--json" in argv:
        print_failure(error)
    return code if isinstance(code, int) else 0
