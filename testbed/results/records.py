"""Records: the lines of rankN.jsonl. A rank appends them, everybody else only reads.

start  once      who, where, with which versions
step   per step  seconds of each phase, loss, bytes so far
eval   per test  loss and correct answers on the test set
hash   some      parameter hash, to prove that replicas agree
end    once      the last line of a rank that finished
error  once      the last line of a rank that did not
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, ValidationError

from testbed.spec.errors import SpecError, quote
from testbed.spec.run import SCHEMA, check_schema

Count = Annotated[int, Field(ge=0, lt=1 << 63)]  # bounded where a stranger's line is read; nobody counts further


@dataclass(frozen=True, kw_only=True)
class Start:
    kind: ClassVar[str] = "start"
    rank: int
    world: int
    unix: float  # wall clock, for people
    parameters: int
    gradient_bytes: int
    tensors: int
    deadline: float  # seconds that any one wait of this rank may take
    counter: str  # where byte counts come from: "interface eth0" or "tcp sockets"
    environment: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class Step:
    """Times are seconds on the monotonic clock; offsets count from `at`.

    `blocked` is timed in the loop, `busy` in the communication layer, `hidden` is where busy and not blocked overlap:
    that blocked + hidden = busy is a check, not a definition.
    """

    kind: ClassVar[str] = "step"
    step: Count
    epoch: Count
    at: float  # monotonic time at which the step began
    data: float
    forward: float
    backward: float
    sync: float  # synchronising and the optimizer's step, as the loop sees them
    update: float  # the optimizer's step alone, inside `sync`
    total: float
    loss: float
    images: Count
    sent: Count | None  # bytes since the start, None where nothing counts them
    received: Count | None
    cpu: float | None = None  # processor time of the loop's own thread in data, forward, backward and update
    attempt: Count | None = None  # the earlier one that did this step; None: the one that this file is of
    blocked: float = 0.0  # the loop waited for communication: exposed
    busy: float = 0.0  # at least one buffer was on its way
    hidden: float = 0.0
    phases: list[tuple[str, float, float]] = field(default_factory=list)  # name, offset, seconds
    comm: list[tuple[str, float, float, int]] = field(default_factory=list)  # name, offset, seconds, bytes
    stalls: list[tuple[float, float]] = field(default_factory=list)  # offset, seconds


@dataclass(frozen=True, kw_only=True)
class Eval:
    kind: ClassVar[str] = "eval"
    step: Count
    epoch: Count
    loss: float  # mean over the images below
    correct: Count
    images: Count
    scope: str  # "all ranks" when summed, "this rank" when each tested alone
    train_loss: float  # mean over the epoch so far, this rank
    train_accuracy: float


@dataclass(frozen=True, kw_only=True)
class Hash:
    kind: ClassVar[str] = "hash"
    step: Count
    parameters: str
    agree: bool


@dataclass(frozen=True, kw_only=True)
class End:
    kind: ClassVar[str] = "end"
    steps: int
    seconds: float  # training and tests, without start-up
    sent: int | None
    received: int | None
    before: int | None = None  # of `sent`, what the counter had when the first step began
    payload: dict[str, int] = field(default_factory=dict)  # bytes this rank sent, by kind: gradients, parameters, ...


@dataclass(frozen=True, kw_only=True)
class Error:
    kind: ClassVar[str] = "error"
    code: int
    message: str
    failed_rank: int | None = None  # the rank that was lost, where this one lost a peer and knows which
    at: float | None = None  # monotonic time


CONTINUED = " (cont.)"  # ends the name in `comm` of what was on its way when the step began
MAX_LINE = 4 << 20  # bytes; a step of a deep model with all its buffers has some thousand

Record = Start | Step | Eval | Hash | End | Error
Repeated = Step | Eval | Hash  # what a run that goes on takes over from earlier attempts
_REPEATED: dict[str, TypeAdapter[Any]] = {
    "step": TypeAdapter(Step),
    "eval": TypeAdapter(Eval),
    "hash": TypeAdapter(Hash),
}


def encode(record: Record) -> str:
    """One line, without its newline."""
    return json.dumps({"kind": record.kind, **vars(record)}, separators=(",", ":"))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a record file; a half-written last line is left out."""
    for record in read_lines(path, "kind"):
        if record["kind"] == "start":
            check_schema(record.get("schema"), str(path))
        yield record


def read_repeated(path: Path) -> Iterator[Repeated]:
    """The lines that a run which goes on repeats, each checked against its class: the file may be a stranger's."""
    for line in read(path):
        kind = str(line["kind"])
        try:
            if kind in _REPEATED:
                yield _REPEATED[kind].validate_python(line)
        except ValidationError as error:
            wrong = error.errors()[0]
            key, rule = quote(".".join(map(str, wrong["loc"]))), wrong["msg"]
            raise SpecError(f"{path}: {key} of a {kind} is damaged ({rule}). Run it anew with another --out.") from None


def read_lines(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """JSON objects that have `key`, one a line."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE), b""), start=1):
            if not line.endswith(b"\n") and len(line) < MAX_LINE:
                return
            try:
                record = json.loads(line)
                record[key]  # it has one
            except (ValueError, KeyError, TypeError, RecursionError):
                raise SpecError(f"{path}: line {number} is no record. The file is damaged; run it again.") from None
            yield record
