"""`--check`: write predictions to a file, then measure the same points on emulated nodes, and compare.

predictions.json is written before anything is measured, with the commit of the code. A point in it is never changed:
a check that is continued measures what is missing. Points are measured with `testbed.run`: real ranks, real messages on
shaped links; each rank sleeps for what the profile says (rank/workload.py). So the prediction is for such nodes: moving
bytes does not slow their compute, all are equally fast, and with time dilation what the processor really does seems to
take less time.

measured.json is written at the end: the same points with what was measured, the commits and the machine. The tables of
docs/predict.md are made of such files (results/predict).
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import testbed
from testbed.predict.calibrate import WAKEUP_S, Calibration, Measured
from testbed.predict.scale import Point, Prediction, Predictor, racks_for
from testbed.results.folder import RunFolder, read_json, write_whole
from testbed.results.profile import Profile
from testbed.results.records import Start, read
from testbed.spec.errors import SpecError, TestbedError, UsageError, one_line, refuse
from testbed.spec.experiment import run_name
from testbed.spec.mode import SyncMode
from testbed.spec.topology import as_lists
from testbed.spec.units import format_duration, format_rate

PREDICTIONS = "predictions.json"
MEASURED = "measured.json"
PROFILE = "profile.json"
VERSION = 3  # of predictions.json
STEPS, WARMUP = 8, 2  # of each measured run
MAX_STEP_S = 60.0  # a point whose step would take longer here, time dilation included, is predicted and not measured
MAX_NODES = 128  # that are emulated on one machine
MAX_FROM = 200  # M of every:K@M: its first M steps are warm-up, and each of them synchronises
APART = 0.05  # modes whose measured steps differ by more must be ranked right


@dataclass(frozen=True)
class Checked:
    """One point of predictions.json, and what was measured there."""

    mode: SyncMode
    point: Point
    predicted: float
    low: float
    high: float
    measured: float | None = None
    missing: str = ""  # why nothing was measured
    busy: bool = False  # other work took the processor meanwhile

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1."""
        return self.predicted / self.measured - 1.0 if self.measured else None

    @property
    def name(self) -> str:
        """The name of its run folder."""
        words = [run_name(str(self.mode), self.point.nodes)]
        words += [format_rate(round(self.point.rate))] if self.point.rate else []
        delay = self.point.delay
        words += [] if delay is None else [format_duration(delay) if delay else "0ms"]
        words += [f"x{self.point.speed:g}"] if self.point.speed != 1 else []
        return "-".join(words)


def emulated(calibration: Calibration) -> Calibration:
    """The calibration for nodes whose compute sleeps: nothing slows it, nothing varies, and there is no quota.

    A quota of q cores makes copies and codecs, which are processor time, take 1/q as long. A wake-up that was measured
    under one is mostly the wait for the next period of the quota, so no longer one than without it is expected.
    """
    quota, wire, node = min(1.0, calibration.base.node.cpus or 1.0), calibration.wire, calibration.node
    return replace(
        calibration,
        node=replace(node, sleeps=True, jitter=(1.0,)),
        wire=replace(wire, wakeup=min(wire.wakeup, WAKEUP_S) if quota < 1 else wire.wakeup),
        copies={name: seconds * quota for name, seconds in calibration.copies.items()},
        codes={name: seconds * quota for name, seconds in calibration.codes.items()},
        measured=[each for each in calibration.measured if each.emulated],
    )


Slower = Callable[[dict[str, Any], Profile], float]  # the time dilation that a run with these keys needs


def check(
    calibration: Calibration,
    modes: Sequence[SyncMode],
    points: Iterable[Point],
    out: Path,
    announce: Callable[[Checked], None] = lambda each: None,
    run: Callable[..., Any] | None = None,
    slower: Slower = lambda keys, profile: 1.0,
) -> list[Checked]:
    """Predict all points, write them, and measure them by `run` (testbed.run).

    Returns the measured points of earlier checks in `out`, then these in order. `announce` is called with each point
    before it is measured.

    Raises UsageError if `out` has predictions of something else, or if no point can be measured.
    """
    predictor = Predictor(emulated(calibration))
    wanted = [
        _begin(predictor.at(mode, replace(point, dilation=_dilation(mode, point, calibration, slower))))
        for point in points
        for mode in modes
        if _exists(mode, point)
    ]
    if not wanted:
        raise refuse("--check", "", "there is no mode to measure", "Name modes that synchronise, e.g. ring,ddp.")
    out.mkdir(parents=True, exist_ok=True)
    found, others = _write(out, calibration, wanted)
    found = [*_earlier(others, out), *(_carried_out(each, calibration, out, announce, run) for each in found)]
    _write_measured(out, found, calibration)
    return found


def _carried_out(
    each: Checked,
    calibration: Calibration,
    out: Path,
    announce: Callable[[Checked], None],
    run: Callable[..., Any] | None,
) -> Checked:
    """The point as it was measured, or with the reason why it was not."""
    if missing := _too_much(each):
        return replace(each, missing=missing)
    announce(each)
    return _measured(each, calibration, out, run or testbed.run)


def _exists(mode: SyncMode, point: Point) -> bool:
    return mode.distributed and not mode.is_control and point.nodes > 1


def _dilation(mode: SyncMode, point: Point, calibration: Calibration, slower: Slower) -> float:
    """The time dilation of a point; 1 if it will not be measured."""
    if point.nodes > MAX_NODES:
        return 1.0
    try:
        return slower(keys(mode, point, calibration, PROFILE), faster(calibration, point.speed).profile)
    except TestbedError:  # the run is refused for the same reason, and that is what the table says
        return 1.0


def _begin(found: Prediction) -> Checked:
    return Checked(found.mode, found.point, found.step.seconds, found.low, found.high)


def _too_much(each: Checked) -> str:
    """Why a point is predicted only; empty if it is measured."""
    point, first = each.point, each.mode.every_from
    seconds = each.predicted * point.dilation
    if point.nodes > MAX_NODES:
        return f"more than {MAX_NODES} nodes"
    if first > MAX_FROM:
        return f"the first {first} steps synchronise each time: too long to wait for"
    if seconds > MAX_STEP_S:
        slower = f", {point.dilation:g} times slower as it is measured" if point.dilation > 1 else ""
        return f"a step would take {seconds:.0f} s{slower}"
    return ""


# --- predictions.json --------------------------------------------------------------------------------------------


def _write(out: Path, calibration: Calibration, wanted: Sequence[Checked]) -> tuple[list[Checked], list[Checked]]:
    """Add the predictions that the file does not have yet; return those of the file: the wanted ones, and the others.

    Raises UsageError if they are of something else, SpecError if the file cannot be read.
    """
    path, base = out / PREDICTIONS, calibration.base
    # what a point leaves open is that of the calibrating runs
    of = {
        "model": calibration.profile.model,
        "batch_per_rank": calibration.batch_per_rank,
        "accumulate": calibration.passes,
        "profile": hashlib.sha256(calibration.profile.model_dump_json().encode()).hexdigest(),  # what is replayed
        "link": base.link.model_dump(mode="json", exclude_defaults=True),
        "topology": base.topology.model_dump(mode="json", exclude_defaults=True),
        "congestion": base.node.congestion,
    }
    content: dict[str, Any] = {"schema": VERSION, **of, "points": []}
    if path.exists():
        content = _read(path)
        for name, value in of.items():
            if content.get(name) != value:
                rule = f"has predictions with {name} = {one_line(str(content.get(name)))}, and the runs have {value}"
                raise UsageError(f"{path}: {rule}. Give another folder with --out.")
    known = {_place(each) for each in content["points"]}
    fresh = [each for each in map(_as_json, wanted) if _place(each) not in known]
    if fresh:
        content["points"] += [each | {"commit": commit(), "written": time.time()} for each in fresh]
        write_whole(path, json.dumps(content, indent=1), durable=True)
    of_file = {_place(each): _from_json(each) for each in content["points"]}
    found = [of_file.pop(_place(_as_json(each))) for each in wanted]
    for each, own in zip(wanted, found, strict=True):
        if each.point.dilation > own.point.dilation:
            was, now = own.point.dilation, each.point.dilation
            rule = f"{own.name} is predicted there with a time dilation of {was:g}, and {now:g} is needed or requested"
            raise UsageError(f"{path}: {rule}. Give another folder with --out.")
    return found, list(of_file.values())


def _write_measured(out: Path, found: Sequence[Checked], calibration: Calibration) -> None:
    """Write measured.json. `measured_at` of a point is the commit of the check that measured it."""
    path, content, now = out / MEASURED, read_json(out / PREDICTIONS), commit()
    before = {_place(each): each for each in read_json(path)["points"]} if path.is_file() else {}
    predicted = {_place(each): each for each in content["points"]}
    points = []
    for each in found:
        place = _place(_as_json(each))
        known = before.get(place, {})
        same = each.measured is not None and known.get("measured") == each.measured
        own = {"measured": each.measured, "missing": each.missing, "busy": each.busy}
        points.append(predicted[place] | own | {"measured_at": known["measured_at"] if same else now})
    predictor = Predictor(calibration)
    fit = [
        {"mode": str(each.mode), "nodes": each.nodes, "measured": each.seconds, "error": predictor.misfit[each.folder]}
        for each in calibration.measured
    ]
    judged = verdict(found)
    content |= {
        "calibrated_on": calibration.base.nodes,
        "calibration": fit,
        "points": points,
        "verdict": judged.sentence if judged else "nothing was measured",
        "commit": now,
        "machine": next((_machine(out / each.name) for each in found if each.measured), ""),
    }
    write_whole(path, json.dumps(content, indent=1) + "\n", durable=True)


def _machine(folder: Path) -> str:
    """Processor, cores and kernel on which a run was measured."""
    start = next(each for each in read(RunFolder(folder).records(0)) if isinstance(each, Start))
    found = start.environment
    return f"{found.get('cpu')} ({found.get('cores')} cores), Linux {found.get('kernel')}"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
        if content["schema"] != VERSION or not isinstance(content["points"], list):
            raise ValueError(f"schema {content['schema']}")
        for each in content["points"]:
            _from_json(each)
        return dict(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        rule = f"no predictions that this testbed reads ({one_line(str(error))})"
        raise SpecError(f"{path}: {rule}. Give another folder with --out.") from None


def _as_json(each: Checked) -> dict[str, Any]:
    place = {"nodes": each.point.nodes, "rate": each.point.rate, "delay": each.point.delay, "speed": each.point.speed}
    found = {"seconds": each.predicted, "low": each.low, "high": each.high, "dilation": each.point.dilation}
    return {"mode": str(each.mode), **place, **found}


def _place(each: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(each[key] for key in ("mode", "nodes", "rate", "delay", "speed"))


def _from_json(own: dict[str, Any]) -> Checked:
    point = Point(own["nodes"], own["rate"], own["delay"], own["speed"], float(own["dilation"]))
    return Checked(SyncMode.parse(own["mode"]), point, float(own["seconds"]), float(own["low"]), float(own["high"]))


def commit() -> str:
    """The commit of the code that predicts, with + if it was changed since; the version outside of a clone."""
    root = Path(__file__).parents[2]
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return testbed.__version__
    return found.stdout.strip() or testbed.__version__


# --- measuring ---------------------------------------------------------------------------------------------------


def _measured(each: Checked, calibration: Calibration, out: Path, run: Callable[..., Any]) -> Checked:
    """Return the point with its measured time, or with the reason why there is none.

    A point that an earlier check has measured is read from its folder.
    """
    folder, speed = out / each.name, each.point.speed
    summary = _finished(folder)
    if summary is None or _was_busy(summary):  # continued: what other work disturbed is measured again
        profile = out / (PROFILE if speed == 1 else f"profile-x{speed:g}.json")
        if not profile.exists():
            faster(calibration, speed).profile.write(profile)
        try:
            summary = run(out=_free(folder), quiet=True, **keys(each.mode, each.point, calibration, profile)).summary
        except TestbedError as error:
            if error.exit_code == 130:
                raise
            return replace(each, missing=one_line(str(error)))
    if summary.status != "ok" or summary.seconds_per_step is None:
        return replace(each, missing=one_line(f"{summary.status}: {summary.reason}"))
    return replace(each, measured=summary.seconds_per_step, busy=_was_busy(summary))


def _earlier(others: Iterable[Checked], out: Path) -> list[Checked]:
    """Those of these points that were measured, with what was measured."""
    found = [(each, _finished(out / each.name)) for each in others]
    return [
        replace(each, measured=summary.seconds_per_step, busy=_was_busy(summary)) for each, summary in found if summary
    ]


def _was_busy(summary: Any) -> bool:
    return any(machine.is_busy for machine in summary.machines)


def _finished(folder: Path) -> Any:
    """The summary of a run that ended well; None if there is none."""
    if not RunFolder(folder).summary.is_file():
        return None
    summary = testbed.load(folder).summary  # type: ignore[union-attr]
    return summary if summary.status == "ok" else None


def _free(folder: Path) -> Path:
    """The folder, after what an interrupted or failed run left there was set aside."""
    if folder.exists():
        RunFolder(folder).set_aside()
    return folder


def keys(mode: SyncMode, point: Point, calibration: Calibration, profile: Path | str) -> dict[str, Any]:
    """The spec keys of the run that measures a point: its ranks sleep for the times in this profile."""
    base, recorded = calibration.base, calibration.profile
    link = base.link.model_dump(mode="json")
    if point.rate is not None:
        link["rate"] = format_rate(round(point.rate))
    if point.delay is not None:
        link["delay"] = format_duration(point.delay) if point.delay else None
        jitter = min(base.link.jitter or 0.0, point.delay)  # which varies a delay
        link["jitter"] = format_duration(jitter) if jitter else None
    warmup = WARMUP + mode.every_from  # before step M of every:K@M each step synchronises
    made = {
        "mode": str(mode),
        "nodes": point.nodes,
        "model": recorded.model,
        "dtype": recorded.dtype,
        "threads": recorded.threads,
        "batch_per_rank": calibration.batch_per_rank,
        "accumulate": calibration.passes,
        "steps": warmup + -(-(STEPS - WARMUP) // mode.every) * mode.every,  # whole rounds of every:K
        "warmup": warmup,
        "optimizer": {"name": recorded.optimizer},
        "link": {key: value for key, value in link.items() if value is not None},
        "node": {"congestion": base.node.congestion},
        "compute": f"emulated:{profile}",
        "dilation": point.dilation,
    }
    if racks := racks_for(mode, point.nodes, calibration.racks):
        made["topology"] = base.topology.model_dump(mode="json") | {"racks": as_lists(racks)}
    return made


def faster(calibration: Calibration, speed: float) -> Calibration:
    """The calibration with a profile whose compute is so many times faster."""
    if speed == 1:
        return calibration
    profile = calibration.profile
    times = ("data_s", "zero_s", "loss_s", "optimizer_s")
    layers = tuple(
        each.model_copy(update={"forward_s": each.forward_s / speed, "backward_s": each.backward_s / speed})
        for each in profile.layers
    )
    update = {name: getattr(profile, name) / speed for name in times} | {"layers": layers}
    return replace(calibration, profile=profile.model_copy(update=update))


def with_measured(calibration: Calibration, found: Sequence[Checked]) -> Predictor:
    """The predictor of emulated nodes that shows what a check has measured."""
    base = calibration.base
    measured = [
        Measured(
            each.mode,
            each.point.nodes,
            each.point.rate or (float(base.link.rate) if base.link.rate else None),
            each.point.delay if each.point.delay is not None else base.link.delay or 0.0,
            each.measured,
            each.measured,
            each.measured,
            Path(each.name),
            emulated=True,
            dilation=each.point.dilation,
        )
        for each in found
        if each.measured and each.point.speed == 1
    ]
    own = emulated(calibration)
    return Predictor(replace(own, measured=[*own.measured, *measured]))


# --- what came out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """How good the predictions were."""

    points: int  # that nothing disturbed; the next three are of them
    median: float | None  # of the absolute errors; None without points
    worst: float | None
    inside: int  # measured inside the band
    pairs: int  # of modes that were measured at one point and differ by more than APART
    right: int  # of them ranked as predicted
    disturbed: int = 0  # points more, during which other work took the processor

    @property
    def sentence(self) -> str:
        words = []
        if self.median is not None and self.worst is not None:
            words += [f"{self.points} points: median error {100 * self.median:.1f} %, worst {100 * self.worst:.1f} %"]
            words += [f"{self.inside} of {self.points} inside their band"]
        if self.pairs:
            apart = f"pairs of modes that differ by more than {100 * APART:g} %"
            words += [f"{self.right} of {self.pairs} {apart} ranked right"]
        if self.disturbed:
            words += [f"{self.disturbed} more were measured beside other work and do not count"]
        return "; ".join(words)


def verdict(found: Sequence[Checked]) -> Verdict | None:
    """The verdict on all measured points; None if nothing was measured."""
    everything = [each for each in found if each.measured]
    measured = [each for each in everything if not each.busy]
    if not everything:
        return None
    errors = [abs(each.error) for each in measured if each.error is not None]
    inside = sum(each.low <= (each.measured or 0.0) <= each.high for each in measured)
    pairs = right = 0
    for number, one in enumerate(measured):
        for other in measured[number + 1 :]:
            ours, theirs = float(one.measured or 0), float(other.measured or 0)
            same = replace(one.point, dilation=1.0) == replace(other.point, dilation=1.0)
            if same and max(ours, theirs) > (1 + APART) * min(ours, theirs):
                pairs += 1
                right += (ours < theirs) == (one.predicted < other.predicted)
    disturbed = len(everything) - len(measured)
    median = statistics.median(errors) if errors else None
    return Verdict(len(measured), median, max(errors, default=None), inside, pairs, right, disturbed)
