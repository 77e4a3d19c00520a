"""The command `testbed predict`. testbed.predict is imported inside functions: other commands do not need it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed.control.cli.documents import print_document
from testbed.control.cli.options import Json
from testbed.control.cli.report import Folders, report_folder
from testbed.control.runs.emulation import dilation_for
from testbed.control.runs.progress import console
from testbed.results.table import BUSY_MARK, format_table
from testbed.spec.errors import UsageError, refuse, require_extra
from testbed.spec.run import MAX_DILATION

if TYPE_CHECKING:
    from testbed.predict.calibrate import Calibration
    from testbed.predict.check import Checked
    from testbed.predict.scale import Point, Prediction, Predictor

app = typer.Typer()
DEFAULT_NODES = "1..1024"

Nodes = Annotated[str | None, typer.Option(help=f"e.g. 8..1024, which doubles, or 8,16,32 [default: {DEFAULT_NODES}]")]
Rates = Annotated[
    str | None,
    typer.Option(help="of every link but the racks' uplinks, e.g. 1gbit,10gbit [default: as in the runs, and others]"),
]
Delays = Annotated[str | None, typer.Option(help="one way, e.g. 0ms,25ms [default: as in the runs, and others]")]
Speeds = Annotated[str, typer.Option(help="compute is so many times faster, e.g. 1,10")]
Modes = Annotated[
    str | None, typer.Option(help="e.g. ring,ddp,pipeline,every:8 [default: those of the runs and the usual ones]")
]
OfModel = Annotated[
    Path | None, typer.Option(help="compute of another model, by `testbed profile` [default: as in the runs]")
]
Checks = Annotated[
    str | None, typer.Option(metavar="NODES", help="measure there on emulated nodes, e.g. 8,16,32, and compare")
]
Dilation = Annotated[
    float | None, typer.Option(metavar="K", help="of --check: measure at least K times slower [default: as needed]")
]
Out = Annotated[Path | None, typer.Option(help="folder for what-if.html [default: the folder of the runs]")]


@app.command()
def predict(
    runs: Folders,
    nodes: Nodes = None,
    rate: Rates = None,
    delay: Delays = None,
    speed: Speeds = "1",
    modes: Modes = None,
    profile: OfModel = None,
    check: Checks = None,
    dilation: Dilation = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Predict a step on more nodes, or on another network, from what was measured.

    The table has the seconds of a step and its band. what-if.html has the same model with sliders.
    """
    from testbed.predict import scale
    from testbed.predict.calibrate import calibrate

    _refuse_together(check, nodes, dilation)
    asked = check or nodes
    counts = scale.parse_nodes(asked or DEFAULT_NODES)
    rates = scale.parse_rates(rate) if rate else [None]
    delays = scale.parse_delays(delay) if delay else [None]
    speeds = scale.parse_speeds(speed)
    wanted = scale.parse_modes(modes) if modes else []
    if wanted and not asked:
        several = any(mode.distributed for mode in wanted)
        counts = [n for n in counts if (n > 1) == several]
    scale.check_modes(wanted, counts)
    calibration = calibrate(runs, profile)
    predictor = scale.Predictor(calibration)
    chosen = wanted or scale.default_modes(calibration)
    places = [scale.Point(counts[0], *place) for place in product(rates, delays, speeds)]
    if check:
        points = [replace(each, nodes=n) for each in places for n in counts]
        _check(calibration, chosen, points, out or _beside(runs), dilation or 1.0, as_json)
        return
    if rate is None and delay is None:
        places += [other for place in places for other in scale.other_networks(place, calibration)]
    found = {place: _along(predictor, chosen, counts, place) for place in places}
    if as_json:
        print_document(_document(predictor, [each for rows in found.values() for each in rows]))
        return
    _print_calibration(predictor)
    for place, predictions in found.items():
        _print_table(calibration, place, predictions)
    console.print(f"\n{_page(predictor, chosen, out or report_folder(runs))}")


def _refuse_together(check: str | None, nodes: str | None, dilation: float | None) -> None:
    if check and nodes:
        raise refuse("--nodes", nodes, f"--check {check} names the nodes that are measured", "Give one of them.")
    if dilation is not None and not check:
        raise refuse("--dilation", dilation, "only what --check measures is made slower", "Add e.g. --check 8.")
    if dilation is not None and not 1 <= dilation <= MAX_DILATION:
        rule = f"measured points are so many times slower, from 1 to {MAX_DILATION:g}"
        raise refuse("--dilation", dilation, rule, "Write e.g. 2, or leave it out.")


def _beside(runs: list[Path]) -> Path:
    """The folder for `--check` of these runs."""
    return report_folder(runs).with_name(f"{report_folder(runs).name}-check")


def _check(
    calibration: Calibration, modes: list[Any], points: list[Point], folder: Path, least: float, as_json: bool
) -> None:
    """Predict, measure on emulated nodes, and print the error of each point; resume what is in the folder."""
    from testbed.predict import check

    def announce(each: check.Checked) -> None:
        if not as_json:
            slower = f", {each.point.dilation:g} times slower" if each.point.dilation != 1 else ""
            console.print(f"  {each.name}: predicted {each.predicted:.3g} s a step{slower}")

    if not as_json:
        console.print(f"predictions are in {folder / check.PREDICTIONS}, and are measured now")
    found = check.check(
        calibration, modes, points, folder, announce, slower=lambda keys, profile: dilation_for(keys, profile, least)
    )
    judged = check.verdict(found)
    if as_json:
        rows = [_figures_of_check(each) for each in found]
        print_document({"folder": str(folder), "points": rows, "verdict": vars(judged) if judged else None})
        return
    rows_of_table = [
        (
            str(each.mode),
            str(each.point.nodes),
            _network(each, calibration),
            f"{each.point.dilation:g}",
            f"{each.predicted:.3f}",
            *_outcome(each),
        )
        for each in found
    ]
    header = ("mode", "nodes", "network", "dilation", "predicted s", "measured s", "error")
    console.print(f"\n{format_table(header, rows_of_table)}\n")
    if any(each.busy for each in found):
        console.print(
            f"{BUSY_MARK.strip()} other work took much of this machine's processor meanwhile: measure it again"
        )
    for each in found:
        if each.missing:
            console.print(f"{each.name} was not measured: {each.missing}")
    console.print(judged.sentence if judged else "nothing was measured")
    console.print(f"predicted and measured: {folder / check.MEASURED}")
    drawn = check.with_measured(calibration, found)
    console.print(_page(drawn, list(dict.fromkeys([*modes, *(each.mode for each in found)])), folder))


def _outcome(each: Checked) -> tuple[str, str]:
    if each.error is None:
        return "-", "-"
    return f"{each.measured:.3f}", f"{100 * each.error:+.1f} %{BUSY_MARK if each.busy else ''}"


def _network(each: Checked, calibration: Calibration) -> str:
    from testbed.predict.scale import in_words

    return in_words(each.point, calibration)


def _figures_of_check(each: Checked) -> dict[str, Any]:
    return {
        "mode": str(each.mode),
        **vars(each.point),
        "predicted": each.predicted,
        "low": each.low,
        "high": each.high,
        "measured": each.measured,
        "error": each.error,
        "missing": each.missing,
        "busy": each.busy,
    }


def _page(predictor: Predictor, modes: list[Any], out: Path) -> str:
    """Write the page and return a line with its path, or with what is missing to make it."""
    try:
        require_extra("the page", "report", "matplotlib", "jinja2")
    except UsageError as missing:
        return f"no page: {missing}"
    from testbed.predict.page import write

    return f"with sliders: {write(predictor, modes, out)}"


def _along(predictor: Predictor, modes: list[Any], counts: list[int], place: Point) -> list[Prediction]:
    return [predictor.at(mode, replace(place, nodes=count)) for mode in modes for count in counts]


def _print_calibration(predictor: Predictor) -> None:
    """Print each parameter with its source, what was assumed, and how far the model is from what was measured."""
    calibration = predictor.calibration
    base = calibration.base
    console.print(
        f"{calibration.profile.model}, {calibration.batch_per_rank} a rank; calibrated on {base.nodes} nodes"
        f"{' with emulated compute' if base.emulated else ''}\n"
    )
    rows = [
        (each.name, f"{each.value:.4g} {each.unit}", f"{100 * each.spread:.1f} %" if each.spread else "-", each.source)
        for each in calibration.parameters
    ]
    console.print(f"{format_table(('parameter', 'value', '+-', 'source'), rows)}\n")
    for note in calibration.notes:
        console.print(f"note: {note}")
    measured = [
        (str(each.mode), str(each.nodes), f"{each.seconds:.3f}", _misfit(predictor.misfit[each.folder]))
        for each in calibration.measured
    ]
    if measured:
        console.print(f"\n{format_table(('measured mode', 'nodes', 's/iter', 'model'), measured)}")


def _misfit(off: float | None) -> str:
    return "-" if off is None else f"{100 * off:+.1f} %"


def _print_table(calibration: Calibration, place: Point, predictions: list[Prediction]) -> None:
    """Print seconds per step and their band, modes down and nodes across, and the fastest mode."""
    from testbed.predict.scale import in_words

    counts = sorted({each.point.nodes for each in predictions})
    modes = list(dict.fromkeys(each.mode for each in predictions))
    cells = {(each.mode, each.point.nodes): each for each in predictions}
    rows = [(str(mode), *(_cell(cells[mode, count]) for count in counts)) for mode in modes]
    console.print(f"\npredicted s/iter: {in_words(place, calibration)}\n")
    console.print(format_table(("mode", *(_nodes(count) for count in counts)), rows))
    several = [count for count in counts if count > 1]
    if not several:
        return
    console.print()
    fastest = [min((cells[mode, count] for mode in modes), key=lambda each: each.step.seconds) for count in several]
    console.print(format_table(("fastest", *(_nodes(count) for count in several)), _winners(fastest)))


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count > 1 else ''}"


def _winners(fastest: list[Prediction]) -> list[tuple[str, ...]]:
    kept = ("efficiency", *(f"{100 * each.efficiency:.0f} %" for each in fastest))
    return [("mode", *(str(each.mode) for each in fastest)), kept]


def _cell(found: Prediction) -> str:
    half = (found.high - found.low) / 2 / found.step.seconds
    return f"{found.step.seconds:.3g} +-{100 * half:.0f} %"


def _document(predictor: Predictor, predictions: list[Prediction]) -> dict[str, Any]:
    calibration = predictor.calibration
    return {
        "model": calibration.profile.model,
        "parameters": [vars(each) for each in calibration.parameters],
        "notes": calibration.notes,
        "measured": [
            {
                "mode": str(each.mode),
                "nodes": each.nodes,
                "rate": each.rate,
                "emulated": each.emulated,
                "seconds": each.seconds,
                "model_error": predictor.misfit[each.folder],
                "folder": str(each.folder),
            }
            for each in calibration.measured
        ],
        "predictions": [_figures(each) for each in predictions],
    }


def _figures(found: Prediction) -> dict[str, Any]:
    return {
        "mode": str(found.mode),
        "nodes": found.point.nodes,
        "rate": found.point.rate,
        "delay": found.point.delay,
        "speed": found.point.speed,
        "seconds": found.step.seconds,
        "low": found.low,
        "high": found.high,
        "exposed": found.step.exposed,
        "efficiency": found.efficiency,
        "speed_up": found.speed_up,
    }
