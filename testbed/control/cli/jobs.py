"""`testbed status` and `testbed collect`: runs on Slurm whose controller has gone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.control.cli.report import exit_code, print_results
from testbed.control.runs import jobs
from testbed.control.runs.progress import console
from testbed.control.substrates.slurm import check_programs
from testbed.results.folder import runs_dir
from testbed.results.table import format_table
from testbed.spec.errors import TestbedError, UsageError

app = typer.Typer()
Below = Annotated[Path | None, typer.Argument(help="a run folder, or a folder of runs [default: runs]")]


@app.command()
def status(folder: Below = None) -> None:
    """List the runs on Slurm that have not finished, with the state of their jobs."""
    check_programs()
    rows = [
        (str(run.folder.path), run.state, f"{min(run.steps)} to {max(run.steps)}")
        for run in jobs.find(folder or runs_dir())
    ]
    console.print(format_table(("run", "state", "steps"), rows) if rows else "no unfinished runs on Slurm")


@app.command()
def collect(folder: Below = None) -> None:
    """Conclude runs on Slurm whose controller has gone. Write the summary and print the table from the ranks' files."""
    check_programs()
    summaries, problems = [], []
    for run in jobs.find(folder or runs_dir()):
        try:
            summary = jobs.collect(run)
        except TestbedError as error:
            problems.append(error)
            continue
        print_results([summary], run.folder.path, as_json=False)
        summaries.append(summary)
    for problem in problems:
        console.print(f"problem: {problem}")
    if not summaries and not problems:
        console.print("nothing to collect")
    raise typer.Exit(UsageError.exit_code if problems else exit_code(summaries))
