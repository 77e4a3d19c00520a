"""Network: what receipt.json says, as the report needs it: rates per node, how far off, and whose clock shows what."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.report.foreign import read_json
from testbed.spec.errors import SpecError
from testbed.spec.run import RunSpec, check_schema


@dataclass(frozen=True)
class Network:
    """Rates in byte/s of payload; None or empty where nobody measured."""

    links: dict[tuple[int, int], float] = field(default_factory=dict)  # (src, dst) -> goodput
    asked: dict[tuple[int, int], float] = field(default_factory=dict)  # wire rate, byte/s
    got: dict[tuple[int, int], float] = field(default_factory=dict)  # wire rate, byte/s
    fan_in: float | None = None
    worst: float | None = None  # the largest |got / asked - 1|, with its sign
    mtu: int = 1500
    delay: float = 0.0  # seconds, one way: half the quickest round trip, or what was asked
    offsets: dict[int, float] = field(default_factory=dict)  # seconds to take from a rank's clock to get rank 0's
    offset_error: float = 0.0  # seconds; 0 where ranks share one clock

    @property
    def slowest(self) -> float | None:
        """The slowest directed link."""
        return min(self.links.values(), default=None)

    def node(self, rank: int, rates: dict[tuple[int, int], float] | None = None) -> float | None:
        """A node's rate: the best that any link to or from it reached, the worse of its two directions.

        Of payload; with `rates=got` on the wire, which is what counted bytes must be held against.
        """
        rates = self.links if rates is None else rates
        ways = [[rate for pair, rate in rates.items() if pair[way] == rank] for way in (0, 1)]
        return min(max(way) for way in ways) if all(ways) else None

    @property
    def usual(self) -> float | None:
        """The median node's rate."""
        rates = [rate for node in {pair[0] for pair in self.links} if (rate := self.node(node)) is not None]
        return statistics.median(rates) if rates else None


def read_network(path: Path, spec: RunSpec) -> Network:
    """The receipt beside a run; a run without one has no rates."""
    if not path.is_file():
        return Network()
    values = read_json(path)
    if not isinstance(values, dict):
        raise SpecError(f"{path.name}: no receipt. The file is damaged")
    check_schema(values.get("schema"), path.name)
    links = values.get("links") or []
    pairs = {(int(link["src"]), int(link["dst"])): link for link in links}
    errors = [float(each["error"]) for each in [*links, values.get("fan_in") or {}] if each.get("error") is not None]
    return Network(
        links={pair: float(link["goodput"]) / 8 for pair, link in pairs.items()},
        asked={pair: float(link["asked"]) / 8 for pair, link in pairs.items() if link["asked"] is not None},
        got={pair: float(link["got"]) / 8 for pair, link in pairs.items()},
        fan_in=float(values["fan_in"]["goodput"]) / 8 if values.get("fan_in") else None,
        worst=max(errors, key=abs, default=None),
        mtu=int(values.get("mtu") or 1500),
        delay=_delay(links, spec),
        **_clock(values.get("clock")),
    )


def _delay(links: list[dict[str, Any]], spec: RunSpec) -> float:
    trips = [float(link["rtt"]) for link in links if link.get("rtt")]
    return min(trips) / 2 if trips else spec.link.delay or 0.0


def _clock(clocks: Any) -> dict[str, Any]:
    """How far each rank's clock is ahead of rank 0's; an offset within its error is none, as on one machine."""
    if not isinstance(clocks, list):
        return {}
    known = [(float(each["offset"]), abs(float(each["error"]))) for each in clocks]
    offsets = {rank: offset for rank, (offset, error) in enumerate(known) if abs(offset) > error}
    return {"offsets": offsets, "offset_error": max((known[rank][1] for rank in offsets), default=0.0)}
