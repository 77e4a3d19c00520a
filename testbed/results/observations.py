"""What the observer (attach/) records about a user's script, besides steps: lines of rankN.jsonl.

setup       once      how the script set itself up: backend, world, DDP and its options, threads
calls       some      its collectives so far: kind, call site, count, bytes, seconds
gradients   sampled   values of some gradients before synchronisation, and as the optimizer gets them
parameters  sampled   hash of all parameters
batch       sampled   hash of a whole batch
pass        per pass  order in which a sampler gave its indices
unseen      some      a part of the observer that failed, and its error
where       some      the present line of a script that makes no step
made        some      the number of steps so far, while the file is too full for their records
files       once      the files that the script wrote to its working copy, and why some were not collected
swap        once      --instead MODE: from this step on the mode synchronises

The observer runs inside the script's own process, so a script can forge these lines. Every line is checked against its
class when it is read. The launcher writes `files`, `where` and `made`.

`Finding` is what a rule of the testbed says about the script. It is shown in the table, on the report page, in
summary.json and by --json.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Text = Annotated[str, Field(max_length=4096)]
Short = Annotated[str, Field(max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=True)]


@dataclass(frozen=True, kw_only=True)
class Call:
    """All calls of one operation from one line of the script, in one phase."""

    operation: Short  # all_reduce, broadcast, ...
    site: Text  # "main.py:88"; empty: called by torch itself, e.g. by DDP's reducer
    phase: Short  # forward, backward, sync, update, data, other
    count: Count
    bytes: Count  # sum over all calls, as Collective.size in attach/events.py
    seconds: float = 0.0  # in flight, sum over all calls
    blocked: float = 0.0  # seconds that the script waited for the calls
    by: Short = ""  # "DistributedDataParallel" and the like, if torch made the call
    detail: dict[str, Any] = field(default_factory=dict)  # reduce, root or peer, group, smallest, largest


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the script set itself up; recorded with its first step."""

    kind: Literal["setup"] = "setup"
    rank: Count  # in the script's process group
    world: Count
    backend: Short = ""  # empty: no process group
    wrappers: dict[str, dict[str, Any]] = field(default_factory=dict)  # "DistributedDataParallel": its options
    optimizers: list[Short] = field(default_factory=list)
    threads: Count = 0
    changed: list[Text] = field(default_factory=list)  # changes that the launcher made for the script, as sentences
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The collectives of the steps `first` to `last`. Counts are cumulative: only the last such record is used."""

    kind: Literal["calls"] = "calls"
    first: Count
    last: Count
    rows: list[Call]
    detail: dict[str, Any] = field(default_factory=dict)  # ddp: the times in DDP's own logging data, to compare with


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Samples of gradients at updates 0, 1, 3, 7, ... of an optimizer. All ranks sample the same positions."""

    kind: Literal["gradients"] = "gradients"
    step: Count
    passes: Count  # backward passes since the last step of the optimizer
    names: list[Short]
    local: list[list[Number]]  # before synchronisation, as backward accumulated them
    given: list[list[Number]]  # as the optimizer gets them
    reduced: list[list[Number]] = field(default_factory=list)  # at the end of backward; empty: equal to `given`
    unclipped: list[list[Number]] = field(default_factory=list)  # before clipping; empty: not clipped
    # keys: optimizer, site, sharded, norms (of `given`), local_norms, pass_bytes (of collectives in each backward
    # pass), pass_sites, bytes (of all parameters), between (operation, site, phase, content, count, bytes), unused,
    # loss_scale, loss_is_sum, wrapped (site of DDP)
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """A hash of all parameters of an optimizer: before its first backward pass (`moment` start), or after an update.

    "After an update" is just before the next backward pass, because a script may send parameters after the update.
    """

    kind: Literal["parameters"] = "parameters"
    step: Count
    moment: Literal["start", "step"]
    hash: Short
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A hash of all bytes of one batch. `step` is the number of the batch among those fetched for training.

    Batches 0, 1, 3, 7, ... are sampled.
    """

    kind: Literal["batch"] = "batch"
    step: Count
    hash: Short
    images: Count
    detail: dict[str, Any] = field(default_factory=dict)  # tensors, site; samples: a hash of each image, if few


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A complete pass over a sampler."""

    kind: Literal["pass"] = "pass"
    number: Count
    epoch: int  # of the sampler (set_epoch); -1 if it has none
    order: Short  # hash of the sequence of indices
    length: Count
    shuffled: bool = False
    site: Text = ""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """A part of the observer that failed. The script went on."""

    kind: Literal["unseen"] = "unseen"
    seam: Short
    error: Text


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files that the script wrote, collected in rankN.files/; the launcher writes this record."""

    kind: Literal["files"] = "files"
    count: Count
    bytes: Count
    left_out: Count = 0
    names: list[Text] = field(default_factory=list)  # of the first files
    reasons: list[Text] = field(default_factory=list)  # why files were left out, without repetition


@dataclass(frozen=True, kw_only=True)
class Where:
    """The present line of a script that makes no step. The launcher asks for it before the deadline."""

    kind: Literal["where"] = "where"
    site: Text  # "main.py:88"; empty if no line of the script is on the stack
    waits: bool  # True: the script is inside torch.distributed or a backward pass


@dataclass(frozen=True, kw_only=True)
class Made:
    """The number of steps that the script has made. The launcher writes it when records are no longer stored."""

    kind: Literal["made"] = "made"
    steps: Count


@dataclass(frozen=True, kw_only=True)
class Swap:
    """`--instead MODE` replaced the script's synchronisation from `step` on."""

    kind: Literal["swap"] = "swap"
    step: Count
    mode: Short
    detail: dict[str, Any] = field(default_factory=dict)  # factor and residual before, passes, collectives replaced


Observation = Setup | Calls | Gradients | Parameters | Batch | Pass | Unseen | Files | Where | Made | Swap


Severity = Literal["error", "cost", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "cost", "note")
LongText = Annotated[str, Field(max_length=16_384)]


@dataclass(frozen=True)
class Finding:
    """One statement about a script. `error`: it does not train the model that it seems to; `cost`: it loses time."""

    __pydantic_config__: ClassVar = ConfigDict(extra="ignore")  # of summary.json

    rule: LongText
    severity: Severity
    title: LongText  # one sentence
    evidence: LongText  # the numbers
    fix: LongText
    sure: LongText  # how certain the statement is
    refuted_by: LongText  # what would have to be observed if the statement were wrong
    site: LongText = ""  # file and line of the script; empty if none is known
    seconds: float | None = None  # that a step loses, if known
