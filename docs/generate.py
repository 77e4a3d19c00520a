"""Write what documents and .env.example have from other files: rows in testbed/spec, and figures in results/.

The plot of the five models in results/ is drawn from the same figures.

python -m docs.generate            write these files (`make docs`)
python -m docs.generate --check    exit with 1 if one of them is out of date

What is written lies between two marks. The first word after `begin` is a row of MADE, the others are its arguments:

    <!-- begin bench loop start (made by `make docs`) -->      the figures of these parts of results/bench.json
    <!-- end bench loop start -->

    soak                outcomes of the parts of `make soak`, from results/soak
    sweeps              the tables of every experiment in results/sweeps (`make measure`), and which have none
    earlier NAME        a table of results/earlier.json, without the experiments that results/sweeps has
    quick               what `make run` prints
    predictions         what `testbed predict --check` predicted and measured, from results/predict
    mistakes            what is wrong in the published figures, from the experiment files
    transports NAME...  which transport the pipeline had in the parts of the bench that the next text speaks of

How old a figure may be: at most MOST_CHANGES commits may have changed the code that it speaks of since it was measured.
A figure of uncommitted changes is too old at once. `make docs` lists the figures that are older in results/old.json,
and each table names its own. A test fails if that list is wrong, so a figure that becomes too old is measured again or
is shown to be old. Another one fails if the list is not empty in a release. The list also has the parts of the bench
that were measured while the pipeline sent through Gloo; tables, rows and text say so.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from testbed.report.load import load
from testbed.report.model import Chapter, chapters
from testbed.report.published import published
from testbed.report.tables import Table, as_text, modes
from testbed.results.table import BUSY_MARK, caption, format_table, table
from testbed.spec.errors import SpecError
from testbed.spec.experiment import Experiment
from testbed.spec.fault import FAULT_KINDS
from testbed.spec.mode import ALGORITHMS, CODECS, SCHEDULES, SyncMode, codecs_of
from testbed.spec.units import format_duration, format_rate, parse_rate
from tests.bench.__main__ import PARTS
from tests.bench.figures import MEASURED
from tests.bench.measure import experiment_files
from tests.bench.models import PLOT as MODELS_PLOT
from tests.bench.models import plot as plot_models
from tests.bench.models import sizes_table
from tests.bench.models import table as models_table
from tests.soak.__main__ import PARTS as SOAK_PARTS
from tests.soak.outcomes import SOAKED
from tests.support.provenance import changes_since, has_file, has_whole_history

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "results" / "bench.json"
SWEEPS = ROOT / "results" / "sweeps"  # NAME.tar.xz: run folders of an experiment, and how they were measured
EARLIER = ROOT / "results" / "earlier.json"  # tables that were typed before files were kept
PREDICT = ROOT / "results" / "predict"  # NAME.json: measured.json of `testbed predict --check`
SOAK = ROOT / "results" / "soak"
OLD = ROOT / "results" / "old.json"  # figures that are older than the rule allows, e.g. "bench loop"
MOST_CHANGES = 50
TRANSPORT = "testbed/rank/sync/transport.py"  # before the commit that added it, the pipeline sent through Gloo
PIPELINE = re.compile("pipeline|exact modes")  # in the figures of a part: it measured a pipeline
MAX_ROWS = 24  # of a table in a document: the rest is left out
DOCUMENTS = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
BLOCK = re.compile(r"(<!-- begin ([^\n(]+?) \(made by `make docs`\) -->\n).*?(<!-- end \2 -->\n)", re.S)
SMALL = 1e-3  # values below are written as 1.1e-13
Lines = list[str]
UNMEASURED = ["Not measured yet."]

# --- how old figures are ----------------------------------------------------------------------------------------------


def too_old() -> list[str] | None:
    """Figures that are older than the rule allows, by name; None if the history is not there, as in a shallow clone.

    `gloo NAME` is a part of the bench with a pipeline that was measured before the pipeline had its own transport.
    """
    if not has_whole_history():
        return None
    sweeps = sorted(path.name.removesuffix(".tar.xz") for path in SWEEPS.glob("*.tar.xz"))
    figures = {f"bench {name}": (part["commit"], MEASURED) for name, part in bench_file().items()}
    for name in sweeps:
        found = archived(name)
        assert found is not None
        of = ("testbed", f"experiments/{name}.toml", "requirements*.txt")
        figures[f"sweeps {name}"] = (found[1]["commit"], of)
    figures |= {f"earlier {name}": (of["commit"], ("testbed",)) for name, of in earlier_file().items()}
    figures |= {
        f"soak {name}": (of["commit"], (*SOAKED, *SOAK_PARTS[name][2].also)) for name, of in soak_files().items()
    }
    figures |= {f"predict {name}": (_oldest(_commits(of)), ("testbed",)) for name, of in predict_files().items()}
    found = [name for name, (commit, paths) in figures.items() if _is_old(changes_since(commit, *paths))]
    pipelines = {name: part["commit"] for name, part in bench_file().items() if PIPELINE.search(json.dumps(part))}
    found += [f"gloo {name}" for name, commit in pipelines.items() if not has_file(commit, TRANSPORT)]
    return sorted(found)


def _oldest(commits: Lines) -> str:
    """The commit since which most commits changed the testbed; one that is not in the history is older than all."""
    changes = {commit: changes_since(commit, "testbed") for commit in commits}
    return max(commits, key=lambda commit: math.inf if changes[commit] is None else changes[commit] or 0, default="")


def _is_old(changes: int | None) -> bool:
    return changes is None or changes > MOST_CHANGES


@cache
def old() -> list[str]:
    names: list[str] = json.loads(OLD.read_text(encoding="utf-8"))
    return names


def _age(kind: str, *names: str) -> str:
    """A sentence that names those of these figures that are too old; empty if none is."""
    found = [name for name in names if f"{kind} {name}" in old()]
    which = "" if found == list(names) else f": {', '.join(f'`{name}`' for name in found)}"
    return f" Old: more than {MOST_CHANGES} later commits changed the measured code{which}." if found else ""


def _through_gloo(*parts: str) -> list[str]:
    return [name for name in parts if f"gloo {name}" in old()]


def transports(*names: str) -> Lines:
    """A sentence above a text: which transport the pipeline had in the parts that it speaks of."""
    gloo = _through_gloo(*names)
    kinds = {
        "`pipeline` sent through Gloo": gloo,
        "`pipeline` had its own transport": [n for n in names if n not in gloo],
    }
    said = [f"{', '.join(f'`{name}`' for name in of)} ({kind})" for kind, of in kinds.items() if of]
    return [f"The text below is about the figures of {' and '.join(said)}."]


# --- rows of testbed/spec --------------------------------------------------------------------------------------------


def algorithms() -> Lines:
    rows = [f"| `{name}` | {row.does} | {row.time} |" for name, row in ALGORITHMS.items()]
    return ["| algorithm | what it does | time |", "| --- | --- | --- |", *rows]


def schedules() -> Lines:
    return [f"- `{name}`: {does}" for name, does in SCHEDULES.items()]


def codecs() -> Lines:
    takes = {name: codecs_of(SyncMode.parse(name)) for name in ALGORITHMS}
    lines = ["| codec | what is sent | bytes | with |", "| --- | --- | ---: | --- |"]
    for codec in CODECS.values():
        takers = [f"`{name}`" for name, examples in takes.items() if codec.example in examples]
        others = [f"`{name}`" for name, examples in takes.items() if codec.example not in examples]
        allowed = ", ".join(takers) if len(takers) < len(others) else f"all but {', '.join(others)}"
        lines.append(f"| `{codec.example}` | {codec.does} | {codec.bytes} | {allowed} |")
    return lines


def faults() -> Lines:
    everywhere = set().union(*(kind.substrates for kind in FAULT_KINDS.values()))
    lines = ["| fault | what happens | substrates |", "| --- | --- | --- |"]
    for kind in FAULT_KINDS.values():
        where = "all" if set(kind.substrates) == everywhere else ", ".join(kind.substrates)
        lines.append(f"| `{kind.example}` | {kind.does} | {where} |")
    return lines


def env_example(text: str) -> str:
    """Return the text of .env.example with a new list of algorithms after MODE."""
    line = f"MODE=ring            # {' '.join(ALGORITHMS)}; all: testbed modes"
    return re.sub(r"^MODE=.*$", line, text, flags=re.M)


# --- figures of results/bench.json -----------------------------------------------------------------------------------

Figure = dict[str, Any]
Part = dict[str, Any]  # commit, load, figures

# Parts whose figures make a grid: a pattern of their names that says which row and column each belongs to. Figures with
# other names are left out.
GRIDS = {
    "growth": r"(?P<row>.+), 8 MB, 100mbit, (?P<column>N = \d+): time / theory",
    "uplinks": r"(?P<row>.+), 8 MB, 100mbit, uplinks of 50mbit, (?P<column>racks .+): time / theory",
    "attach-cost": r"step with the observer / without, (?P<row>.+), (?P<column>steps of \d+ ms)",
    "codecs": r"(?P<column>bytes|accuracy)( a step)?, (?P<row>\S+) (/ 2\(N-1\)/N S|less .*)",
}


@cache
def bench_file() -> dict[str, Part]:
    parts: dict[str, Part] = json.loads(BENCH.read_text(encoding="utf-8"))
    return parts


def parts_named(*names: str) -> dict[str, Part]:
    """The parts of these names that are measured; `attach` names all parts `attach-...`. SystemExit: none is known."""
    found = {}
    for name in names:
        these = {part: of for part, of in bench_file().items() if _is_named(part, [name])}
        if not these and not any(_is_named(part, [name]) for part in PARTS):
            raise SystemExit(f"make bench has no part {name!r}. Known: {', '.join(PARTS)}.")
        found |= these
    return found


def bench(*names: str) -> Lines:
    """A row for each figure of these parts: name, value, limit. A part in GRIDS is written as a grid."""
    parts = parts_named(*names)
    if not parts:
        return UNMEASURED
    if len(parts) == 1 and (pattern := GRIDS.get(next(iter(parts)))):
        (part,) = parts.values()
        return [*_grid(part, pattern), "", _measured_at(parts, *names)]
    lines = ["| figure | measured | limit |", "| --- | ---: | ---: |"]
    for part in parts.values():
        lines += [f"| {_name(each)} | {_value(each)}{_missed(each)} | {_limit(each)} |" for each in part["figures"]]
    return [*lines, "", _measured_at(parts, *names)]


def _grid(part: Part, pattern: str) -> Lines:
    """Rows and columns in the order of the figures; limits in a row of their own if each column has one."""
    cells: dict[str, dict[str, Figure]] = {}
    for each in part["figures"]:
        if found := re.fullmatch(pattern, each["name"]):
            cells.setdefault(found["row"], {})[found["column"]] = each
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    limits = {column: {_limit(row[column]) for row in cells.values() if column in row} for column in columns}
    one_limit = all(len(each) == 1 for each in limits.values())
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for name, row in cells.items():
        texts = [
            _value(row[column]) + _missed(row[column], alone=one_limit) if column in row else "" for column in columns
        ]
        lines.append(f"| {name.replace('|', '/')} | {' | '.join(texts)} |")
    if one_limit:
        lines.append(f"| limit | {' | '.join(next(iter(limits[column])) for column in columns)} |")
    return lines


def steps() -> Lines:
    """A row for each part `step-...`, the slowest network first."""
    head = ["rate", "C/(F+B)", "C, F+B", "`ddp`, s", "DDP's best, s", "`pipeline`, s", "sent through"]
    head += ["`ddp` / `pipeline`"]
    head += ["DDP's best / `pipeline`", "`pipeline` / max(C, F+B)", "bytes / minimum"]
    parts = parts_named("step")
    rows = sorted((_step_row(name, part["figures"]) for name, part in parts.items()), key=lambda row: row[0])
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    return [*lines, *(f"| {' | '.join(cells)} |" for _, cells in rows), "", _measured_at(parts, "step")]


def _step_row(part: str, figures: list[Figure]) -> tuple[float, Lines]:
    """The rate in bits per second, and the cells of a row of `steps`."""

    def one(name: str, detail: str) -> tuple[Figure, re.Match[str], re.Match[str]]:
        for each in figures:
            in_name, in_detail = re.fullmatch(name, each["name"]), re.match(detail, each["detail"])
            if in_name and in_detail:
                return each, in_name, in_detail
        raise SystemExit(
            f"{BENCH.name}: no figure fits {name!r} and {detail!r}. Change docs/generate.py with the part."
        )

    seconds, point = r"(\S+) ([\d.]+) s \([^)]*\)", r", (\w+), C/\(F\+B\) = ([\d.]+)"
    default, where, default_times = one(rf"DDP's default / \S+{point}", rf"{seconds}, {seconds}")
    best, _, best_times = one(rf"DDP's best / \S+{point}", seconds)
    bound, _, parts = one(rf"\S+ / max\(C, F\+B\){point}", r"C ([\d.]+) s, F\+B ([\d.]+) s")
    sent, _, _ = one(r"bytes of \S+ / least, \w+", "")
    rate, size = (
        parse_rate(where[1]),
        (lambda mode: mode.split("/")[1].removeprefix("bucket:") if "/" in mode else mode),
    )
    times = [
        f"{default_times[4]}",
        f"{best_times[2]} ({size(best_times[1])})",
        f"{default_times[2]} ({size(default_times[1])})",
        "Gloo" if _through_gloo(part) else "its own transport",
    ]
    ratios = [
        f"{_value(each, 2)}{_missed(each)}" + (f" (limit {_number(_bound(each))})" if _limit(each) else "")
        for each in (default, best, bound)
    ]
    name = f"{rate / 1e9:g} Gbit" if rate >= 1e9 else f"{rate / 1e6:g} Mbit"
    return rate, [name, where[2], f"{parts[1]}, {parts[2]}", *times, *ratios, _value(sent)]


def _bound(figure: Figure) -> float:
    return float(figure["low"] if figure["low"] is not None else figure["high"])


def models() -> Lines:
    """A row for each model and ratio of wire time to compute time, and the plot of the gains (`draw` makes it)."""
    parts = parts_named("models")
    if not parts:
        return UNMEASURED
    plot = f"![gain over DDP's best against C/(F+B), a line a model](../results/{MODELS_PLOT.name})"
    return [*models_table(parts), "", _measured_at(parts, "models"), "", plot]


def draw() -> None:
    """Draw the plots of the documents from results/bench.json."""
    if parts := parts_named("models"):
        plot_models(parts)


def sizes() -> Lines:
    """A row for each model and ratio at which bucket sizes were compared."""
    parts = parts_named("sizes")
    return [*sizes_table(parts), "", _measured_at(parts, "sizes")] if parts else UNMEASURED


def profile() -> Lines:
    """A row for each mode whose use of the cores was sampled."""
    lines = ["| | step, s | user | system | softirq | idle | context switches |", f"| --- |{' ---: |' * 6}"]
    detail = r"programs (\S+), kernel (\S+), packets (\S+), idle (\S+), (\d+) switches; step (\S+) s"
    parts = parts_named("profile")
    for each in (figure for part in parts.values() for figure in part["figures"]):
        mode = each["name"].removeprefix("core-seconds of a step, all four ranks, ").rpartition(", ")[0]
        found = re.match(detail, each["detail"])
        if found is None:
            raise SystemExit(
                f"{BENCH.name}: {each['detail']!r} has no core-seconds. Change docs/generate.py with the part."
            )
        user, system, softirq, idle, switches, step = found.groups()
        lines.append(f"| {mode} | {step} | {user} | {system} | {softirq} | {idle} | {int(switches):,} |")
    return [*lines, "", _measured_at(parts, "profile")]


def _name(figure: Figure) -> str:
    """The name of a figure. A mode that was removed since is named as such."""
    words = str(figure["name"]).replace("|", "/").split()
    return " ".join(f"{word} (removed since)" if _is_removed_mode(word) else word for word in words)


def _is_removed_mode(word: str) -> bool:
    if "/bucket:" not in word:  # "gather/scatter" is no mode either
        return False
    try:
        SyncMode.parse(word.rstrip(","))
    except SpecError:
        return True
    return False


def _value(figure: Figure, digits: int = 3) -> str:
    value = figure["value"]
    if isinstance(value, int):
        return str(value)
    if 0 < abs(value) < SMALL and "digits" not in figure:
        return f"{value:.1e}"
    return f"{value:.{figure.get('digits', digits)}f}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _limit(figure: Figure) -> str:
    low, high = figure["low"], figure["high"]
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}"
    return f">= {_number(low)}" if low is not None else f"<= {_number(high)}" if high is not None else ""


def _missed(figure: Figure, alone: bool = True) -> str:
    """What follows a value: that its limit is missed, or if nothing else says the limit, the limit."""
    verdict = [] if figure["met"] else ["missed"]
    limit = [f"limit {_limit(figure)}"] if not alone and _limit(figure) else []
    return f" ({', '.join([*limit, *verdict])})" if limit or verdict else ""


def _measured_at(parts: dict[str, Part], *names: str) -> str:
    """How many limits are met; commit and load of each part, parts of one commit together; which parts are missing.

    `names`: those of the table, of which `parts` are the measured parts.
    """
    limits = [each["met"] for part in parts.values() for each in part["figures"] if _limit(each)]
    met = f"{sum(limits)} of {len(limits)} limits are met. " if limits else ""
    commits, gloo = dict[str, Lines](), _through_gloo(*parts)
    for name, part in parts.items():
        load = part.get("load")
        commits.setdefault(part["commit"], []).append(
            f"`{name}`" + (f" (load {load:g} before)" if load is not None else "")
        )
    return (
        f"{met}Measured at commit "
        + "; ".join(f"{commit}: {', '.join(names)}" for commit, names in commits.items())
        + "."
        + _age("bench", *parts)
        + (f" There `pipeline` sent through Gloo: {', '.join(f'`{name}`' for name in gloo)}." if gloo else "")
        + _not_measured(part for part in PARTS if part not in parts and _is_named(part, names))
    )


def _not_measured(names: Iterable[str]) -> str:
    """A sentence that names them; empty if there are none."""
    listed = ", ".join(f"`{name}`" for name in names)
    return f" Not measured yet: {listed}." if listed else ""


def _is_named(part: str, names: Iterable[str]) -> bool:
    """`attach` names all parts `attach-...`."""
    return any(part == name or part.startswith(f"{name}-") for name in names)


# --- outcomes of the soak ---------------------------------------------------------------------------------------------

COUNTED = {  # key of results/soak/PART.json: how its value is written
    "median_seconds": "median {} s",
    "most_seconds": "at most {} s",
    "named": "failed rank named {} times",
    "identical": "{} with the undisturbed hash",
    "by_hand": "{} resumed by hand",
    "resumed": "{} continued from a checkpoint",
    "injected": "{} faults injected",
    "recovered": "{} recovered",
}


@cache
def soak_files() -> dict[str, dict[str, Any]]:
    """By name, in the order of the parts."""
    paths = {name: SOAK / f"{name}.json" for name in SOAK_PARTS}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def soak() -> Lines:
    """A row for each part: its promise, and what was counted."""
    files, lines = soak_files(), ["| part | promise | outcome |", "| --- | --- | --- |"]
    for name, (_, _, promise) in SOAK_PARTS.items():
        lines.append(f"| `{name}` | {' '.join(promise.words.split())} | {_outcome(files.get(name))} |")
    commits: dict[str, Lines] = {}
    for name, of in files.items():
        commits.setdefault(of["commit"], []).append(f"`{name}`")
    where = "; ".join(f"{commit}: {', '.join(names)}" for commit, names in commits.items())
    return [*lines, "", f"Counted at commit {where}.{_age('soak', *files)}"]


def _outcome(of: dict[str, Any] | None) -> str:
    if of is None:
        return "not counted yet"
    counts = [how.format(of[key]) for key, how in COUNTED.items() if of.get(key)]
    return ", ".join([f"{of['ok']} of {of['of']}", *counts, *(f"missed: {line}" for line in of["missed"])])


# --- predictions that were measured -----------------------------------------------------------------------------------


@cache
def predict_files() -> dict[str, dict[str, Any]]:
    """By name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(PREDICT.glob("*.json"))}


def predictions() -> Lines:
    """A section for each file: what it was calibrated on, every point with its error, and the verdict."""
    return [line for name, of in predict_files().items() for line in [*_checked(name, of), ""]][:-1] or UNMEASURED


def _checked(name: str, of: dict[str, Any]) -> Lines:
    batch = f"{of['batch_per_rank']} images a rank, {_network(of, {'rate': None, 'delay': None})}"
    fit = [f"`{each['mode']}` {_error(each['error'])}" for each in of["calibration"]]
    lines = [f"### `{name}`: {of['model']}, {batch}", ""]
    lines += (
        [f"Calibrated on {of['calibrated_on']} nodes; the model is off there by: {', '.join(fit)}.", ""] if fit else []
    )
    rows = [_checked_row(of, each) for each in of["points"] if each["measured"] is not None]
    head = ("mode", "nodes", "network", "dilation", "predicted s", "measured s", "error")
    lines += format_table(head, rows).splitlines()
    if any(each["busy"] for each in of["points"]):
        lines += ["", f"`{BUSY_MARK.strip()}`: measured beside other work."]
    left = [f"- {each['mode']} on {each['nodes']} nodes: {each['missing']}" for each in of["points"] if each["missing"]]
    lines += ["", "Not measured:", "", *left] if left else []
    at, predicted = _commits(of), sorted({each["commit"] for each in of["points"]})
    where = f"Predicted at commit {', '.join(predicted)}, measured at {', '.join(at)}, on {of['machine']}."
    return [*lines, "", f"{of['verdict']}.", "", f"{where}{_age('predict', name)}"]


def _checked_row(of: dict[str, Any], each: dict[str, Any]) -> tuple[str, ...]:
    error = _error(each["seconds"] / each["measured"] - 1) + (BUSY_MARK if each["busy"] else "")
    times = (f"{each['seconds']:.3f}", f"{each['measured']:.3f}")
    return (f"`{each['mode']}`", str(each["nodes"]), _network(of, each), f"{each['dilation']:g}", *times, error)


def _error(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.1f} %"


def _network(of: dict[str, Any], each: dict[str, Any]) -> str:
    """`100mbit, delay 10ms, compute 10 x faster`; what a point leaves open is that of the calibrating runs."""
    link = of["link"]
    rate = format_rate(round(each["rate"])) if each["rate"] else link.get("rate", "links without a rate")
    delay = link.get("delay") if each["delay"] is None else each["delay"] and format_duration(each["delay"])
    speed = each.get("speed", 1)
    faster = [f"compute {speed:g} x faster"] if speed != 1 else []
    return ", ".join([rate, *([f"delay {delay}"] if delay else []), *faster])


def _commits(of: dict[str, Any]) -> Lines:
    """The commits at which the points of a file were measured."""
    return sorted({each["measured_at"] for each in of["points"] if each["measured"] is not None})


# --- runs of experiments ---------------------------------------------------------------------------------------------


@cache
def archived(name: str) -> tuple[Chapter, dict[str, Any]] | None:
    """The runs of an experiment and what `make measure` noted of them; None if there is no archive."""
    path = SWEEPS / f"{name}.tar.xz"
    if not path.is_file():
        return None
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")
        facts: dict[str, Any] = json.loads((Path(folder) / name / "measured.json").read_text(encoding="utf-8"))
        loaded = load([Path(folder) / name])
    if loaded.skipped:
        raise SystemExit(f"{path.name}: {loaded.skipped[0].path.name}: {loaded.skipped[0].reason}. Measure it again.")
    (chapter,) = chapters(loaded)
    return chapter, facts


@cache
def earlier_file() -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(EARLIER.read_text(encoding="utf-8"))
    return tables


def sweeps() -> Lines:
    """A section for each archive, and the names of the experiments that have none."""
    names = sorted(path.name.removesuffix(".tar.xz") for path in SWEEPS.glob("*.tar.xz"))
    missing = ", ".join(f"`{name}`" for name in sorted({path.stem for path in experiment_files()} - {*names}))
    lines = [line for name in names if name != "quick" for line in [*_section(name), ""]]
    return [*lines, f"Without records yet (`make measure` makes them): {missing}."] if missing else lines[:-1]


@cache
def _section(name: str) -> Lines:
    """Title, how it was measured, each published finding with its state, and the tables."""
    found = archived(name)
    assert found is not None
    chapter, facts = found
    where = f"{len(chapter.summaries)} runs, {facts['minutes']:g} minutes on {facts['substrate']}"
    lines = [f"### `{name}`: {as_text(chapter.title)}", "", f"{as_text(caption(chapter.summaries))}."]
    load = f", load {facts['load']:g} before" if facts["load"] is not None else ""  # None: it was not recorded
    lines += [f"Measured at commit {facts['commit']}{load}; {where}.{_age('sweeps', name)}"]
    part = published(chapter)
    if part and part.sentences:
        lines += ["", *(f"- {claim.word} {as_text(claim.text)}" for claim in part.sentences)]
    for each in part.tables if part else [modes(chapter)]:
        lines += ["", f"{as_text(each.title)}:", "", *_table_lines(each)]
    return lines


def _table_lines(made: Table) -> Lines:
    rows = [[as_text(cell) for cell in row] for row in made.rows[:MAX_ROWS]]
    more = ["", f"{len(made.rows) - MAX_ROWS} more rows are left out."] if len(made.rows) > MAX_ROWS else []
    return [*format_table(made.header, rows).splitlines(), *more, *(["", as_text(made.note)] if made.note else [])]


def earlier(name: str) -> Lines:
    """Rows whose first cell names an experiment that has an archive are left out."""
    stored = earlier_file()[name]
    rows = [row for row in stored["rows"] if archived(row[0]) is None]
    lines = [f"| {' | '.join(row)} |" for row in (stored["header"], ["---"] * len(stored["header"]), *rows)]
    return [*lines, "", f"Measured at commit {stored['commit']}.{_age('earlier', name)}"]


def quick() -> Lines:
    """What `make run` printed when it was measured last."""
    found = archived("quick")
    if found is None:
        stored = earlier_file()["quick"]
        lines, commit, age = stored["lines"], stored["commit"], _age("earlier", "quick")
    else:
        first = {cell.first.summary.spec.name for cell in found[0].cells}  # the table has no columns for repeats
        runs = [each for each in found[0].summaries if each.spec.name in first]
        commit, age = found[1]["commit"], _age("sweeps", "quick")
        lines = [caption(runs), "", *format_table(*table(runs)).splitlines()]
    return ["```", *lines, "```", "", f"Commit {commit}{' (old)' if age else ''}."]  # README has few words


def mistakes() -> Lines:
    paths = [path for path in experiment_files() if re.match(r"r\d", path.name)]
    return [
        f"- `{path.stem}`: {each}" for path in paths for each in Experiment.read(path).published.get("mistakes", [])
    ]


# --- pages -----------------------------------------------------------------------------------------------------------

MADE: dict[str, Callable[..., Lines]] = {
    each.__name__: each
    for each in (
        *(algorithms, schedules, codecs, faults),
        *(bench, steps, models, sizes, profile, transports),
        *(soak, predictions, sweeps, earlier, quick, mistakes),
    )
}


def page(name: str, text: str) -> str:
    """Return the text of a document with new lines between its marks. SystemExit if a mark is damaged."""

    def made(block: re.Match[str]) -> str:
        word, *arguments = block[2].split()
        if word not in MADE:
            raise SystemExit(f"{name}: nothing makes {word!r}. Known: {', '.join(MADE)}.")
        return block[1] + "\n".join([*MADE[word](*arguments), ""]) + block[3]

    text, count = BLOCK.subn(made, text)
    if not text.count("<!-- begin ") == text.count("<!-- end ") == count:
        raise SystemExit(f"{name}: a mark `begin` without its `end`, or with other words. Restore its marks.")
    return text


def main() -> None:
    stale, names = [], too_old()
    if names is not None and (not OLD.is_file() or names != old()):
        stale.append(str(OLD.relative_to(ROOT)))
        if "--check" not in sys.argv:
            OLD.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
            old.cache_clear()
    for name in (*DOCUMENTS, ".env.example"):
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = env_example(before) if name == ".env.example" else page(name, before)
        if after != before:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(after, encoding="utf-8")
    if "--check" not in sys.argv:
        draw()
    if stale and "--check" in sys.argv:
        raise SystemExit(f"{', '.join(stale)}: out of date with testbed/spec or results. Run make docs.")
    print(f"written: {', '.join(stale)}" if stale else "up to date")


if __name__ == "__main__":
    main()
