"""How long one training step takes: an event model of compute and communication on equal nodes.

    compute   zero, data, forward, loss, backward and update of the profile, layer by layer, divided by the node's speed
    slowest   a collective begins when the last rank joins, so compute takes what the slowest of N ranks needs
    ready     a bucket can be sent when backward has made the gradients of its first layer
    sharing   while the wire is full, moving bytes takes its share of the node's processor, and compute is slower;
              a node carries no more bytes than its processor can move
    in flight one collective (overlap), two that share the wire (DDP), or all of a pipeline, the most urgent first
    every:K   K steps of compute, then one synchronisation; of every:K@M the steps after M
    passes    with several micro-batches a step only the last backward makes gradients that can be sent, and only the
              first forward waits for parameters: what is between them is part of `after`

model.js computes the same (tests/browser/test_what_if_page.py compares them at random points).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from testbed.predict.collectives import GOODPUT, Duration, Wire, duration, halves, loads_of
from testbed.results.profile import Profile
from testbed.results.theory import RoundLoad, pipeline_bucket
from testbed.spec.fabric import Racks
from testbed.spec.mode import SyncMode, bucket_bounds, fill_buckets

ELEMENT_BYTES = 4
# torch's DDP: the first bucket and the others, if the mode has no size of its own
DDP_BUCKETS = (1 << 20, 25 << 20)
# collectives at the same time; of DDP as many as Gloo has threads
OVERLAP_IN_FLIGHT, DDP_IN_FLIGHT = 1, 2
PERIODS = 4  # steps of a pipeline that are computed; the last one counts
MAX_SLOWED = 0.9  # the largest share of a processor that moving bytes can take from compute
EPSILON_S = 1e-12


@dataclass(frozen=True)
class Node:
    """One of N equal nodes."""

    speed: float = 1.0  # compute is so many times faster than in the profile
    byte_cpu: float = 0.0  # core-seconds that moving one byte takes, sent and received together
    cpus: float = 1.0  # cores that compute and bytes share
    threads: int = 1  # that compute
    copy: float = 0.0  # seconds of backward for each byte of gradient that is copied to where it is sent from
    code: float = 0.0  # seconds that the mode's codec needs for each byte of gradient; 0 without a codec
    # compute is emulated: moving bytes does not slow it down, and copies and codecs, which are real, have no `speed`
    sleeps: bool = False
    jitter: tuple[float, ...] = (1.0,)  # seconds of compute / their median, sorted

    def slowest(self, ranks: int, steps: int = 1) -> float:
        """What the slowest of `ranks` needs, as a multiple of the median, if each draws from `jitter`.

        Over `steps` steps in a row the differences partly cancel.
        """
        return 1.0 + (median_of_largest(self.jitter, ranks) - 1.0) / math.sqrt(steps)


def median_of_largest(values: Sequence[float], draws: int) -> float:
    """The median of the largest of `draws` draws from sorted values: what a measured median of steps shows.

    Beyond the values an exponential tail goes on, whose mean excess is that of their upper tenth.
    """
    count, beyond = len(values), -math.expm1(math.log(0.5) / draws)  # the share of values above that median
    place = (1.0 - beyond) * count - 0.5
    if place <= 0:
        return values[0]
    if place < count - 1:
        whole = int(place)
        return values[whole] + (place - whole) * (values[whole + 1] - values[whole])
    upper = values[-max(2, count // 10) :]
    return values[-1] + (sum(upper) / len(upper) - upper[0]) * math.log(0.5 / count / beyond)


@dataclass(frozen=True)
class Work:
    """A profile as the model uses it: only layers with parameters; the others' time is part of the one before."""

    before: float  # zero and data
    forward: tuple[float, ...]
    after: float  # loss, and the passes between the first forward and the last backward
    backward: tuple[float, ...]
    update: float
    tensors: tuple[tuple[int, int], ...]  # bytes and layer of each, the last first, as backward makes them

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.tensors)

    @property
    def compute(self) -> float:
        return self.before + sum(self.forward) + self.after + sum(self.backward) + self.update

    @classmethod
    def of(cls, profile: Profile, passes: int = 1) -> Work:
        """Return the work of a step of `passes` passes (micro-batches). The profile was recorded with one pass."""
        forward, backward = [0.0], [0.0]
        sizes: list[tuple[int, ...]] = [()]
        for layer in profile.layers:
            if sizes[-1] and layer.sizes:
                forward, backward, sizes = [*forward, 0.0], [*backward, 0.0], [*sizes, ()]
            forward[-1] += layer.forward_s
            backward[-1] += layer.backward_s
            sizes[-1] = sizes[-1] or layer.sizes
        tensors = [(size, number) for number, own in enumerate(sizes) for size in own]
        before = profile.zero_s + profile.data_s
        after = profile.loss_s + (passes - 1) * (sum(forward) + profile.loss_s + sum(backward))
        return cls(before, tuple(forward), after, tuple(backward), profile.optimizer_s, tuple(reversed(tensors)))


@dataclass(frozen=True)
class Bucket:
    """What is sent as one unit: its bytes, and the first and the last layer that have a part of it."""

    size: float
    first: int
    last: int


def buckets_of(mode: SyncMode, work: Work) -> list[Bucket]:
    """The buckets of a mode in the order in which backward fills them."""
    sizes = [size for size, _ in work.tensors]
    if mode.schedule == "pipeline":
        return _divided(mode, work)
    if mode.is_reference:
        groups = _closed(sizes, (mode.bucket, mode.bucket) if mode.bucket else DDP_BUCKETS)
    elif mode.granularity == "bucket":
        groups = fill_buckets(sizes, mode.bucket or 0)
    elif mode.granularity == "param":
        groups = [[number] for number in range(len(sizes))]
    else:
        groups = [list(range(len(sizes)))] if sizes else []
    layers = [[work.tensors[number][1] for number in group] for group in groups]
    return [Bucket(sum(sizes[k] for k in g), min(own), max(own)) for g, own in zip(groups, layers, strict=True)]


def _closed(sizes: Sequence[int], limits: tuple[int, int]) -> list[list[int]]:
    """DDP's buckets: one is closed as soon as it has reached its limit."""
    groups: list[list[int]] = [[]]
    filled = 0
    for number, size in enumerate(sizes):
        groups[-1].append(number)
        filled += size
        if filled >= limits[len(groups) > 1]:
            groups.append([])
            filled = 0
    return [group for group in groups if group]


def _divided(mode: SyncMode, work: Work) -> list[Bucket]:
    """A pipeline's buckets: by size, also inside a tensor."""
    bounds = bucket_bounds(work.size // ELEMENT_BYTES, max(1, (mode.bucket or 0) // ELEMENT_BYTES))
    ends = list(accumulate(size for size, _ in work.tensors))
    found = []
    for a, b in pairwise(bound * ELEMENT_BYTES for bound in bounds):
        inside = [layer for (size, layer), end in zip(work.tensors, ends, strict=True) if a < end and end - size < b]
        found.append(Bucket(b - a, min(inside), max(inside)))
    return found


def sized(mode: SyncMode, work: Work, ranks: int, wire: Wire) -> SyncMode:
    """The mode with the size of its buckets that the ranks would choose, if it leaves that open."""
    if not mode.leaves_bucket_open:
        return mode
    return replace(mode, bucket=pipeline_bucket(work.size, ranks, min(wire.rate, wire.uplink or math.inf) / GOODPUT))


@dataclass(frozen=True)
class Step:
    """Seconds of one step; compute + exposed = step."""

    seconds: float
    compute: float
    busy: float = 0.0  # at least one bucket was in flight

    @property
    def exposed(self) -> float:
        return max(0.0, self.seconds - self.compute)


def predict(work: Work, node: Node, wire: Wire, mode: SyncMode, ranks: int, racks: Racks = ()) -> Step:
    """The step of a mode on `ranks` equal nodes. Raises ValueError if the messages of the mode are unknown."""
    loads, mode, wire = loads_of(mode, ranks, racks), sized(mode, work, ranks, wire), carried(node, wire)
    if not loads:
        alone = work.compute / node.speed
        return Step(alone, alone)
    slow = node.slowest(ranks, mode.every) / node.speed
    real = node.speed if node.sleeps else 1.0  # times as long as faster nodes would need
    copies = node.copy * work.size * real
    forward = (work.before + sum(work.forward) + work.after) * slow
    backward = (sum(work.backward) + copies) * slow
    update = work.update * slow
    coded = node.code * work.size / node.speed * real
    buckets, share = buckets_of(mode, work), mode.coded_share
    timed = [duration(loads, mode.segments, bucket.size * share, wire) for bucket in buckets]
    compute = forward + backward + update + coded
    credit = min(wire.credit, sum(each.wire for each in timed))
    if mode.schedule == "pipeline":
        return _pipelined(work, node, wire, mode, ranks, halves(mode, ranks, racks), buckets, slow, copies)
    if mode.schedule == "after" and not mode.is_reference:
        sent = (sum(each.seconds for each in timed) - credit) / mode.every
        return Step(compute + sent, compute, sent)
    ready = [min(each, backward) for each in _ready(work, buckets, slow, copies)]  # sums may differ in the last digit
    slowed = _slowed(node, wire)
    ended, busy = overlapped(backward, ready, timed, in_flight(mode), slowed, credit)
    return Step(forward + ended + update + coded, compute, busy)


def _ready(work: Work, buckets: Sequence[Bucket], slow: float, copies: float) -> list[float]:
    """Seconds of backward until each bucket is full; a bucket does not overtake the one before it."""
    done, ends = 0.0, {}
    of_layer = [0] * len(work.backward)
    for size, layer in work.tensors:
        of_layer[layer] += size
    for layer in reversed(range(len(work.backward))):
        done += (work.backward[layer] + copies * of_layer[layer] / work.size) * slow
        ends[layer] = done
    found: list[float] = []
    for bucket in buckets:
        found.append(max(ends[bucket.first], found[-1] if found else 0.0))
    return found


def carried(node: Node, wire: Wire) -> Wire:
    """The wire with a rate that the node's processor can carry."""
    if node.sleeps or node.byte_cpu <= 0:
        return wire
    return replace(wire, rate=min(wire.rate, node.cpus * node.speed / node.byte_cpu))


def _slowed(node: Node, wire: Wire) -> float:
    """By which share compute is slower while the wire is full: bytes take the cores that compute then lacks."""
    if node.sleeps:
        return 0.0
    wanted = min(float(node.threads), node.cpus)
    left = node.cpus - node.byte_cpu / node.speed * wire.payload
    return min(MAX_SLOWED, max(0.0, 1.0 - left / wanted))


def in_flight(mode: SyncMode) -> int:
    """Collectives at the same time, of a mode that begins them during backward."""
    return DDP_IN_FLIGHT if mode.is_reference else OVERLAP_IN_FLIGHT


def overlapped(
    compute: float, ready: Sequence[float], timed: Sequence[Duration], together: int, slowed: float, credit: float
) -> tuple[float, float]:
    """When compute and all collectives have ended, and how long one was in flight.

    A collective begins in its turn, once `compute` has come to `ready`. At most `together` share the wire.
    """
    now = at = busy = 0.0
    following = 0
    active: list[list[float]] = []  # seconds that are left, and the share of the wire that it takes
    while at < compute - EPSILON_S or following < len(timed) or active:
        while following < len(timed) and len(active) < together and ready[following] <= at + EPSILON_S:
            own = timed[following]
            active.append([max(0.0, own.seconds - (credit if following == 0 else 0.0)), own.use])
            following += 1
        wanted = sum(use for _, use in active)
        rate = min(1.0, 1.0 / wanted) if wanted > 0 else 1.0
        pace = 1.0 - slowed * min(1.0, wanted)
        until = [left / rate for left, _ in active]
        if at < compute - EPSILON_S:
            waits = following < len(timed) and len(active) < together
            goal = min(compute, ready[following]) if waits and ready[following] > at else compute
            until.append((goal - at) / pace)
        passed = min(until)
        now += passed
        busy += passed if active else 0.0
        at = min(compute, at + passed * pace) if at < compute else at
        for each in active:
            each[0] -= passed * rate
        active = [each for each in active if each[0] > EPSILON_S]
    return now, busy


# --- pipeline --------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """The reduce or the gather of one bucket, under way."""

    urgency: tuple[int, int]  # the smaller is first
    left: float  # seconds, alone
    use: float  # share of the wire


@dataclass
class Pipe:
    """The wire of a pipeline: the most urgent bucket gets what it can use, the next one the rest."""

    reduce: list[Duration]
    gather: list[Duration]
    slowed: float
    now: float = 0.0
    busy: float = 0.0
    jobs: list[Job] = field(default_factory=list)  # most urgent first
    open: set[int] = field(default_factory=set)  # buckets that are not complete

    def launch(self, number: int) -> None:
        self.open.add(number)
        self._begin(number, 0, self.reduce[number])

    def _begin(self, number: int, kind: int, own: Duration) -> None:
        insort(self.jobs, Job((-number, kind), own.seconds, own.use), key=lambda job: job.urgency)

    def compute(self, seconds: float) -> None:
        """Let so many seconds of compute pass; moving bytes slows it down."""
        while seconds > EPSILON_S:
            rates, free = self._rates()
            pace = 1.0 - self.slowed * (1.0 - free)
            passed = min(seconds / pace, self._next(rates))
            seconds -= passed * pace
            self._pass(passed, rates)

    def wait(self, numbers: Sequence[int]) -> None:
        """Until these buckets are complete."""
        while any(number in self.open for number in numbers):
            rates, _ = self._rates()
            self._pass(self._next(rates), rates)

    def _rates(self) -> tuple[list[float], float]:
        """How fast each job goes, and the share of the wire that is left."""
        free, rates = 1.0, []
        for job in self.jobs:
            if free <= EPSILON_S:
                break
            rate = min(1.0, free / job.use) if job.use > 0 else 1.0
            rates.append(rate)
            free -= rate * job.use
        return rates, max(0.0, free)

    def _next(self, rates: Sequence[float]) -> float:
        return min((job.left / rate for job, rate in zip(self.jobs, rates, strict=False)), default=math.inf)

    def _pass(self, seconds: float, rates: Sequence[float]) -> None:
        self.now += seconds
        self.busy += seconds if self.jobs else 0.0
        ended = []
        for job, rate in zip(self.jobs, rates, strict=False):
            job.left -= seconds * rate
            if job.left <= EPSILON_S:
                ended.append(job)
        for job in ended:
            self.jobs.remove(job)
            number, kind = -job.urgency[0], job.urgency[1]
            if kind == 0:
                self._begin(number, 1, self.gather[number])
            else:
                self.open.discard(number)


def _pipelined(
    work: Work,
    node: Node,
    wire: Wire,
    mode: SyncMode,
    ranks: int,
    loads: tuple[Sequence[RoundLoad], Sequence[RoundLoad]],
    buckets: Sequence[Bucket],
    slow: float,
    copies: float,
) -> Step:
    """Reduce under backward, update 1/N, gather under the next forward; the period of the steady state."""
    reduce, gather = loads
    # a shard of a bucket is one segment, whatever its size
    first = [duration(reduce, None, bucket.size, wire, pipelined=True) for bucket in buckets]
    second = [_updated(duration(gather, None, b.size, wire, True), work, slow, b.size, ranks) for b in buckets]
    pipe = Pipe(first, second, _slowed(node, wire))
    needs: list[list[int]] = [[] for _ in work.forward]
    launches: list[list[int]] = [[] for _ in work.forward]
    for number, bucket in enumerate(buckets):
        launches[bucket.first].append(number)
        for layer in range(bucket.first, bucket.last + 1):
            needs[layer].append(number)
    of_layer = [0] * len(work.forward)
    for size, layer in work.tensors:
        of_layer[layer] += size
    began = busy = 0.0
    for _ in range(PERIODS):
        began, busy = pipe.now, pipe.busy
        pipe.compute(work.before * slow)
        for layer, seconds in enumerate(work.forward):
            pipe.wait(needs[layer])
            pipe.compute(seconds * slow)
        pipe.compute(work.after * slow)
        for layer in reversed(range(len(work.backward))):
            pipe.compute((work.backward[layer] + copies * of_layer[layer] / work.size) * slow)
            for number in launches[layer]:
                pipe.launch(number)
    forward, backward = work.before + sum(work.forward) + work.after, sum(work.backward) + copies
    return Step(pipe.now - began, (forward + backward) * slow, pipe.busy - busy)


def _updated(own: Duration, work: Work, slow: float, size: float, ranks: int) -> Duration:
    """A gather with the update of the own shard before it."""
    return Duration(own.seconds + work.update * slow * size / work.size / ranks, own.wire)
