"""Write the report: the page, and a folder next to it with every figure, every table and all numbers for scripts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2

from testbed import __version__
from testbed.report import findings, tables
from testbed.report.figures import axes, modes, time
from testbed.report.figures.style import Plot, css
from testbed.report.figures.time import draw_faults
from testbed.report.findings import Verdict, verdict
from testbed.report.load import Loaded, Skipped, load
from testbed.report.model import Cell, Chapter, Focus, chapters, focus
from testbed.report.published import Published, published
from testbed.report.script import ScriptPart, script_parts
from testbed.report.tables import Table
from testbed.results.folder import finite, write_whole
from testbed.results.table import caption
from testbed.spec.errors import UsageError, refuse

PAGE = "report.html"
FILES = "report"  # folder next to the page
WRONG = "What is wrong in the published figures:"
NAMED = 5  # most folders that a message names if they cannot be shown
FAULTS = "faults"  # prefix of the file names of the section on faults


@dataclass(frozen=True)
class Section:
    """Everything that the page shows of one chapter."""

    chapter: Chapter
    slug: str
    name: str
    title: str
    caption: str
    verdict: Verdict
    tables: list[Table]
    plots: list[Plot]
    published: Published | None
    scripts: list[ScriptPart]  # one for each user's script
    shown: str  # a sentence on which cells the side-by-side figures show; empty if all


@dataclass(frozen=True)
class Faults:
    """Everything that the page shows of the runs with injected faults. Failed runs are in no chapter."""

    finding: str
    table: Table
    plots: list[Plot]


@dataclass(frozen=True)
class Report:
    """The written page and its content."""

    page: Path
    sections: list[Section]
    faults: Faults | None
    skipped: list[Skipped]


def write(paths: Sequence[Path], out: Path) -> Report:
    """Read the runs below `paths` and write the report to the folder `out`. Raise UsageError without a run to show."""
    files = out / FILES
    if files.is_symlink() or (files.exists() and not files.is_dir()):  # `out` may come from another user
        rule, way_out = "is a symlink or not a folder", "Remove it, or give another folder with --out."
        raise refuse("report folder", str(files), rule, way_out)
    loaded = load(paths)
    if not loaded.runs and not loaded.faulted:
        raise UsageError(_nothing_to_show(paths, loaded))
    sections = [make_section(chapter) for chapter in chapters(loaded)]
    faults = make_faults(loaded)
    files.mkdir(parents=True, exist_ok=True)
    for section in sections:
        _write_files(
            section.slug,
            section.plots,
            [
                *section.tables,
                *(section.published.tables if section.published else []),
                *(table for part in section.scripts for table in part.tables),
            ],
            files,
        )
    if faults:
        _write_files(FAULTS, faults.plots, [faults.table], files)
    texts = [*map(_markdown, sections), *([_faults_markdown(faults)] if faults else [])]
    write_whole(files / "report.md", "\n".join(texts) + _left_out(loaded.skipped))
    write_whole(files / "report.json", json.dumps(finite(_figures(sections, loaded)), indent=1, allow_nan=False))
    write_whole(out / PAGE, render(sections, faults, loaded))
    return Report(out / PAGE, sections, faults, loaded.skipped)


def _nothing_to_show(paths: Sequence[Path], loaded: Loaded) -> str:
    named = ", ".join(map(str, paths))
    if not loaded.skipped:
        return f"{named}: no run folder in it. Make one with `testbed run`."
    reasons = [f"{each.path.name}: {each.reason.rstrip('.')}" for each in loaded.skipped[:NAMED]]
    reasons += [f"{len(loaded.skipped) - NAMED} more"] if len(loaded.skipped) > NAMED else []
    rule = f"none of {len(loaded.skipped)} run folders can be shown ({'; '.join(reasons)})"
    return f"{named}: {rule}. Give a folder with a run that has ended well, or repeat one of these runs."


def make_section(chapter: Chapter) -> Section:
    focused = focus(chapter)
    swept = [plot for draw in axes.ALONG for plot in draw(chapter)]
    return Section(
        chapter=chapter,
        slug=slug(chapter.name),
        name=chapter.name,
        title=chapter.title,
        caption=caption(chapter.summaries),
        verdict=verdict(chapter, swept[0].finding if swept else ""),
        tables=_tables(chapter),
        plots=[*swept, *_plots(chapter, focused)],
        published=published(chapter),
        scripts=script_parts(chapter),
        shown=focused.shown,
    )


def _tables(chapter: Chapter) -> list[Table]:
    """Return all tables that have rows, in the order of the page."""
    made = [
        tables.modes(chapter),
        *tables.workers_by_batch(chapter),
        tables.split(chapter),
        tables.traffic(chapter),
        tables.wire(chapter),
        tables.epochs(chapter),
        tables.ranks(chapter),
        tables.compact(chapter),
        tables.network(chapter),
    ]
    return [table for table in made if table]


DrawModes = Callable[[Sequence[Cell], Sequence[str]], Plot | None]
# Each file of figures lists its figures at its end. The order here is the order on the page.
DETAILED: tuple[DrawModes, ...] = (*modes.DETAILED, *time.DETAILED)
SIDE_BY_SIDE: tuple[DrawModes, ...] = (*modes.SIDE_BY_SIDE, *time.SIDE_BY_SIDE)
LEARNING: tuple[DrawModes, ...] = time.LEARNING


def _plots(chapter: Chapter, focused: Focus) -> list[Plot]:
    """Return the figures of slow ranks, then those that show modes side by side."""
    detailed = focused.only(lambda cell: cell.spec.spans)
    # ranks of a control run train different models; a script may have no observed loss
    learning = focused.only(lambda cell: not cell.spec.mode.is_control and len(cell.losses()) > 0)
    groups = ((DETAILED, detailed), (SIDE_BY_SIDE, focused), (LEARNING, learning))
    drawn = [draw(group.cells, group.names) for draws, group in groups if group.cells for draw in draws]
    return [*modes.slow_ranks(chapter), *(plot for plot in drawn if plot)]


def make_faults(loaded: Loaded) -> Faults | None:
    runs = loaded.faulted
    if not runs:
        return None
    return Faults(findings.faults(runs), tables.faults(runs), draw_faults(runs))


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "runs"


def render(sections: Sequence[Section], faults: Faults | None, loaded: Loaded) -> str:
    """Return the page as HTML. Every value from a run folder is escaped."""
    loader = jinja2.PackageLoader("testbed.report", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("page.html.j2").render(
        title=sections[0].title if len(sections) == 1 else "testbed report",
        chapters=sections,
        wrong=WRONG,
        faults=faults,
        runs=len(loaded.runs),
        skipped=loaded.skipped,
        version=__version__,
        light=css(False),
        dark=css(True),
        environment=_environment(sections),
    )


def _environment(sections: Sequence[Section]) -> dict[str, str]:
    """Return versions, kernel and CPU as rank 0 of each run recorded them; up to three values where runs differ."""
    found: dict[str, dict[str, None]] = {}
    for section in sections:
        for summary in section.chapter.summaries:
            for key, value in summary.environment.items():
                found.setdefault(str(key), {})[str(value)] = None
    return {key: _few(list(values)) for key, values in found.items() if key != "load"}


def _few(values: list[str]) -> str:
    return ", ".join(values[:3]) + (f" and {len(values) - 3} more" if len(values) > 3 else "")


def _write_files(slug: str, plots: Sequence[Plot], tables: Sequence[Table], files: Path) -> None:
    for plot in plots:
        write_whole(files / f"{slug}-{plot.name}.svg", plot.svg)
        write_whole(files / f"{slug}-{plot.name}.png", plot.png)
    for table in tables:
        write_whole(files / f"{slug}-{table.name}.csv", table.csv())


def _markdown(section: Section) -> str:
    lines = [
        f"## {section.title}",
        "",
        f"{section.verdict.headline}.",
        "",
        *section.verdict.why,
        "",
        f"{section.caption}.",
        "",
    ]
    states = {True: "passed", False: "FAILED", None: "open"}
    lines += [f"- {states[check.ok]}: {check.text}" for check in section.verdict.checks]
    for part in section.scripts:
        lines += ["", part.markdown()]
    if section.published:
        lines += ["", *(f"- {claim.word} {claim.text}" for claim in section.published.sentences)]
        lines += (
            ["", WRONG, "", *(f"- {mistake}" for mistake in section.published.mistakes)]
            if section.published.mistakes
            else []
        )
        lines += ["", *(table.markdown() for table in section.published.tables)]
    lines += ["", *(table.markdown() for table in section.tables)]
    return "\n".join([*lines, *_pictures(section.slug, section.plots)])


def _faults_markdown(faults: Faults) -> str:
    return "\n".join([f"## {faults.finding}", "", faults.table.markdown(), *_pictures(FAULTS, faults.plots)])


def _pictures(slug: str, plots: Sequence[Plot]) -> list[str]:
    return [f"![{plot.finding}]({slug}-{plot.name}.svg)\n" for plot in plots]


def _left_out(skipped: Sequence[Skipped]) -> str:
    return "".join(["\n## Left out\n\n", *(f"- {s.path}: {s.reason}\n" for s in skipped)]) if skipped else ""


def _figures(sections: Sequence[Section], loaded: Loaded) -> dict[str, Any]:
    """Return the content of report.json: all numbers of every cell, for scripts."""
    return {
        "testbed": __version__,
        "experiments": {
            section.name: [
                _cell_figures(section.chapter, cell)
                | next(({"script": part.figures()} for part in section.scripts if part.cell is cell), {})
                for cell in section.chapter.cells
            ]
            for section in sections
        },
        "left_out": [{"folder": str(s.path), "reason": s.reason} for s in loaded.skipped],
    }


def _cell_figures(chapter: Chapter, cell: Cell) -> dict[str, Any]:
    waiting = cell.waiting
    return {
        "mode": cell.label,
        "substrate": cell.substrate,
        "folders": [str(run.folder.path) for run in cell.runs],
        "spec": json.loads(cell.spec.to_json()) if cell.spec.script is None else cell.flat,
        "seconds": asdict(cell.seconds),
        "left_out_steps": sum(run.summary.left_out_steps for run in cell.runs),
        "speed_up": chapter.speed_up(cell),
        "images_per_second": cell.images_per_second,
        "split": asdict(cell.split) | {"hidden_share": cell.split.hidden_share} if cell.spec.spans else None,
        "waiting": asdict(waiting) | {"slowest": waiting.slowest},
        "stragglers": [asdict(each) for each in cell.stragglers],
        "bound": cell.bound,
        "sent_per_step": cell.sent(),
        "received_per_step": cell.received(),
        "needed_per_step": cell.needed(),
        "test_accuracy": cell.first.summary.test_accuracy,
        "test_loss": cell.first.summary.test_loss,
        "machines": [[machine.model_dump() for machine in run.summary.machines] for run in cell.runs],
    }
