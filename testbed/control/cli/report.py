"""report, compare, trace: the commands that read run folders. The one module of this side that calls testbed.report.

It does so inside its functions: matplotlib takes a second to import, and `testbed run` must not pay for it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed.control.cli.progress import Json, console
from testbed.results.folder import (
    EXPERIMENT,
    RunFolder,
    runs_dir,
    write_whole,
)
from testbed.results.table import format_table
from testbed.spec.errors import TestbedError, require_extra
from testbed.spec.experiment import Experiment

if TYPE_CHECKING:
    from testbed.report.compare import Change, Comparison

app = typer.Typer()
Runs = Annotated[list[Path], typer.Argument(help="run folders, or folders of runs, e.g. runs/quick")]


@app.command()
def report(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(help="folder for report.html [default: beside the runs]")] = None,
    as_json: Json = False,
) -> None:
    """Tables, plots and one page of what was measured; folders that cannot be read are named."""
    require_extra("the report page", "report", "matplotlib", "jinja2")
    from testbed.report.page import write

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


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="a run folder, or a folder of runs")],
    b: Annotated[Path, typer.Argument(help="another; runs of equal spec are compared")],
    threshold: Annotated[float, typer.Option(help="share by which a step of B may be slower")] = 0.05,
    allow_missing: Annotated[bool, typer.Option("--allow-missing", help="B may lack runs that A has")] = False,
    as_json: Json = False,
) -> None:
    """What changed from A to B, with confidence; exit code 1 when B is slower than the threshold or lost a run."""
    from testbed.report.compare import compare as find
    from testbed.report.stats import finite

    found = find(a, b, threshold)
    if as_json:
        document = asdict(found) | {"worse": [change.name for change in found.worse]}
        print(json.dumps(finite(document), indent=1, default=str, allow_nan=False))
    else:
        _print_comparison(found)
    if found.worse or (found.lost and not allow_missing):
        raise typer.Exit(1)


def _print_comparison(found: Comparison) -> None:
    for line in found.differences:
        console.print(f"differs: {line}")
    header = ("run", "A s/iter", "B s/iter", "B / A", "95 % interval", "B is", "bytes B / A", "test loss A", "B")
    console.print(f"\n{format_table(header, [_row(change) for change in found.changes])}\n")
    for line in [*found.notes, *found.only, *(f"left out: {each.path}: {each.reason}" for each in found.skipped)]:
        console.print(line)
    for line in found.lost:
        console.print(f"lost in B: {line}")
    for change in found.worse:
        console.print(f"worse: {change.name} takes {100 * (change.ratio - 1):.1f} % longer")


def _row(c: Change) -> tuple[str, ...]:
    times = (f"{c.before:.3f}", f"{c.after:.3f}", f"{c.ratio:.3f}", f"{c.low:.3f} to {c.high:.3f}", c.verdict)
    return (c.name, *times, *("-" if value is None else f"{value:.3f}" for value in (c.sent, *c.loss)))


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path | None, typer.Option(help="file to write [default: trace.json in the run folder]")] = None,
) -> None:
    """One trace of all ranks on one clock, for Perfetto or chrome://tracing."""
    from testbed.report.trace import write_trace

    path, spans = write_trace(run, out)
    console.print(f"{spans} spans in {path}; open it at https://ui.perfetto.dev or chrome://tracing")


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
    """The report at the end of a sweep; that it cannot be made is said, and costs nobody the runs or the exit code."""
    try:
        require_extra("the report page", "report", "matplotlib", "jinja2")
        from testbed.report.page import write

        return f"report: {write([folder], folder).page}"
    except Exception as error:  # also what nobody thought of: the runs are there, and `testbed report` shows it in full
        kind = "" if isinstance(error, TestbedError | OSError) else f"{type(error).__name__}: "
        return f"no report: {kind}{error}"
