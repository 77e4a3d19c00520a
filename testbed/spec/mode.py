"""SyncMode: how gradients are synchronised, written in one way everywhere.

    algorithm[/granularity][/schedule][/codec][/every:K[@M]]     e.g. ring, allreduce/param, ring/bucket:2MiB/pipeline

`str(SyncMode.parse(text))` can be parsed again and gives the same value. Defaults are left out, so one mode has one
spelling. `ring/pipeline` has no bucket size: the ranks choose it (rank/sync/buckets.py).

`every:K`    each rank takes K local steps on its own gradients, then parameters are averaged (after the last step too).
`every:K@M`  gradients are averaged in each of the first M steps; after them the mode is `every:K`.

To add an algorithm, add a row to ALGORITHMS here and a function to rank/sync/algorithms.py. Everything else is made
from the row: the list in `testbed modes`, the lower bounds in the report, the colour in figures, and (by `make docs`)
docs/modes.md and .env.example.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Annotated, Any, overload

from pydantic import BeforeValidator, PlainSerializer

from testbed.spec.base import validator
from testbed.spec.errors import SpecError, UsageError, did_you_mean, refuse
from testbed.spec.fabric import Racks
from testbed.spec.own_files import method_path, mode_name, own_methods
from testbed.spec.units import format_size, parse_size

# --- rounds: which rank sends which share of a buffer to which rank --------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """One message: the share of the buffer from `begin` to `end`, both fractions of the whole."""

    sender: int
    receiver: int
    begin: Fraction = Fraction(0)
    end: Fraction = Fraction(1)

    @property
    def share(self) -> Fraction:
        return self.end - self.begin


Round = Sequence[Transfer]  # simultaneous transfers; the next round begins when all of them have arrived


@dataclass(frozen=True)
class Rotated(Sequence[Transfer]):
    """A round in which all ranks do the same: rank k's transfers are rank 0's, with receiver and shard moved on by k.

    Only rank 0's transfers are stored, so a round of a thousand ranks takes as much memory as a round of four.
    """

    first: tuple[Transfer, ...]  # what rank 0 sends: shards of 1/n, or the whole buffer
    n: int

    def __len__(self) -> int:
        return self.n * len(self.first)

    @overload
    def __getitem__(self, index: int) -> Transfer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Transfer, ...]: ...
    def __getitem__(self, index: int | slice) -> Transfer | tuple[Transfer, ...]:
        if isinstance(index, slice):
            return tuple(self[k] for k in range(len(self))[index])
        rank, number = divmod(range(len(self))[index], len(self.first))
        sent = self.first[number]
        begin = (sent.begin + Fraction(rank, self.n)) % 1 if sent.share < 1 else sent.begin
        return Transfer(rank, (sent.receiver + rank) % self.n, begin, begin + sent.share)


@dataclass(frozen=True)
class Rounds:
    """All messages of one synchronisation. In `reduce` the receiver adds a message, in `gather` it copies it."""

    reduce: tuple[Round, ...] = ()
    gather: tuple[Round, ...] = ()


MakeRounds = Callable[[int], Rounds]  # takes the number of ranks
MakeRackRounds = Callable[[Racks], Rounds]  # takes the ranks of each rack


def _mirrored(reduce: list[Round]) -> Rounds:
    """Return rounds whose gather sends back what `reduce` sent, in the opposite order."""
    back = [tuple(replace(t, sender=t.receiver, receiver=t.sender) for t in round_) for round_ in reversed(reduce)]
    return Rounds(tuple(reduce), tuple(back))


def _shard(sender: int, receiver: int, number: int, n: int) -> Transfer:
    """Return the transfer of shard `number` of n."""
    return Transfer(sender, receiver, Fraction(number, n), Fraction(number + 1, n))


def root_rounds(n: int) -> Rounds:
    """Return the rounds in which all other ranks send the whole buffer to rank 0, which sends the mean back to each."""
    return _mirrored([tuple(Transfer(rank, 0) for rank in range(1, n))])


def ring_rounds(n: int) -> Rounds:
    """Return N-1 rounds to reduce and N-1 to gather. In each one, every rank sends one shard to its right neighbour."""

    def round_(hop: int, first: int) -> Round:
        return Rotated((_shard(0, 1 % n, (first - hop) % n, n),), n)

    hops = range(n - 1)
    return Rounds(tuple(round_(hop, first=-1) for hop in hops), tuple(round_(hop, first=0) for hop in hops))


def direct_rounds(n: int) -> Rounds:
    """Return two rounds: each rank receives its shard from all others at once, then sends its mean to all others."""
    reduce = Rotated(tuple(_shard(0, peer, peer, n) for peer in range(1, n)), n)
    gather = Rotated(tuple(_shard(0, peer, 0, n) for peer in range(1, n)), n)
    return Rounds((reduce,), (gather,))


def sequential_ring_rounds(n: int) -> Rounds:
    """Return rounds in which the whole buffer goes from rank to rank: 1 -> 2 -> ... -> 0, then 0 -> 1 -> ... -> N-1."""
    path = [*range(1, n), 0]
    there = tuple((Transfer(a, b),) for a, b in pairwise(path))
    return Rounds(there, tuple((Transfer(rank, rank + 1),) for rank in range(n - 1)))


def tree_rounds(n: int) -> Rounds:
    """Return a binomial tree: in round k, ranks 2^k apart form pairs; the higher rank sends its sum to the lower."""
    distances = [1 << k for k in range((n - 1).bit_length())]
    return _mirrored([tuple(Transfer(a + d, a) for a in range(0, n, 2 * d) if a + d < n) for d in distances])


def halving_rounds(n: int) -> Rounds:
    """Return recursive halving among the first P ranks, P the largest power of two up to N.

    In a round before it, each other rank sends its whole buffer to one of the first ranks.
    """
    core = 1 << (n.bit_length() - 1)
    rounds: list[Round] = [tuple(Transfer(rank, rank - core) for rank in range(core, n))] if core < n else []
    kept = [(Fraction(0), Fraction(1))] * core
    distance = core // 2
    while distance:
        halves = []
        for rank, (begin, end) in enumerate(kept):
            lower, upper = (begin, (begin + end) / 2), ((begin + end) / 2, end)
            halves.append((upper, lower) if rank & distance else (lower, upper))  # kept, sent
        rounds.append(tuple(Transfer(rank, rank ^ distance, *sent) for rank, (_, sent) in enumerate(halves)))
        kept = [keep for keep, _ in halves]
        distance //= 2
    return _mirrored(rounds)


def exchange_rounds(n: int) -> Rounds:
    """Return one round: each rank sends its whole buffer to all others at the same time."""
    return Rounds(gather=(Rotated(tuple(Transfer(0, peer) for peer in range(1, n)), n),))


def hierarchical_rounds(racks: Racks) -> Rounds:
    """Return a reduce-scatter inside each rack, a ring across racks for each piece, and the same rounds backwards.

    Inside a rack of M ranks each rank owns 1/M of the buffer. Racks may differ in size, so the buffer is cut at the
    boundaries of all racks. Each piece then has one owner in each of the R racks. The owners of a piece form a ring,
    which reduces 1/R of the piece per round.
    """
    across = len(racks)
    inside = [
        Transfer(sender, owner, Fraction(place, len(rack)), Fraction(place + 1, len(rack)))
        for rack in racks
        for place, owner in enumerate(rack)
        for sender in rack
        if sender != owner
    ]
    cuts = sorted({Fraction(place, len(rack)) for rack in racks for place in range(len(rack) + 1)})
    ring: list[list[Transfer]] = [[] for _ in range(across - 1)]
    for begin, end in pairwise(cuts):
        owners = [rack[int(begin * len(rack))] for rack in racks]
        part = (end - begin) / across
        for hop, round_ in enumerate(ring):
            for place, sender in enumerate(owners):
                first = begin + (place - 1 - hop) % across * part
                round_.append(Transfer(sender, owners[(place + 1) % across], first, first + part))
    return _mirrored([tuple(round_) for round_ in [inside, *ring] if round_])


# --- the algorithms and codecs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """How the messages of a ring are cut: while one segment is added, the next is on the wire."""

    size: int  # approximate bytes of a segment
    fewest: int = 1  # smallest number of segments of a message
    most: int | None = None  # largest number of segments of a message; None: no limit
    in_flight: int | None = None  # segments that are sent at the same time; None: all of a message

    def count(self, message: float) -> int:
        """Return the number of segments of a message of `message` bytes."""
        needed = max(self.fewest, math.ceil(message / self.size))
        return needed if self.most is None else min(self.most, needed)


RING_SEGMENTS = Segments(2 << 20, most=8)  # of our ring (rank/sync/algorithms.py)
GLOO_SEGMENTS = Segments(1 << 20, fewest=2, in_flight=2)  # of Gloo's ring, from its source code


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A row of ALGORITHMS; the function that averages is in rank/sync/algorithms.py."""

    does: str  # one sentence
    colour: tuple[str, str]  # in figures: on a light page, on a dark page
    rounds: MakeRounds | None = None  # None: nothing is sent, or the messages are unknown (a user's algorithm)
    rack_rounds: MakeRackRounds | None = None  # replaces `rounds` of an algorithm that follows the racks
    time: str = "0"  # of the rounds, as printed formula: S bytes on links of B byte/s, N ranks; uplinks of U byte/s
    granularities: tuple[str, ...] = ("param", "bucket", "flat")
    default: str | None = None  # default granularity; None: the algorithm has its own
    segments: Segments | None = None  # None: each message is sent as a whole
    rooted: bool = False  # all messages pass rank 0's link
    pipelined: bool = False  # schedule `pipeline` can send these rounds: after `reduce` rank k has the sum of shard k
    sends_parameters: bool = False  # half of the bytes sent are parameters
    direct: bool = False  # a payload goes directly to the ranks that need it, so it need not be summable
    every_refused: str | None = None  # why `every:K` is refused; None: it is allowed

    @property
    def follows_racks(self) -> bool:
        """True if the messages depend on the racks, so that a run needs racks."""
        return self.rack_rounds is not None


# Colours are the hues of Okabe and Ito, darkened or lightened until text in these colours is readable on the page.
ALGORITHMS: dict[str, Algorithm] = {
    "single": Algorithm(
        does="one node, nothing to synchronise",
        colour=("#5b6470", "#a3adba"),
        granularities=(),
        every_refused="one node has no other node to average with",
    ),
    "none": Algorithm(
        does="N ranks and no synchronisation: the control run, which shows what computing alone costs",
        colour=("#6c737d", "#8f98a4"),
        granularities=(),
        every_refused="nothing is averaged",
    ),
    "gather": Algorithm(
        does="gather to rank 0, mean there, scatter back",
        colour=("#b84c00", "#ff8f4d"),
        rounds=root_rounds,
        time="2(N-1) S/B",
        default="param",
        rooted=True,
    ),
    "allreduce": Algorithm(
        does="torch.distributed.all_reduce (Gloo's ring)",
        colour=("#926600", "#f2b92f"),
        rounds=ring_rounds,
        time="2(N-1)/N S/B",
        default="param",
        segments=GLOO_SEGMENTS,
    ),
    "ring": Algorithm(
        does="our ring: scatter-reduce, then all-gather, by isend/irecv",
        colour=("#0068a8", "#5cb3f2"),
        rounds=ring_rounds,
        time="2(N-1)/N S/B",
        default="flat",
        segments=RING_SEGMENTS,
        pipelined=True,
    ),
    "direct": Algorithm(
        does="each rank owns a shard: it receives the shard from all and sends its mean to all",
        colour=("#5b7f0b", "#a8cf55"),
        rounds=direct_rounds,
        time="2(N-1)/N S/B",
        default="flat",
        direct=True,
    ),
    "ring-reduce": Algorithm(
        does="partial sums go from rank to rank up to rank 0, then the mean goes from rank to rank",
        colour=("#7b5331", "#cfa079"),
        rounds=sequential_ring_rounds,
        time="2(N-1) S/B",
        default="flat",
    ),
    "tree": Algorithm(
        does="binomial tree: reduce to rank 0, broadcast",
        colour=("#a43c84", "#e78ecb"),
        rounds=tree_rounds,
        time="2 log2(N) S/B",
        default="flat",
    ),
    "halving": Algorithm(
        does="recursive halving, then doubling, among P ranks, P the largest power of two up to N",
        colour=("#5145a8", "#a79df5"),
        rounds=halving_rounds,
        time="2(P-1)/P S/B, and 2 S/B more if P < N",
        default="flat",
    ),
    "hierarchical": Algorithm(
        does="reduce-scatter inside each rack, a ring across racks for each shard, all-gather inside each rack",
        colour=("#a3273f", "#ff7d93"),
        rack_rounds=hierarchical_rounds,
        time="2(M-1)/M S/B + 2(R-1)/R S/U, R racks of M ranks",
        default="flat",
    ),
    "server": Algorithm(
        does="parameter server: rank 0 receives all gradients, updates, and sends the parameters to all",
        colour=("#2f6f73", "#74c4c9"),
        rounds=root_rounds,
        time="2(N-1) S/B",
        default="flat",
        rooted=True,
        sends_parameters=True,
        every_refused="rank 0 holds the parameters, so no other rank can take a local step",
    ),
    "ddp": Algorithm(
        does="torch's DistributedDataParallel, overlapped with backward: the reference",
        colour=("#00795c", "#35c79d"),
        rounds=ring_rounds,
        time="2(N-1)/N S/B",
        granularities=("bucket",),
        segments=GLOO_SEGMENTS,
        every_refused="DDP averages gradients inside backward; use allreduce/.../every:K",
    ),
}
# The row of every algorithm that a file of the user defines.
USER_METHOD = Algorithm(does="your own", colour=("#3f4a1f", "#b9c67d"), default="flat")
# The row of a run of the user's own training script, which synchronises by itself.
OWN_SCRIPT = Algorithm(
    does="your own training script, with the synchronisation it has",
    colour=("#8a3ffc", "#b794f6"),
    granularities=(),
    every_refused="the script decides when it synchronises",
)
SCRIPT = "script"  # not in ALGORITHMS, because only `testbed exec` runs it
CONTROL = "none"  # the same ranks without synchronisation; other modes are compared with this mode
REFERENCE = "ddp"  # PyTorch's standard way to train on several nodes

SCHEDULES = {
    "after": "synchronise after backward",
    "overlap": "each bucket starts as soon as backward has filled it",
    "pipeline": "reduce under backward, update 1/N of the parameters, gather under the next forward",
}
DEFAULT_SCHEDULE = "after"


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A row of CODECS: what is sent in place of a gradient; the code is in rank/sync/codecs.py."""

    does: str
    bytes: str  # bytes sent as a fraction of the gradient's bytes, as text
    example: str  # this codec in a mode, e.g. fp16 or topk:0.01
    share: Callable[[float], float]  # approximate fraction of the gradient's bytes, from the codec's number
    summable: bool  # the sum of two payloads is a payload, so every algorithm can send this codec
    number_pattern: str = ""  # regular expression of the codec's number; empty: the codec has no number
    max_number: float = 0
    in_ddp: bool = False  # torch has a DDP hook for this codec
    rounds: MakeRounds | None = None  # None: the algorithm's rounds
    time: str = ""  # of these rounds, as in Algorithm


CODECS: dict[str, Codec] = {
    "fp16": Codec(
        does="16-bit floats, divided by N first so that no sum overflows",
        bytes="1/2",
        share=lambda _: 0.5,
        example="fp16",
        summable=True,
        in_ddp=True,
    ),
    "bf16": Codec(
        does="16-bit floats with the range of 32-bit ones",
        bytes="1/2",
        share=lambda _: 0.5,
        example="bf16",
        summable=True,
        in_ddp=True,
    ),
    "int8": Codec(
        does="8-bit integers and one scale per shard, rounded at random (seeded); its owner averages in full precision",
        bytes="1/4",
        share=lambda _: 0.25,
        example="int8",
        summable=False,
    ),
    "topk": Codec(
        does="the largest fraction F and their indices; the rest is added to the next step's gradient",
        bytes="F N",
        share=lambda fraction: 2 * fraction,  # an index and a value for each number that is sent
        example="topk:0.01",
        summable=False,
        number_pattern=r"\d?\.\d{1,6}|\d",
        max_number=1,
        rounds=exchange_rounds,
        time="(N-1) S/B",
    ),
    "powersgd": Codec(
        does="each matrix as a product of rank R; the rest is added to the next step's gradient",
        bytes="0.6 % (VGG-11, R = 2)",
        share=lambda rank: 0.003 * rank,
        example="powersgd:2",
        summable=True,
        number_pattern=r"\d{1,3}",
        max_number=999,
        in_ddp=True,
    ),
}

EVERY = {  # an example of every:K[@M]: what it does
    "every:4": "4 local steps, then parameters are averaged",
    "every:4@100": "gradients are averaged every step up to step 100, from then on every:4",
}
_EVERY = re.compile(r"every:(\d{1,6})(?:@(\d{1,9}))?")


def algorithms() -> dict[str, Algorithm]:
    """Return the built-in algorithms and the user's own. Files are not read; `unusable_methods` reads them."""
    own = [method for method in own_methods([*ALGORITHMS, SCRIPT]) if not method.name_problem]
    return ALGORITHMS | {each.name: replace(USER_METHOD, does=f"your own, from {each.path}") for each in own}


def unusable_methods() -> dict[str, str]:
    """Return the files in the methods folder that no run can use, with the reasons."""
    return {str(method.path): problem for method in own_methods([*ALGORITHMS, SCRIPT]) if (problem := method.problem)}


def check_method(mode: SyncMode) -> None:
    """Raise SpecError if the mode is a file of the user that cannot be used."""
    for method in own_methods([*ALGORITHMS, SCRIPT]):
        if method.name == mode.algorithm and (problem := method.problem):
            raise SpecError(f"mode {str(mode)!r}: {method.path} cannot be used: {problem}.")


# --- the mode --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SyncMode:
    """One combination of algorithm, granularity, schedule, codec and every:K. `parse` refuses illegal combinations."""

    algorithm: str
    granularity: str | None = None  # "param", "flat" or "bucket"; None: the algorithm has its own
    bucket: int | None = None  # bytes, for granularity "bucket" only; None: the ranks choose
    schedule: str = DEFAULT_SCHEDULE
    codec: str | None = None  # None: gradients are sent as they are
    codec_number: float | None = None  # F of topk, R of powersgd
    every: int = 1
    every_from: int = 0  # first step that is local

    @property
    def row(self) -> Algorithm:
        """The row of the algorithm in ALGORITHMS; USER_METHOD for a method of the user, OWN_SCRIPT for a script."""
        return OWN_SCRIPT if self.is_script else ALGORITHMS.get(self.algorithm, USER_METHOD)

    def rounds(self, ranks: int, racks: Racks = ()) -> Rounds | None:
        """Return the messages of one synchronisation; None if nothing is sent, or if the messages are unknown.

        Without racks all ranks are in one rack.
        """
        if self.row.rack_rounds:
            return self.row.rack_rounds(racks or (tuple(range(ranks)),))
        make = (CODECS[self.codec].rounds if self.codec else None) or self.row.rounds
        return make(ranks) if make else None

    @property
    def coded_share(self) -> float:
        """Bytes that are sent in place of each byte of gradient; 1 without a codec."""
        return CODECS[self.codec].share(self.codec_number or 0.0) if self.codec else 1.0

    @property
    def segments(self) -> Segments | None:
        """How messages are cut; None if a message is sent as a whole."""
        own = self.codec is not None and (CODECS[self.codec].rounds is not None or not CODECS[self.codec].summable)
        return None if own else self.row.segments

    @property
    def time(self) -> str:
        """The time of these rounds as a printed formula."""
        return (CODECS[self.codec].time if self.codec else "") or self.row.time

    @property
    def leaves_bucket_open(self) -> bool:
        """True if the ranks choose the size of the buckets."""
        return self.granularity == "bucket" and self.bucket is None

    @property
    def distributed(self) -> bool:
        return self.algorithm != "single"

    @property
    def is_control(self) -> bool:
        """True if N ranks train independently. Only the time of such a run has a meaning, not its accuracy."""
        return self.algorithm == CONTROL

    @property
    def is_script(self) -> bool:
        """True if the user's script synchronises by itself. Its messages are observed and not known beforehand."""
        return self.algorithm == SCRIPT

    @property
    def is_own(self) -> bool:
        """True if a file of the user defines the algorithm (spec/own_files.py)."""
        return self.row is USER_METHOD

    @property
    def is_reference(self) -> bool:
        """True for DDP, which makes, starts and awaits its buckets itself."""
        return self.algorithm == REFERENCE

    @property
    def silent(self) -> bool:
        """True if nothing is synchronised at all."""
        return self.is_control or not self.distributed

    @property
    def rooted(self) -> bool:
        """True if all messages pass rank 0's link."""
        return self.row.rooted

    @property
    def separable(self) -> bool:
        """True if the exchange can be separated from the step: done less often (every:K) or after the update."""
        return self.row.every_refused is None

    @property
    def synchronous(self) -> bool:
        """True if every update is the same on every rank."""
        return self.every == 1 and not self.is_control

    def __str__(self) -> str:
        words = [self.algorithm]
        if self.bucket:
            words.append(f"bucket:{format_size(self.bucket)}")
        elif self.leaves_bucket_open:
            pass
        elif self.granularity and self.granularity != self.row.default:
            words.append(self.granularity)
        if self.schedule != DEFAULT_SCHEDULE:
            words.append(self.schedule)
        if self.codec and self.codec_number is None:
            words.append(self.codec)
        elif self.codec:
            words.append(f"{self.codec}:{f'{self.codec_number:.6f}'.rstrip('0').rstrip('.')}")
        if self.every > 1:
            words.append(f"every:{self.every}" + (f"@{self.every_from}" if self.every_from else ""))
        return "/".join(words)

    @classmethod
    def parse(cls, text: str) -> SyncMode:
        """Parse a mode. Raises SpecError with the reason if the combination is illegal."""
        name, *words = text.strip().split("/")
        known = algorithms() | {SCRIPT: OWN_SCRIPT}
        if name not in known:
            if mode_name(name) not in known:
                raise _unknown_algorithm(text, name)
            name = mode_name(name)  # a user's method may be written like its file: my_way for my-way
        mode = cls(name, granularity=known[name].default)
        axes = [_read_granularity, _read_schedule, _read_codec, _read_every]  # the order of the words
        if words[:1] == ["pipeline"] and mode.row.pipelined:
            mode = replace(mode, granularity="bucket")  # without a size
        for word in words:
            mode = _read_word(mode, word, axes, text)
        return mode


def _unknown_algorithm(text: str, name: str) -> UsageError:
    unusable = unusable_methods()
    own = [method for method in own_methods([*ALGORITHMS, SCRIPT]) if str(method.path) not in unusable]
    known = [*ALGORITHMS, *(method.name for method in own)]
    others = "".join(f" {path} cannot be used: {problem}." for path, problem in unusable.items())
    way_out = f"Known: {', '.join(known)}.{did_you_mean(name, known)}{others}"
    return refuse("mode", text, f"unknown algorithm {name!r}", way_out)


def _read_word(mode: SyncMode, word: str, axes: list[Any], text: str) -> SyncMode:
    """Apply a word to the first remaining axis that accepts it; return the new mode. Raises SpecError if none does.

    The axis and all axes before it are removed from `axes`.
    """
    while axes:
        changes = axes.pop(0)(mode, word, text)
        if changes is not None:
            return replace(mode, **changes)
    words = ["param, bucket:SIZE or flat", "after, overlap or pipeline", "a codec", "every:K[@M]"]
    way_out = f"After the algorithm come {'; then '.join(words)}."
    raise refuse("mode", text, f"{word!r} is unknown, repeated or out of place", way_out)


def _read_granularity(mode: SyncMode, word: str, text: str) -> dict[str, Any] | None:
    kind, _, size = word.partition(":")
    if kind not in ("param", "bucket", "flat"):
        return None
    allowed = mode.row.granularities
    if kind not in allowed:
        why = f"{mode.algorithm} takes " + (" or ".join(allowed) + " only" if allowed else "no granularity")
        raise refuse("mode", text, why, "Leave the word out, or see `testbed modes`.")
    if kind == "bucket":
        return {"granularity": "bucket", "bucket": parse_size(size)}
    if size:
        raise refuse("mode", text, f"{kind} takes no size", "Only bucket:SIZE does.")
    return {"granularity": kind, "bucket": None}


def _read_schedule(mode: SyncMode, word: str, text: str) -> dict[str, Any] | None:
    if word not in SCHEDULES:
        return None
    own = "nothing is synchronised" if mode.silent else "DDP has its own" if mode.is_reference else ""
    own = "the script has its own" if mode.is_script else own
    if own:
        raise refuse("mode", text, f"{mode.algorithm} takes no schedule: {own}", "Leave the word out.")
    why, way_out = _schedule_illegal(mode, word)
    if why:
        raise refuse("mode", text, f"{word} {why}", way_out)
    return {"schedule": word}


def _schedule_illegal(mode: SyncMode, word: str) -> tuple[str, str]:
    """Return why the mode cannot have this schedule, and what to use instead; two empty texts if it can."""
    if word == "pipeline" and not mode.row.pipelined:
        why = f"sends shards round a ring, over connections of its own; {mode.algorithm} does not"
        return why, "Use ring/pipeline."
    if word == "overlap" and mode.row.sends_parameters:
        why = f"averages gradients on every rank; {mode.algorithm} has them on rank 0 only"
        return why, "Use ring/bucket:2MiB/overlap."
    if word != "after" and mode.granularity == "flat":
        way_out = "Use ring/pipeline or bucket:SIZE." if word == "pipeline" else "Use bucket:SIZE."
        return "needs several buffers; a flat one is full only when backward is over", way_out
    if word == "pipeline" and mode.granularity == "param":
        return "makes its buckets by size, not by tensor", "Use ring/pipeline or bucket:SIZE."
    return "", ""


def _read_codec(mode: SyncMode, word: str, text: str) -> dict[str, Any] | None:
    name, colon, digits = word.partition(":")
    codec = CODECS.get(name)
    if codec is None:
        return None
    if not codec.number_pattern and colon:
        raise refuse("mode", text, f"{name} takes no number", f"Write {name}.")
    if codec.number_pattern and (
        not re.fullmatch(codec.number_pattern, digits, re.ASCII) or not 0 < float(digits) <= codec.max_number
    ):
        kind = "a fraction" if codec.max_number == 1 else "a whole number"
        rule = f"{name} needs {kind} greater than 0 and at most {codec.max_number:g}"
        raise refuse("mode", text, rule, f"Write e.g. {codec.example}.")
    why, way_out = _codec_illegal(mode, codec, word)
    if why:
        raise refuse("mode", text, f"{name} {why}", way_out)
    return {"codec": name, "codec_number": float(digits) if codec.number_pattern else None}


def _codec_illegal(mode: SyncMode, codec: Codec, word: str) -> tuple[str, str]:
    """Return why the mode cannot have this codec, and what to use instead; two empty texts if it can."""
    if mode.silent or mode.is_script:
        does = "decides that itself" if mode.is_script else "sends nothing"
        return f"changes what is sent, and {mode.algorithm} {does}", "Leave the word out."
    if mode.is_reference:
        own = ("has no hook in torch's DDP", f"Use direct/bucket:5MiB/overlap/{word}.")
        return ("", "") if codec.in_ddp else own
    if mode.row.sends_parameters or mode.schedule == "pipeline":
        half = "half of what is sent are parameters, and a rounding error in them is never corrected"
        return f"is made for gradients: {half}", "Use ring/bucket:2MiB/overlap/fp16."
    if not codec.summable and not mode.row.direct:
        why = f"has payloads that cannot be summed, and {mode.algorithm} sums them: they must go to all ranks directly"
        return why, f"Use direct/{word}."
    return "", ""


def _read_every(mode: SyncMode, word: str, text: str) -> dict[str, Any] | None:
    match = _EVERY.fullmatch(word)
    if match is None:
        return None
    if mode.row.every_refused:
        raise refuse(
            "mode", text, f"{mode.algorithm} takes no every:K: {mode.row.every_refused}", "Leave the word out."
        )
    if mode.schedule != "after":
        raise refuse("mode", text, f"every:K averages after a step, but {mode.schedule} during it", "Use one of them.")
    every = int(match[1])
    if every < 1:
        raise refuse("mode", text, "every:K needs K of at least 1", "Write e.g. every:4.")
    if mode.codec and every > 1:
        rule = f"every:K averages parameters, and a rounding error of {mode.codec} in them is never corrected"
        raise refuse("mode", text, rule, "Use one of them.")
    return {"every": every, "every_from": int(match[2] or 0) if every > 1 else 0}


# --- how a gradient is cut into buckets ---------------------------------------------------------------------------

# In a pipeline the last buckets have 1/8, 1/4 and 1/2 of the usual size. `make bench ARGS=first-layers` tries others.
# A direct exchange of the very last one would send the same bytes, 2(N-1)/N of it a rank, in 2 hops instead of 2(N-1).
# That would save 2(N-1) - 2 wake-ups once a step, 4 at N = 4, each shorter than SEGMENT_S (results/theory.py): at most
# 1.6 ms. It would need N-1 connections a rank and another order of sums.
LAST_BUCKETS = (8, 4, 2)


def fill_buckets(sizes: Iterable[int], limit: int) -> list[list[int]]:
    """Return the numbers of the tensors in each bucket, in order. A tensor above the limit gets a bucket of its own."""
    buckets: list[list[int]] = []
    room = 0
    for number, size in enumerate(sizes):
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(number)
        room -= size
    return buckets


def bucket_bounds(total: int, most: int) -> list[int]:
    """Return the bounds of the buckets of a pipeline: `most` elements each, and fewer in the LAST_BUCKETS.

    The end of the buffer is the first layer. Its gradient is complete last, and its new values are needed first. So its
    bucket is sent while nothing is computed, and a small bucket shortens this time.
    """
    sizes: list[int] = []
    rest = total
    for divisor in LAST_BUCKETS:
        sizes.append(min(rest, max(1, most // divisor)))
        rest -= sizes[-1]
    while rest:
        sizes.append(min(rest, most))
        rest -= sizes[-1]
    return [0, *accumulate(size for size in reversed(sizes) if size)]


# --- lists of modes --------------------------------------------------------------------------------------------------


def legal_modes(bucket: str = "5MiB") -> Iterator[SyncMode]:
    """Yield every legal combination of algorithm, granularity and schedule, without a codec and every:K.

    Buckets have the size `bucket`. Modes whose ranks choose the size are included. `codecs_of` and `every_of` return
    what can be appended.
    """
    sizes = {"bucket": f"bucket:{bucket}"}
    unusable = unusable_methods()
    for name, algorithm in algorithms().items():
        if name not in ALGORITHMS and str(method_path(name)) in unusable:
            continue
        if algorithm.default is None:
            yield SyncMode.parse(name)
        for granularity in algorithm.granularities:
            for schedule in SCHEDULES if algorithm.default else ("",):
                words = [name, sizes.get(granularity, granularity), *([schedule] if schedule else [])]
                with contextlib.suppress(SpecError):
                    yield SyncMode.parse("/".join(words))
        if algorithm.pipelined:
            yield SyncMode.parse(f"{name}/pipeline")


def codecs_of(mode: SyncMode) -> list[str]:
    """Return the codecs that can be appended to a mode without a codec, each with one example of its number."""
    return [codec.example for codec in CODECS.values() if _can_follow(mode, codec.example)]


def every_of(mode: SyncMode) -> list[str]:
    """Return examples of `every:K[@M]` if it can be appended to the mode; else an empty list."""
    return [word for word in EVERY if _can_follow(mode, word)]


def _can_follow(mode: SyncMode, word: str) -> bool:
    try:
        SyncMode.parse(f"{mode}/{word}")
    except SpecError:
        return False
    return True


def _from_text(value: object) -> SyncMode:
    if isinstance(value, SyncMode):
        return value
    if not isinstance(value, str):
        raise refuse("mode", value, "must be text", "Write e.g. ring/bucket:2MiB.")
    return SyncMode.parse(value)


Mode = Annotated[SyncMode, BeforeValidator(validator(_from_text)), PlainSerializer(str)]  # the field type of specs
