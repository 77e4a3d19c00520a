"""The Python API: `testbed.run`, `testbed.sweep`, `testbed.load`, and what they return.

    import testbed

    run = testbed.run(mode="ring", nodes=4, rate="200mbit", model="lenet5", data="synthetic")
    run.summary.seconds_per_step
    pandas.DataFrame(run.steps)

The command line calls the same functions. A request that cannot be run raises an exception of testbed.spec.errors
before anything is created. A run that fails also raises one, and the reason is in its summary.json.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from testbed.control.runs.emulation import (
    PROFILES,
    RECORDED_STEPS,
    WARMUP_STEPS,
    check_profiled,
    profile_name,
    with_dilation,
    with_profile,
)
from testbed.control.runs.progress import Progress, console, open_progress
from testbed.control.runs.run import execute, recorded_substrate, resume_run
from testbed.control.runs.select import HOSTS, SubstrateChoice, SubstrateType, check_shaping, select
from testbed.control.runs.sweep import folder_for, run_all
from testbed.control.substrates.slurm import SlurmOptions
from testbed.results.conclude import Summary
from testbed.results.folder import EXPERIMENT, RunFolder, find_runs, fresh_folder, runs_dir, write_whole
from testbed.results.profile import Profile
from testbed.results.receipt import Receipt
from testbed.results.records import Step, read
from testbed.results.table import caption, footnotes, left_out, table
from testbed.spec.errors import SpecError, TestbedError, UsageError, refuse, require_extra
from testbed.spec.experiment import Experiment, spec_from_flags, with_settings
from testbed.spec.inventory import Inventory, read_inventory
from testbed.spec.run import RunSpec

if TYPE_CHECKING:
    from testbed.report.figures.style import Plot

COLUMNS = tuple(  # of Run.steps, after `rank`; times in seconds, sizes in bytes
    each.name for each in fields(Step) if each.default_factory is MISSING and each.name != "kind"
)
logging.getLogger("testbed").addHandler(logging.NullHandler())  # the caller decides where warnings go
FIGURES = {"step": "where-time-goes", "bytes": "bytes-per-rank", "seconds": "seconds-by-iteration"}  # short names


@dataclass(frozen=True)
class Run:
    """One run folder: what was requested, what was measured."""

    folder: Path
    ended: Summary | None = field(default=None, repr=False)  # set if this process executed the run

    @cached_property
    def summary(self) -> Summary:
        """summary.json: status, seconds per step, losses, bytes, accuracy. Raises UsageError if the run has none."""
        return self.ended or Summary.read(RunFolder(self.folder))

    @cached_property
    def spec(self) -> RunSpec:
        """spec.json: what was requested, as far as the substrate can apply it."""
        return self.ended.spec if self.ended else RunFolder(self.folder).read_spec()

    @cached_property
    def receipt(self) -> Receipt | None:
        """What the probe measured on every link; None if the network was not measured."""
        path = RunFolder(self.folder).receipt
        return Receipt.read(path) if path.is_file() else None

    @cached_property
    def steps(self) -> dict[str, list[Any]]:
        """Every step of every rank, warm-up included, as columns: pandas.DataFrame(run.steps)."""
        folder = RunFolder(self.folder)
        columns: dict[str, list[Any]] = {name: [] for name in ("rank", *COLUMNS)}
        for rank in range(self.spec.world):
            for record in read(folder.records(rank)):
                if isinstance(record, Step):
                    columns["rank"].append(rank)
                    for name in COLUMNS:
                        columns[name].append(getattr(record, name))
        return columns

    def figure(self, name: str = "step") -> Plot:
        """Return a figure of the report, which a notebook displays. Raises SpecError, which lists the known names."""
        return draw_figure([self.folder], name)

    def _repr_html_(self) -> str:
        return _html([self.summary], str(self.folder))


@dataclass(frozen=True)
class Runs(Sequence[Run]):
    """The runs of a sweep or of a folder, in order."""

    folder: Path
    runs: tuple[Run, ...]
    errors: tuple[TestbedError, ...] = field(default=())  # of runs that failed during this sweep

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | Sequence[Run]:
        return self.runs[index]

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def summaries(self) -> list[Summary]:
        """The summaries of all runs that have one."""
        found = []
        for run in self.runs:
            with suppress(UsageError, OSError):
                found.append(run.summary)
        return found

    @property
    def table(self) -> list[dict[str, str]]:
        """The table that the command line prints, one dict per run: pandas.DataFrame(runs.table)."""
        header, rows = table(self.summaries)
        return [dict(zip(header, row, strict=True)) for row in rows]

    def figure(self, name: str = "step") -> Plot:
        """Return a figure of the report over all runs. Raises SpecError if they have no such figure."""
        return draw_figure([self.folder], name)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the report page; return its path."""
        require_extra("the report page", "report", "matplotlib", "jinja2")
        from testbed.report.page import write

        return write([self.folder], Path(out) if out else self.folder).page

    def _repr_html_(self) -> str:
        return _html(self.summaries, str(self.folder))


def run(
    *,
    on: str | SubstrateType = "auto",
    out: Path | str | None = None,
    inventory: Inventory | Path | None = None,
    accept_new: bool = False,
    allow_concurrent: bool = False,
    slurm: SlurmOptions | None = None,
    quiet: bool = False,
    settings: Iterable[str] = (),
    **keys: Any,
) -> Run:
    """Train once and return the run. `keys` are those of the spec, and the flags of `testbed run`.

    `on`: auto, compose, netns, process, uml, hosts or slurm. `out`: the run's folder, which must not exist.
    `inventory` and `accept_new` are for hosts, `slurm` for Slurm. `allow_concurrent`: do not wait for another
    measurement here. `settings`: KEY=VALUE strings, as for --set. Raises a TestbedError if the run is refused, fails or
    is interrupted.
    """
    spec, choice = prepare(
        keys,
        settings,
        on=on,
        inventory=inventory,
        accept_new=accept_new,
        allow_concurrent=allow_concurrent,
        slurm=slurm,
    )
    folder = RunFolder(Path(out) if out else fresh_folder(runs_dir() / spec.experiment, spec.name))
    with _show_progress(quiet, f"on {choice.name}: {choice.reason}") as progress:
        return Run(folder.path, execute(spec, choice, folder, progress))


def prepare(
    flags: Mapping[str, Any],
    settings: Iterable[str],
    *,
    on: str | SubstrateType,
    inventory: Inventory | Path | None,
    accept_new: bool,
    allow_concurrent: bool,
    slurm: SlurmOptions | None = None,
) -> tuple[RunSpec, SubstrateChoice]:
    """Return the spec and the substrate of one run. On hosts, `nodes` is by default the number of hosts.

    Raises SpecError for a bad value, Unavailable if the substrate cannot run it.
    """
    if on == HOSTS and not isinstance(inventory, Inventory):
        inventory = read_inventory(inventory)
    nodes = len(inventory.nodes) if isinstance(inventory, Inventory) else None
    spec = spec_from_flags(
        {"nodes": nodes} | {key: value for key, value in flags.items() if value is not None}, settings
    )
    spec = with_profile(spec, _record_profile).with_files()
    choice = select(
        on, [spec], inventory=inventory, accept_new=accept_new, allow_concurrent=allow_concurrent, slurm=slurm
    )
    check_shaping(spec, choice)
    return with_dilation(spec, choice), choice


def _record_profile(spec: RunSpec, folder: Path) -> None:
    """Record a profile on this machine, on the best substrate."""
    choice = select("auto", [spec])
    check_profiled(spec, choice)
    with _show_progress(False, f"recording a profile of {spec.model}, on {choice.name}: {choice.reason}") as progress:
        execute(spec, choice, RunFolder(folder), progress)


def profile(
    *,
    on: str = "auto",
    out: Path | str | None = None,
    allow_concurrent: bool = False,
    quiet: bool = False,
    settings: Iterable[str] = (),
    **keys: Any,
) -> tuple[Run, Profile]:
    """Record how long each layer of a model computes, on one node. Return the run and its profile.

    `keys` are those of `run`. `out`: the profile is written there too. Raises a TestbedError.
    """
    fixed = {"mode": "single", "nodes": 1, "layers": True, "evaluate": "never", "experiment": PROFILES}
    lengths = {"steps": RECORDED_STEPS + WARMUP_STEPS, "warmup": WARMUP_STEPS}
    flags = lengths | {key: value for key, value in keys.items() if value is not None} | fixed
    spec = spec_from_flags({"name": profile_name(flags)} | flags, settings).with_files()
    choice = select(on, [spec], allow_concurrent=allow_concurrent)
    check_profiled(spec, choice)
    folder = RunFolder(fresh_folder(runs_dir() / PROFILES, spec.name))
    with _show_progress(quiet, f"on {choice.name}: {choice.reason}") as progress:
        made = Run(folder.path, execute(spec, choice, folder, progress))
    found = Profile.read(folder.layers)
    if out is not None:
        found.write(Path(out))
    return made, found


def resume(
    path: Path | str,
    *,
    on: str | SubstrateType = "auto",
    retries: int | str = 0,
    inventory: Inventory | Path | None = None,
    accept_new: bool = False,
    allow_concurrent: bool = False,
    slurm: SlurmOptions | None = None,
    quiet: bool = False,
) -> Run:
    """Continue an unfinished run from its last checkpoint, on the substrate it began on. Raises a TestbedError."""
    if not str(retries).isdecimal() or int(retries) > 100:
        raise refuse("retries", retries, "must be a whole number up to 100", "Write e.g. --retries 2.")
    folder = RunFolder(Path(path))
    spec = folder.read_spec()
    if on == "auto":
        with suppress(OSError, UsageError):
            on = recorded_substrate(folder) or "auto"
    choice = select(
        on, [spec], inventory=inventory, accept_new=accept_new, allow_concurrent=allow_concurrent, slurm=slurm
    )
    check_shaping(spec, choice)
    with _show_progress(quiet, f"resuming {path}, on {choice.name}: {choice.type.description}") as progress:
        return Run(folder.path, resume_run(spec, choice, folder, progress, int(retries)))


def sweep(
    experiment: Experiment | Mapping[str, Any] | Path | str,
    *,
    on: str | SubstrateType = "auto",
    fresh: bool = False,
    inventory: Inventory | Path | None = None,
    accept_new: bool = False,
    allow_concurrent: bool = False,
    slurm: SlurmOptions | None = None,
    quiet: bool = False,
    settings: Iterable[str] = (),
) -> Runs:
    """Make every run of an experiment and return them all; finished ones are not run again unless `fresh`.

    `experiment`: a TOML file, or a mapping with its keys (name, title, base, axes, cells, repeats). A run that fails
    does not end the sweep; its error is in `errors` of the result.
    """
    found, specs, choice = prepare_sweep(
        experiment,
        settings,
        on=on,
        inventory=inventory,
        accept_new=accept_new,
        allow_concurrent=allow_concurrent,
        slurm=slurm,
    )
    duration = f", {found.takes}" if found.takes else ""
    with _show_progress(quiet, f"{found.title} ({len(specs)} runs{duration})") as progress:
        progress.headline(f"on {choice.name}: {choice.reason}")
        save_experiment(found)
        summaries, errors = run_all(specs, choice, runs_dir(), progress, fresh)
    folders = {spec.name: folder_for(spec, choice, runs_dir()).path for spec in specs}
    done = tuple(Run(folders[summary.spec.name], summary) for summary in summaries)
    return Runs(runs_dir() / found.name, done, tuple(errors))


def prepare_sweep(
    experiment: Experiment | Mapping[str, Any] | Path | str,
    settings: Iterable[str],
    *,
    on: str | SubstrateType,
    inventory: Inventory | Path | None,
    accept_new: bool,
    allow_concurrent: bool,
    slurm: SlurmOptions | None = None,
) -> tuple[Experiment, list[RunSpec], SubstrateChoice]:
    """Return the experiment, its runs and their substrate. Raises SpecError or Unavailable."""
    settings = list(settings)
    found = _experiment(experiment)
    for key in (setting.partition("=")[0].strip() for setting in settings):
        if key in found.axes:
            what = experiment if isinstance(experiment, str | Path) else found.name
            raise SpecError(f"--set {key}: {what} sweeps it over {found.axes[key]}. Change it in the file.")
    found = found.model_copy(update={"base": with_settings(found.base, settings)})
    specs = [with_profile(spec, _record_profile).with_files() for spec in found.runs()]
    choice = select(
        on, specs, inventory=inventory, accept_new=accept_new, allow_concurrent=allow_concurrent, slurm=slurm
    )
    return found, [with_dilation(spec, choice) for spec in specs], choice


def load(path: Path | str) -> Run | Runs:
    """Return a run folder as Run, a folder of runs (e.g. runs/quick) as Runs. Raises UsageError if there is no run."""
    path = Path(path)
    found = tuple(Run(folder) for folder in find_runs(path))
    if found and found[0].folder == path:
        return found[0]
    if not found:
        raise UsageError(f"{path}: contains no run folder. Give a folder that `testbed run` or `testbed sweep` wrote.")
    return Runs(path, found)


def draw_figure(folders: Sequence[Path], name: str) -> Plot:
    """Return the figure of that name. Raises SpecError if these runs have none."""
    require_extra("figures", "report", "matplotlib", "jinja2")
    from testbed.report.load import load as load_runs
    from testbed.report.model import chapters
    from testbed.report.page import make_section

    loaded = load_runs(folders)
    plots = {plot.name: plot for chapter in chapters(loaded) for plot in make_section(chapter).plots}
    wanted = FIGURES.get(name, name)
    if wanted not in plots:
        short = {full: key for key, full in FIGURES.items()}
        known = ", ".join(short.get(full, full) for full in plots) or "none, because no run succeeded"
        raise refuse("figure", name, "these runs have no such figure", f"Known: {known}.")
    return plots[wanted]


def save_experiment(experiment: Experiment) -> None:
    """Write experiment.json into the experiment's folder. A report reads its title and published figures from there."""
    folder = runs_dir() / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / EXPERIMENT, experiment.model_dump_json(indent=1))


def _experiment(source: Experiment | Mapping[str, Any] | Path | str) -> Experiment:
    if isinstance(source, Experiment):
        return source
    if isinstance(source, Mapping):
        return Experiment.load({"name": "adhoc", "title": ""} | dict(source), "experiment")
    return Experiment.read(Path(source))


@contextmanager
def _show_progress(quiet: bool, headline: str) -> Iterator[Progress]:
    """Print the headline, yield the progress display, and close it at the end."""
    progress = open_progress(console, quiet)
    progress.headline(headline)
    try:
        yield progress
    finally:
        progress.end()


def _html(summaries: Sequence[Summary], folder: str) -> str:
    """Return the results table as HTML; footnotes and runs that are not ok are listed below it."""

    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    counted = [summary for summary in summaries if summary.status == "ok"]
    parts = []
    if counted:
        header, rows = table(counted)
        body = "".join(row(cells, "td") for cells in rows)
        parts = [f"<p>{html.escape(caption(counted))}</p>", f"<table>{row(header, 'th')}{body}</table>"]
    parts += [f"<p>{html.escape(line)}</p>" for line in [*footnotes(summaries), *left_out(summaries), folder]]
    return "".join(parts)
