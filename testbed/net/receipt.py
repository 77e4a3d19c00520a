"""The receipt: what a probe measured on every directed link and on the fan-in, asked against got."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from testbed.net.probe import Flow, Measurement
from testbed.net.tcp import bottleneck, wire_rate
from testbed.results.folder import read_bounded, write_whole
from testbed.spec.base import Spec
from testbed.spec.errors import SpecError
from testbed.spec.run import SCHEMA, check_schema
from testbed.spec.units import format_rate

MAX_BYTES = 16 << 20  # of a receipt; that of 64 nodes has about one million
TOLERANCE = 0.05  # a run that is further off is invalid


class Measured(Spec):
    """One rate in bit/s; `error` is got / asked - 1, None where nothing was asked."""

    asked: int | None
    goodput: float  # payload
    got: float  # on the wire, headers included
    error: float | None


class LinkReceipt(Measured):
    """One directed link."""

    src: int
    dst: int
    rtt: float | None = None  # seconds there and back, on the quiet path


class FanIn(Measured):
    """All the others into node 0 at once."""

    senders: tuple[int, ...]


class ClockReceipt(Spec):
    """How far a node's clock is ahead of node 0's, and how wrong that may be; seconds."""

    offset: float
    error: float


class Receipt(Spec):
    """Written before training; a run whose receipt is not valid stays out of the tables."""

    version: int = Field(default=SCHEMA, alias="schema")
    links: tuple[LinkReceipt, ...]
    fan_in: FanIn | None  # None with a single node
    mtu: int
    congestion: tuple[str, ...]  # of each node's sockets
    duration: float  # seconds
    clock: tuple[ClockReceipt, ...] = ()  # of each node

    @classmethod
    def of(cls, measurement: Measurement, rates: Sequence[int | None]) -> Self:
        """Hold what was measured against the rates of the nodes' links."""
        links = [_link(flow, rates, measurement.mtu) for flow in measurement.flows if flow.src is not None]
        whole = [flow for flow in measurement.flows if flow.src is None]
        return cls(
            links=tuple(links),
            fan_in=_fan_in(whole[0], rates, measurement.mtu) if whole else None,
            mtu=measurement.mtu,
            congestion=tuple(measurement.congestion),
            duration=measurement.seconds,
            clock=tuple(ClockReceipt(offset=each.offset, error=each.error) for each in measurement.clocks),
        )

    @property
    def worst_error(self) -> float | None:
        """The error furthest from 0, with its sign; None where nothing was asked."""
        errors = [each.error for each in self._all() if each.error is not None]
        return max(errors, key=abs, default=None)

    def valid(self, tolerance: float = TOLERANCE) -> bool:
        """True when every rate that was asked was got; nothing asked is nothing broken."""
        return self.worst_error is None or abs(self.worst_error) <= tolerance

    def sentence(self, tolerance: float = TOLERANCE) -> str:
        """One line for a person: how far off, and where."""
        if not self.links:
            return "network: one node, no link to measure"
        count = f"{len(self.links)} links and the fan-in"
        if self.worst_error is None:
            slowest = min(self._all(), key=lambda each: each.got)
            return f"network: unshaped; {count} measured, slowest {_mbit(slowest.got)} ({_name(slowest)})"
        worst = max((each for each in self._all() if each.error is not None), key=lambda each: abs(each.error or 0.0))
        verdict = "within" if self.valid(tolerance) else "NOT within"
        asked = format_rate(worst.asked) if worst.asked else "nothing"
        detail = f"worst {100 * self.worst_error:+.1f} % on {_name(worst)}: asked {asked}, got {_mbit(worst.got)}"
        return f"network: {count} {verdict} {100 * tolerance:g} %; {detail}"

    def write(self, path: Path) -> None:
        """To a temporary name first: whoever reads `path` reads all of it."""
        write_whole(path, self.model_dump_json(by_alias=True, indent=1))

    @classmethod
    def read(cls, path: Path) -> Self:
        """A receipt written earlier; another schema is refused by number."""
        try:
            values = json.loads(read_bounded(path, MAX_BYTES))
        except (SpecError, ValueError) as error:
            raise SpecError(f"{path}: no receipt ({error}). Run it again.") from None
        check_schema(values.get("schema") if isinstance(values, dict) else None, str(path))
        return cls.load(values, str(path))

    def _all(self) -> list[Measured]:
        return [*self.links, *([self.fan_in] if self.fan_in else [])]


def _link(flow: Flow, rates: Sequence[int | None], mtu: int) -> LinkReceipt:
    assert flow.src is not None
    asked, got = bottleneck(rates[flow.dst], [rates[flow.src]]), wire_rate(flow.goodput, mtu)
    rates_got: dict[str, Any] = {"asked": asked, "goodput": flow.goodput, "got": got, "error": _error(asked, got)}
    return LinkReceipt(src=flow.src, dst=flow.dst, rtt=flow.round_trip, **rates_got)


def _fan_in(flow: Flow, rates: Sequence[int | None], mtu: int) -> FanIn:
    asked, got = bottleneck(rates[0], rates[1:]), wire_rate(flow.goodput, mtu)
    senders = tuple(range(1, len(rates)))
    return FanIn(senders=senders, asked=asked, goodput=flow.goodput, got=got, error=_error(asked, got))


def _error(asked: int | None, got: float) -> float | None:
    return None if asked is None else got / asked - 1


def _name(measured: Measured) -> str:
    return f"node{measured.src} -> node{measured.dst}" if isinstance(measured, LinkReceipt) else "the fan-in"


def _mbit(rate: float) -> str:
    return f"{rate / 1e6:.4g} Mbit/s" if rate < 9.9995e9 else f"{rate / 1e9:.1f} Gbit/s"
