"""What commands print about runs: the table after `run` and `sweep`, and the commands report, compare and trace.

testbed.report is imported inside functions: matplotlib takes a second to import, and `testbed run` does not need it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed.control.api import Run, Runs
from testbed.control.cli.documents import outcome, print_document, results
from testbed.control.cli.options import Json
from testbed.control.runs.progress import console
from testbed.results.conclude import Summary
from testbed.results.faults import HEADER, fault_table
from testbed.results.folder import RunFolder, runs_dir
from testbed.results.table import format_results, format_table
from testbed.spec.errors import NetworkInvalid, RankFailed, TestbedError, require_extra

if TYPE_CHECKING:
    from testbed.report.compare import Change, Comparison

app = typer.Typer()
Folders = Annotated[list[Path], typer.Argument(help="run folders, or folders of runs, e.g. runs/quick")]


@app.command()
def report(
    runs: Folders,
    out: Annotated[Path | None, typer.Option(help="folder for report.html [default: the folder of the runs]")] = None,
    as_json: Json = False,
) -> None:
    """Write tables, figures and a page about runs. Folders that cannot be read are listed."""
    require_extra("the report page", "report", "matplotlib", "jinja2")
    from testbed.report.page import write

    made = write(runs, out or report_folder(runs))
    if as_json:
        left_out = [{"folder": str(s.path), "reason": s.reason} for s in made.skipped]
        print_document({"page": str(made.page), "left_out": left_out})
        return
    for part in made.sections:
        console.print(f"{part.name}: {part.verdict.headline}")
    for each in made.skipped:
        console.print(f"left out: {each.path}: {each.reason}")
    console.print(f"report: {made.page}")


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="a run folder, or a folder of runs")],
    b: Annotated[Path, typer.Argument(help="another such folder; runs with equal specs are compared")],
    threshold: Annotated[float, typer.Option(help="fraction by which a step of B may be slower")] = 0.05,
    allow_missing: Annotated[bool, typer.Option("--allow-missing", help="B may lack runs that A has")] = False,
    as_json: Json = False,
) -> None:
    """Compare the runs of two folders. Ratios have confidence intervals. The exit code is 1 if B is slower than the
    threshold allows, or lacks a run."""
    from testbed.report.compare import compare as find

    found = find(a, b, threshold)
    if as_json:
        document = asdict(found) | {"worse": [change.name for change in found.worse]}
        print_document(document)
    else:
        _print_comparison(found)
    if found.worse or (found.lost and not allow_missing):
        raise typer.Exit(TestbedError.exit_code)


def _print_comparison(found: Comparison) -> None:
    for line in found.differences:
        console.print(f"differs: {line}")
    header = ("run", "A s/iter", "B s/iter", "B / A", "95 % interval", "B is", "bytes B / A", "test loss A", "B")
    console.print(f"\n{format_table(header, [_comparison_row(change) for change in found.changes])}\n")
    for line in [*found.notes, *found.only, *(f"left out: {each.path}: {each.reason}" for each in found.skipped)]:
        console.print(line)
    for line in found.lost:
        console.print(f"lost in B: {line}")
    for change in found.worse:
        console.print(f"worse: {change.name} takes {100 * (change.ratio - 1):.1f} % longer")


def _comparison_row(c: Change) -> tuple[str, ...]:
    times = (f"{c.before:.3f}", f"{c.after:.3f}", f"{c.ratio:.3f}", f"{c.low:.3f} to {c.high:.3f}", c.verdict)
    return (c.name, *times, *("-" if value is None else f"{value:.3f}" for value in (c.sent, *c.loss)))


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path | None, typer.Option(help="file to write [default: trace.json in the run folder]")] = None,
    as_json: Json = False,
) -> None:
    """Write a trace of all ranks on one clock. Perfetto and chrome://tracing show it."""
    from testbed.report.trace import write_trace

    path, spans = write_trace(run, out)
    if as_json:
        print_document({"trace": str(path), "spans": spans})
        return
    console.print(f"{spans} spans in {path}; open it at https://ui.perfetto.dev or chrome://tracing")


def report_folder(runs: list[Path]) -> Path:
    """Return the folder of the report: the given one, its parent if it is a single run, runs/ for several folders."""
    if len(runs) > 1:
        return runs_dir()
    return runs[0].parent if RunFolder(runs[0]).spec.exists() else runs[0]


def print_results(summaries: list[Summary], where: Path, as_json: bool, error: TestbedError | None = None) -> None:
    """Print the table, notes, runs left out of the table and why, the measured network, and the folder.

    `error` is that of the first run that failed. Only the JSON document contains it, because the caller prints it as a
    sentence too.
    """
    if as_json:
        worst = next((each for status in ("failed", "invalid") for each in summaries if each.status == status), None)
        ended = outcome(error, worst.status, worst.reason, exit_code(summaries)) if worst else outcome(error)
        print_document(results(summaries, where, ended))
        return
    console.print(format_results(summaries, where))


def print_run(run: Run, as_json: bool) -> None:
    """Print the results of one run, the findings about its script, and the command that makes its page."""
    print_results([run.summary], run.folder, as_json)
    if as_json:
        return
    if run.summary.findings:
        print_findings([run.summary])
    if run.summary.status == "ok":
        console.print(f"its page: testbed report {shlex.quote(str(run.folder))}")


def print_findings(summaries: Sequence[Summary]) -> None:
    """Print one line for each mistake of a user's script and each loss of time; nothing if there are none."""
    from testbed.report.script_findings import as_line

    for finding in dict.fromkeys(each for summary in summaries for each in summary.findings):
        if finding.severity != "note":
            console.print(as_line(finding))


def exit_code(summaries: list[Summary]) -> int:
    """Return 0 if all runs are ok; else the code of a failed run; without a failed run, that of an invalid network."""
    found = {summary.status for summary in summaries}
    if "failed" in found:
        return RankFailed.exit_code
    return NetworkInvalid.exit_code if "invalid" in found else 0


def finish_sweep(runs: Runs, as_json: bool) -> int:
    """Print the table, the faults and the report's path, and return the exit code. Raises the first error of a run."""
    print_results(runs.summaries, runs.folder, as_json, next(iter(runs.errors), None))
    if not as_json:
        _print_faults(runs)
    line = _write_report(runs)
    if not as_json:
        console.print(line)
    if runs.errors:
        raise runs.errors[0]
    return exit_code(runs.summaries)


def _print_faults(runs: Runs) -> None:
    """Print which faults were injected, which ranks detected them, and how the runs ended."""
    ended = [(RunFolder(run.folder), run.summary) for run in runs if RunFolder(run.folder).summary.is_file()]
    rows = fault_table([(folder, summary.spec, summary.status) for folder, summary in ended])
    if rows:
        console.print(f"\n{format_table(HEADER, rows)}\n")


def _write_report(runs: Runs) -> str:
    """Write the report and return a line with its path. If that fails, the line has the error; the sweep goes on."""
    try:
        return f"report: {runs.report()}"
    except Exception as error:  # also an unexpected error; `testbed report` shows its traceback
        kind = "" if isinstance(error, TestbedError | OSError) else f"{type(error).__name__}: "
        return f"no report: {kind}{error}"
