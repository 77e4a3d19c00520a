"""`testbed profile`: how long each layer of a model computes, as a table and as profile.json."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from testbed.control import api
from testbed.control.cli import options as opt
from testbed.control.cli.documents import print_document
from testbed.control.cli.options import Json
from testbed.control.runs.progress import console
from testbed.results.folder import RunFolder
from testbed.results.profile import Profile
from testbed.results.table import busy_footnote, format_table
from testbed.spec.own_files import EMULATED
from testbed.spec.units import in_megabytes

app = typer.Typer()
HEADER = ("layer", "tensors", "MB", "forward ms", "backward ms")


@app.command()
def profile(
    model: opt.Model = "vgg11",
    data: opt.Data = None,
    batch_per_rank: Annotated[str, typer.Option(help="images, or sequences, of one pass of one rank")] = "64",
    cpus: Annotated[str | None, typer.Option(help="CPU share in cores, as --set node.cpus [default: no limit]")] = None,
    steps: Annotated[str, typer.Option(help="training steps, of which the first 2 are left out")] = "12",
    on: Annotated[str, typer.Option("--on", help="substrate: auto, compose, netns or process")] = "auto",
    share: opt.Share = False,
    settings: opt.Set = None,
    out: Annotated[
        Path | None, typer.Option(help="write the profile here too [default: only profile.json in the run folder]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Record how long each layer of a model computes, on one node that exchanges nothing. The profile is replayed by
    `testbed run --set compute=emulated:FILE`."""
    more = [f"node.cpus={cpus}"] if cpus else []
    keys = {"model": model, "data": data, "batch_per_rank": batch_per_rank, "steps": steps}
    made, found = api.profile(
        on=on, out=out, allow_concurrent=share, quiet=as_json, settings=[*more, *(settings or [])], **keys
    )
    path = out or RunFolder(made.folder).layers
    if as_json:
        print_document({"file": str(path), "profile": json.loads(found.model_dump_json(by_alias=True))})
        return
    console.print(f"\n{caption(found)}\n\n{format_table(HEADER, rows(found))}\n")
    if busy := busy_footnote([made.summary]):
        console.print(f"note: {busy}")
    console.print(f"{path}; replay it: testbed run --set compute={EMULATED}:{shlex.quote(str(path))} {options(found)}")


def caption(found: Profile) -> str:
    """Return what the profile was recorded of, and by how much its steps differed."""
    share = f"{found.cpus:g} cores" if found.cpus else "no CPU limit"
    spread = f", {100 * (min(found.jitter) - 1):+.1f} to {100 * (max(found.jitter) - 1):+.1f} %" if found.jitter else ""
    threads = f"{found.threads} thread{'s' * (found.threads > 1)}"
    what = f"{found.model}, {found.dtype}, batch {found.batch_per_rank} per rank, {threads}, {share}"
    return f"{what}; {found.step_s:.3f} s a step without synchronisation, {len(found.jitter)} steps{spread}"


def rows(found: Profile) -> list[tuple[str, ...]]:
    """Return one row for each layer, and rows for the rest of a step."""
    layers = [
        (
            layer.name or "(model)",
            str(len(layer.sizes)),
            in_megabytes(layer.gradient_bytes, 2) if layer.sizes else "-",
            _ms(layer.forward_s),
            _ms(layer.backward_s),
        )
        for layer in found.layers
    ]
    count = str(sum(len(layer.sizes) for layer in found.layers))
    total = ("all layers", count, in_megabytes(found.gradient_bytes, 2), _ms(found.forward_s), _ms(found.backward_s))
    rest = [("data", found.data_s, 0.0), ("loss", 0.0, found.loss_s)]
    rest += [("clearing gradients", found.zero_s, 0.0), (f"optimizer ({found.optimizer})", found.optimizer_s, 0.0)]
    others = [(name, "-", "-", _ms(a) if a else "-", _ms(b) if b else "-") for name, a, b in rest]
    return [*layers, total, *others]


def options(found: Profile) -> str:
    """Return the options of a run that fit the profile, as words of a command line."""
    dtype = f" --set dtype={found.dtype}" if found.dtype != "float32" else ""
    threads = f" --set threads={found.threads}" if found.threads > 1 else ""
    return f"--model {shlex.quote(found.model)} --batch-per-rank {found.batch_per_rank}{dtype}{threads}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
