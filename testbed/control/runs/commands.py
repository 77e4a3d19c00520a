"""What `testbed` and `fab` have in common: flags become a spec, a spec becomes a run, runs become a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from testbed.control.cli import report
from testbed.control.cli.progress import Progress, console, open_progress
from testbed.control.runs.run import execute, resume, where_it_began
from testbed.control.runs.select import Place
from testbed.control.runs.sweep import folder_for, sweep
from testbed.results.conclude import Summary
from testbed.results.faults import HEADER, fault_table
from testbed.results.folder import RunFolder, fresh_folder, runs_dir
from testbed.results.table import format_results, format_table
from testbed.spec.errors import NetworkInvalid, RankFailed, SpecError, UsageError, refuse
from testbed.spec.experiment import Experiment, run_name, set_key, with_settings
from testbed.spec.run import RunSpec


def build_spec(flags: dict[str, Any], settings: list[str]) -> RunSpec:
    """Flags and --set pairs as one validated spec; all values go in as text."""
    values: dict[str, Any] = {}
    for key, value in flags.items():
        if value is not None:
            set_key(values, key, value)
    values = with_settings(values, settings)
    values.setdefault("name", run_name(str(values["mode"]), values["nodes"]))
    return RunSpec.load(values, where="")


def run_once(spec: RunSpec, place: Place, out: Path | None, as_json: bool) -> int:
    """One run, its table, and the exit code; errors are raised."""
    folder = RunFolder(out or fresh_folder(runs_dir() / spec.experiment, spec.name))
    return _conclude(folder, lambda progress: execute(spec, place, folder, progress), f"on {_where(place)}", as_json)


def where_it_was(path: Path) -> str:
    """The place that an earlier run began at; `auto` where nobody wrote it down."""
    with suppress(OSError, UsageError):
        return where_it_began(RunFolder(path)) or "auto"
    return "auto"


def run_rest(path: Path, place: Place, retries: str, as_json: bool) -> int:
    """The rest of an earlier run, from its last checkpoint."""
    if not retries.isdecimal() or int(retries) > 100:
        raise refuse("retries", retries, "must be a whole number up to 100", "Write e.g. --retries 2.")
    folder = RunFolder(path)
    headline = f"going on with {path}, on {_where(place)}"
    return _conclude(folder, lambda progress: resume(place, folder, progress, int(retries)), headline, as_json)


def _where(place: Place) -> str:
    return f"{place.name}: {place.why}"


def _conclude(folder: RunFolder, run: Callable[[Progress], Summary], headline: str, as_json: bool) -> int:
    progress = open_progress(console, quiet=as_json)
    progress.headline(headline)
    try:
        summary = run(progress)
    finally:
        progress.end()
    print_results([summary], folder.path, as_json)
    return exit_code([summary])


def run_file(
    file: Path, settings: list[str], place_for: Callable[[list[RunSpec]], Place], fresh: bool, as_json: bool
) -> int:
    """Every cell of an experiment, one table, and the exit code; the first error is raised at the end."""
    experiment = Experiment.read(file)
    for key in (setting.partition("=")[0].strip() for setting in settings):
        if key in experiment.axes:
            swept = f"{file} sweeps it over {experiment.axes[key]}"
            raise SpecError(f"--set {key}: {swept}. Change it in the file.")
    experiment = experiment.model_copy(update={"base": with_settings(experiment.base, settings)})
    specs = experiment.runs()
    place = place_for(specs)
    progress = open_progress(console, quiet=as_json)
    progress.headline(f"{experiment.title} ({len(specs)} runs{', ' + experiment.takes if experiment.takes else ''})")
    progress.headline(f"on {place.name}: {place.why}")
    report.remember(experiment)
    try:
        summaries, errors = sweep(specs, place, runs_dir(), progress, fresh)
    finally:
        progress.end()
    print_results(summaries, runs_dir() / experiment.name, as_json)
    if not as_json:
        _print_faults([folder_for(spec, place, runs_dir()) for spec in specs])
    told = report.conclude(runs_dir() / experiment.name)
    if not as_json:
        console.print(told)
    if errors:
        raise errors[0]
    return exit_code(summaries)


def _print_faults(folders: list[RunFolder]) -> None:
    """What was done on purpose, who noticed, and what became of it."""
    ended = [folder for folder in folders if folder.summary.is_file()]
    rows = fault_table([(folder, s.spec, s.status) for folder in ended for s in [Summary.read(folder)]])
    if rows:
        console.print(f"\n{format_table(HEADER, rows)}\n")


def exit_code(summaries: list[Summary]) -> int:
    """Of runs that all came to an end, the worst counts."""
    found = {summary.status for summary in summaries}
    if "failed" in found:
        return RankFailed.exit_code
    return NetworkInvalid.exit_code if "invalid" in found else 0


def print_results(summaries: list[Summary], where: Path, as_json: bool) -> None:
    """The table, what is not in it and why, what could not be applied, and the folder."""
    if as_json:
        document = {"folder": str(where), "runs": [json.loads(s.model_dump_json(by_alias=True)) for s in summaries]}
        print(json.dumps(document, indent=1))
        return
    console.print(format_results(summaries, where))
