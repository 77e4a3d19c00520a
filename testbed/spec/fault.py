"""Fault: a failure that the controller injects, in one spelling: `kind:rankR@WHEN[+DURATION][=VALUE]`.

kill       SIGKILL to all processes of the node              kill:rank2@step10
exit       SIGTERM to the rank                               exit:rank1@step5
pause      freeze the node; without +DURATION for ever       pause:rank1@step5+3s
cut        set its link down; without +DURATION for ever     cut:rank3@20s+5s
rate       another rate of its link, each way                rate:rank2@step8=50mbit, rate:rank2@step8+5s=50mbit
slow       another share of the processor                    slow:rank1@step5=0.25cpu
oom        a memory limit that the rank exceeds              oom:rank2@step10
disk-full  every further write of the rank fails             disk-full:rank1@step8

WHEN is the number of steps that the rank has completed (`step10`) or the seconds since it started to train (`20s`).
`rank?` and `step?` are drawn with the run's seed.
`str(Fault.parse(text))` can be parsed again and gives the same value.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from testbed.spec.errors import SpecError, refuse
from testbed.spec.units import format_duration, format_rate, parse_duration, parse_rate

ANY = "?"
MAX_FAULTS = 64  # of one run
LASTING = ("pause", "cut", "rate", "slow")  # kinds that can be undone
KINDS = ("kill", "exit", *LASTING, "oom", "disk-full")
STEPS_TO_DRAW = 100  # `step?` is below this if the run's length is given in epochs
_FORM = re.compile(
    r"(?P<kind>[a-z-]{1,16}):rank(?P<rank>\d{1,4}|\?)@(?:step(?P<step>\d{1,9}|\?)|(?P<after>[\d.]{1,16}[a-z]{1,2}))"
    r"(?:\+(?P<lasts>[\d.]{1,16}[a-z]{1,2}))?(?:=(?P<value>[0-9A-Za-z.]{1,24}))?",
    re.ASCII,
)
_WAY_OUT = "Write e.g. kill:rank2@step10, pause:rank1@step5+3s or rate:rank2@step8=50mbit."


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; build it with `parse`. Either `step` or `after` is set; neither if the step is to be drawn."""

    kind: str
    rank: int | None  # None: to be drawn
    step: int | None = None
    after: float | None = None  # seconds
    lasts: float | None = None  # seconds; None: for ever
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
        """Parse one fault; SpecError if it has another form or an unknown kind."""
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
            **_value(kind, match["value"], text),
        )


def _value(kind: str, value: str | None, text: str) -> dict[str, Any]:
    """The value after the `=`, which `rate` and `slow` need and the other kinds refuse."""
    if kind not in ("rate", "slow"):
        if value is not None:
            raise refuse("fault", text, f"{kind} takes no value", "Leave out the = and what follows.")
        return {}
    if value is None:
        example = {"rate": "50mbit", "slow": "0.25cpu"}[kind]
        raise refuse("fault", text, f"{kind} needs a value", f"Write e.g. {text}={example}.")
    if kind == "rate":
        return {"rate": parse_rate(value)}
    number = re.fullmatch(r"(\d{1,4}(?:\.\d{1,4})?)cpu", value)
    if number is None or not 0.01 <= float(number[1]) <= 1024:
        raise refuse("fault", text, "a share is 0.01cpu to 1024cpu", "Write e.g. =0.25cpu.")
    return {"cpus": float(number[1])}


def draw_random(faults: Sequence[Fault], seed: int, world: int, steps: int | None) -> tuple[Fault, ...]:
    """Return the faults with every `?` replaced by a number drawn with the run's seed; a drawn step is never 0."""
    rng = random.Random(f"faults {seed}")
    found = []
    for fault in faults:
        # Both are drawn for every fault, so that changing one fault does not change the draws of the others.
        rank, step = (
            rng.randrange(world),
            rng.randrange(1, max(2, steps or STEPS_TO_DRAW)),
        )
        where = fault.rank if fault.rank is not None else rank
        when = fault.step if fault.step is not None or fault.after is not None else step
        found.append(replace(fault, rank=where, step=when))
    return tuple(found)


def _from_text(value: object) -> object:
    try:
        return Fault.parse(value) if isinstance(value, str) else value
    except SpecError as error:
        raise ValueError(str(error)) from None


FaultText = Annotated[Fault, BeforeValidator(_from_text), PlainSerializer(str)]  # the field type of specs
