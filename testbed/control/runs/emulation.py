"""Before a run with emulated compute: the profile that it replays, and how many times slower everything has to be.

Many ranks on few cores are only measured rightly while the cores are mostly idle: moving bytes costs processor time,
and a sleeping rank must be woken in time. So the network and the sleeps of a run are made K times slower (time
dilation), and all results are divided by K when they are read (results/records.py, results/receipt.py). K is chosen
so that all ranks together need at most half of the cores, so that the thread of a pipeline's transport is woken before
its socket has nothing left to send, and so that ranks that encode at the same moment do not wait long for a core.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from testbed.control.machine.affinity import usable_cores
from testbed.control.runs.locks import set_aside_unless
from testbed.control.runs.select import SubstrateChoice
from testbed.results import theory
from testbed.results.folder import RunFolder, runs_dir
from testbed.results.profile import Profile
from testbed.spec.errors import Unavailable, UsageError, refuse
from testbed.spec.own_files import EMULATED, digest_of, own_profile
from testbed.spec.run import RunSpec
from testbed.spec.words import refuse_setting, setting

PROFILES = "profiles"  # the experiment of runs that record one
RECORDED_STEPS = 10
HASH_DIGITS = 8  # in the name of a profile
WARMUP_STEPS = 2
CPU_S_PER_BYTE = 4.8e-9  # of sending and receiving through a shaped link, kernel and Gloo, both ends together
CPU_S_PER_STEP = 0.004  # of a rank besides, plus the next for each byte of gradients: hooks, copies, update
CPU_S_PER_GRADIENT_BYTE = 0.6e-9
START_S_PER_RANK = 8.0  # of one core, to start a rank: 3 s where nothing else runs
MAX_SHARE = 0.5  # of the cores that all ranks together may need
# What a pipeline's socket has left when its thread is woken must last so many times as long as the thread waits for a
# core on average. If waits are exponential, the wire is then idle for e^-4 = 2 % of a wait at each wake-up.
LOOK_AHEAD = 4.0
MAX_WAIT = 0.05  # of a step, that ranks whose codecs begin at the same moment may wait for a core
MIN_STEP_S = 1e-6  # instead of no time at all: a profile may be all zeros, to see the communication alone
MAX_CHOSEN = 64.0  # a larger K is not chosen: the run would take too long to be meant
RANK_BYTES = 165 << 20  # memory of a rank that has imported torch, without what ranks share
COPIES = 4  # of the gradients that a rank holds at most: parameters, gradients, buffers that are sent and received

LOCAL = ("netns", "compose", "process")  # substrates that can record a profile
Record = Callable[[RunSpec, Path], None]  # runs a spec into a folder


def profile_name(values: Mapping[str, Any]) -> str:
    """The name of a run that records a profile, from the keys of its spec: that of its model."""
    return re.sub(r"[^A-Za-z0-9]+", "_", str(values.get("model", "vgg11")))[-60:].strip("_")


def check_profiled(spec: RunSpec, choice: SubstrateChoice) -> None:
    """Raise UsageError if this substrate cannot record the requested profile."""
    if choice.name not in LOCAL:
        rule = "a profile is recorded on this machine"
        raise refuse("--on", choice.name, rule, f"Use auto or one of {', '.join(LOCAL)}.")
    if spec.cpus_of(0) is not None and choice.drop_unsupported(spec).cpus_of(0) is None:
        rule = f"there are no CPU quotas on {choice.name}"
        raise refuse_setting("node.cpus", spec.cpus_of(0), rule, "Leave it out, or use --on netns or compose.")


def profile_spec(spec: RunSpec) -> RunSpec:
    """The run that records the profile of a spec: one node, the same model, batch per pass and share of a core.

    Its name has a hash of all that decides the work of a step, so that no other work is replayed. Raises SpecError if
    a file of the user's own cannot be used.
    """
    kept = ("model", "dtype", "batchnorm", "optimizer", "seed", "threads", "node", "start_deadline")
    values: dict[str, Any] = {key: getattr(spec, key) for key in kept}
    batch = spec.local_batch(0) // spec.passes(0)
    cpus = f"-{spec.node.cpus:g}cpus" if spec.node.cpus else ""
    values |= {
        "experiment": PROFILES,
        "mode": "single",
        "nodes": 1,
        "data": spec.data.model_copy(update={"shares": None}),
        "batch_per_rank": batch,
        "steps": RECORDED_STEPS + WARMUP_STEPS,
        "warmup": WARMUP_STEPS,
        "evaluate": "never",
        "layers": True,
    }
    made = RunSpec.load(values, "").with_files()
    work = made.model_dump_json(exclude={"seed": True, "start_deadline": True, "node": {"congestion"}})
    name = f"{profile_name(values)}-{spec.dtype}-batch{batch}-threads{spec.threads}{cpus}"
    return made.model_copy(update={"name": f"{name}-{digest_of(work.encode())[:HASH_DIGITS]}"})


def with_profile(spec: RunSpec, record: Record) -> RunSpec:
    """The spec with the path of the profile that it replays. One that is not named is recorded, once.

    Raises UsageError if it cannot be used, Unavailable if another process records it.
    """
    if not spec.emulated:
        return spec
    own = own_profile(spec.compute)
    if own is None:
        wanted = profile_spec(spec)
        folder = RunFolder(runs_dir() / PROFILES / wanted.name)
        path = folder.layers
        if not path.is_file() and not set_aside_unless(folder, lambda: path.is_file() or None, lambda sentence: None):
            record(wanted, folder.path)
    else:
        path = Path(own.path)
        path = RunFolder(path).layers if path.is_dir() else path
    check_profile(spec, Profile.read(path), path)
    return spec.model_copy(update={"compute": f"{EMULATED}:{path}"})


def check_profile(spec: RunSpec, profile: Profile, path: Path) -> None:
    """Raise SpecError if a profile was recorded of something else than the spec trains."""
    batch = {spec.local_batch(rank) // spec.passes(rank) for rank in range(spec.world)}
    for key, wanted, recorded in (
        ("model", spec.model, profile.model),
        ("dtype", spec.dtype, profile.dtype),
        ("threads", spec.threads, profile.threads),
        ("optimizer.name", spec.optimizer.name, profile.optimizer),
        ("batch_per_rank", batch.pop() if len(batch) == 1 else sorted(batch), profile.batch_per_rank),
    ):
        if wanted != recorded:
            rule = f"the profile {path} was recorded with {recorded}"
            way_out = f"Use {setting(key, recorded)}, or record another with `testbed profile`."
            raise refuse_setting(key, wanted, rule, way_out)


def with_dilation(spec: RunSpec, choice: SubstrateChoice) -> RunSpec:
    """The spec with its time dilation, which is chosen if it is not requested.

    Raises UsageError if the ranks would need more of this machine than there is.
    """
    if not spec.emulated:
        return spec
    if choice.name == "uml":
        rule = "the kernel of uml has one processor, too few for ranks that must be woken in time"
        raise refuse_setting("compute", spec.compute, rule, "Use --on netns, or --on compose.", Unavailable)
    own = own_profile(spec.compute)
    assert own is not None, spec.compute
    profile = Profile.read(Path(own.path))
    applied = choice.drop_unsupported(spec)
    can_dilate = choice.type.shapes and not spec.faults and all(applied.rates)
    if not choice.type.is_local():
        if (spec.dilation or 1.0) > 1.0 and not can_dilate:
            raise _no_dilation(spec, choice)
        return spec.model_copy(update={"dilation": spec.dilation or 1.0})
    _check_memory(spec, profile)
    causes = dilations(applied, profile, len(usable_cores()))
    needed = needed_dilation(applied, profile, len(usable_cores()))
    chosen = spec.dilation or needed
    if chosen > 1.0 and not can_dilate:
        raise _no_dilation(spec, choice, needed)
    if chosen < needed:
        rule = f"{max(causes, key=lambda cause: causes[cause])}: it takes {needed:g} or more"
        raise refuse_setting("dilation", chosen, rule, "Leave it out, and it is chosen.")
    if chosen > MAX_CHOSEN and spec.dilation is None:
        seconds = needed * max(compute_s(applied, profile), wire_s(applied, profile))
        rule = f"needs a time dilation of {needed:g} here: a step would take {seconds:.0f} s"
        way_out = f"Use fewer nodes, a lower rate, more cores, or {setting('dilation', needed)}"
        raise Unavailable(f"{spec.mode} on {spec.world} nodes: {rule}. {way_out}.")
    start = max(spec.start_deadline, START_S_PER_RANK * spec.world / len(usable_cores()))
    return spec.model_copy(update={"dilation": chosen, "start_deadline": start})


def _no_dilation(spec: RunSpec, choice: SubstrateChoice, needed: float = 0.0) -> UsageError:
    reason = "needs links with a rate on --on netns or compose, and no fault"
    if spec.dilation is not None:
        return refuse_setting("dilation", spec.dilation, reason, f"Use {setting('dilation', 1.0)}.")
    rule = f"the ranks would need more than half of this machine's cores, and time dilation {reason}"
    way_out = "Use fewer nodes, or give the links a rate"
    return refuse("nodes", spec.nodes, f"{rule} ({needed:g} times)", f"{way_out}.", Unavailable)


def needed_dilation(spec: RunSpec, profile: Profile, cores: int) -> float:
    """The smallest K, at least 1, at which this run can be measured on so many cores."""
    needed = max(dilations(spec, profile, cores).values())
    return max(1.0, math.ceil(10 * needed) / 10)


def dilations(spec: RunSpec, profile: Profile, cores: int) -> dict[str, float]:
    """What would be wrong without time dilation, and the K at which it is not; less than 1 if nothing is wrong."""
    return {
        "the ranks would need more than half of this machine's cores": for_cores(spec, profile, cores),
        "ranks would be woken too late": for_wake_ups(spec, cores),
        "ranks would wait for a core while others encode": for_codecs(spec, profile, cores),
    }


def dilation_for(keys: Mapping[str, Any], profile: Profile, least: float) -> float:
    """Return the smallest time dilation at which this machine can do the run, at least `least`. Raises SpecError."""
    return max(least, needed_dilation(RunSpec.load(dict(keys), ""), profile, len(usable_cores())))


def for_cores(spec: RunSpec, profile: Profile, cores: int) -> float:
    """The K at which all ranks together need MAX_SHARE of the cores.

    While they communicate each byte costs processor time, and so do each step and each segment of a pipeline. Without a
    rate nothing is known of the first: communication then takes the time that the processor needs.
    """
    wire = wire_s(spec, profile)
    a_rank = CPU_S_PER_STEP + CPU_S_PER_GRADIENT_BYTE * profile.gradient_bytes + code_s(spec, profile)
    if spec.mode.schedule == "pipeline":
        rate = min(spec.limiting_rates) / 8 if spec.limiting_rates else None
        segments = theory.pipeline_segments(spec.mode, profile.gradient_bytes, spec.world, rate)
        a_rank += segments * theory.SEGMENT_S
    used = spec.world * a_rank / max(compute_s(spec, profile), wire, MIN_STEP_S)
    if wire:
        used += CPU_S_PER_BYTE * bytes_per_sync(spec, profile) / wire
    return used / cores / MAX_SHARE


def for_wake_ups(spec: RunSpec, cores: int) -> float:
    """The K at which the thread of a pipeline's transport is woken in time; 0 where there is none.

    It is woken when half of UNSENT_BYTES are left: 5.2 ms at 100 Mbit/s. The threads of all ranks on its core may be
    before it, each with a segment. Gloo's sockets hold megabytes, so this does not limit other modes.
    """
    rates = [rate for rate in spec.rates if rate]
    if spec.mode.schedule != "pipeline" or not rates:
        return 0.0
    left = theory.UNSENT_BYTES / 2 * 8 / min(rates)
    return LOOK_AHEAD * spec.world / cores * theory.SEGMENT_S / left


def for_codecs(spec: RunSpec, profile: Profile, cores: int) -> float:
    """The K at which ranks that encode at the same moment wait MAX_WAIT of a step for a core; 0 without a codec."""
    waits = (spec.world / cores - 1) * code_s(spec, profile)
    return max(0.0, waits) / MAX_WAIT / max(compute_s(spec, profile), wire_s(spec, profile), MIN_STEP_S)


def code_s(spec: RunSpec, profile: Profile) -> float:
    """Seconds of a rank's processor for the codec in a step."""
    return theory.CODE_S_PER_BYTE * profile.gradient_bytes if spec.mode.codec else 0.0


def compute_s(spec: RunSpec, profile: Profile) -> float:
    """Seconds of a step without synchronisation."""
    each_pass = profile.forward_s + profile.loss_s + profile.backward_s
    return profile.data_s + profile.zero_s + spec.passes(0) * each_pass + profile.optimizer_s


def bytes_per_sync(spec: RunSpec, profile: Profile) -> float:
    """Bytes that all ranks send to synchronise once; in a mode whose rounds are not known as many as in a ring."""
    n = spec.world
    shares = [theory.shares(spec.mode, n, rank, spec.topology.racks) for rank in range(n)]
    whole = sum(share[0] if share is not None else 2 * (n - 1) / n for share in shares)
    return whole * spec.mode.coded_share * profile.gradient_bytes


def wire_s(spec: RunSpec, profile: Profile) -> float:
    """The least seconds on the wire to synchronise once; 0 where nothing is sent, or a link has no rate."""
    rates = [rate for rate in spec.rates if rate]
    if spec.mode.silent or len(rates) < spec.world:
        return 0.0
    cost = theory.cost(spec.mode, spec.world)
    load = cost.load if cost is not None else 2 * (spec.world - 1) / spec.world
    return load * spec.mode.coded_share * profile.gradient_bytes * 8 / max(rates)


def _check_memory(spec: RunSpec, profile: Profile) -> None:
    """Raise Unavailable if the ranks do not fit into the memory that is free."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    each = RANK_BYTES + COPIES * profile.gradient_bytes
    if spec.world * each > free:
        rule = f"{spec.world} ranks need about {spec.world * each >> 20} MiB, and {free >> 20} MiB are free"
        raise refuse("nodes", spec.nodes, rule, "Use fewer nodes, or a smaller model.", Unavailable)
