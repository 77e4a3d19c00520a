"""The command line: run, sweep, modes, data, doctor, clean. Flags become a spec; errors become one sentence."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from testbed import __version__
from testbed.control import data as datasets
from testbed.control.doctor import examine
from testbed.control.place import choose
from testbed.control.progress import open_progress
from testbed.control.run import execute
from testbed.control.run import resume as go_on
from testbed.control.sweep import sweep as run_sweep
from testbed.spec.datasets import DATASETS, data_dir, is_complete
from testbed.spec.errors import NetworkInvalid, SpecError, TestbedError, Unavailable, refuse
from testbed.spec.experiment import Experiment, set_key
from testbed.spec.folder import RunFolder, runs_dir
from testbed.spec.history import HEADER, fault_table
from testbed.spec.mode import algorithms, legal_modes
from testbed.spec.run import RunSpec
from testbed.spec.settings import fresh_folder, run_name, with_settings
from testbed.spec.summary import Summary
from testbed.spec.table import caption, format_table, left_out, table

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="What keeping N copies of a model in step really costs: every sync mode, on a network you choose.",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets: list, get, verify.")
app.add_typer(data_app, name="data")
console = Console(markup=False, highlight=False, soft_wrap=True)

On = Annotated[str, typer.Option("--on", help="where: auto, compose (engine), netns (root), process (unshaped)")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="any other key of the spec, e.g. optimizer.lr=0.1"),
]


@app.command()
def run(
    mode: Annotated[str, typer.Option(help="how gradients are synchronised; `testbed modes` lists them")] = "ring",
    nodes: Annotated[str, typer.Option(help="nodes of the network, one rank each")] = "4",
    rate: Annotated[str | None, typer.Option(help="bandwidth of every node's link, each way, e.g. 200mbit")] = None,
    model: Annotated[str, typer.Option(help="vgg11, resnet18, lenet5, or a torchvision name")] = "vgg11",
    data: Annotated[str, typer.Option(help="cifar10, mnist or synthetic")] = "cifar10",
    batch: Annotated[str | None, typer.Option(help="images per step over all ranks [default: 256]")] = None,
    batch_per_rank: Annotated[str | None, typer.Option(help="the other way to say it")] = None,
    steps: Annotated[str | None, typer.Option(help="training steps [default: 40]")] = None,
    seed: Annotated[str, typer.Option(help="of parameters, data order and augmentation")] = "0",
    on: On = "auto",
    settings: Set = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="FAULT", help="go wrong on purpose, e.g. kill:rank2@step10")
    ] = None,
    retries: Annotated[str, typer.Option(help="restarts from the last checkpoint (--set checkpoint=K)")] = "0",
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="go on with that run's folder; its spec counts")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="run folder [default: runs/adhoc/MODE-nN-TIME]")] = None,
    as_json: Json = False,
) -> None:
    """Train once, in one mode, and print what it cost."""
    if resume is not None:
        return _finish(_resume(resume, on, retries, as_json), resume, as_json)
    flags = {
        "retries": retries,
        "faults": fault,
        "mode": mode,
        "nodes": nodes,
        "link.rate": rate,
        "model": model,
        "data.name": data,
        "seed": seed,
    }
    flags |= {"batch": batch, "batch_per_rank": batch_per_rank, "steps": steps}
    spec = build_spec(flags, settings or [])
    place = choose(on, spec)
    if spec.link.shaped and not place.shapes:
        asked = spec.link.model_dump_json(exclude_defaults=True)
        way_out = "Use --on netns or compose" if on == "process" else "Run as root, or start a Docker engine"
        raise Unavailable(f"link {asked}: cannot be shaped here: {place.why}. {way_out}, or leave it out.")
    folder = RunFolder(out or fresh_folder(runs_dir() / spec.experiment, spec.name))
    progress = open_progress(console, quiet=as_json)
    progress.headline(f"on {place.name}: {place.why}")
    try:
        summary = execute(spec, place, folder, progress)
    finally:
        progress.end()
    return _finish(summary, folder.path, as_json)


def _resume(path: Path, on: str, retries: str, as_json: bool) -> Summary:
    """The rest of an earlier run, where it was unless --on says otherwise."""
    folder = RunFolder(path)
    if not retries.isdecimal() or int(retries) > 100:
        raise refuse("retries", retries, "must be a whole number up to 100", "Write e.g. --retries 2.")
    place = choose(on, folder.read_spec())
    progress = open_progress(console, quiet=as_json)
    progress.headline(f"going on with {path}, on {place.name}: {place.why}")
    try:
        return go_on(place, folder, progress, int(retries))
    finally:
        progress.end()


def _print_faults(folders: list[RunFolder]) -> None:
    """What was done on purpose, who noticed, and what became of it."""
    ended = [folder for folder in folders if folder.summary.is_file()]
    rows = fault_table([(folder, s.spec, s.status) for folder in ended for s in [Summary.read(folder)]])
    if rows:
        console.print(f"\n{format_table(HEADER, rows)}\n")


def _finish(summary: Summary, where: Path, as_json: bool) -> None:
    _print_results([summary], where, as_json)
    if summary.status == "invalid":
        raise typer.Exit(NetworkInvalid.exit_code)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="an experiment, e.g. experiments/quick.toml")],
    on: On = "auto",
    settings: Set = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="run finished cells again; old folders are set aside")] = False,
    as_json: Json = False,
) -> None:
    """Run every cell of an experiment file; finished runs are skipped, so that it resumes."""
    experiment = Experiment.read(file)
    for key in (setting.partition("=")[0].strip() for setting in settings or []):
        if key in experiment.axes:
            swept = f"{file} sweeps it over {experiment.axes[key]}"
            raise SpecError(f"--set {key}: {swept}. Change it in the file.")
    experiment = experiment.model_copy(update={"base": with_settings(experiment.base, settings or [])})
    specs = experiment.runs()
    # The run that asks most of the machine decides where all of them go.
    place = choose(on, max(specs, key=lambda spec: spec.world))
    progress = open_progress(console, quiet=as_json)
    progress.headline(f"{experiment.title} ({len(specs)} runs{', ' + experiment.takes if experiment.takes else ''})")
    progress.headline(f"on {place.name}: {place.why}")
    try:
        summaries, errors = run_sweep(specs, place, runs_dir(), progress, fresh)
    finally:
        progress.end()
    _print_results(summaries, runs_dir() / experiment.name, as_json)
    if not as_json:
        _print_faults([RunFolder(runs_dir() / spec.experiment / spec.name) for spec in specs])
    if errors:
        raise errors[0]
    if any(summary.status == "invalid" for summary in summaries):
        raise typer.Exit(NetworkInvalid.exit_code)


def build_spec(flags: dict[str, Any], settings: list[str]) -> RunSpec:
    """Flags and --set pairs as one validated spec; all values go in as text."""
    values: dict[str, Any] = {}
    for key, value in flags.items():
        if value is not None:
            set_key(values, key, value)
    values = with_settings(values, settings)
    values.setdefault("name", run_name(str(values["mode"]), values["nodes"]))
    return RunSpec.load(values, where="")


def _print_results(summaries: list[Summary], where: Path, as_json: bool) -> None:
    """The table, what is not in it and why, what could not be applied, and the folder."""
    if as_json:
        document = {"folder": str(where), "runs": [json.loads(s.model_dump_json(by_alias=True)) for s in summaries]}
        print(json.dumps(document, indent=1))
        return
    counted = [s for s in summaries if s.status == "ok"]
    if counted:
        console.print(f"\n{caption(counted)}\n\n{format_table(*table(summaries))}\n")
    for line in dict.fromkeys(note for s in summaries for note in s.notes):
        console.print(f"note: {line}")
    for line in left_out(summaries):
        console.print(f"left out: {line}")
    for s in counted:
        if s.spec.world > 1:
            console.print(f"{s.spec.name}: {s.network}")
    console.print(f"everything is in {where}")


@app.command()
def modes(as_json: Json = False) -> None:
    """List every legal mode: algorithm x granularity; each of ours also takes every:K[@M]."""
    rows = [(str(mode), algorithms()[mode.algorithm].does) for mode in legal_modes()]
    if as_json:
        print(json.dumps([{"mode": mode, "does": does} for mode, does in rows], indent=1))
        return
    width = max(len(mode) for mode, _ in rows)
    for mode, does in rows:
        console.print(f"{mode.ljust(width)}  {does}")
    console.print("\nSpelled algorithm[/granularity][/schedule][/every:K[@M]]; any bucket size works.")
    console.print("/every:K after any mode but single, server and ddp: K local steps, then parameters are averaged.")


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine can and cannot do, one line each, with the fix."""
    findings = examine()
    if as_json:
        print(json.dumps([vars(finding) for finding in findings], indent=1))
        return
    for f in findings:
        mark = "yes" if f.ok else "no "
        console.print(f"{mark}  {f.what}: {f.found}" + (f"  -> {f.fix}" if f.fix and not f.ok else ""))


@app.command()
def clean(
    everything: Annotated[bool, typer.Option("--all", help="also what a live controller still uses")] = False,
    as_json: Json = False,
) -> None:
    """Remove what a dead controller left: namespaces, cgroups, containers, processes. runs/ and data/ stay."""
    from testbed.control.substrates import leftovers  # with it comes the engine's SDK

    removed = [str(each) for each in leftovers.remove(everything=everything)]
    if as_json:
        print(json.dumps(removed, indent=1))
    for line in [] if as_json else (removed or ["nothing of ours was left"]):
        console.print(line)


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="cifar10 or mnist")]) -> None:
    """Fetch a data set once, verified by checksum."""
    path = datasets.fetch(name, data_dir(), lambda text: console.print(f"  {text}"))
    console.print(f"{name} is in {path}")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """Which data sets are known, and which are here."""
    rows = {name: is_complete(name, data_dir()) for name in DATASETS}
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for name, here in rows.items():
        console.print(f"{name}: {'ready' if here else f'missing; testbed data get {name}'}")


@data_app.command("verify")
def data_verify(name: Annotated[str, typer.Argument(help="cifar10 or mnist")]) -> None:
    """Hash the files again and compare."""
    datasets.verify(name, data_dir())
    console.print(f"{name}: every checksum is right")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command; an error of ours is printed as its sentence and becomes its exit code."""
    # A closed session is no reason to leave anything behind; a script's background job is born deaf to SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    try:
        app(standalone_mode=True)
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("testbed: interrupted", file=sys.stderr)
        sys.exit(130)
