"""Calibration: what the model of a step needs to know, from run folders: records, receipts and a profile.

Each parameter has its source and its uncertainty (`Parameter`), what the folders lack is assumed and marked so:

    compute     the control (mode none) shows it best, then modes that synchronise after backward, then the others
    tensors     the buffers of a mode that sends each tensor alone; else those of the mode with most buffers
    ready       when buckets were launched during backward (overlap, pipeline, DDP); else in proportion to bytes
    rate        the receipt's links; latency: its shortest round trip
    wakeup      what small buffers took beyond their bytes, for each message that waits for another
    byte_cpu    processor time of a rank in a mode beyond that of the control, a byte
    jitter      seconds of compute of each rank over those of the others in the same step
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from testbed.predict.collectives import GOODPUT, Wire, duration, loads_of
from testbed.predict.step import ELEMENT_BYTES, Node, Work
from testbed.report.load import Loaded, LoadedRun, Steps, load
from testbed.results.profile import Profile, ProfiledLayer
from testbed.results.theory import sent_share
from testbed.spec.errors import SpecError, UsageError, one_line
from testbed.spec.fabric import Racks
from testbed.spec.mode import SyncMode
from testbed.spec.run import RunSpec
from testbed.spec.units import BURST_S

MESSAGE_S = 50e-6  # assumed: a thread hands a message to the kernel
WAKEUP_S = 200e-6  # assumed where no small buffer was measured, on a machine that is not busy
BYTE_CPU_S = 2.0e-9  # assumed: core-seconds per byte; 1.5 to 4 were measured through veth pairs
CODE_S = 2.0e-9  # assumed: seconds of a codec per byte of gradient
COPY_S = 0.5e-9  # assumed: seconds per byte of a copy
ACKS = 0.016  # assumed: measured on shaped links of veth pairs; one acknowledgement of 66 bytes for two or three frames
MAX_ACKS = 0.05
WINDOW_BYTES = 4 << 20  # assumed: what one TCP connection of Linux has under way at most, by its default buffers
SMALL_S = 2e-3  # a buffer whose bytes take less shows what its messages cost
SAME_SIZE = 0.01  # a profile and a run are of one model if their gradients differ by less
MAX_JITTER = 200  # values; of more their quantiles are kept
FAMILIES = ("buffers", "reference", "pipeline")  # who copies gradients, and how


@dataclass(frozen=True)
class Parameter:
    """One number of the model."""

    name: str
    value: float
    unit: str
    source: str
    spread: float = 0.0  # relative standard deviation
    assumed: bool = False


@dataclass(frozen=True)
class Measured:
    """One measured point."""

    mode: SyncMode
    nodes: int
    rate: float | None  # bit/s that was requested of a link; None: unshaped
    delay: float
    seconds: float
    low: float
    high: float
    folder: Path
    emulated: bool = False


@dataclass(frozen=True)
class Calibration:
    """Everything that predictions are made of."""

    base: RunSpec  # the run whose network is the default of predictions
    profile: Profile
    wire: Wire
    efficiency: float  # payload byte/s of a link for each requested byte/s
    threads: int
    node: Node
    copies: dict[str, float]  # seconds per byte of gradient, by family
    parameters: list[Parameter]
    measured: list[Measured]
    notes: list[str] = field(default_factory=list)  # what was assumed or left out
    modes: list[SyncMode] = field(default_factory=list)  # of the runs

    @property
    def work(self) -> Work:
        return Work.of(self.profile)

    @property
    def racks(self) -> Racks:
        return self.base.topology.racks if self.base.world > 1 else ()

    def copies_of(self, mode: SyncMode) -> float:
        """Seconds that this mode copies for each byte of gradient."""
        return self.copies[family(mode)]

    def spread(self, name: str) -> float:
        """The relative standard deviation of a parameter."""
        return next((each.spread for each in self.parameters if each.name == name), 0.0)


def family(mode: SyncMode) -> str:
    return "reference" if mode.is_reference else "pipeline" if mode.schedule == "pipeline" else "buffers"


def calibrate(paths: Sequence[Path], profile: Path | None = None) -> Calibration:
    """Calibrate from the runs below these paths, and from a profile if one is given.

    Raises UsageError if no run can be used, SchemaError or SpecError if the profile cannot be read.
    """
    given = Profile.read(profile) if profile else None
    runs, notes = _usable(load(paths), paths)
    base = _base(runs)
    if not base.gradient and given is None:
        raise SpecError(f"{base.folder.path}: no gradient was seen in it. Give a profile with --profile.")
    alike = [run for run in runs if _work_key(run.spec) == _work_key(base.spec)]
    if len(alike) < len(runs):
        notes.append(
            f"{len(runs) - len(alike)} runs train something else than {base.folder.path.name} and are left out"
        )
    found: list[Parameter] = []
    work = given or _own_profile(base)
    if work is not None:
        found.append(Parameter("compute", work.step_s, "s", f"profile of {work.model}, {len(work.layers)} layers"))
    else:
        work = _from_records(alike, found, notes)
    jitter = _jitter(alike, work, given is not None and not _same_model(work, base), found)
    wire, efficiency = _network(base, found, notes)
    wire = replace(wire, acks=_acks(alike, found))
    found.append(Parameter("message", MESSAGE_S, "s", "assumed", 0.5, assumed=True))
    wire = replace(wire, message=MESSAGE_S, wakeup=_wakeup(alike, wire, efficiency, found, notes))
    cpus, threads = _cpus(base, found)
    node = Node(
        byte_cpu=_byte_cpu(alike, found, notes),
        cpus=cpus,
        threads=threads,
        jitter=jitter,
        sleeps=base.spec.emulated,
    )
    copies = {name: _copies(alike, name, found) for name in FAMILIES}
    node = replace(node, code=_code(alike, wire, efficiency, found))
    measured = [_measured(run) for run in alike if _same_model(work, run) and not run.spec.mode.is_script]
    modes = [run.spec.mode for run in alike if run.spec.mode.distributed and not run.spec.mode.is_script]
    return Calibration(
        base.spec,
        work,
        wire,
        efficiency,
        threads,
        node,
        copies,
        found,
        measured,
        notes,
        list(dict.fromkeys(modes)),
    )


# --- which runs --------------------------------------------------------------------------------------------------


def _usable(loaded: Loaded, paths: Sequence[Path]) -> tuple[list[LoadedRun], list[str]]:
    """The runs that ended well and whose network is known; a note for each other one."""
    named = ", ".join(str(path) for path in paths)
    if not loaded.runs and loaded.skipped:
        first = loaded.skipped[0]
        rule = f"cannot be used: {one_line(first.reason).rstrip('.')}"
        raise UsageError(f"{first.path}: {rule}. Give a folder with a run that has ended well, or run it again.")
    if not loaded.runs:
        raise UsageError(f"{named}: no run folder in it. Make one with `testbed run`.")
    notes = [f"{each.path.name} is left out: {one_line(each.reason)}" for each in loaded.skipped]
    known = [run for run in loaded.runs if run.network.links or run.spec.world == 1]
    unknown = [run for run in loaded.runs if run not in known]
    if not any(run.spec.world > 1 for run in known):
        first_run = (unknown or loaded.runs)[0]
        if unknown:
            rule, way_out = "has no receipt, so its network is not known", "Run it again with --set probe=true."
        else:
            rule, way_out = "has one node, so it shows no network", "Add a run of two nodes or more."
        raise SpecError(f"{first_run.folder.path}: {rule}. {way_out}")
    notes += [f"{run.folder.path.name} is left out: it has no receipt" for run in unknown]
    return known, notes


def _work_key(spec: RunSpec) -> tuple[object, ...]:
    """Equal for runs whose ranks compute the same."""
    if spec.script is not None:
        return (tuple(spec.script.argv), spec.node.cpus, spec.threads)
    single = spec.global_batch if spec.world == 1 else None  # its batch is the global one
    per_rank = single or spec.local_batch(0)
    return (
        spec.model,
        spec.data.name,
        spec.data.size,
        spec.dtype,
        per_rank,
        spec.node.cpus,
        spec.threads,
        spec.passes(0),
    )


def _base(runs: Sequence[LoadedRun]) -> LoadedRun:
    """A run of the condition that most runs share: the same work on the same network."""

    def condition(run: LoadedRun) -> tuple[object, ...]:
        return (_work_key(run.spec), run.spec.nodes, run.spec.link, run.spec.topology, run.summary.substrate)

    several = [run for run in runs if run.spec.world > 1]
    conditions = [condition(run) for run in several]
    return max(several, key=lambda run: conditions.count(condition(run)))


def _own_profile(run: LoadedRun) -> Profile | None:
    """The profile that the run recorded, or that it replayed; None if it has none."""
    path = run.folder.layers
    if run.spec.emulated and "compute" in run.spec.own_files:
        path = run.folder.own_file(run.spec, "compute") or path
    return Profile.read(path) if path.is_file() else None


def _same_model(profile: Profile, run: LoadedRun) -> bool:
    return abs(profile.gradient_bytes - run.gradient) <= SAME_SIZE * run.gradient


def _measured(run: LoadedRun) -> Measured:
    seconds = float(run.summary.seconds_per_step or 0.0)
    low, high = run.summary.seconds_spread or (seconds, seconds)
    spec = run.spec
    rate = float(spec.link.rate) if spec.link.rate else None
    delay = spec.link.delay or 0.0
    return Measured(spec.mode, spec.world, rate, delay, seconds, low, high, run.folder.path, spec.emulated)


# --- compute -----------------------------------------------------------------------------------------------------


def _rank_of_mode(mode: SyncMode) -> int:
    """How well a run of this mode shows what computing alone takes; the smaller the better."""
    return 0 if mode.is_control else 1 if mode.schedule == "after" and not mode.is_reference else 2


def _best_for_compute(runs: Sequence[LoadedRun]) -> list[LoadedRun]:
    several = [run for run in runs if run.spec.world > 1]
    best = min(_rank_of_mode(run.spec.mode) for run in several)
    return [run for run in several if _rank_of_mode(run.spec.mode) == best]


def _pool(runs: Iterable[LoadedRun]) -> list[Steps]:
    return [steps for run in runs for steps in run.kept]


def _alone(steps: Steps) -> np.ndarray:
    """Seconds of computing of each step, without waits and copies."""
    between = steps.total - (steps.data + steps.forward + steps.backward + steps.sync)
    return np.asarray(steps.compute + np.maximum(0.0, between))


def _from_records(runs: Sequence[LoadedRun], found: list[Parameter], notes: list[str]) -> Profile:
    """A profile from the phases of the recorded steps; layers are what is sent, each with its share of backward."""
    chosen = _best_for_compute(runs)
    pooled = _pool(chosen)

    def median(name: str) -> float:
        return float(np.median(np.concatenate([getattr(steps, name) for steps in pooled])))

    whole = np.concatenate([np.mean([_alone(steps) for steps in run.kept], axis=0) for run in chosen])
    total = float(np.median(whole))
    data, forward, backward, update = (median(name) for name in ("data", "forward", "backward", "update"))
    spread = float(np.std(whole) / total / np.sqrt(len(whole))) if total else 0.0
    source = (
        f"median of {len(whole)} steps, mean over ranks, of {', '.join(sorted({str(run.spec.mode) for run in chosen}))}"
    )
    found.append(Parameter("compute", total, "s", source, spread))
    if chosen[0].spec.mode.is_script and not forward:
        forward = max(0.0, total - data - backward - update)
    phases = data + forward + backward + update
    scale = min(1.0, total / phases) if phases else 1.0  # backward and forward have copies and waits in them
    sizes = _tensors(runs, found, notes)
    ready = _ready_curve(runs, found, notes)
    layers, sent, total_bytes = [], 0, sum(sizes)
    for number, size in enumerate(reversed(sizes)):  # as backward makes them
        begin, end = ready(sent / total_bytes), ready((sent + size) / total_bytes)
        share, sent = end - begin, sent + size
        layers.append(
            ProfiledLayer(
                name=f"tensor {len(sizes) - 1 - number}",
                sizes=(size,),
                forward_s=share * forward * scale,
                backward_s=share * backward * scale,
            )
        )
    spec, start = chosen[0].spec, chosen[0].ranks[0].start
    return Profile(
        model=one_line(spec.model if spec.script is None else " ".join(spec.script.argv))[:400],
        batch_per_rank=max(1, round(chosen[0].images(0))),
        threads=spec.threads,
        cpus=spec.node.cpus,
        environment=start.environment if start else {},
        layers=tuple(reversed(layers)),
        data_s=data * scale,
        zero_s=max(0.0, total - phases),
        loss_s=0.0,
        optimizer_s=update * scale,
    )


def _tensors(runs: Sequence[LoadedRun], found: list[Parameter], notes: list[str]) -> list[int]:
    """Bytes of what is sent as one unit, in order of forward."""
    best: list[int] = []
    whose: LoadedRun | None = None
    gradient = int(runs[0].gradient)
    for run in runs:
        mode = run.spec.mode
        if mode.silent or mode.codec or mode.is_script or not run.kept[0].comm or mode.row.sends_parameters:
            continue
        sizes = {c.name: c.size for step in run.kept[0].comm for c in step if c.first_half}
        better = whose is None or (mode.granularity == "param", len(sizes)) > (
            whose.spec.mode.granularity == "param",
            len(best),
        )
        if sum(sizes.values()) == int(run.gradient) and better:
            best = [sizes[name] for name in sorted(sizes, key=_number)]  # bucket 0 is the last layer
            whose = run
    if whose is None:
        start = next((run.ranks[0].start for run in runs if run.ranks[0].start), None)
        count = max(1, start.tensors if start else 1)
        notes.append(f"no run shows the sizes of tensors: {count} equal ones are assumed")
        found.append(Parameter("tensors", count, "", "assumed: equal", 0.0, assumed=True))
        each = max(1, gradient // count // ELEMENT_BYTES) * ELEMENT_BYTES
        return [each] * (count - 1) + [max(ELEMENT_BYTES, gradient - each * (count - 1))]
    if whose.spec.mode.granularity != "param":
        notes.append(f"tensors are taken to be the {len(best)} buckets of {whose.spec.mode}")
    found.append(Parameter("tensors", len(best), "", f"buffers of {whose.spec.mode}"))
    return list(reversed(best))


def _number(name: str) -> int:
    digits = "".join(char for char in name if char.isdigit())
    return int(digits) if digits else 0


class Ready:
    """The share of backward after which a share of the gradient's bytes is ready."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self.bytes, self.backward = zip(*[(0.0, 0.0), *points, (1.0, 1.0)], strict=True)

    def __call__(self, share: float) -> float:
        return float(np.interp(share, self.bytes, self.backward))


def _ready_curve(runs: Sequence[LoadedRun], found: list[Parameter], notes: list[str]) -> Ready:
    """From when buckets were launched during backward, in the run with most of them."""
    best: list[tuple[float, float]] = []
    whose = ""
    for run in runs:
        mode = run.spec.mode
        if mode.codec or mode.silent or (mode.schedule == "after" and not mode.is_reference):
            continue
        points = _launches(run)
        if len(points) > len(best):
            best, whose = points, str(mode)
    if not best:
        notes.append("no run shows when gradients are ready: in proportion to their bytes is assumed")
        found.append(Parameter("ready", 1.0, "", "assumed: in proportion to bytes", 0.2, assumed=True))
        return Ready([])
    found.append(Parameter("ready", len(best), "points", f"launches of {whose}"))
    return Ready(best)


def _launches(run: LoadedRun) -> list[tuple[float, float]]:
    """(share of bytes, share of backward) for each bucket of one run, medians over steps and ranks."""
    offsets: dict[int, list[float]] = {}
    sizes: dict[int, int] = {}
    for steps in run.kept:
        for phases, comm in zip(steps.phases, steps.comm, strict=True):
            backward = next(((begin, seconds) for name, begin, seconds in phases if name == "backward"), None)
            if backward is None or backward[1] <= 0:
                continue
            for each in comm:
                if each.first_half and not each.continued:
                    number = _number(each.name)
                    sizes[number] = each.size
                    offsets.setdefault(number, []).append((each.offset - backward[0]) / backward[1])
    whole = sum(sizes.values())
    points, sent = [], 0
    reached = 0.0
    for number in sorted(sizes):
        sent += sizes[number]
        reached = min(1.0, max(reached, statistics.median(offsets[number])))
        points.append((sent / whole, reached))
    return points[:-1]


def _jitter(runs: Sequence[LoadedRun], profile: Profile, foreign: bool, found: list[Parameter]) -> tuple[float, ...]:
    """Seconds of compute of a rank over what is usual in the same step, sorted."""
    if foreign and profile.jitter:
        values, source = list(profile.jitter), f"{len(profile.jitter)} steps of the profile"
    else:
        chosen = _best_for_compute(runs)
        values = [value for run in chosen for value in _beside_each_other(run)] or [1.0]
        source = f"{len(values)} steps of all ranks of {', '.join(sorted({str(run.spec.mode) for run in chosen}))}"
    found.append(Parameter("jitter", float(np.std(values)), "of the median", source))
    if len(values) > MAX_JITTER:
        values = np.quantile(values, (np.arange(MAX_JITTER) + 0.5) / MAX_JITTER).tolist()
    return tuple(sorted(values))


def _beside_each_other(run: LoadedRun) -> list[float]:
    """Each rank's seconds of each step over the mean of all ranks in that step.

    What slows all ranks of one machine at the same time is left out: it makes none of them wait for another. A mean of
    few ranks follows each of them, so deviations are enlarged by what that hides.
    """
    rows = np.array([_alone(steps) for steps in run.kept])
    ranks = len(rows)
    means = rows.mean(axis=0)
    if ranks < 2 or not (means > 0).all():
        return []
    ratios = 1.0 + (rows / means - 1.0) * np.sqrt(ranks / (ranks - 1))
    return [float(each) for each in np.maximum(0.0, ratios / np.median(ratios)).ravel()]


# --- the network -------------------------------------------------------------------------------------------------


def _network(run: LoadedRun, found: list[Parameter], notes: list[str]) -> tuple[Wire, float]:
    """The wire of the base run, and what a requested rate gives as payload."""
    network, spec = run.network, run.spec
    shaped = [(rate, network.requested[pair]) for pair, rate in network.links.items() if pair in network.requested]
    if shaped:
        shares = sorted(rate / requested for rate, requested in shaped)
        efficiency = statistics.median(shares)
        spread = statistics.pstdev(shares) / efficiency / np.sqrt(len(shares))
        rate = min(requested for _, requested in shaped) * efficiency
        source = f"receipt, {len(shaped)} links, asked for {8 * min(r for _, r in shaped) / 1e6:g} Mbit/s"
    else:
        efficiency, rate = GOODPUT, network.slowest or 1.0
        rates = list(network.links.values())
        spread = statistics.pstdev(rates) / statistics.fmean(rates) / 2 if len(rates) > 1 else 0.1
        source = f"receipt, the slowest of {len(rates)} links; nothing was requested"
    found.append(Parameter("rate", 8 * rate / 1e6, "Mbit/s of payload", source, float(spread)))
    found.append(Parameter("latency", network.delay, "s", "receipt, half the shortest round trip", 0.2))
    uplink = min(network.uplinks.values(), default=None)
    if uplink is None and spec.topology.uplink:
        uplink = spec.topology.uplink / 8 * efficiency
        found.append(Parameter("uplink", 8 * uplink / 1e6, "Mbit/s of payload", "assumed: as requested", 0.05, True))
    elif uplink:
        found.append(Parameter("uplink", 8 * uplink / 1e6, "Mbit/s of payload", "receipt", float(spread)))
    if spec.link.delay:
        notes.append(f"a TCP connection is assumed to have at most {WINDOW_BYTES >> 20} MiB under way")
        found.append(Parameter("window", WINDOW_BYTES, "bytes", "assumed: Linux's default buffers", 0.3, assumed=True))
    wire = Wire(
        rate=rate,
        latency=network.delay,
        uplink=uplink,
        uplink_latency=spec.topology.delay or 0.0,
        window=WINDOW_BYTES,
        loss=spec.link.loss,
        credit=BURST_S if shaped else 0.0,
    )
    return wire, efficiency


def _acks(runs: Sequence[LoadedRun], found: list[Parameter]) -> float:
    """Bytes of acknowledgements for each byte received: what interfaces counted beyond payload and its headers."""
    shares, names = [], set()
    for run in runs:
        mode, racks = run.spec.mode, run.spec.topology.racks
        if mode.silent or mode.is_script or mode.codec or mode.every > 1 or not run.spec.link.rate:
            continue
        loads = loads_of(mode, run.spec.world, racks)
        sent = [each for each in run.summary.sent_per_step if each is not None]
        payload = [sent_share(mode, run.spec.world, rank, racks) or 0.0 for rank in range(run.spec.world)]
        if not loads or any(load.back != load.link for load in loads) or len(sent) < run.spec.world:
            continue
        shares.append(sum(sent) / sum(payload) / run.gradient - 1 / GOODPUT)
        names.add(str(mode))
    if not shares:
        found.append(Parameter("acks", ACKS, "byte a byte", "assumed", 0.3, assumed=True))
        return ACKS
    value = min(MAX_ACKS, max(0.0, statistics.median(shares)))
    found.append(Parameter("acks", value, "byte a byte", f"bytes counted in {', '.join(sorted(names))}", 0.05))
    return value


def _wire_of(run: LoadedRun, wire: Wire, efficiency: float) -> Wire:
    """The wire of another run than the base."""
    rate = run.spec.link.rate / 8 * efficiency if run.spec.link.rate else run.network.slowest
    return replace(wire, rate=rate or wire.rate, latency=run.network.delay, wakeup=0.0, message=MESSAGE_S, credit=0.0)


def _wakeup(
    runs: Sequence[LoadedRun], wire: Wire, efficiency: float, found: list[Parameter], notes: list[str]
) -> float:
    """Seconds until the receiver of a message uses it, from small buffers that are sent one after the other."""
    costs: list[float] = []
    names = set()
    for run in runs:
        mode = run.spec.mode
        if mode.silent or mode.is_script or mode.schedule != "after" or mode.is_reference or mode.codec:
            continue
        loads, own = loads_of(mode, run.spec.world, run.spec.topology.racks), _wire_of(run, wire, efficiency)
        for size, seconds in _fastest(run) if loads else []:
            once = duration(loads, mode.segments, size, own)
            waits = duration(loads, mode.segments, size, replace(own, wakeup=1.0)).seconds - once.seconds
            if once.wire < SMALL_S and waits > 0:
                costs.append(max(0.0, seconds - once.seconds) / waits)
                names.add(str(mode))
    if not costs:
        notes.append(f"no run sends small buffers one after the other: a wake-up of {1e6 * WAKEUP_S:g} us is assumed")
        found.append(Parameter("wakeup", WAKEUP_S, "s", "assumed", 0.7, assumed=True))
        return WAKEUP_S
    value = statistics.median(costs)
    spread = min(1.0, statistics.pstdev(costs) / value / np.sqrt(len(costs))) if value else 0.5
    source = f"{len(costs)} small buffers of {', '.join(sorted(names))}"
    found.append(Parameter("wakeup", value, "s", source, float(spread)))
    return value


def _fastest(run: LoadedRun) -> list[tuple[int, float]]:
    """(bytes, seconds) of each buffer of each step, of the rank that joined last: it did not wait for another."""
    found = []
    for rows in zip(*(steps.comm for steps in run.kept), strict=False):
        for each in zip(*([c for c in row if c.first_half] for row in rows), strict=False):
            found.append((each[0].size, min(c.seconds for c in each)))
    return found


# --- the processor -----------------------------------------------------------------------------------------------


def _cpus(run: LoadedRun, found: list[Parameter]) -> tuple[float, int]:
    """Cores of one node, and threads that compute on it."""
    spec, start = run.spec, run.ranks[0].start
    cores = float((start.environment.get("cores") if start else None) or 1)
    if spec.node.cpus:
        value, source = spec.node.cpus, "requested (node.cpus)"
    elif run.summary.substrate in ("hosts", "slurm"):
        value, source = cores, "cores of the host"
    else:
        value, source = cores / spec.world, f"{cores:g} cores over {spec.world} nodes"
    found.append(Parameter("cpus", value, "cores a node", source))
    return value, spec.threads


def _byte_cpu(runs: Sequence[LoadedRun], found: list[Parameter], notes: list[str]) -> float:
    """Core-seconds to send and receive one byte: processor time beyond that of the control; else assumed."""
    used: dict[bool, list[tuple[str, float, float]]] = {True: [], False: []}
    for run in runs:
        cpu, mode = _cpu_per_step(run), run.spec.mode
        sent = [each for each in run.summary.sent_per_step if each is not None]
        if cpu is not None and sent and not mode.codec and not mode.is_script:
            used[mode.is_control].append((str(mode), cpu, statistics.fmean(sent)))
    if used[True]:
        control = statistics.fmean(cpu for _, cpu, _ in used[True])
        costs = [max(0.0, cpu - control) / sent for _, cpu, sent in used[False] if sent > 0]
        if costs:
            value = statistics.median(costs)
            spread = min(1.0, statistics.pstdev(costs) / value) if value and len(costs) > 1 else 0.5
            source = f"processor time of {len(costs)} runs beyond that of the control"
            found.append(Parameter("byte_cpu", 1e9 * value, "core-s per GB", source, spread))
            return value
    notes.append(f"no control to compare with: {1e9 * BYTE_CPU_S:g} core-seconds per GB are assumed for moving bytes")
    found.append(Parameter("byte_cpu", 1e9 * BYTE_CPU_S, "core-s per GB", "assumed", 0.5, assumed=True))
    return BYTE_CPU_S


def _cpu_per_step(run: LoadedRun) -> float | None:
    """Processor time of a rank in one measured step, mean over ranks; None if it was not recorded."""
    values = []
    for rank, steps in zip(run.ranks, run.counted, strict=True):
        if rank.end is None or rank.end.own_cpu is None or not len(steps.total) or run.under_fault:
            return None
        values.append(rank.end.own_cpu / len(steps.total))
    return statistics.fmean(values)


def _copies(runs: Sequence[LoadedRun], name: str, found: list[Parameter]) -> float:
    """Seconds of copying for each byte of gradient, in the modes of a family."""
    costs = [
        float(np.median(np.concatenate([steps.copies for steps in run.kept]))) / run.gradient
        for run in runs
        if not run.spec.mode.silent and not run.spec.mode.is_script and family(run.spec.mode) == name and run.gradient
    ]
    if not costs:
        found.append(Parameter(f"copy ({name})", 1e9 * COPY_S, "s per GB", "assumed", 0.5, assumed=True))
        return COPY_S
    value = statistics.median(costs)
    found.append(Parameter(f"copy ({name})", 1e9 * value, "s per GB", f"copies of {len(costs)} runs", 0.1))
    return value


def _code(runs: Sequence[LoadedRun], wire: Wire, efficiency: float, found: list[Parameter]) -> float:
    """Seconds of a codec for each byte of gradient: what averaging took beyond what was sent."""
    costs = []
    for run in runs:
        mode = run.spec.mode
        if mode.codec and mode.schedule == "after" and not mode.is_reference and run.gradient:
            loads, own = loads_of(mode, run.spec.world), replace(_wire_of(run, wire, efficiency), wakeup=wire.wakeup)
            sizes = {c.name: c.size for step in run.kept[0].comm for c in step if c.first_half}
            sent = sum(duration(loads, mode.segments, size, own).seconds for size in sizes.values())
            took = float(np.median(np.min([steps.blocked for steps in run.kept], axis=0)))
            costs.append(max(0.0, took - sent) / run.gradient)
    if not costs:
        found.append(Parameter("codec", 1e9 * CODE_S, "s per GB", "assumed", 1.0, assumed=True))
        return CODE_S
    value = statistics.median(costs)
    found.append(Parameter("codec", 1e9 * value, "s per GB", f"{len(costs)} runs with a codec", 0.3))
    return value
