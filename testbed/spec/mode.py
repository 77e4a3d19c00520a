"""SyncMode: how gradients are synchronised, in one spelling everywhere.

    algorithm[/granularity][/schedule][/codec][/every:K[@M]]     e.g. ring, allreduce/param, ring/bucket:2MiB/pipeline

It parses and prints back to itself; defaults are left out, so one mode has one spelling.
`every:K`    each rank takes K local steps on its own gradients, then parameters are averaged (after the last step too).
`every:K@M`  for the first M steps gradients are averaged every step, from then on it is `every:K`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from testbed.spec.errors import SpecError, refuse
from testbed.spec.units import format_size, parse_size

# Codec: what travels in place of a gradient. Its word is a name and, for some, a number: fp16, topk:0.01.


@dataclass(frozen=True, kw_only=True)
class Codec:
    """What the vocabulary knows of a codec; the code that does it lives in rank/sync."""

    does: str
    example: str  # a word of it
    summable: bool  # what travels can be added up on its way, so that any algorithm can carry it
    number: str = ""  # the pattern of its number, where it has one
    most: float = 0  # the largest number
    in_ddp: bool = False  # torch has a hook for it


CODECS: dict[str, Codec] = {
    "fp16": Codec(does="16-bit floats: half the bytes", example="fp16", summable=True, in_ddp=True),
    "bf16": Codec(
        does="16-bit floats with the range of 32: half the bytes", example="bf16", summable=True, in_ddp=True
    ),
    "int8": Codec(
        does="8-bit integers, one scale a shard, rounded at random: a quarter of the bytes",
        example="int8",
        summable=False,
    ),
    "topk": Codec(
        does="the largest fraction F and where they were, the rest is kept for later: F N of the bytes",
        example="topk:0.01",
        summable=False,
        number=r"\d?\.\d{1,6}|\d",
        most=1,
    ),
    "powersgd": Codec(
        does="each matrix as a product of rank R, the rest is kept for later",
        example="powersgd:2",
        summable=True,
        number=r"\d{1,3}",
        most=999,
        in_ddp=True,
    ),
}


def read_codec(word: str, text: str) -> tuple[str, float | None] | None:
    """Name and number of a codec's word; None where it is no codec. `text` is the whole mode, for the refusal."""
    name, colon, digits = word.partition(":")
    codec = CODECS.get(name)
    if codec is None:
        return None
    if not codec.number:
        if colon:
            raise refuse("mode", text, f"{name} takes no number", f"Write {name}.")
        return name, None
    if not re.fullmatch(codec.number, digits, re.ASCII) or not 0 < float(digits) <= codec.most:
        kind = "a fraction" if codec.most == 1 else "a whole number"
        rule = f"{name} needs {kind} greater than 0 and at most {codec.most:g}"
        raise refuse("mode", text, rule, f"Write e.g. {codec.example}.")
    return name, float(digits)


def codec_word(name: str, number: float | None) -> str:
    """The one spelling of a codec, which `read_codec` reads back."""
    return name if number is None else f"{name}:{f'{number:.6f}'.rstrip('0').rstrip('.')}"


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What the vocabulary knows of an algorithm; the code that does it lives in rank/sync."""

    does: str
    granularities: tuple[str, ...] = ("param", "bucket", "flat")
    default: str | None = None  # None: the algorithm decides itself
    every: str | None = None  # why `every:K` is refused, where it is


ALGORITHMS: dict[str, Algorithm] = {
    "single": Algorithm(
        does="one node, nothing to synchronise", granularities=(), every="one node has nobody to average with"
    ),
    "none": Algorithm(
        does="N ranks and no synchronisation: the control run, which shows what computing alone costs",
        granularities=(),
        every="nothing is averaged",
    ),
    "gather": Algorithm(does="gather to rank 0, mean there, scatter back", default="param"),
    "allreduce": Algorithm(does="torch.distributed.all_reduce (Gloo's ring)", default="param"),
    "ring": Algorithm(does="our ring: scatter-reduce, then all-gather, by isend/irecv", default="flat"),
    "direct": Algorithm(does="each rank owns a part: gets it from all, sends its mean to all", default="flat"),
    "ring-reduce": Algorithm(does="partial sums go round to rank 0, the mean goes round again", default="flat"),
    "tree": Algorithm(does="binomial tree: reduce to rank 0, broadcast", default="flat"),
    "halving": Algorithm(does="recursive halving, then doubling; any number of ranks", default="flat"),
    "server": Algorithm(
        does="parameter server on rank 0: gradients go up, rank 0 steps, parameters come down",
        default="flat",
        every="parameters live on rank 0, so no rank can step alone",
    ),
    "ddp": Algorithm(
        does="torch's DistributedDataParallel, the reference",
        granularities=("bucket",),
        every="DDP averages gradients inside backward; use allreduce/.../every:K",
    ),
}
OWN = Algorithm(does="your own", default="flat")  # what every method of a user's is
SCHEDULES = {
    "after": "synchronise after backward",
    "overlap": "each bucket starts as soon as backward has filled it",
    "pipeline": "reduce under backward, update 1/N of the parameters, gather under the next forward",
}
CONTROL = "none"  # the same ranks without synchronisation: what the others are held against
REFERENCE = "ddp"  # what one would have taken without this tool
ROOTED = ("gather", "server")
PIPELINED = ("ring", "direct")  # algorithms that are a reduce of parts, then a gather of parts
DEFAULT_SCHEDULE = "after"
_EVERY = re.compile(r"every:(\d{1,6})(?:@(\d{1,9}))?")


def methods_dir() -> Path:
    """Where a user's own algorithms lie: one file NAME.py with a `mean_(buffer, group)` makes the mode NAME."""
    return Path(os.environ.get("TESTBED_METHODS", "methods"))


def algorithms() -> dict[str, Algorithm]:
    """The built-in algorithms and the user's own."""
    files = sorted(methods_dir().glob("[a-z]*.py"))
    own = {f.stem.replace("_", "-"): replace(OWN, does=f"your own, from {f}") for f in files}
    return ALGORITHMS | {name: own[name] for name in own if name not in ALGORITHMS}


@dataclass(frozen=True)
class SyncMode:
    """One cell of the matrix of modes; build it with `parse`, which refuses illegal cells."""

    algorithm: str
    granularity: str | None = None  # "param", "flat", "bucket", or None: the algorithm's own
    bucket: int | None = None  # bytes, with granularity "bucket"
    schedule: str = DEFAULT_SCHEDULE
    codec: str | None = None  # None: gradients travel as they are
    codec_number: float | None = None  # F of topk, R of powersgd
    every: int = 1
    every_from: int = 0  # first step that is local

    @property
    def distributed(self) -> bool:
        return self.algorithm != "single"

    @property
    def is_control(self) -> bool:
        """True where N ranks train, each for itself: what it costs counts, what it learns does not."""
        return self.algorithm == CONTROL

    @property
    def is_reference(self) -> bool:
        """True for DDP, which cuts, starts and awaits its buckets by itself."""
        return self.algorithm == REFERENCE

    @property
    def silent(self) -> bool:
        """True where nothing is synchronised at all."""
        return self.is_control or not self.distributed

    @property
    def rooted(self) -> bool:
        """True where everything passes rank 0's link."""
        return self.algorithm in ROOTED

    @property
    def separable(self) -> bool:
        """True where the exchange is a step of its own, so that it can come less often (every:K), or too late."""
        return ALGORITHMS.get(self.algorithm, OWN).every is None

    @property
    def synchronous(self) -> bool:
        """True when every update is the same on every rank."""
        return self.every == 1 and not self.is_control

    def __str__(self) -> str:
        words = [self.algorithm]
        if self.granularity == "bucket":
            words.append(f"bucket:{format_size(self.bucket or 0)}")
        elif self.granularity and self.granularity != ALGORITHMS.get(self.algorithm, OWN).default:
            words.append(self.granularity)
        if self.schedule != DEFAULT_SCHEDULE:
            words.append(self.schedule)
        if self.codec:
            words.append(codec_word(self.codec, self.codec_number))
        if self.every > 1:
            words.append(f"every:{self.every}" + (f"@{self.every_from}" if self.every_from else ""))
        return "/".join(words)

    @classmethod
    def parse(cls, text: str) -> SyncMode:
        """Read a mode; raise SpecError with the reason where the cell is illegal."""
        name, *words = text.strip().split("/")
        known = algorithms()
        if name not in known:
            raise refuse("mode", text, f"unknown algorithm {name!r}", f"Known: {', '.join(known)}.")
        mode = cls(name, granularity=known[name].default)
        axes = [_read_granularity, _read_schedule, _read_codec, _read_every]  # the order words must come in
        for word in words:
            mode = _read_word(mode, word, axes, text)
        return mode


def _read_word(mode: SyncMode, word: str, axes: list[Any], text: str) -> SyncMode:
    """Give a word to the first remaining axis that knows it; axes before it are then over."""
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
    allowed = algorithms()[mode.algorithm].granularities
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
    if own:
        raise refuse("mode", text, f"{mode.algorithm} takes no schedule: {own}", "Leave the word out.")
    why, way_out = _schedule_illegal(mode, word)
    if why:
        raise refuse("mode", text, f"{word} {why}", way_out)
    return {"schedule": word}


def _schedule_illegal(mode: SyncMode, word: str) -> tuple[str, str]:
    """Why this cell is empty, and where to go; two empty texts where it is not."""
    if word == "pipeline" and mode.algorithm not in PIPELINED:
        why = f"needs an algorithm that reduces parts, then gathers them; {mode.algorithm} does not"
        return why, "Use ring/bucket:2MiB/pipeline."
    if word == "overlap" and mode.algorithm == "server":
        return "averages gradients on every rank; server has them on rank 0 only", "Use ring/bucket:2MiB/overlap."
    if word != "after" and mode.granularity == "flat":
        return "needs several buffers; a flat one is full only when backward is over", "Use bucket:SIZE."
    if word == "pipeline" and mode.granularity == "param":
        return "cuts its pieces by size, not by tensor", "Use bucket:SIZE."
    return "", ""


def _read_codec(mode: SyncMode, word: str, text: str) -> dict[str, Any] | None:
    read = read_codec(word, text)
    if read is None:
        return None
    name, number = read
    why, way_out = _codec_illegal(mode, name, word)
    if why:
        raise refuse("mode", text, f"{name} {why}", way_out)
    return {"codec": name, "codec_number": number}


def _codec_illegal(mode: SyncMode, name: str, word: str) -> tuple[str, str]:
    """Why this cell is empty, and where to go; two empty texts where it is not."""
    codec = CODECS[name]
    if not algorithms()[mode.algorithm].granularities:
        return f"changes what travels, and in {mode.algorithm} nothing does", "Leave the word out."
    if mode.is_reference and not codec.in_ddp:
        return "is no hook that torch has for DDP", f"Use direct/bucket:5MiB/overlap/{word}."
    if mode.algorithm == "server" or mode.schedule == "pipeline":
        half = "half of what travels are parameters, and what they lose is lost for good"
        return f"is made for gradients: {half}", "Use ring/bucket:2MiB/overlap/fp16."
    if not codec.summable and mode.algorithm not in ("direct", REFERENCE):
        why = f"cannot be added up on its way, as {mode.algorithm} does: it goes straight to the others"
        return why, f"Use direct/{word}."
    return "", ""


def _read_every(mode: SyncMode, word: str, text: str) -> dict[str, Any] | None:
    match = _EVERY.fullmatch(word)
    if match is None:
        return None
    reason = algorithms()[mode.algorithm].every
    if reason:
        raise refuse("mode", text, f"{mode.algorithm} takes no every:K: {reason}", "Leave the word out.")
    if mode.schedule != "after":
        raise refuse("mode", text, f"every:K averages after the step, {mode.schedule} during it", "Use one of them.")
    every = int(match[1])
    if every < 1:
        raise refuse("mode", text, "every:K needs K of at least 1", "Write e.g. every:4.")
    if mode.codec and every > 1:
        rule = f"every:K averages parameters, and what they would lose to {mode.codec} is lost for good"
        raise refuse("mode", text, rule, "Use one of them.")
    return {"every": every, "every_from": int(match[2] or 0) if every > 1 else 0}


def legal_modes(bucket: str = "5MiB") -> Iterator[SyncMode]:
    """Every legal algorithm x granularity x schedule, with one bucket size for all; `codecs_of` has the fourth axis."""
    sizes = {"bucket": f"bucket:{bucket}"}
    for name, algorithm in algorithms().items():
        if algorithm.default is None:
            yield SyncMode.parse(name)
        for granularity in algorithm.granularities:
            for schedule in SCHEDULES if algorithm.default else ("",):
                words = [name, sizes.get(granularity, granularity), *([schedule] if schedule else [])]
                with contextlib.suppress(SpecError):
                    yield SyncMode.parse("/".join(words))


def codecs_of(mode: SyncMode) -> list[str]:
    """The codecs that a mode without one can have; one number stands for all."""
    legal = []
    for codec in CODECS.values():
        with contextlib.suppress(SpecError):
            SyncMode.parse(f"{mode}/{codec.example}")
            legal.append(codec.example)
    return legal


def _read(value: object) -> object:
    try:
        return SyncMode.parse(value) if isinstance(value, str) else value
    except SpecError as error:
        raise ValueError(str(error)) from None


Mode = Annotated[SyncMode, BeforeValidator(_read), PlainSerializer(str)]  # the field type of specs
