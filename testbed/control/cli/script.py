"""`testbed exec`: run the user's own training script on the nodes, unchanged, and observe it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.control import api
from testbed.control.cli import options as opt
from testbed.control.cli.options import Json
from testbed.control.cli.report import exit_code, print_run
from testbed.control.runs.progress import console
from testbed.control.runs.select import HOSTS
from testbed.control.substrates.layer import image_with
from testbed.spec.errors import refuse
from testbed.spec.mode import SCRIPT
from testbed.spec.script import PLACEHOLDERS, Mount, fill

app = typer.Typer()
EXAMPLE = "testbed exec --nodes 4 -- python main.py --rank {rank}"
EPILOG = "\n".join(  # click does not wrap the lines after \b
    [
        "\b\nPlaceholders:",
        *(f"  {{{name}}}  {does}" for name, does in PLACEHOLDERS.items()),
        "\n\b\nExamples:",
        "  testbed exec --nodes 4 --rate 500mbit -- python main.py --master-ip {master} --rank {rank}",
        "  testbed exec --steps 40 -- torchrun --nnodes {world} --node-rank {rank}",
        "      --master-addr {master} --master-port {port} train.py",
        "  testbed exec --fault kill:rank1@step10 --set overrides.node1.cpus=0.2 -- python main.py",
        "\n\b\nExit codes: 0 ok, 2 refused, 3 the script failed or made no step, 5 the network was not",
        "as requested, 130 interrupted",
    ]
)


Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="any key of testbed/spec/run.py or link.py, e.g. node.cpus=0.4"),
]
Steps = Annotated[str | None, typer.Option(help="end the script after this number of steps [default: its own end]")]
Deadline = Annotated[str | None, typer.Option(help="end the script after these seconds without a step [default: 300]")]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME[=VALUE]", help="pass a variable to the script; a VALUE is recorded"),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="NAME", help="do not copy files and folders of this name or pattern"),
]
Address = Annotated[
    str, typer.Option(help="the master address in your script: node 0 gets it, else the script gets that of node 0")
]
Interface = Annotated[
    str, typer.Option(help="the network interface in your script: nodes get it, else the script gets that of its node")
]
Mounts = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST[:TARGET[:ro|rw]]", help="containers: a folder or file that the script needs"),
]
Image = Annotated[str, typer.Option(help="containers: an image built FROM testbed, with the script's packages")]
Requirements = Annotated[
    Path | None,
    typer.Option(help="containers: a pip file of the script's packages, which become a layer on the testbed's image"),
]
AsCpu = Annotated[
    bool, typer.Option("--as-cpu", help="run a script that was written for CUDA on the CPU, and NCCL as Gloo")
]
DataAt = Annotated[
    list[str] | None,
    typer.Option(metavar="FOLDER", help="where the script looks for CIFAR-10 or MNIST [default: ./data]"),
]


Instead = Annotated[
    str | None, typer.Option(metavar="MODE", help="synchronise the script's gradients by this mode, not by its code")
]


@app.command(
    "exec",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] -- COMMAND...",
    epilog=EPILOG,
)
def exec_(
    context: typer.Context,
    nodes: opt.Nodes = None,
    rate: opt.Rate = None,
    steps: Steps = None,
    deadline: Deadline = None,
    env: Env = None,
    exclude: Exclude = None,
    instead: Instead = None,
    address: Address = "",
    interface: Interface = "",
    on: opt.On = "auto",
    inventory: opt.InventoryFile = None,
    accept_new: opt.AcceptNew = False,
    share: opt.Share = False,
    partition: opt.Partition = "",
    account: opt.Account = "",
    time: opt.Time = "",
    slurm_option: opt.SlurmOption = None,
    python: opt.Python = "",
    settings: Set = None,
    keep_going: opt.KeepGoing = False,
    fault: opt.Faults = None,
    mount: Mounts = None,
    image: Image = "",
    requirements: Requirements = None,
    data_at: DataAt = None,
    as_cpu: AsCpu = False,
    out: opt.Out = None,
    as_json: Json = False,
) -> None:
    """Run your own training script on every node, unchanged. See where its time goes and what it does wrong."""
    if not context.args:
        raise refuse("command", "", "is missing", f"Write it after --, e.g. {EXAMPLE}")
    script = script_keys(context.args)
    script |= {"exclude": exclude or [], "address": address, "interface": interface} | variables(env or [])
    script["as_cpu"] = as_cpu
    if data_at:
        script["data_at"] = ["data", *data_at]
    if mount or image or requirements:
        on = in_containers(on)
        script |= {"mounts": mounts(mount or (), on), "image": image_of(image, requirements, as_json)}
    where: dict[str, Any] = {"on": opt.substrate(context, on), "inventory": inventory, "accept_new": accept_new}
    where |= {"allow_concurrent": share, "quiet": as_json, "slurm": opt.slurm(context)}
    keys = opt.spec_options(context) | {"mode": instead or SCRIPT, "script": script}
    made = api.run(**where, out=out, settings=settings or [], **keys)
    print_run(made, as_json)
    raise typer.Exit(exit_code([made.summary]))


def script_keys(argv: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a script with this command line in this folder. Raises UsageError for a wrong placeholder."""
    fill(argv, dict.fromkeys(PLACEHOLDERS, ""))  # checked before RunSpec does, whose message would name the whole key
    return {"argv": list(argv), "folder": str(Path.cwd()), "path": script_path()}


def mounts(given: Sequence[str], on: str) -> list[Mount]:
    """Return the mounts of `--mount`. Raises UsageError if a path does not exist."""
    found = [Mount.parse(text) for text in given]
    missing = [each.source for each in found if on != HOSTS and not Path(each.source).exists()]
    if missing:
        raise refuse("--mount", missing[0], "does not exist on this machine", "Give the path of a folder or file.")
    return found


def image_of(image: str, requirements: Path | None, quiet: bool) -> str:
    """Return the image of the containers. With requirements, build it unless it is up to date. Raises UsageError."""
    if requirements is None:
        return image
    if image:
        raise refuse("--requirements", str(requirements), "cannot be added to --image", "Install them in that image.")
    return image_with(requirements, lambda text: None if quiet else console.print(f"  {text}", highlight=False))


def in_containers(on: str) -> str:
    """Return the substrate of a script that needs an image or a mount: compose for `auto`.

    Raises UsageError for a substrate without containers.
    """
    if on not in ("auto", "compose", HOSTS):
        rule = "has no containers, and --mount, --image and --requirements are for containers"
        way_out = "Leave them out, because the script can read the files of this machine, or use --on compose."
        raise refuse("--on", on, rule, way_out)
    return "compose" if on == "auto" else on


def variables(given: Sequence[str]) -> dict[str, Any]:
    """Return the keys for `--env`: NAME=VALUE sets a variable of the script, NAME passes the caller's variable on."""
    pairs = [each.partition("=") for each in given]
    set_here = {name: value for name, equals, value in pairs if equals}
    return {"environment": set_here, "handed": [name for name, equals, _ in pairs if not equals]}


def script_path() -> str:
    """Return PATH for the script: the caller's. If no virtual environment is active, the testbed's Python is first."""
    path = os.environ.get("PATH", os.defpath)
    if os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX"):
        return path
    return f"{Path(sys.executable).parent}{os.pathsep}{path}"
