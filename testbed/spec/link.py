"""Link: the requested rate, delay, loss and queue of a node's network interface, each way."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from testbed.spec.base import Spec, validator
from testbed.spec.errors import refuse
from testbed.spec.fabric import Distance
from testbed.spec.units import (
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_rate,
    parse_size,
)
from testbed.spec.words import refuse_setting, setting


def _from_text(parse):  # type: ignore[no-untyped-def]
    """Return a validator that parses a value with `parse` if it is text, and leaves other values unchanged."""
    return BeforeValidator(validator(lambda value: parse(value) if isinstance(value, str) else value))


Rate = Annotated[int, _from_text(parse_rate), PlainSerializer(format_rate), Field(gt=0, le=10**15)]
Segment = Annotated[int, _from_text(parse_size), PlainSerializer(format_size), Field(ge=2**11, le=2**16)]
Duration = Annotated[
    float,
    _from_text(parse_duration),
    Field(ge=1e-6, le=86400),  # seconds, rounded to the microsecond because that is the precision of printed values
    AfterValidator(lambda seconds: round(seconds, 6)),
    PlainSerializer(format_duration),
]


def _parse_percent(text: str) -> float | str:
    """Return 0.001 for the text 0.1%. Any other text is returned unchanged."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else text
    except ValueError:
        return text


class Link(Spec):
    """One node's link. Rate and queue hold in each direction. `rate = None` sets no limit."""

    rate: Rate | None = Field(default=None, examples=["200mbit"])  # bit/s on the wire, frame headers included
    delay: Duration | None = Field(default=None, examples=["20ms"])  # one way, added on egress; needs netem
    jitter: Duration | None = Field(default=None, examples=["2ms"])
    # fraction of packets, also as text, e.g. "1%"; needs netem
    loss: Annotated[float, _from_text(_parse_percent)] = Field(default=0.0, ge=0.0, lt=1.0, examples=[0.01])
    # tbf's `latency`: the longest time a packet may wait in the queue before it is dropped
    queue: Duration = Field(default=0.05, examples=["50ms"])
    # largest segment that TCP passes to the interface for segmentation (GSO); None: the kernel's 64 KiB
    segment: Segment | None = Field(default=None, examples=["16KiB"])

    @model_validator(mode="after")
    def _check_jitter(self) -> Link:
        if self.jitter is not None and (self.delay is None or self.jitter > self.delay):
            rule, way_out = "varies a delay, and none is set", f"Add e.g. {setting('link.delay', '20ms')}."
            if self.delay is not None:  # netem sends what is due earlier at once, so the mean would not be the delay
                rule = f"varies a delay of {format_duration(self.delay)}, which cannot be less than nothing"
                way_out = "Use a jitter of at most the delay."
            raise ValueError(refuse_setting("link.jitter", format_duration(self.jitter), rule, way_out))
        return self

    @property
    def shaped(self) -> bool:
        """True if a substrate must configure the interface to provide this link."""
        return self.rate is not None or self.segment is not None or self.needs_netem

    @property
    def needs_netem(self) -> bool:
        """True if the kernel must have the netem qdisc."""
        return self.delay is not None or self.loss > 0

    def with_queue_of(self, further_delay: float) -> Link:
        """The link with a queue for the round trips of a path that also has this delay, each way (`queue_s`)."""
        queue = max(self.queue, 2 * ((self.delay or 0.0) + further_delay))
        return self.model_copy(update={"queue": round(queue, 6)})

    def slowed(self, factor: float) -> Link:
        """Return the link of a network that is `factor` times slower. Its queue holds the same number of bytes.

        The token bucket has the usual size for the slower rate, so that a probe does not take longer.
        """
        if factor == 1.0:
            return self
        times = {"delay": self.delay, "jitter": self.jitter, "queue": self.queue}
        values = {name: seconds * factor for name, seconds in times.items() if seconds is not None}
        rate = None if self.rate is None else max(1, round(self.rate / factor))
        return Link(rate=rate, loss=self.loss, segment=self.segment, **values)

    @property
    def distance(self) -> Distance:
        """What this link adds to the packets that the node sends."""
        return Distance(self.delay or 0.0, self.jitter or 0.0, self.loss)


# The values of SHAPING, and why a run with that value is left out of tables; empty: the run is not left out.
SHAPINGS = {"both": "", "egress": "what arrives at a node is not shaped", "off": "nothing is shaped"}


def parse_shaping(text: str) -> str:
    """Return the value of SHAPING; "both" for an empty text. Raises SpecError for an unknown value."""
    if text and text not in SHAPINGS:
        rule = "must say which directions of a link are shaped"
        raise refuse("SHAPING", text, rule, f"Use one of {', '.join(SHAPINGS)}.")
    return text or "both"


def why_not_shaped(shaping: str) -> str:
    """Return why a run is left out of tables although nothing failed; empty if its links are shaped both ways."""
    return f"SHAPING={shaping}: {SHAPINGS[shaping]}" if SHAPINGS.get(shaping) else ""
