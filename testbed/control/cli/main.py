"""The command line, but for the commands that read runs (reporting.py). Flags become a spec, errors one sentence."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from testbed import __version__
from testbed.control.cli import report
from testbed.control.cli.progress import Json, console
from testbed.control.machine import ownership
from testbed.control.machine.doctor import examine
from testbed.control.runs.commands import (
    build_spec,
    run_file,
    run_once,
    run_rest,
    where_it_was,
)
from testbed.control.runs.select import (
    HOSTS,
    Place,
    check_shaping,
    choose,
    on_hosts,
)
from testbed.control.tuning.search import tune as run_tune
from testbed.data.fetch import fetch, verify
from testbed.results.folder import RunFolder
from testbed.spec.datasets import DATASETS, data_dir, is_complete
from testbed.spec.errors import SpecError, TestbedError, os_failure, refuse
from testbed.spec.inventory import DEFAULT, VARIABLE, read_inventory
from testbed.spec.mode import CODECS, EVERY, algorithms, codecs_of, every_of, legal_modes
from testbed.spec.run import RunSpec

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # or what stands in brackets is taken for markup: [default: 256] vanishes, [/CODEC] breaks
    help="What keeping N copies of a model in step really costs: every sync mode, on a network you choose.",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets: list, get, verify.")
app.add_typer(data_app, name="data")
app.add_typer(report.app)

Nodes = Annotated[str | None, typer.Option(help="one rank each [default: 4; on hosts the whole inventory]")]
Rate = Annotated[str | None, typer.Option(help="of every node's link, each way, e.g. 200mbit [default: unshaped]")]
Model = Annotated[str, typer.Option(help="vgg11, resnet18, lenet5, or a torchvision name")]
Data = Annotated[str, typer.Option(help="cifar10, mnist or synthetic")]
Batch = Annotated[str | None, typer.Option(help="images per step over all ranks [default: 256]")]
BatchPerRank = Annotated[str | None, typer.Option(help="images per step of each rank, instead of --batch")]
Seed = Annotated[str, typer.Option(help="of parameters, data order and augmentation")]
On = Annotated[
    str, typer.Option("--on", help="where: auto, compose (engine), netns (root), process (unshaped), hosts (by SSH)")
]
File = Annotated[
    Path | None,
    typer.Option("--inventory", help=f"the hosts, for --on hosts [default: ${VARIABLE}, else {DEFAULT}]"),
]
AcceptNew = Annotated[
    bool, typer.Option("--accept-new", help="on hosts: trust host keys that nobody has seen; changed ones are refused")
]
Share = Annotated[bool, typer.Option("--share", help="measure although another testbed does on this machine")]
Profile = Annotated[bool, typer.Option("--profile", help="torch.profiler over the first steps that count")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="any key of testbed/spec/run.py or link.py, e.g. optimizer.lr=0.1"),
]
BESIDE_RESUME = {"resume", "on", "inventory", "accept_new", "share", "retries", "as_json"}  # the rest is in its spec


@app.command()
def run(
    context: typer.Context,
    mode: Annotated[str, typer.Option(help="how gradients are synchronised; `testbed modes` lists them")] = "ring",
    nodes: Nodes = None,
    rate: Rate = None,
    model: Model = "vgg11",
    data: Data = "cifar10",
    batch: Batch = None,
    batch_per_rank: BatchPerRank = None,
    steps: Annotated[str | None, typer.Option(help="training steps [default: 40]")] = None,
    seed: Seed = "0",
    on: On = "auto",
    inventory: File = None,
    accept_new: AcceptNew = False,
    share: Share = False,
    settings: Set = None,
    profile: Profile = False,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="FAULT", help="go wrong on purpose, e.g. kill:rank2@step10")
    ] = None,
    retries: Annotated[str, typer.Option(help="restarts from the last checkpoint (--set checkpoint=K)")] = "0",
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="go on with that run's folder, by its own spec")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="run folder [default: runs/adhoc/MODE-nN-TIME]")] = None,
    as_json: Json = False,
) -> None:
    """Train once, in one mode, and print what it cost."""
    if resume is not None:
        _check_beside_resume(context)
        spec = RunFolder(resume).read_spec()
        on = where_it_was(resume) if on == "auto" else on
        place = _place(on, [spec], inventory, accept_new, share)
        check_shaping(spec, place, on)
        raise typer.Exit(run_rest(resume, place, retries, as_json))
    nodes = nodes or _all_nodes(on, inventory)
    flags: dict[str, Any] = {"mode": mode, "nodes": nodes, "link.rate": rate, "model": model, "data.name": data}
    flags |= {"seed": seed, "batch": batch, "batch_per_rank": batch_per_rank, "steps": steps}
    flags |= {"faults": fault, "retries": retries}
    spec = build_spec(flags, _settings(settings, profile))
    place = _place(on, [spec], inventory, accept_new, share)
    check_shaping(spec, place, on)
    raise typer.Exit(run_once(spec, place, out, as_json))


@app.command()
def tune(
    mode: Annotated[str, typer.Option(help="whose bucket size and schedule are sought: ALGORITHM[/CODEC]")] = "ring",
    nodes: Nodes = None,
    rate: Rate = None,
    model: Model = "vgg11",
    data: Data = "cifar10",
    batch: Batch = None,
    batch_per_rank: BatchPerRank = None,
    steps: Annotated[str, typer.Option(help="training steps of each run, the first 2 left out")] = "10",
    seed: Seed = "0",
    minutes: Annotated[float, typer.Option(help="no run begins after this")] = 20.0,
    on: On = "auto",
    inventory: File = None,
    accept_new: AcceptNew = False,
    share: Share = False,
    settings: Set = None,
    out: Annotated[Path, typer.Option(help="the winner as an experiment file")] = Path("experiments/tuned.toml"),
    as_json: Json = False,
) -> None:
    """Find the fastest bucket size and schedule for this model on this network, by measuring."""
    nodes = nodes or _all_nodes(on, inventory)
    flags = {"mode": mode, "nodes": nodes, "link.rate": rate, "model": model, "data.name": data, "seed": seed}
    flags |= {"batch": batch, "batch_per_rank": batch_per_rank, "steps": steps}
    spec = build_spec(flags, settings or [])
    place = _place(on, [spec], inventory, accept_new, share)
    check_shaping(spec, place, on)
    run_tune(spec, place, out, 60 * minutes, console, as_json)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="an experiment, e.g. experiments/quick.toml")],
    on: On = "auto",
    inventory: File = None,
    accept_new: AcceptNew = False,
    share: Share = False,
    settings: Set = None,
    profile: Profile = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="run finished cells again; old folders are set aside")] = False,
    as_json: Json = False,
) -> None:
    """Run every cell of an experiment file; finished runs are skipped, so that it resumes."""
    place_for = partial(_place, on, inventory=inventory, accept_new=accept_new, share=share)
    raise typer.Exit(run_file(file, _settings(settings, profile), place_for, fresh, as_json))


def _check_beside_resume(context: typer.Context) -> None:
    """An earlier run goes on as it began: what would change it is refused, not swallowed."""

    def typed(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    options = {option.name or "": option.opts[0] for option in context.command.params}
    given = [flag for name, flag in options.items() if name not in BESIDE_RESUME and typed(name)]
    if given:
        rule = "a run that goes on keeps the spec and the folder that it began with"
        raise refuse("--resume beside", ", ".join(given), rule, "Leave these out, or begin anew without --resume.")


def _settings(settings: list[str] | None, profile: bool) -> list[str]:
    return [*(settings or []), *(["profile=true"] if profile else [])]


def _all_nodes(on: str, inventory: Path | None) -> str:
    return "4" if on != HOSTS else str(len(read_inventory(inventory).nodes))


def _place(on: str, specs: list[RunSpec], inventory: Path | None, accept_new: bool, share: bool) -> Place:
    """The run that asks most of the machine decides where all of them go."""
    largest = max(specs, key=lambda spec: spec.world)
    if on == HOSTS:
        return on_hosts(read_inventory(inventory), largest, accept_new)
    if inventory is not None:
        raise SpecError(f"--inventory {inventory}: holds for real hosts only. Use it with --on hosts.")
    if accept_new:
        raise SpecError("--accept-new: holds for real hosts only. Use it with --on hosts.")
    return replace(choose(on, largest), beside=share)


@app.command()
def modes(as_json: Json = False) -> None:
    """List every legal mode: algorithm x granularity x schedule, and what can follow: codecs and every:K."""
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
        print(json.dumps(rows, indent=1))
        return
    width = max(len(row["mode"]) for row in rows)
    for row in rows:
        console.print(f"{row['mode'].ljust(width)}  {row['does']}")
    console.print("\nSpelled algorithm[/granularity][/schedule][/codec][/every:K[@M]]; any bucket size works.\n")
    for codec in CODECS.values():
        takers = ", ".join(dict.fromkeys(row["mode"].split("/")[0] for row in rows if codec.example in row["codecs"]))
        console.print(f"/{codec.example.ljust(width - 1)}  {codec.does}; bytes: {codec.bytes}")
        console.print(f"{' ' * width}  after {takers}")
    for word, does in EVERY.items():
        console.print(f"/{word.ljust(width - 1)}  {does}")
    others = ", ".join(name for name, algorithm in algorithms().items() if algorithm.every)
    console.print(f"{' ' * width}  after any mode but {others}, overlap, pipeline and those with a codec")


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
    removed = [str(each) for each in ownership.remove(everything=everything)]
    kept = [] if everything else [each for each in ownership.find(everything=True) if each.other_host]
    for each in kept:
        why = "it is of another machine, container or boot, which may use it"
        print(f"{each} stays: {why}. Remove it with --all.", file=sys.stderr)
    if as_json:
        print(json.dumps(removed, indent=1))
    for line in [] if as_json else (removed or ["nothing of ours was left"]):
        console.print(line)


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="cifar10 or mnist")]) -> None:
    """Fetch a data set once, verified by checksum."""
    path = fetch(name, data_dir(), lambda text: console.print(f"  {text}"))
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
    verify(name, data_dir())
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
    except OSError as error:  # of the machine, and of no run: those end with a sentence of their own
        print(f"testbed: {os_failure(error, 'this machine')}", file=sys.stderr)
        sys.exit(TestbedError.exit_code)
    except KeyboardInterrupt:
        print("testbed: interrupted", file=sys.stderr)
        sys.exit(130)
