"""`testbed exec`: run the user's own training script on the nodes, unchanged, and observe it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.control import api
from testbed.control.cli import options as opt
from testbed.control.cli.options import Json
from testbed.control.cli.report import exit_code, print_results
from testbed.spec.errors import refuse
from testbed.spec.script import PLACEHOLDERS

app = typer.Typer()
EXAMPLE = "testbed exec --nodes 4 -- python main.py --rank {rank}"


@app.command(
    "exec",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog="Placeholders: " + ", ".join(f"{{{name}}} {does}" for name, does in PLACEHOLDERS.items()) + ".",
)
def exec_(
    context: typer.Context,
    nodes: opt.Nodes = None,
    rate: opt.Rate = None,
    steps: Annotated[str | None, typer.Option(help="end the script after so many steps [default: its own end]")] = None,
    on: opt.On = "auto",
    inventory: opt.InventoryFile = None,
    accept_new: opt.AcceptNew = False,
    share: opt.Share = False,
    settings: opt.Set = None,
    keep_going: opt.KeepGoing = False,
    fault: opt.Faults = None,
    out: opt.Out = None,
    as_json: Json = False,
) -> None:
    """Run your own training script on every node, unchanged: testbed exec [OPTIONS] -- python main.py --rank {rank}"""
    if not context.args:
        raise refuse("command", "", "is missing", f"Write it after --, e.g. {EXAMPLE}")
    script = {"argv": list(context.args), "folder": str(Path.cwd()), "path": script_path()}
    where: dict[str, Any] = {"on": opt.substrate(context, on), "inventory": inventory, "accept_new": accept_new}
    where |= {"allow_concurrent": share, "quiet": as_json}
    keys = opt.spec_options(context) | {"mode": "script", "script": script, "batch_per_rank": 1}
    made = api.run(**where, out=out, settings=settings or [], **keys)
    print_results([made.summary], made.folder, as_json)
    raise typer.Exit(exit_code([made.summary]))


def script_path() -> str:
    """PATH of the script: the caller's if an environment is active, else with the testbed's own Python first."""
    path = os.environ.get("PATH", os.defpath)
    if os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX"):
        return path
    return f"{Path(sys.executable).parent}{os.pathsep}{path}"
