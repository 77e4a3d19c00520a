"""Fault: something that goes wrong on purpose, in one spelling: `kind:rankR@WHEN[+DURATION][=VALUE]`.

kill       SIGKILL everything of the node                    kill:rank2@step10
exit       the rank is told to end (SIGTERM)                 exit:rank1@step5
pause      freeze the node; without +DURATION for good       pause:rank1@step5+3s
cut        unplug its link; without +DURATION for good       cut:rank3@20s+5s
rate       another rate of its link, each way                rate:rank2@step8=50mbit, rate:rank2@step8+5s=50mbit
slow       another share of the processor                    slow:rank1@step5=0.25cpu
oom        a memory limit that the rank then runs into       oom:rank2@step10
disk-full  nothing more can be written by the rank           disk-full:rank1@step8

WHEN is a step that the rank has done (`step10`: after ten) or seconds since it started to train (`20s`).
`rank?` and `step?` are drawn with the run's seed. It parses and prints back to itself.
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
LASTING = ("pause", "cut", "rate", "slow")  # kinds that can be over again
KINDS = ("kill", "exit", *LASTING, "oom", "disk-full")
STEPS_TO_DRAW = 100  # where a run's length is given in epochs
_FORM = re.compile(
    r"(?P<kind>[a-z-]{1,16}):rank(?P<rank>\d{1,4}|\?)@(?:step(?P<step>\d{1,9}|\?)|(?P<after>[\d.]{1,16}[a-z]{1,2}))"
    r"(?:\+(?P<lasts>[\d.]{1,16}[a-z]{1,2}))?(?:=(?P<value>[0-9A-Za-z.]{1,24}))?",
    re.ASCII,
)
_WAY_OUT = "Write e.g. kill:rank2@step10, pause:rank1@step5+3s or rate:rank2@step8=50mbit."


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; build it with `parse`. Of `step` and `after` one is set, unless the step is still to be drawn."""

    kind: str
    rank: int | None  # None: to be drawn
    step: int | None = None
    after: float | None = None  # seconds
    lasts: float | None = None  # seconds; None: for good
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
        """Read one; SpecError with the reason."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise refuse("fault", text[:80], "is not of the form kind:rankR@WHEN[+DURATION][=VALUE]", _WAY_OUT)
        kind = match["kind"]
        if kind not in KINDS:
            raise refuse("fault", text, f"unknown kind {kind!r}", f"Known: {', '.join(KINDS)}.")
        if match["lasts"] and kind not in LASTING:
            raise refuse("fault", text, f"{kind} is never over again", "Leave out the + and what follows.")
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
    """What stands behind the `=`, which some kinds need and the others refuse."""
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


def drawn(faults: Sequence[Fault], seed: int, world: int, steps: int | None) -> tuple[Fault, ...]:
    """Every `?` replaced by a number from the run's seed; never the first step, whose end nobody waits for."""
    rng = random.Random(f"faults {seed}")
    found = []
    for fault in faults:
        rank, step = rng.randrange(world), rng.randrange(1, max(2, steps or STEPS_TO_DRAW))  # drawn in any case
        where = fault.rank if fault.rank is not None else rank
        when = fault.step if fault.step is not None or fault.after is not None else step
        found.append(replace(fault, rank=where, step=when))
    return tuple(found)


def _read(value: object) -> object:
    try:
        return Fault.parse(value) if isinstance(value, str) else value
    except SpecError as error:
        raise ValueError(str(error)) from None


FaultText = Annotated[Fault, BeforeValidator(_read), PlainSerializer(str)]  # the field type of specs
