"""`testbed grade`: run submissions of an assignment, and print the verdict and the points of each demand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from testbed.control.cli import options as opt
from testbed.control.cli.documents import print_document
from testbed.control.cli.options import Json
from testbed.control.cli.script import script_path
from testbed.control.grading.grade import Setting, check_trust, find_submissions, grade_all
from testbed.control.grading.gradebook import HEADER, LEGEND, Gradebook, Graded
from testbed.control.runs.progress import console, open_progress
from testbed.results.folder import fresh_folder, runs_dir
from testbed.spec.errors import ConnectionLost, Interrupted, TestbedError, refuse
from testbed.spec.grading import Assignment

app = typer.Typer()


@app.command(
    epilog="Exit code: 0 every submission was graded, whatever its points; 1 a submission could not be graded because"
    " of this machine; 2 the request cannot be met; 130 interrupted, the results so far are kept."
)
def grade(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="the demands, e.g. course/assignment2.toml")],
    submissions: Annotated[Path, typer.Argument(help="a folder with one folder per submission")],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="grade this submission; can be repeated")
    ] = None,
    on: Annotated[
        str, typer.Option("--on", help="substrate: compose; with --trusted also netns or process")
    ] = "compose",
    trusted: Annotated[
        bool, typer.Option("--trusted", help="allow substrates that do not contain hostile code")
    ] = False,
    share: opt.Share = False,
    out: Annotated[Path | None, typer.Option(help="folder of the results [default: runs/grade-TIME]")] = None,
    as_json: Json = False,
) -> None:
    """Grade submissions by an instructor's file of demands. Print a table for each submission; results.md, .json and
    .html contain all tables."""
    assignment = Assignment.read(file)
    found = _selected(find_submissions(submissions), only or [])
    where = check_trust(on, trusted)
    setting = Setting(
        assignment=assignment,
        given=_given(file, assignment),
        out=out or fresh_folder(runs_dir(), f"grade-{assignment.name}"),
        on=where,
        path=script_path() if where != "compose" else "",
        allow_concurrent=share,
        progress=open_progress(console, quiet=as_json),
    )
    if setting.out.exists():
        raise refuse("--out", str(setting.out), "exists", "Give the name of a folder that does not exist.")
    try:
        book = grade_all(setting, found)
    except (Interrupted, KeyboardInterrupt, ConnectionLost):
        print(f"The results so far are in {setting.out / 'results.md'}", file=sys.stderr)
        raise
    finally:
        setting.progress.end()
    _print(book, as_json)
    raise typer.Exit(0 if book.complete else TestbedError.exit_code)


def _selected(found: list[Path], only: list[str]) -> list[Path]:
    names = [path.name for path in found]
    for name in only:
        if name not in names:
            raise refuse("--only", name, "is no submission", f"There are: {', '.join(names[:20])}.")
    return [path for path in found if not only or path.name in only]


def _given(file: Path, assignment: Assignment) -> Path | None:
    folder = file.resolve().parent / assignment.given if assignment.given else None
    if folder is not None and not folder.is_dir():
        raise refuse("given", assignment.given, f"{folder} is no folder", "Make it, or leave the key out.")
    return folder


def _print(book: Gradebook, as_json: bool) -> None:
    if as_json:
        print_document(book.document())
        return
    for each in book.graded:
        console.print(f"\n{each.headline()}")
        console.print(_table(each))
    console.print(f"\n{LEGEND}\n{book.missing()}")
    console.print(f"results: {book.folder / 'results.html'}, results.md and results.json beside it")


def _table(graded: Graded) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in HEADER:
        table.add_column(name, overflow="fold")
    for row in graded.rows():
        table.add_row(*row)
    return table
