"""report, compare, trace: the commands that read run folders. The one module of this side that calls testbed.report.

It does so inside its functions: matplotlib takes a second to import, and `testbed run` must not pay for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from testbed.control.screen import Json, console
from testbed.spec.errors import TestbedError
from testbed.spec.experiment import Experiment
from testbed.spec.folder import EXPERIMENT, RunFolder, runs_dir, write_whole

app = typer.Typer()
Runs = Annotated[list[Path], typer.Argument(help="run folders, or folders of runs, e.g. runs/quick")]


@app.command()
def report(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(help="folder for report.html [default: beside the runs]")] = None,
    as_json: Json = False,
) -> None:
    """Tables, plots and one page of what was measured; folders that cannot be read are named."""
    from testbed.report.write import write

    made = write(runs, out or _beside(runs))
    if as_json:
        left_out = [{"folder": str(s.path), "reason": s.reason} for s in made.skipped]
        print(json.dumps({"page": str(made.page), "left_out": left_out}, indent=1))
        return
    for part in made.parts:
        console.print(f"{part.name}: {part.verdict.headline}")
    for each in made.skipped:
        console.print(f"left out: {each.path}: {each.reason}")
    console.print(f"report: {made.page}")


def _beside(runs: list[Path]) -> Path:
    """One folder named: there. Several: in the folder that holds all runs."""
    if len(runs) > 1:
        return runs_dir()
    return runs[0].parent if RunFolder(runs[0]).spec.exists() else runs[0]


def remember(experiment: Experiment) -> None:
    """Leave the question beside its answers, so that a report made later can print it with the published figures."""
    folder = runs_dir() / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / EXPERIMENT, experiment.model_dump_json(indent=1))


def conclude(folder: Path) -> str:
    """The report at the end of a sweep; that it cannot be made is said, and costs nobody the runs."""
    from testbed.report.write import write

    try:
        return f"report: {write([folder], folder).page}"
    except (TestbedError, OSError) as error:
        return f"no report: {error}"
