"""what-if.html: the model with sliders, in one file. The page computes with model.js what step.py computes here.

Python writes what does not depend on a slider: the profile, the parameters and their draws, the rounds of each mode for
each number of nodes, and the measured points.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from testbed import __version__
from testbed.predict import collectives, step
from testbed.predict.calibrate import Calibration, family
from testbed.predict.collectives import Wire, halves, loads_of
from testbed.predict.scale import BAND, MAX_NODES, Predictor, racks_for
from testbed.predict.step import Node, Work
from testbed.report.figures.style import css
from testbed.results import theory
from testbed.results.folder import finite, write_whole
from testbed.results.theory import RoundLoad
from testbed.spec.datasets import dataset_info
from testbed.spec.errors import SpecError
from testbed.spec.fabric import Racks
from testbed.spec.mode import LAST_BUCKETS, SyncMode

PAGE = "what-if.html"
NODES = (*range(1, 17), *(part << k for k in range(2, 8) for part in (5, 6, 7, 8)))
CONSTANTS = {  # of model.js
    "segment_bytes": collectives.SEGMENT_BYTES,
    "goodput": collectives.GOODPUT,
    "loss_factor": collectives.LOSS_FACTOR,
    "element": step.ELEMENT_BYTES,
    "epsilon": step.EPSILON_S,
    "ddp_buckets": step.DDP_BUCKETS,
    "periods": step.PERIODS,
    "max_slowed": step.MAX_SLOWED,
    "last_buckets": LAST_BUCKETS,
    "band": BAND,
    "open": {  # of buckets whose size is left open
        "segment": theory.SEGMENT_S,
        "least": theory.MIN_PIPELINE_BYTES,
        "most": theory.MAX_PIPELINE_BYTES,
        "buckets": theory.LEAST_BUCKETS,
    },
}
MAX_RACKED = 64  # nodes in racks: beyond, making all their messages would take longer than the page may


def write(predictor: Predictor, modes: Sequence[SyncMode], out: Path) -> Path:
    """Write the page into a folder and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / PAGE, render(predictor, modes))
    return out / PAGE


def render(predictor: Predictor, modes: Sequence[SyncMode]) -> str:
    """The page as HTML. Every value that comes from a run folder is escaped."""
    loader = jinja2.ChoiceLoader(
        [jinja2.PackageLoader("testbed.predict", "."), jinja2.PackageLoader("testbed.report", ".")]
    )
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    calibration = predictor.calibration
    return environment.get_template("what-if.html.j2").render(
        model=calibration.profile.model,
        base=calibration.base,
        parameters=calibration.parameters,
        notes=[*calibration.notes, *([f"with racks up to {MAX_RACKED} nodes are drawn"] if calibration.racks else [])],
        version=__version__,
        light=css(False),
        dark=css(True),
        data=as_script(document(predictor, modes)),
    )


def as_script(value: Any) -> str:
    """JSON that is safe inside <script>: no text in it can end the element."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")


def document(predictor: Predictor, modes: Sequence[SyncMode]) -> dict[str, Any]:
    """Everything that the page computes from."""
    calibration = predictor.calibration
    base = calibration.base
    return {
        "model": calibration.profile.model,
        "batch": calibration.batch_per_rank,
        "samples": None if base.script else dataset_info(base.data.name).train,
        "nodes": [
            n for n in sorted({*NODES, *(each.nodes for each in calibration.measured)}) if n <= _most(calibration)
        ],
        "base": {"nodes": base.nodes, "rate": base.link.rate, "delay": base.link.delay or 0.0},
        "efficiency": calibration.efficiency,
        "work": _work(calibration.work),
        "node": _node(calibration.node),
        "wire": _wire(calibration.wire),
        "copies": calibration.copies,
        "codes": calibration.codes,
        "draws": [
            {
                "compute": each.compute,
                "ready": each.ready,
                "node": _node(each.node),
                "wire": _wire(each.wire),
                "copies": each.copies,
                "codes": each.codes,
            }
            for each in predictor.draws
        ],
        "constants": CONSTANTS,
        "rounds": _rounds(modes, calibration),
        "modes": [_mode(mode, predictor) for mode in modes],
        "measured": [
            {
                "mode": str(each.mode),
                "nodes": each.nodes,
                "rate": each.rate,
                "delay": each.delay,
                "seconds": each.seconds,
                "low": each.low,
                "high": each.high,
                "emulated": each.emulated,
            }
            for each in calibration.measured
        ],
    }


def _most(calibration: Calibration) -> int:
    """The largest number of nodes of the page."""
    return MAX_RACKED if calibration.racks else MAX_NODES


def _work(work: Work) -> dict[str, Any]:
    return asdict(work) | {"size": work.size}


def _node(node: Node) -> dict[str, Any]:
    return asdict(node) | {"jitter": [round(value, 9) for value in node.jitter]}


def _wire(wire: Wire) -> dict[str, Any]:
    return asdict(wire) | {"window": None if math.isinf(wire.window) else wire.window}


def _key(mode: SyncMode) -> str:
    """Equal for modes with the same rounds."""
    return f"{mode.algorithm}/{mode.codec or ''}"


def _rounds(modes: Iterable[SyncMode], calibration: Calibration) -> dict[str, dict[int, Any]]:
    """The loads of each mode's rounds for every number of nodes, whole and in two halves."""
    found: dict[str, dict[int, Any]] = {}
    counts = sorted({*NODES, *(each.nodes for each in calibration.measured)})
    for mode in modes:
        if mode.silent or _key(mode) in found:
            continue
        own = found[_key(mode)] = {}
        for nodes in counts:
            if nodes < 2 or nodes > _most(calibration):
                continue
            try:
                own[nodes] = _of_nodes(mode, nodes, racks_for(mode, nodes, calibration.racks))
            except (SpecError, ValueError):
                continue
    return found


def _of_nodes(mode: SyncMode, nodes: int, racks: Racks) -> dict[str, Any]:
    loads = {"all": _loads(loads_of(mode, nodes, racks))}
    if mode.row.pipelined:
        loads["reduce"], loads["gather"] = map(_loads, halves(mode, nodes, racks))
    return loads


def _loads(loads: Sequence[RoundLoad]) -> list[list[float]]:
    return [[float(each.link), float(each.back), float(each.uplink), each.messages, each.count] for each in loads]


def _mode(mode: SyncMode, predictor: Predictor) -> dict[str, Any]:
    """A row of the page: everything that model.js needs of a mode, so that it names none."""
    cut = mode.segments
    return {
        "name": str(mode),
        "colour": mode.algorithm if mode.row.rounds or mode.silent else "own",
        "key": None if mode.silent else _key(mode),
        "granularity": mode.granularity,
        "bucket": mode.bucket,
        "schedule": mode.schedule,
        "reference": mode.is_reference,
        "in_flight": step.in_flight(mode),
        "every": mode.every,
        "codec": mode.codec,
        "share": mode.coded_share,
        "family": family(mode),
        "segments": asdict(cut) if cut else None,
        "misfit": predictor.typical_misfit(mode),
        "exact": mode.synchronous and mode.codec is None,
    }
