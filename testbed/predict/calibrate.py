"""Calibration: what the model of a step needs to know, from run folders: records, receipts and a profile.

Each parameter has its source and its uncertainty (`Parameter`), what the folders lack is assumed and marked so:

    compute     the control (mode none) shows it best, then modes that synchronise after backward, then the others
    tensors     the buffers of a mode that sends each tensor alone; else those of the mode with most buffers
    ready       when buckets were launched during backward (overlap, pipeline, DDP); else in proportion to bytes
    rate        the receipt's links; latency: its shortest round trip
    byte_cpu    processor time of a rank in a mode beyond that of the control, a byte; and a message, where modes with
                many and with few messages are there
    wakeup      what small buffers took beyond their bytes, for each message that waits for another
    jitter      seconds of compute of each rank over those of the others in the same step

Seconds of what the processor does are those of this machine, also where a run had time dilation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from testbed.predict.collectives import GOODPUT, Wire, duration, loads_of, messages_of
from testbed.predict.step import ELEMENT_BYTES, Node, Work
from testbed.report.load import Loaded, LoadedRun, Steps, load
from testbed.results.profile import Profile, ProfiledLayer
from testbed.results.theory import CODE_S_PER_BYTE, SEGMENT_S, RoundLoad, sent_share
from testbed.spec.errors import SpecError, UsageError, one_line
from testbed.spec.fabric import Racks
from testbed.spec.mode import CODECS, SCRIPT, SyncMode
from testbed.spec.run import RunSpec
from testbed.spec.units import BURST_S, covered_length

# Assumed: what handing a message to the kernel takes, in which the link carries nothing. SEGMENT_S is more, because it
# is all that a rank does for a segment of a pipeline, most of it in Python; its link carries others meanwhile.
MESSAGE_S = 50e-6
WAKEUP_S = 200e-6  # assumed where no small buffer was measured, on a machine that is not busy
BYTE_CPU_S = 2.0e-9  # assumed: core-seconds per byte; 1.5 to 4 were measured through veth pairs
COPY_S = 0.5e-9  # assumed: seconds per byte of a copy
ACKS = 0.016  # assumed: measured on shaped links of veth pairs; one acknowledgement of 66 bytes for two or three frames
MAX_ACKS = 0.05
WINDOW_BYTES = 4 << 20  # assumed: what one TCP connection of Linux has under way at most, by its default buffers
SMALL_S = 2e-3  # if the bytes of a buffer take less, its time is that of its messages
MANY = 3.0  # times as many messages in one mode as in another show what a message costs
WHOLE = 1.5  # records count fewer than so many messages for each buffer where whole buffers are handed to torch
LEAST_NOISE = 0.01  # of the control's processor time: what two runs of the same differ by
MAX_JITTER = 200  # values; more are replaced by so many of their quantiles
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
    dilation: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Everything that predictions are made of."""

    base: RunSpec  # the run whose network is the default of predictions
    profile: Profile
    passes: int = 1  # of the profile in a step: micro-batches
    wire: Wire
    efficiency: float  # payload byte/s of a link for each requested byte/s
    node: Node
    copies: dict[str, float]  # seconds per byte of gradient, by family
    codes: dict[str, float]  # the same that encoding and decoding take, by codec
    parameters: list[Parameter]
    measured: list[Measured]
    notes: list[str] = field(default_factory=list)  # what was assumed or left out
    modes: list[SyncMode] = field(default_factory=list)  # of the runs

    @property
    def work(self) -> Work:
        return Work.of(self.profile, self.passes)

    @property
    def batch_per_rank(self) -> int:
        """Samples of a rank in a step."""
        return self.profile.batch_per_rank * self.passes

    @property
    def racks(self) -> Racks:
        return self.base.topology.racks if self.base.world > 1 else ()

    def spread(self, name: str) -> float:
        """The relative standard deviation of a parameter."""
        return next((each.spread for each in self.parameters if each.name == name), 0.0)


def family(mode: SyncMode) -> str:
    return "reference" if mode.is_reference else "pipeline" if mode.schedule == "pipeline" else "buffers"


@dataclass
class Evidence:
    """Runs that train the same, by what they show; and the parameters and notes that were found in them so far."""

    base: LoadedRun
    runs: list[LoadedRun]
    notes: list[str]
    parameters: list[Parameter] = field(default_factory=list)

    def found(
        self, name: str, value: float, unit: str, source: str, spread: float = 0.0, assumed: bool = False
    ) -> None:
        self.parameters.append(Parameter(name, value, unit, source, float(spread), assumed))

    @cached_property
    def controls(self) -> list[LoadedRun]:
        return [run for run in self.runs if run.spec.mode.is_control]

    @cached_property
    def sending(self) -> list[LoadedRun]:
        """Runs whose messages are known."""
        return [run for run in self.runs if run.spec.mode.row.rounds or run.spec.mode.row.rack_rounds]

    @cached_property
    def plain(self) -> list[LoadedRun]:
        """Those without a codec: the gradient itself is sent."""
        return [run for run in self.sending if not run.spec.mode.codec]

    @cached_property
    def in_turn(self) -> list[LoadedRun]:
        """Those that send one buffer after the other when backward is over."""
        return [run for run in self.sending if not during_backward(run.spec.mode)]

    @cached_property
    def plain_in_turn(self) -> list[LoadedRun]:
        return [run for run in self.in_turn if not run.spec.mode.codec]

    @cached_property
    def balanced(self) -> list[LoadedRun]:
        """Plain runs in which every rank sends as much as it receives."""
        return [run for run in self.plain if all(load.back == load.link for load in loads_of_run(run))]


def during_backward(mode: SyncMode) -> bool:
    return mode.is_reference or mode.schedule != "after"


def loads_of_run(run: LoadedRun) -> tuple[RoundLoad, ...]:
    return loads_of(run.spec.mode, run.spec.world, run.spec.topology.racks)


def slower(run: LoadedRun) -> float:
    """The time dilation of a run: its seconds were divided by it, also those of what was not made slower."""
    return run.spec.dilation or 1.0


def calibrate(paths: Sequence[Path], profile: Path | None = None) -> Calibration:
    """Calibrate from the runs below these paths, and from a profile if one is given.

    Raises UsageError if no run can be used, SchemaError or SpecError if the profile cannot be read.
    """
    given = Profile.read(profile) if profile else None
    runs, notes = _usable(load(paths), paths)
    base = _base(runs)
    if not base.gradient and given is None:
        raise SpecError(f"{base.folder.path}: no gradient was seen in it. Give a profile with --profile.")
    alike = [run for run in runs if _work_key(run) == _work_key(base)]
    if len(alike) < len(runs):
        notes.append(
            f"{len(runs) - len(alike)} runs train something else than {base.folder.path.name} and are left out"
        )
    evidence = Evidence(base, alike, notes)
    work = given or _own_profile(base)
    different = [] if given is None else _differences(given, base)
    passes = base.spec.passes(0) if base.spec.script is None and not different else 1
    if work is not None:
        source = f"profile of {work.model}, {len(work.layers)} layers"
        evidence.found("compute", Work.of(work, passes).compute, "s", source)
    else:
        work = _from_records(evidence, passes)
    jitter = _jitter(evidence, work, foreign=bool(different))
    wire, efficiency = _network(evidence)
    wire = replace(wire, acks=_acks(evidence), segment=SEGMENT_S)
    byte_cpu, message = _processor(evidence)
    evidence.found("segment", SEGMENT_S, "s", "assumed, of a pipeline", 0.5, assumed=True)
    wire = replace(wire, message=message)
    wire = replace(wire, wakeup=_wakeup(evidence, wire, efficiency))
    copies = {name: _copies(evidence, name) for name in FAMILIES}
    node = Node(
        byte_cpu=byte_cpu,
        cpus=_cpus(evidence),
        threads=base.spec.threads,
        jitter=jitter,
        sleeps=base.spec.emulated,
    )
    codes = {name: _code(evidence, name, wire, efficiency) for name in CODECS}
    shown = [run for run in alike if not run.spec.mode.is_script]
    return Calibration(
        base=base.spec,
        profile=work,
        passes=passes,
        wire=wire,
        efficiency=efficiency,
        node=node,
        copies=copies,
        codes=codes,
        parameters=evidence.parameters,
        measured=[_measured(run) for run in _comparable(shown, base, different, notes)],
        notes=evidence.notes,
        modes=list(dict.fromkeys(run.spec.mode for run in shown if run.spec.mode.distributed)),
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
        raise UsageError(f"no run folder was found in {named}. Make one with `testbed run`.")
    notes = [f"{each.path.name} is left out: {one_line(each.reason)}" for each in loaded.skipped]
    refused = [(run, reason) for run in loaded.runs if (reason := _unfit(run))]
    fit = [run for run in loaded.runs if not _unfit(run)]
    if not any(run.spec.world > 1 for run in fit):
        if refused:
            first_run, (rule, way_out) = refused[0]
        else:
            first_run = loaded.runs[0]
            rule, way_out = "has one node, so it shows no network", "Add a run of two nodes or more."
        raise SpecError(f"{first_run.folder.path}: {rule}. {way_out}")
    return fit, [*notes, *(f"{run.folder.path.name} is left out: it {rule}" for run, (rule, _) in refused)]


def _unfit(run: LoadedRun) -> tuple[str, str] | None:
    """Why nothing can be calibrated from a run, and the way out; None if it can."""
    if run.spec.world == 1:
        return None
    unequal = sorted(name for name, own in run.spec.overrides.items() if own.link)
    if unequal:
        rule = f"gives {', '.join(unequal)} another link, and predictions are for equal ones"
        return rule, "Add a run without overrides of links."
    if not run.network.links:
        return "has no receipt, so its network is not known", "Run it again with --set probe=true."
    return None


def _work_key(run: LoadedRun) -> tuple[object, ...]:
    """Equal for runs whose ranks compute the same.

    The spec does not say what a user's script computes: one that divides a global batch has other images on other
    numbers of nodes, and one that was changed may have another model.
    """
    spec = run.spec
    if spec.script is not None:
        images = statistics.median(run.kept[0].images.tolist())
        seen = (images, run.gradient)
        return (tuple(spec.script.argv), spec.script.folder, spec.node.cpus, spec.threads, *seen)
    single = spec.global_batch if spec.world == 1 else None  # its batch is the global one
    optimizer = spec.optimizer
    # the content of the user's own model and data, and of the profile that is replayed, wherever they are
    own = {key: spec.files.get(each.path, each.path) for key, (_, each) in spec.own_files.items() if key != "mode"}
    return (
        spec.model,
        spec.data.name,
        spec.data.size,
        spec.dtype,
        spec.batchnorm,
        single or spec.local_batch(0),
        spec.passes(0),
        (optimizer.name, optimizer.momentum > 0, optimizer.weight_decay > 0, optimizer.clip is None),
        (spec.threads, spec.node.cpus, tuple(spec.cpus_of(rank) for rank in range(spec.world) if spec.overrides)),
        (spec.emulated, tuple(sorted(own.items()))),
    )


def _base(runs: Sequence[LoadedRun]) -> LoadedRun:
    """A run of the condition that most runs share: the same work on the same network."""

    def condition(run: LoadedRun) -> tuple[object, ...]:
        return (_work_key(run), run.spec.nodes, run.spec.link, run.spec.topology, run.summary.substrate)

    several = [run for run in runs if run.spec.world > 1]
    conditions = [condition(run) for run in several]
    return max(several, key=lambda run: conditions.count(condition(run)))


def _comparable(
    runs: Sequence[LoadedRun], base: LoadedRun, different: Sequence[str], notes: list[str]
) -> list[LoadedRun]:
    """The runs that the model is compared with; a note says why others are not. `different`: work of the profile."""
    if different:
        notes.append(f"the model is not compared with the runs: the profile is of other work ({', '.join(different)})")
        return []
    found = [run for run in runs if _same_network(run.spec, base.spec)]
    if left := len(runs) - len(found):
        rule = f"{left} runs have other racks, uplinks or loss than {base.folder.path.name}"
        notes.append(f"the model is not compared with all runs: {rule}")
    return found


def _same_network(spec: RunSpec, base: RunSpec) -> bool:
    """True if predictions are for the network of this run; a point has a rate and a delay of its own."""
    if spec.world == 1:
        return True
    ours, theirs = spec.topology, base.topology
    if (ours.trunk, spec.link.loss) != (theirs.trunk, base.link.loss):
        return False
    racks_matter = ours.trunk is not None or spec.mode.row.follows_racks
    return not racks_matter or ours.racks == racks_of(theirs.racks, spec.world)


def racks_of(racks: Racks, nodes: int) -> Racks:
    """Racks of the same size for another number of nodes, filled in the order of ranks."""
    if not racks or nodes == sum(map(len, racks)):
        return racks
    size = max(map(len, racks))
    return tuple(tuple(range(k, min(k + size, nodes))) for k in range(0, nodes, size))


def _own_profile(run: LoadedRun) -> Profile | None:
    """The profile that the run recorded, or that it replayed; None if it has none."""
    path = run.folder.layers
    if run.spec.emulated and "compute" in run.spec.own_files:
        path = run.folder.own_file(run.spec, "compute") or path
    return Profile.read(path) if path.is_file() else None


def _differences(profile: Profile, run: LoadedRun) -> list[str]:
    """In what the work of a profile differs from that of a run, in words; empty if they are the same."""
    spec = run.spec
    if spec.emulated:
        return [] if profile == _own_profile(run) else ["they replay another one"]
    pairs: dict[str, tuple[object, object]] = {"bytes of gradient": (profile.gradient_bytes, int(run.gradient))}
    if spec.script is not None:
        pairs["model"] = (profile.model, name_of_script(spec.script.argv))
    else:
        pairs |= {
            "model": (profile.model, spec.model),
            "batch_per_rank": (profile.batch_per_rank, spec.local_batch(0) // spec.passes(0)),
            "dtype": (profile.dtype, spec.dtype),
            "optimizer": (profile.optimizer, spec.optimizer.name),
        }
    pairs |= {"threads": (profile.threads, spec.threads), "node.cpus": (profile.cpus, spec.cpus_of(0))}
    return [f"{name} {ours}, not {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]


def _measured(run: LoadedRun) -> Measured:
    seconds = float(run.summary.seconds_per_step or 0.0)
    low, high = run.summary.seconds_spread or (seconds, seconds)
    spec = run.spec
    return Measured(
        mode=spec.mode,
        nodes=spec.world,
        rate=float(spec.link.rate) if spec.link.rate else None,
        delay=spec.link.delay or 0.0,
        seconds=seconds,
        low=low,
        high=high,
        folder=run.folder.path,
        emulated=spec.emulated,
        dilation=slower(run),
    )


# --- compute -----------------------------------------------------------------------------------------------------


def _rank_of_mode(mode: SyncMode) -> int:
    """How well a run of this mode shows what computing alone takes; the smaller the better."""
    return 0 if mode.is_control else 2 if during_backward(mode) else 1


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


def _from_records(evidence: Evidence, passes: int) -> Profile:
    """A profile of one pass from the phases of recorded steps; layers are what is sent, with shares of backward."""
    chosen = _best_for_compute(evidence.runs)
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
    evidence.found("compute", total, "s", source, spread)
    if chosen[0].spec.mode.is_script and not forward:
        forward = max(0.0, total - data - backward - update)
    phases = data + forward + backward + update
    # Recorded forward and backward include copies and waits; scaled, the phases sum to the compute time.
    scale = min(1.0, total / phases) if phases else 1.0
    sizes = _tensors(evidence)
    ready = _ready_curve(evidence)
    layers, sent, total_bytes = [], 0, sum(sizes)
    for number, size in enumerate(reversed(sizes)):  # as backward makes them
        begin, end = ready(sent / total_bytes), ready((sent + size) / total_bytes)
        share, sent = end - begin, sent + size
        layers.append(
            ProfiledLayer(
                name=f"tensor {len(sizes) - 1 - number}",
                sizes=(size,),
                forward_s=share * forward * scale / passes,
                backward_s=share * backward * scale / passes,
            )
        )
    spec, start = chosen[0].spec, chosen[0].ranks[0].start
    model = spec.model
    if spec.script is not None:
        model = name_of_script(spec.script.argv)
        evidence.notes.append(f"{model} stands for `{one_line(' '.join(spec.script.argv))}`")
    return Profile(
        model=model,
        dtype=spec.dtype,
        optimizer=spec.optimizer.name,
        batch_per_rank=max(1, round(chosen[0].images(0) / passes)),
        threads=spec.threads,
        cpus=spec.node.cpus,
        environment=start.environment if start else {},
        layers=tuple(reversed(layers)),
        data_s=data * scale,
        zero_s=max(0.0, total - phases),
        loss_s=0.0,
        optimizer_s=update * scale,
    )


def name_of_script(argv: Sequence[str]) -> str:
    """`main.py:script`: a user's script as a model's name that a run with emulated compute accepts."""
    files = [one_line(Path(word).name) for word in argv if word.endswith(".py")]
    return f"{files[0].replace(':', '_') if files else 'script.py'}:{SCRIPT}"


def _buffers(run: LoadedRun) -> dict[str, int]:
    """The bytes of each buffer that a step sends, by its name."""
    return {c.name: c.size for step in run.kept[0].comm for c in step if c.first_half}


def _tensors(evidence: Evidence) -> list[int]:
    """Bytes of what is sent as one unit, in order of forward."""
    best: list[int] = []
    whose: LoadedRun | None = None
    runs = evidence.runs
    gradient = int(runs[0].gradient)
    for run in evidence.plain:
        mode = run.spec.mode
        if mode.row.sends_parameters:
            continue
        sizes = _buffers(run)
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
        evidence.notes.append(f"no run shows the sizes of tensors: {count} equal ones are assumed")
        evidence.found("tensors", count, "", "assumed: equal", assumed=True)
        each = max(1, gradient // count // ELEMENT_BYTES) * ELEMENT_BYTES
        return [each] * (count - 1) + [max(ELEMENT_BYTES, gradient - each * (count - 1))]
    if whose.spec.mode.granularity != "param":
        evidence.notes.append(f"tensors are taken to be the {len(best)} buckets of {whose.spec.mode}")
    evidence.found("tensors", len(best), "", f"buffers of {whose.spec.mode}")
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


def _ready_curve(evidence: Evidence) -> Ready:
    """From when buckets were launched during backward, in the run with most of them."""
    best: list[tuple[float, float]] = []
    whose = ""
    for run in evidence.plain:
        points = _launches(run) if during_backward(run.spec.mode) else []
        if len(points) > len(best):
            best, whose = points, str(run.spec.mode)
    if not best:
        evidence.notes.append("no run shows when gradients are ready: in proportion to their bytes is assumed")
        evidence.found("ready", 1.0, "", "assumed: in proportion to bytes", 0.2, assumed=True)
        return Ready([])
    evidence.found("ready", len(best), "points", f"launches of {whose}")
    return Ready(best)


def _launches(run: LoadedRun) -> list[tuple[float, float]]:
    """(share of bytes, share of backward) for each bucket of one run, medians over steps and ranks.

    Backward is that of the last pass, which alone launches buckets, without the waits and copies inside it.
    """
    offsets: dict[int, list[float]] = {}
    sizes: dict[int, int] = {}
    for steps in run.kept:
        for phases, comm, *pauses in zip(steps.phases, steps.comm, steps.stalls, steps.copying, strict=True):
            passes = [(begin, begin + seconds) for name, begin, seconds in phases if name == "backward"]
            spans = [(begin, begin + seconds) for begin, seconds in chain(*pauses)]
            whole = _computed(*passes[-1], spans) if passes else 0.0
            if whole <= 0:
                continue
            for each in comm:
                if each.first_half and not each.continued:
                    number = _number(each.name)
                    sizes[number] = each.size
                    done = _computed(passes[-1][0], each.offset, spans)
                    offsets.setdefault(number, []).append(done / whole)
    whole = sum(sizes.values())
    points, sent = [], 0
    reached = 0.0
    for number in sorted(sizes):
        sent += sizes[number]
        reached = min(1.0, max(reached, statistics.median(offsets[number])))
        points.append((sent / whole, reached))
    return points[:-1]


def _computed(begin: float, end: float, pauses: Iterable[tuple[float, float]]) -> float:
    """Seconds between two moments without these pauses."""
    inside = [(max(begin, a), min(end, b)) for a, b in pauses if a < end and b > begin]
    return max(0.0, end - begin - covered_length(inside))


def _jitter(evidence: Evidence, profile: Profile, foreign: bool) -> tuple[float, ...]:
    """Seconds of compute of a rank over what is usual in the same step, sorted."""
    if foreign and profile.jitter:
        values, source = list(profile.jitter), f"{len(profile.jitter)} steps of the profile"
    else:
        chosen = _best_for_compute(evidence.runs)
        values = [value for run in chosen for value in _beside_each_other(run)] or [1.0]
        source = f"{len(values)} steps of all ranks of {', '.join(sorted({str(run.spec.mode) for run in chosen}))}"
    evidence.found("jitter", float(np.std(values)), "of the median", source)
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


def _network(evidence: Evidence) -> tuple[Wire, float]:
    """The wire of the base run, and what a requested rate gives as payload."""
    network, spec = evidence.base.network, evidence.base.spec
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
    evidence.found("rate", 8 * rate / 1e6, "Mbit/s of payload", source, spread)
    delay = spec.link.delay or 0.0
    latency = delay + max(0.0, network.delay - delay) * slower(evidence.base)
    evidence.found("latency", latency, "s", "receipt, half the shortest round trip", 0.2)
    uplink = _uplink_of(evidence.base, efficiency)
    if uplink and network.uplinks:
        evidence.found("uplink", 8 * uplink / 1e6, "Mbit/s of payload", "receipt", spread)
    elif uplink:
        evidence.found("uplink", 8 * uplink / 1e6, "Mbit/s of payload", "assumed: as requested", 0.05, assumed=True)
    source = "assumed: Linux's default buffers; a connection carries at most this in a round trip"
    evidence.found("window", WINDOW_BYTES, "bytes", source, 0.3, assumed=True)
    wire = Wire(
        rate=rate,
        latency=latency,
        uplink=uplink,
        uplink_latency=spec.topology.delay or 0.0,
        window=WINDOW_BYTES,
        loss=spec.link.loss,
        credit=BURST_S if shaped else 0.0,
    )
    return wire, efficiency


def _uplink_of(run: LoadedRun, efficiency: float) -> float | None:
    """Payload byte/s of a rack's uplink, measured or else as requested; None if there is no limit."""
    requested = run.spec.topology.uplink
    return min(run.network.uplinks.values(), default=requested / 8 * efficiency if requested else None)


def _acks(evidence: Evidence) -> float:
    """Bytes of acknowledgements for each byte received: what interfaces counted beyond payload and its headers."""
    shares, names = [], set()
    for run in evidence.balanced:
        mode, racks = run.spec.mode, run.spec.topology.racks
        sent = [each for each in run.summary.sent_per_step if each is not None]
        if mode.every > 1 or not run.spec.link.rate or len(sent) < run.spec.world:
            continue
        payload = [sent_share(mode, run.spec.world, rank, racks) or 0.0 for rank in range(run.spec.world)]
        shares.append(sum(sent) / sum(payload) / run.gradient - 1 / GOODPUT)
        names.add(str(mode))
    if not shares:
        evidence.found("acks", ACKS, "byte a byte", "assumed", 0.3, assumed=True)
        return ACKS
    value = min(MAX_ACKS, max(0.0, statistics.median(shares)))
    evidence.found("acks", value, "byte a byte", f"bytes counted in {', '.join(sorted(names))}", 0.05)
    return value


def _wire_of(run: LoadedRun, wire: Wire, efficiency: float) -> Wire:
    """The wire of another run than the base, as its times show it; what is woken is not part of it."""
    rate = run.spec.link.rate / 8 * efficiency if run.spec.link.rate else run.network.slowest
    return replace(
        wire,
        rate=rate or wire.rate,
        latency=run.network.delay,
        uplink=_uplink_of(run, efficiency),
        uplink_latency=run.spec.topology.delay or 0.0,
        loss=run.spec.link.loss,
        wakeup=0.0,
        message=wire.message / slower(run),
        credit=0.0,
    )


def _wakeup(evidence: Evidence, wire: Wire, efficiency: float) -> float:
    """Seconds until the receiver of a message uses it, from small buffers that are sent one after the other."""
    costs: list[float] = []
    names = set()
    for run in evidence.plain_in_turn:
        loads, own, mode = loads_of_run(run), _wire_of(run, wire, efficiency), run.spec.mode
        for size, seconds in _fastest(run):
            once = duration(loads, mode.segments, size, own)
            waits = duration(loads, mode.segments, size, replace(own, wakeup=1.0)).seconds - once.seconds
            if once.wire < SMALL_S and waits > 0:
                costs.append(slower(run) * max(0.0, seconds - once.seconds) / waits)
                names.add(str(mode))
    if not costs:
        evidence.notes.append(
            f"no run sends small buffers one after the other: a wake-up of {1e6 * WAKEUP_S:g} us is assumed"
        )
        evidence.found("wakeup", WAKEUP_S, "s", "assumed", 0.7, assumed=True)
        return WAKEUP_S
    value = statistics.median(costs)
    spread = min(1.0, statistics.pstdev(costs) / value / np.sqrt(len(costs))) if value else 0.5
    evidence.found("wakeup", value, "s", f"{len(costs)} small buffers of {', '.join(sorted(names))}", spread)
    return value


def _fastest(run: LoadedRun) -> list[tuple[int, float]]:
    """(bytes, seconds) of each buffer of each step, of the rank that joined last: it did not wait for another."""
    found = []
    for rows in zip(*(steps.comm for steps in run.kept), strict=False):
        for each in zip(*([c for c in row if c.first_half] for row in rows), strict=False):
            found.append((each[0].size, min(c.seconds for c in each)))
    return found


# --- the processor -----------------------------------------------------------------------------------------------


def _cpus(evidence: Evidence) -> float:
    """Cores of one node."""
    run = evidence.base
    spec, start = run.spec, run.ranks[0].start
    cores = float((start.environment.get("cores") if start else None) or 1)
    if spec.node.cpus:
        value, source = spec.node.cpus, "requested (node.cpus)"
    elif run.summary.substrate in ("hosts", "slurm"):
        value, source = cores, "cores of the host"
    else:
        value, source = cores / spec.world, f"{cores:g} cores over {spec.world} nodes"
    evidence.found("cpus", value, "cores a node", source)
    return value


@dataclass(frozen=True)
class Used:
    """What one measured step of a run took and did, the mean over its ranks."""

    mode: str
    cpu: float  # seconds of a rank's processor
    sent: float  # bytes
    messages: float  # 0 where they are not known


def _processor(evidence: Evidence) -> tuple[float, float]:
    """Core-seconds that a byte takes, sent and received together, and seconds that a message takes.

    Both come from processor time beyond that of the control: a quota stops a rank but does not lengthen this. A message
    shows itself where modes cut the same bytes into many messages and into few.
    """
    controls = [used for run in evidence.controls if (used := _used(run, 0.0))]
    in_turn = [used for run in evidence.balanced if not during_backward(run.spec.mode) and (used := _used(run))]
    fitted = _fitted(controls, [each for each in in_turn if each.messages])
    if fitted is not None:
        (byte, off_byte), (message, off_message) = fitted
        names = ", ".join(sorted({each.mode for each in in_turn if each.messages}))
        source = f"processor time of {names} beyond that of the control"
        evidence.found("byte_cpu", 1e9 * byte, "core-s per GB", source, off_byte)
        evidence.found("message", message, "s", "the same, by the number of messages", off_message)
        return byte, message
    evidence.found("message", MESSAGE_S, "s", "assumed", 0.5, assumed=True)
    sending = [used for run in evidence.plain if (used := _used(run)) and used.sent > 0]
    if controls and sending:
        control = statistics.fmean(each.cpu for each in controls)
        costs = [max(0.0, each.cpu - control) / each.sent for each in sending]
        value = statistics.median(costs)
        spread = min(1.0, statistics.pstdev(costs) / value) if value and len(costs) > 1 else 0.5
        source = f"processor time of {len(costs)} runs beyond that of the control"
        evidence.found("byte_cpu", 1e9 * value, "core-s per GB", source, spread)
        return value, MESSAGE_S
    evidence.notes.append(
        f"no control to compare with: {1e9 * BYTE_CPU_S:g} core-seconds per GB are assumed for moving bytes"
    )
    evidence.found("byte_cpu", 1e9 * BYTE_CPU_S, "core-s per GB", "assumed", 0.5, assumed=True)
    return BYTE_CPU_S, MESSAGE_S


def _fitted(controls: Sequence[Used], sending: Sequence[Used]) -> tuple[tuple[float, float], ...] | None:
    """Seconds of a byte and of a message by least squares, each with its uncertainty; None if runs do not show them.

    processor time = that of the control + byte x bytes + message x messages
    """
    counts = [each.messages for each in sending]
    if not controls or not counts or max(counts) < MANY * min(counts):
        return None
    control = statistics.fmean(each.cpu for each in controls)
    scales = np.array([max(each.sent for each in sending), max(counts)])
    rows = np.array([(each.sent, each.messages) for each in sending]) / scales
    beyond = np.array([each.cpu - control for each in sending])
    found, *_ = np.linalg.lstsq(rows, beyond, rcond=None)
    noise = float(np.std([each.cpu for each in controls]))
    off = max(float(np.std(beyond - rows @ found)), noise, LEAST_NOISE * control)
    if min(found) <= off:  # at least one cost is not larger than its uncertainty
        return None
    return tuple((float(each / scale), off / float(each)) for each, scale in zip(found, scales, strict=True))


def _used(run: LoadedRun, messages: float | None = None) -> Used | None:
    """What a step of a run used; None if its records do not have it."""
    cpu, sent = _cpu_per_step(run), [each for each in run.summary.sent_per_step if each is not None]
    if cpu is None or not sent:
        return None
    return Used(str(run.spec.mode), cpu, statistics.fmean(sent), _messages(run) if messages is None else messages)


def _messages(run: LoadedRun) -> float:
    """Messages that a rank sends in a step; 0 if its records do not count them.

    Records count what is handed to the network. Of a whole buffer that is handed to torch Gloo makes several messages.
    """
    ends = [rank.end for rank in run.ranks if rank.end is not None and rank.end.steps]
    handed = [end.messages.get("gradients", 0) / end.steps for end in ends]
    buffers = _buffers(run)
    if not handed or not min(handed) or not buffers:
        return 0.0
    if statistics.fmean(handed) > WHOLE * len(buffers):
        return statistics.fmean(handed)
    return float(sum(messages_of(loads_of_run(run), run.spec.mode.segments, size) for size in buffers.values()))


def _cpu_per_step(run: LoadedRun) -> float | None:
    """Processor time of a rank in one measured step, mean over ranks; None if it was not recorded."""
    values = []
    for rank, steps in zip(run.ranks, run.counted, strict=True):
        if rank.end is None or rank.end.own_cpu is None or not len(steps.total) or run.under_fault:
            return None
        values.append(rank.end.own_cpu / len(steps.total))
    return statistics.fmean(values)


def _copies(evidence: Evidence, name: str) -> float:
    """Seconds of copying for each byte of gradient, in the modes of a family."""
    costs = [
        slower(run) * float(np.median(np.concatenate([steps.copies for steps in run.kept]))) / run.gradient
        for run in evidence.sending
        if family(run.spec.mode) == name and run.gradient
    ]
    if not costs:
        evidence.found(f"copy ({name})", 1e9 * COPY_S, "s per GB", "assumed", 0.5, assumed=True)
        return COPY_S
    value = statistics.median(costs)
    evidence.found(f"copy ({name})", 1e9 * value, "s per GB", f"copies of {len(costs)} runs", 0.1)
    return value


def _code(evidence: Evidence, codec: str, wire: Wire, efficiency: float) -> float:
    """Return the seconds that a codec computes per byte of gradient: the time of averaging without that of sending."""
    costs = []
    for run in evidence.in_turn:
        if run.spec.mode.codec == codec and run.gradient:
            own = replace(_wire_of(run, wire, efficiency), wakeup=wire.wakeup / slower(run))
            loads, segments = loads_of_run(run), run.spec.mode.segments
            sent = sum(duration(loads, segments, size, own).seconds for size in _buffers(run).values())
            took = float(np.median(np.min([steps.blocked for steps in run.kept], axis=0)))
            costs.append(slower(run) * max(0.0, took - sent) / run.gradient)
    if not costs:
        evidence.found(f"codec ({codec})", 1e9 * CODE_S_PER_BYTE, "s per GB", "assumed", 1.0, assumed=True)
        return CODE_S_PER_BYTE
    value = statistics.median(costs)
    spread = statistics.pstdev(costs) / value if value and len(costs) > 1 else 0.3
    evidence.found(f"codec ({codec})", 1e9 * value, "s per GB", f"{len(costs)} runs with {codec}", min(1.0, spread))
    return value
