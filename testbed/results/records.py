"""The lines of rankN.jsonl. A rank appends them; the controller, the report and a resumed rank read them.

start  once      rank, size of the model, environment (versions, machine)
step   per step  seconds of each phase, loss, bytes so far
eval   per test  loss and correct answers on the test set
hash   some      hash of the parameters, to show that replicas agree
end    once      the last line of a rank that finished
error  once      the last line of a rank that failed

The records of a user's own script have further kinds (results/observations.py).

Every line is checked against its class when it is read, because a run folder may come from another user. The
check costs no time: pydantic parses and checks 20,000 steps with 12 buffers each in half the time of json.loads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from testbed.results.folder import open_regular
from testbed.results.observations import Observation
from testbed.spec.base import damage
from testbed.spec.errors import SpecError
from testbed.spec.run import SCHEMA, check_schema

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Code = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
MAX_LINE_BYTES = 4 << 20  # the record of a step of a deep model with all its buffers has some thousand bytes


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first record of a rank."""

    kind: Literal["start"] = "start"
    rank: Count
    world: Count
    unix: float  # wall clock, for readers of the file
    parameters: Count
    gradient_bytes: Count
    tensors: Count
    deadline: float  # seconds that any one wait of this rank may take
    counter: str  # where byte counts come from: "interface eth0" or "tcp sockets"
    environment: dict[str, Any] = field(default_factory=dict)
    mode: str = ""  # the mode with the bucket size that the ranks have chosen; empty: the spec's mode has a size
    chosen: str = ""  # why they have chosen it, in words
    schema: int = SCHEMA
    dilation: Annotated[float, Field(ge=1)] = 1.0  # of the run's times; `read` divides by it


@dataclass(frozen=True, kw_only=True)
class Step:
    """Times are seconds on the monotonic clock; offsets count from `at`.

    `blocked` is measured in the loop, `busy` in the communication layer, and `hidden` is the time that is busy and not
    blocked. So the equation blocked + hidden = busy checks the two measurements against each other.
    """

    kind: Literal["step"] = "step"
    step: Count
    epoch: Count
    at: float  # monotonic time at which the step began
    data: float
    forward: float
    backward: float
    sync: float  # synchronisation and the optimizer's step, measured in the training loop
    update: float  # the optimizer's step alone, inside `sync`
    total: float
    loss: float
    images: Count
    sent: Count | None  # bytes since the start, None where nothing counts them
    received: Count | None
    cpu: float | None = None  # processor time of the loop's own thread in data, forward and backward
    attempt: Count | None = None  # number of the earlier attempt that did this step; None: the attempt of this file
    blocked: float = 0.0  # the loop waited for communication: exposed
    busy: float = 0.0  # at least one buffer was in flight
    hidden: float = 0.0
    copies: float = 0.0  # the loop copied gradients to or from buffers, or ran the mode's hooks; not in `blocked`
    copies_cpu: float = 0.0  # the part of `cpu` that was spent for copies
    observing: float = 0.0  # in a user's script: the observer took samples of gradients, parameters or batches
    # In a user's script, since its start: seconds in which the loop's thread could run but had no processor. If the
    # kernel does not count these, `used` has the processor time of the process instead.
    delayed: float | None = None
    used: float | None = None
    process: float | None = None  # processor time of all threads of the rank from begin to end
    kernel: float = 0.0  # the part of `cpu` in kernel mode: page faults, and interrupts during that time
    phases: list[tuple[str, float, float]] = field(default_factory=list)  # name, offset, seconds
    comm: list[tuple[str, float, float, Count]] = field(default_factory=list)  # name, offset, seconds, bytes
    stalls: list[tuple[float, float]] = field(default_factory=list)  # offset, seconds
    copying: list[tuple[float, float]] = field(default_factory=list)  # offset, seconds; may overlap stalls
    evaluated: str = ""  # in a user's script: the line of an evaluation between the step before and this step


@dataclass(frozen=True, kw_only=True)
class Eval:
    """One test of the model on the test set."""

    kind: Literal["eval"] = "eval"
    step: Count
    epoch: Count
    loss: float  # mean over the labels below
    correct: Count
    images: Count  # labels: one for each image, or for each token of a sequence
    scope: str  # "all ranks": summed over ranks; "this rank": each rank tested all images
    train_loss: float  # mean over the epoch so far, of this rank
    train_accuracy: float


@dataclass(frozen=True, kw_only=True)
class Hash:
    """A comparison of parameter hashes over all ranks."""

    kind: Literal["hash"] = "hash"
    step: Count
    parameters: str
    agree: bool


@dataclass(frozen=True, kw_only=True)
class End:
    """The last record of a rank that finished."""

    kind: Literal["end"] = "end"
    steps: Count
    seconds: float  # training and tests, without start-up
    sent: Count | None
    received: Count | None
    before: Count | None = None  # the part of `sent` that was counted before the first step began
    payload: dict[str, Count] = field(default_factory=dict)  # bytes this rank sent, by kind: gradients, parameters, ...
    messages: dict[str, Count] = field(default_factory=dict)  # number of buffers this rank sent, by kind
    machine: str = ""  # equal for all ranks on one machine; empty if the processor time is unknown
    # The next four are never divided by the dilation.
    measured: float | None = None  # seconds from the first measured step to the last
    machine_cpu: float | None = None  # processor time of all processes of the machine in these seconds
    own_cpu: float | None = None  # processor time of this rank in these seconds
    machine_idle: float | None = None  # sum over all cores of the idle time in these seconds
    processes: Count = 1  # of a user's script: processes that trained on this node; the first one is the rank


@dataclass(frozen=True, kw_only=True)
class Error:
    """The last record of a rank that failed; `code` is its exit code."""

    kind: Literal["error"] = "error"
    code: Code
    message: str
    failed_rank: Count | None = None  # the rank that this rank lost, if known
    at: float | None = None  # monotonic time
    script_code: Code | None = None  # of a user's script: its own exit code, negative for a signal


Record = Start | Step | Eval | Hash | End | Error | Observation
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def encode(record: Record) -> str:
    """Return a record as one JSON line, without the newline."""
    return json.dumps(vars(record), separators=(",", ":"))


def decode(line: bytes) -> Record:
    """Return the record of one JSON line. Raises ValidationError if the line is no record."""
    return _RECORD.validate_json(line, strict=True)


def read(path: Path, raw: bool = False) -> Iterator[Record]:
    """Yield the records of a file; none if it does not exist yet. An incomplete last line is left out.

    The recorded times of a run with time dilation are longer by its factor. They are divided by it here and nowhere
    else; processor times are not divided. `raw`: times are yielded as they are in the file.

    Raises SchemaError if another version wrote the file, SpecError if a line is damaged.
    """
    slower = 1.0
    for number, line in complete_lines(path):
        try:
            record = decode(line)
        except ValidationError as error:
            _check_start(line, path)
            raise SpecError(f"{path}: line {number} is damaged ({damage(error)}). Run it again.") from None
        if isinstance(record, Start):
            check_schema(record.schema, str(path))
            slower = 1.0 if raw else record.dilation
        yield record if slower == 1.0 else _undilated(record, slower)


SECONDS = (  # fields of Step that are divided by the dilation
    *("at", "data", "forward", "backward", "sync", "update", "total"),
    *("blocked", "busy", "hidden", "copies", "observing"),
)


def _undilated(record: Record, slower: float) -> Record:
    """Return a Step or End with its times divided by `slower`; any other record unchanged."""
    if isinstance(record, End):
        return replace(record, seconds=record.seconds / slower)
    if not isinstance(record, Step):
        return record
    changes: dict[str, Any] = {name: getattr(record, name) / slower for name in SECONDS}
    changes["phases"] = [(name, at / slower, length / slower) for name, at, length in record.phases]
    changes["comm"] = [(name, at / slower, length / slower, size) for name, at, length, size in record.comm]
    changes["stalls"] = [(at / slower, length / slower) for at, length in record.stalls]
    changes["copying"] = [(at / slower, length / slower) for at, length in record.copying]
    return replace(record, **changes)


def _check_start(line: bytes, path: Path) -> None:
    """Raise SchemaError if this is a start record of another schema, whose keys may differ."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict) and values.get("kind") == "start":
        check_schema(values.get("schema"), str(path))


def complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of a file to which a rank may still append. A last line without newline is left out."""
    if not os.path.lexists(path):
        return
    with os.fdopen(open_regular(path), "rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), start=1):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                return
            yield number, line
