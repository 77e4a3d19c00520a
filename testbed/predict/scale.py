"""Predictions for any number of nodes, rate, delay and speed, each with its band.

A band has two parts. The model is computed again with parameters drawn from their uncertainties, the jitter resampled;
the middle 90 % of these draws is the first. The second is how far the model is from the points that were measured.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from testbed.predict.calibrate import Calibration, Measured, family, racks_of
from testbed.predict.collectives import Wire
from testbed.predict.step import Node, Step, Work, predict
from testbed.spec.errors import SpecError, refuse
from testbed.spec.fabric import Racks
from testbed.spec.mode import SyncMode
from testbed.spec.units import format_duration, format_rate, parse_duration, parse_rate

MAX_NODES = 1024
MAX_SPEED = 10_000.0
DRAWS = 16
DRAWN = ("rate", "latency", "wakeup", "message", "segment", "acks", "uplink", "window")  # of Wire, by their parameters
BAND = (0.05, 0.95)  # of the draws
SEED = 20261118  # of the draws, so that the same folders always give the same bands
USUAL = ("ring", "ddp", "ring/pipeline", "ring/every:8")  # predicted if the user names no modes
MAX_MODES = 10
FASTER, FAR_S = 10, 0.025  # other networks that are predicted by default: times the rate, and a delay
_RANGE = re.compile(r"(\d{1,6})\.\.(\d{1,6})", re.ASCII)
_EVERY = re.compile(r"every:\d+(@\d+)?", re.ASCII)


@dataclass(frozen=True)
class Point:
    """Where a prediction is made; None is the value of the calibrating run."""

    nodes: int
    rate: float | None = None  # bit/s that is requested of a link
    delay: float | None = None  # seconds, one way, that is requested of a link
    speed: float = 1.0
    dilation: float = 1.0  # of emulated nodes: how many times slower than this their network and their compute are


@dataclass(frozen=True)
class Prediction:
    """A step at a point; times in seconds."""

    mode: SyncMode
    point: Point
    step: Step
    low: float
    high: float
    alone: float  # the step of one node, with the same batch per rank

    @property
    def efficiency(self) -> float:
        return self.alone / self.step.seconds if self.step.seconds else 1.0

    @property
    def speed_up(self) -> float:
        """How many times more images per second than one node."""
        return self.point.nodes * self.efficiency


@dataclass(frozen=True)
class Draw:
    """The parameters of one draw."""

    node: Node
    wire: Wire
    copies: dict[str, float]  # as in Calibration
    codes: dict[str, float]
    compute: float = 1.0  # compute takes so many times as long
    ready: float = 1.0  # what is done after a share x of backward is done after x to this power instead


class Predictor:
    """Predictions from one calibration."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.work = calibration.work
        self.draws = _draws(calibration)
        self.misfit = {each.folder: self._misfit(each) for each in calibration.measured}

    def at(self, mode: SyncMode, point: Point) -> Prediction:
        """Raises SpecError if the mode cannot exist there."""
        found = self.step(mode, point)
        alone = self.work.compute / point.speed
        steps = sorted(self.step(mode, point, draw).seconds for draw in self.draws)
        low, high = (float(np.quantile(steps, share)) for share in BAND)
        off = self.typical_misfit(mode)
        return Prediction(
            mode,
            point,
            found,
            found.seconds - math.hypot(found.seconds - min(low, found.seconds), off * found.seconds),
            found.seconds + math.hypot(max(high, found.seconds) - found.seconds, off * found.seconds),
            alone,
        )

    def step(self, mode: SyncMode, point: Point, draw: Draw | None = None) -> Step:
        """The step without its band."""
        calibration = self.calibration
        given = draw or Draw(calibration.node, calibration.wire, calibration.copies, calibration.codes)
        code = given.codes[mode.codec] if mode.codec else 0.0
        node = replace(given.node, speed=point.speed, copy=given.copies[family(mode)], code=code)
        delay = calibration.base.link.delay or 0.0 if point.delay is None else point.delay
        node, wire = dilated(node, self.wire(point, given.wire), delay, point.dilation)
        racks = racks_for(mode, point.nodes, calibration.racks)
        try:
            return predict(drawn(self.work, given), node, wire, mode, point.nodes, racks)
        except ValueError as error:
            raise refuse("mode", str(mode), one_sentence(error), "Leave it out.") from None

    def wire(self, point: Point, wire: Wire | None = None) -> Wire:
        """The wire of a point: the calibrated one with another rate or delay of the links. Uplinks stay."""
        base, own = self.calibration.base, wire or self.calibration.wire
        if point.rate is not None:
            factor = own.rate / self.calibration.wire.rate  # of a draw
            own = replace(own, rate=point.rate / 8 * self.calibration.efficiency * factor)
        if point.delay is not None:
            own = replace(own, latency=max(0.0, own.latency - (base.link.delay or 0.0)) + point.delay)
        return own

    def typical_misfit(self, mode: SyncMode) -> float:
        """How far the model is from measured points: of this mode if there are any, else of all that send; a share."""
        known = [
            (each.mode, off) for each in self.calibration.measured if (off := self.misfit[each.folder]) is not None
        ]
        own = [abs(off) for other, off in known if other == mode]
        sending = [abs(off) for other, off in known if not other.silent]
        return statistics.median(own or sending or [0.0])

    def _misfit(self, measured: Measured) -> float | None:
        """Predicted / measured - 1; None where the model cannot compute the mode."""
        try:
            predicted = self.step(measured.mode, point_of(measured))
        except SpecError:
            return None
        return predicted.seconds / measured.seconds - 1.0 if measured.seconds else None


def one_sentence(error: Exception) -> str:
    return str(error).rpartition(": ")[2]


def point_of(measured: Measured) -> Point:
    return Point(measured.nodes, measured.rate, measured.delay, dilation=measured.dilation)


def dilated(node: Node, wire: Wire, delay: float, factor: float) -> tuple[Node, Wire]:
    """What emulated nodes show whose network and compute are `factor` times slower, after all times are divided by it.

    What the processor really does was not made slower: it seems to take less time. `delay` is the requested one.
    """
    if factor == 1.0:
        return node, wire
    own = {name: getattr(wire, name) / factor for name in ("wakeup", "message", "segment", "credit")}
    latency = delay + max(0.0, wire.latency - delay) / factor
    return replace(node, copy=node.copy / factor, code=node.code / factor), replace(wire, latency=latency, **own)


def racks_for(mode: SyncMode, nodes: int, racks: Racks) -> Racks:
    """Racks of the same size for another number of nodes, filled in the order of ranks. Raises SpecError."""
    if not racks and mode.row.follows_racks:
        rule = "averages inside racks first, and the calibrating runs have none"
        raise refuse("mode", str(mode), rule, "Calibrate with runs that have topology.racks, or leave it out.")
    return racks_of(racks, nodes)


def _draws(calibration: Calibration) -> list[Draw]:
    """Parameters drawn from their uncertainties; a factor is never below a tenth."""
    random = np.random.default_rng(SEED)
    return [_draw(calibration, random) for _ in range(DRAWS)]


def _draw(calibration: Calibration, random: np.random.Generator) -> Draw:
    def factor(name: str) -> float:
        return max(0.1, 1.0 + calibration.spread(name) * float(random.standard_normal()))

    node, wire = calibration.node, calibration.wire
    jitter = np.sort(random.choice(np.array(node.jitter), len(node.jitter)))
    jitter = jitter / max(1e-9, float(np.median(jitter)))
    of_wire = {name: getattr(wire, name) * factor(name) for name in DRAWN if getattr(wire, name) is not None}
    return Draw(
        replace(
            node,
            byte_cpu=node.byte_cpu * factor("byte_cpu"),
            jitter=tuple(jitter.tolist()),
        ),
        replace(wire, **of_wire),
        {name: seconds * factor(f"copy ({name})") for name, seconds in calibration.copies.items()},
        {name: seconds * factor(f"codec ({name})") for name, seconds in calibration.codes.items()},
        compute=factor("compute"),
        ready=factor("ready"),
    )


def drawn(work: Work, draw: Draw) -> Work:
    """The work with the compute of a draw: its times, and when in backward gradients are made."""
    factor, power, whole = draw.compute, draw.ready, sum(work.backward) or 1.0
    if factor == power == 1.0:
        return work
    done = [0.0, *(seconds / whole for seconds in accumulate(reversed(work.backward)))]
    backward = [whole * factor * (later**power - sooner**power) for sooner, later in pairwise(done)]
    return replace(
        work,
        before=work.before * factor,
        forward=tuple(each * factor for each in work.forward),
        after=work.after * factor,
        backward=tuple(reversed(backward)),
        update=work.update * factor,
    )


# --- what a user asks for ----------------------------------------------------------------------------------------


def parse_nodes(text: str) -> list[int]:
    """`8..1024` doubles from 8 to 1024, `8,16,32` is a list. Raises SpecError."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match:
            low, high = int(match[1]), int(match[2])
            _check_nodes(low, text)
            _check_nodes(high, text)
            while low < high:
                found.append(low)
                low *= 2
            found.append(high)
        elif part.strip().isdecimal() and len(part.strip()) < 9:
            found.append(_check_nodes(int(part), text))
        else:
            raise refuse("--nodes", text, "must be numbers or a range", "Write e.g. 8..1024 or 8,16,32.")
    return sorted(set(found))


def _check_nodes(nodes: int, text: str) -> int:
    if not 1 <= nodes <= MAX_NODES:
        raise refuse("--nodes", text, f"a prediction is for 1 to {MAX_NODES} nodes", "Write e.g. 8..1024.")
    return nodes


def parse_list(what: str, text: str, parse: Callable[[str], float]) -> list[float]:
    """A list of values separated by commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise refuse(what, text, "has no value", "Write one, or several with commas between them.")
    return [parse(part) for part in parts]


def parse_rates(text: str) -> list[float]:
    return parse_list("--rate", text, lambda part: float(parse_rate(part)))


def parse_delays(text: str) -> list[float]:
    """`0ms` is no delay."""
    zero = re.compile(r"0+(\.0+)?\s*(us|ms|s)?", re.ASCII)
    return parse_list("--delay", text, lambda part: 0.0 if zero.fullmatch(part) else parse_duration(part))


def parse_speeds(text: str) -> list[float]:
    def parse(part: str) -> float:
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 1 / MAX_SPEED <= value <= MAX_SPEED:
            rule = f"compute is so many times faster, a number from {1 / MAX_SPEED:g} to {MAX_SPEED:g}"
            raise refuse("--speed", part, rule, "Write e.g. 10.")
        return value

    return parse_list("--speed", text, parse)


def parse_modes(text: str) -> list[SyncMode]:
    """Modes separated by commas; `pipeline` and `every:8` alone mean those of the ring."""
    return list(dict.fromkeys(_parse_mode(part.strip()) for part in text.split(",") if part.strip()))


def _parse_mode(text: str) -> SyncMode:
    if text == "overlap":
        return SyncMode.parse("ring/bucket:2MiB/overlap")
    return SyncMode.parse(f"ring/{text}" if text == "pipeline" or _EVERY.fullmatch(text) else text)


def default_modes(calibration: Calibration) -> list[SyncMode]:
    """The modes of the runs whose messages are known, and the usual ones."""
    modes = [mode for mode in calibration.modes if not mode.is_control and known(mode, calibration.racks)]
    modes += [SyncMode.parse(text) for text in USUAL]
    return list(dict.fromkeys(modes))[:MAX_MODES]


def known(mode: SyncMode, racks: Racks) -> bool:
    """True if the messages of a mode are known."""
    return bool(mode.row.rounds or (mode.row.rack_rounds and racks))


def other_networks(point: Point, calibration: Calibration) -> list[Point]:
    """The same point with faster links, and far away: what is predicted besides if the user asks for no network."""
    own = calibration.base.link.rate or 8 * calibration.wire.rate
    found = [replace(point, rate=float(round(FASTER * own, -3)))]
    return found + ([] if calibration.base.link.delay else [replace(point, delay=FAR_S)])


def check_modes(modes: Iterable[SyncMode], nodes: Sequence[int]) -> None:
    """Raise SpecError if one of the modes cannot exist with one of these numbers of nodes."""
    for mode in modes:
        if mode.is_script:
            rule = "what a script sends is observed, not known beforehand"
            raise refuse("mode", str(mode), rule, "Name the mode that could replace it, e.g. ring.")
        if min(nodes) < 2 and mode.distributed:
            raise refuse("--nodes", min(nodes), f"mode {mode} needs at least 2", "Begin with 2, or use mode single.")
        if max(nodes) > 1 and not mode.distributed:
            raise refuse("--nodes", max(nodes), f"mode {mode} is for one node", "Use --nodes 1, or name another mode.")


def in_words(point: Point, calibration: Calibration) -> str:
    """`500mbit, 25ms, compute 10 x faster`."""
    rate = point.rate if point.rate is not None else calibration.base.link.rate
    own = f"{8 * calibration.wire.rate / 1e6:.4g} Mbit/s as measured"
    words = [format_rate(round(rate)) if rate else own]
    delay = point.delay if point.delay is not None else calibration.base.link.delay
    words += [f"delay {format_duration(delay)}"] if delay else []
    words += [f"compute {point.speed:g} x faster"] if point.speed != 1 else []
    return ", ".join(words)
