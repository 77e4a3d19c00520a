"""The options that several commands have."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.control.runs.select import SubstrateType
from testbed.control.substrates.slurm import SlurmOptions
from testbed.spec.datasets import DATASETS
from testbed.spec.inventory import DEFAULT, VARIABLE
from testbed.spec.models import BUILT_IN_MODELS

Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]
Mode = Annotated[str, typer.Option(help="how gradients are synchronised; `testbed modes` lists them")]
Nodes = Annotated[
    str | None, typer.Option(help="number of nodes, one rank each [default: 4; on hosts the whole inventory]")
]
On = Annotated[
    str,
    typer.Option(
        "--on",
        help="substrate: auto, compose (engine), netns, process (unshaped), uml (own kernel), hosts (SSH), slurm",
    ),
]
Share = Annotated[bool, typer.Option("--share", help="do not wait for another measurement on this machine")]
Rate = Annotated[str | None, typer.Option(help="rate of every node's link, each way, e.g. 200mbit [default: unshaped]")]
Model = Annotated[str, typer.Option(help=f"{', '.join(BUILT_IN_MODELS)}, or a torchvision name")]
Data = Annotated[
    str | None,
    typer.Option(help=f"{', '.join([*DATASETS][:-1])} or {[*DATASETS][-1]} [default: cifar10; text for gpt]"),
]
FetchedData = Annotated[str, typer.Argument(help=" or ".join(k for k, info in DATASETS.items() if not info.generated))]
Batch = Annotated[str | None, typer.Option(help="images, or sequences of text, per step over all ranks [default: 256]")]
BatchPerRank = Annotated[str | None, typer.Option(help="images per step of each rank, instead of --batch")]
Steps = Annotated[str | None, typer.Option(help="training steps [default: 40]")]
Seed = Annotated[str, typer.Option(help="random seed of parameters, data order and augmentation")]
Faults = Annotated[list[str] | None, typer.Option(metavar="FAULT", help="inject a fault, e.g. kill:rank2@step10")]
Retries = Annotated[str, typer.Option(help="restarts from the last checkpoint (--set checkpoint=K)")]
KeepGoing = Annotated[
    bool,
    typer.Option("--keep-going", help="train even if the network is not as requested; the run is left out of tables"),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="any key of testbed/spec/run.py or link.py, e.g. optimizer.lr=0.1"),
]
Out = Annotated[Path | None, typer.Option(help="run folder [default: runs/adhoc/MODE-nN-TIME]")]
InventoryFile = Annotated[
    Path | None,
    typer.Option("--inventory", help=f"the hosts, for --on hosts [default: ${VARIABLE}, else {DEFAULT}]"),
]
AcceptNew = Annotated[
    bool, typer.Option("--accept-new", help="hosts: trust unknown host keys; changed keys are always refused")
]
Partition = Annotated[str, typer.Option(help="slurm: the partition of the job [default: the cluster's]")]
Account = Annotated[str, typer.Option(help="slurm: the account that the job is charged to")]
Time = Annotated[str, typer.Option("--time", help="slurm: time limit of the job, e.g. 30 (minutes) or 01:30:00")]
SlurmOption = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="slurm: another option of sbatch, e.g. constraint=ib")
]
Python = Annotated[str, typer.Option(help="slurm: Python of the nodes [default: this command's, on a shared disk]")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="slurm: print the job and its commands; submit nothing")]
Fresh = Annotated[bool, typer.Option("--fresh", help="run finished cells again; old folders are set aside")]
ExperimentFile = Annotated[Path, typer.Argument(help="an experiment, e.g. experiments/quick.toml")]

# options of a run that are not keys of its spec
OF_SLURM = ("partition", "account", "time", "slurm_option", "python")
OUTSIDE_SPEC = {
    *OF_SLURM,
    "dry_run",
    "on",
    "inventory",
    "accept_new",
    "share",
    "settings",
    "minutes",
    "resume",
    "instead",
    "out",
    "as_json",
    "mount",
    "image",
    "requirements",
    "data_at",
}
OUTSIDE_SPEC |= {"env", "exclude", "address", "interface", "as_cpu"}  # `testbed exec` sets them as keys of `script`


def spec_options(context: typer.Context) -> dict[str, Any]:
    """Return the given options of this command that are keys of a spec."""
    chosen = {name: value for name, value in context.params.items() if name not in OUTSIDE_SPEC}
    return {name: value for name, value in chosen.items() if value not in (None, False, ())}


def slurm(context: typer.Context) -> SlurmOptions:
    """Return what this command line requests of Slurm. Raises SpecError for an option that is not allowed."""
    given = {name: context.params[name] or "" for name in OF_SLURM}
    return SlurmOptions(options=tuple(given.pop("slurm_option") or ()), **given)


def substrate(context: typer.Context, on: str) -> str | SubstrateType:
    """Return the substrate `on` of those that the caller of `app` passes as `obj`; else the name itself."""
    known: dict[str, SubstrateType] = context.obj or {}
    return known.get(on, on)


def typed(context: typer.Context, names: Collection[str]) -> list[str]:
    """Return the options of these names that the user has typed, as words of a command line."""
    words: list[str] = []
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            given = context.params[option.name]
            for value in given if isinstance(given, list | tuple) else [given]:
                words += [option.opts[0], str(value)]
    return words
