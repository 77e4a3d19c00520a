"""Fault: a failure that the controller injects, written as `kind:rankR@WHEN[+DURATION][=VALUE]`.

WHEN is the number of steps that the rank has completed (`step10`) or the seconds since it started to train (`20s`).
`rank?` and `step?` are drawn with the run's seed.
`str(Fault.parse(text))` can be parsed again and gives the same value.

To add a kind, add a row to FAULT_KINDS here and its action to control/runs/faults.py (the rest: docs/architecture.md).
What `--fault` accepts, which substrates refuse it, and the table in docs/faults.md (`make docs`) follow from the row.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from testbed.spec.base import validator
from testbed.spec.errors import refuse
from testbed.spec.units import format_duration, format_rate, parse_duration, parse_rate

ANY = "?"
MAX_FAULTS = 64  # of one run
STEPS_TO_DRAW = 100  # a drawn step is less than this if the run's length is given in epochs
_FORM = re.compile(
    r"(?P<kind>[a-z-]{1,16}):rank(?P<rank>\d{1,4}|\?)@(?:step(?P<step>\d{1,9}|\?)|(?P<after>[\d.]{1,16}[a-z]{1,2}))"
    r"(?:\+(?P<lasts>[\d.]{1,16}[a-z]{1,2}))?(?:=(?P<value>[0-9A-Za-z.]{1,24}))?",
    re.ASCII,
)
_WAY_OUT = "Write e.g. kill:rank2@step10, pause:rank1@step5+3s or rate:rank2@step8=50mbit."


@dataclass(frozen=True, kw_only=True)
class FaultValue:
    """What a kind needs after the `=`."""

    field: str  # the field of Fault
    example: str
    parse: Callable[[str, str], Any]  # takes the value and the text of the whole fault; raises SpecError


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """One kind of fault."""

    does: str
    example: str
    substrates: tuple[str, ...] = ("process", "netns", "compose", "uml", "hosts", "slurm")  # which can inject it
    controller: str = ""  # the cgroup controller that is needed where nodes are processes of this machine
    lasting: bool = False  # True: it can be reverted, so it may have a +DURATION
    stays: bool = False  # True: it acts on the node after the rank has ended, until it is reverted
    value: FaultValue | None = None


def _parse_share(value: str, text: str) -> float:
    number = re.fullmatch(r"(\d{1,4}(?:\.\d{1,4})?)cpu", value)
    if number is None or not 0.01 <= float(number[1]) <= 1024:
        raise refuse("fault", text, "a share is 0.01cpu to 1024cpu", "Write e.g. =0.25cpu.")
    return float(number[1])


# On these substrates each node has its own link and CPU quota. On hosts such a fault would affect all users of a host.
SHAPED = ("netns", "compose", "uml")
FAULT_KINDS: dict[str, FaultKind] = {
    "kill": FaultKind(does="SIGKILL to all processes of the node", example="kill:rank2@step10"),
    "exit": FaultKind(does="SIGTERM to the rank", example="exit:rank1@step5"),
    "pause": FaultKind(
        does="the node is frozen; for ever without `+3s`",
        example="pause:rank1@step5+3s",
        lasting=True,
    ),
    "cut": FaultKind(
        does="the node's link goes down; for ever without `+5s`",
        example="cut:rank3@20s+5s",
        substrates=SHAPED,
        lasting=True,
    ),
    "rate": FaultKind(
        does="the node's link gets another rate, each way",
        example="rate:rank2@step8=50mbit",
        substrates=SHAPED,
        lasting=True,
        value=FaultValue(field="rate", example="50mbit", parse=lambda value, text: parse_rate(value)),
    ),
    "slow": FaultKind(
        does="the node gets another CPU share",
        example="slow:rank1@step5+2s=0.25cpu",
        controller="cpu",
        substrates=SHAPED,
        lasting=True,
        value=FaultValue(field="cpus", example="0.25cpu", parse=_parse_share),
    ),
    "oom": FaultKind(
        does="a memory limit that the rank then exceeds",
        example="oom:rank2@step10",
        controller="memory",
        stays=True,
        substrates=(*SHAPED, "hosts"),
    ),
    "disk-full": FaultKind(
        does="every further write of the rank fails",
        example="disk-full:rank1@step8",
        substrates=("process", *SHAPED),
    ),
}
KINDS = tuple(FAULT_KINDS)
LASTING = tuple(name for name, kind in FAULT_KINDS.items() if kind.lasting)


def kinds_on(substrate: str) -> tuple[str, ...]:
    """Return the kinds of faults that can be injected on a substrate."""
    return tuple(name for name, kind in FAULT_KINDS.items() if substrate in kind.substrates)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; build it with `parse`. Either `step` or `after` is set; neither if the step is to be drawn."""

    kind: str
    rank: int | None  # None: to be drawn
    step: int | None = None
    after: float | None = None  # seconds
    lasts: float | None = None  # seconds; None: until the attempt ends
    rate: int | None = None  # bit/s
    cpus: float | None = None

    def __str__(self) -> str:
        when = (
            format_duration(self.after) if self.after is not None else f"step{ANY if self.step is None else self.step}"
        )
        text = f"{self.kind}:rank{ANY if self.rank is None else self.rank}@{when}"
        text += f"+{format_duration(self.lasts)}" if self.lasts is not None else ""
        text += f"={format_rate(self.rate)}" if self.rate is not None else ""
        return text + (f"={self.cpus:g}cpu" if self.cpus is not None else "")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse one fault. Raises SpecError if it has another form or an unknown kind."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise refuse("fault", text[:80], "is not of the form kind:rankR@WHEN[+DURATION][=VALUE]", _WAY_OUT)
        kind = match["kind"]
        if kind not in KINDS:
            raise refuse("fault", text, f"unknown kind {kind!r}", f"Known: {', '.join(KINDS)}.")
        if match["lasts"] and kind not in LASTING:
            raise refuse("fault", text, f"{kind} cannot be undone", "Leave out the + and what follows.")
        drawn_step = match["step"] in (None, ANY)
        return cls(
            kind=kind,
            rank=None if match["rank"] == ANY else int(match["rank"]),
            step=None if drawn_step else int(match["step"]),
            after=parse_duration(match["after"]) if match["after"] else None,
            lasts=parse_duration(match["lasts"]) if match["lasts"] else None,
            **_parse_value(kind, match["value"], text),
        )


def _parse_value(kind: str, value: str | None, text: str) -> dict[str, Any]:
    """Return the value after the `=` as a field of Fault. Raises SpecError if it is missing or the kind has none."""
    needed = FAULT_KINDS[kind].value
    if needed is None:
        if value is not None:
            raise refuse("fault", text, f"{kind} takes no value", "Leave out the = and what follows.")
        return {}
    if value is None:
        raise refuse("fault", text, f"{kind} needs a value", f"Write e.g. {text}={needed.example}.")
    return {needed.field: needed.parse(value, text)}


def draw_random(faults: Sequence[Fault], seed: int, world: int, steps: int | None) -> tuple[Fault, ...]:
    """Return the faults with every `?` replaced by a number drawn with the run's seed; a drawn step is never 0."""
    rng = random.Random(f"faults {seed}")
    found = []
    for fault in faults:
        # Rank and step are drawn for every fault, so that a change of one fault does not change what others draw.
        rank, step = (
            rng.randrange(world),
            rng.randrange(1, max(2, steps or STEPS_TO_DRAW)),
        )
        where = fault.rank if fault.rank is not None else rank
        when = fault.step if fault.step is not None or fault.after is not None else step
        found.append(replace(fault, rank=where, step=when))
    return tuple(found)


def _from_text(value: object) -> Fault:
    if isinstance(value, Fault):
        return value
    if not isinstance(value, str):
        raise refuse("fault", value, "must be text", _WAY_OUT)
    return Fault.parse(value)


# the field type of specs
FaultText = Annotated[Fault, BeforeValidator(validator(_from_text)), PlainSerializer(str)]
