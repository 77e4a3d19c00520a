"""Fabric: the requested rates and distances of a network, and the rate that several nodes reach if they send at once.

Nodes are connected by one switch, or by one switch per rack. All nodes of a rack share one uplink to the other racks,
which has its rate in each direction. Standard library only: a probe process imports this, and has to start quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Racks = tuple[tuple[int, ...], ...]  # the nodes of each rack; empty: one switch connects all
Pairs = Sequence[tuple[int, int]]  # (src, dst)


def rack_numbers(racks: Racks, nodes: int) -> tuple[int, ...]:
    """Return the rack of each node; 0 for all nodes if there are no racks."""
    found = {node: number for number, rack in enumerate(racks) for node in rack}
    return tuple(found.get(node, 0) for node in range(nodes))


@dataclass(frozen=True)
class Distance:
    """What the network adds to a packet on its way: delay and jitter in seconds, and the share of lost packets."""

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Fabric:
    """A requested network. Rates are in bit/s for each direction; None means no limit."""

    rates: tuple[int | None, ...]  # the rate of each node's link
    racks: tuple[int, ...] = ()  # the rack of each node; empty: one switch connects all
    uplink: int | None = None  # the rate of each rack's uplink
    distances: tuple[Distance, ...] = ()  # what each node's link adds on egress; empty: nothing
    uplink_delay: float = 0.0  # seconds one way, from rack to rack

    @classmethod
    def of(
        cls,
        rates: Iterable[int | None],
        racks: Iterable[int] = (),
        uplink: int | None = None,
        distances: Iterable[Distance] = (),
        uplink_delay: float = 0.0,
    ) -> Fabric:
        return cls(tuple(rates), tuple(racks), uplink, tuple(distances), uplink_delay)

    @property
    def longest_round_trip_s(self) -> float:
        """An upper bound of all round-trip times: twice the sum of a node's longest delay and the uplink's delay."""
        return 2 * max((each.delay for each in self.distances), default=0.0) + 2 * self.uplink_delay

    def distance(self, src: int, dst: int) -> Distance:
        """Return what is added to packets from `src` to `dst`."""
        found = self.distances[src] if self.distances else Distance()
        across = bool(self.racks) and self.racks[src] != self.racks[dst]
        return replace(found, delay=found.delay + self.uplink_delay) if across else found

    def round_trip(self, src: int, dst: int) -> Distance:
        """Return what is added to a packet from `src` to `dst` and the reply. The loss is left out: nothing uses it."""
        there, back = self.distance(src, dst), self.distance(dst, src)
        return Distance(there.delay + back.delay, there.jitter + back.jitter)

    def is_far(self, pairs: Pairs) -> bool:
        """Return True if a delay or a loss is requested between the two nodes of a pair."""
        return any(self.distance(*way) != Distance() for src, dst in pairs for way in ((src, dst), (dst, src)))

    def is_lossy(self, pairs: Pairs) -> bool:
        """Return True if a flow of a pair loses packets or their acknowledgements."""
        return any(self.distance(*way).loss > 0 for src, dst in pairs for way in ((src, dst), (dst, src)))

    @property
    def size(self) -> int:
        return len(self.rates)

    @property
    def shared_uplinks(self) -> list[int]:
        """The racks whose uplink has a rate; empty if there are fewer than two racks."""
        numbers = sorted(set(self.racks))
        return numbers if self.uplink is not None and len(numbers) > 1 else []

    def crosses(self, src: int, dst: int) -> bool:
        """Return True if packets from `src` to `dst` pass an uplink with a rate."""
        return bool(self.shared_uplinks) and self.racks[src] != self.racks[dst]

    def limit(self, pairs: Pairs) -> int | None:
        """Return the sum of the rates in bit/s if all pairs send at once; None if nothing limits it.

        The formula is for the patterns of a probe: one link, several nodes to one node, or all nodes of a rack to or
        from other racks.
        """
        across = [pair for pair in pairs if self.crosses(*pair)]
        inside = {src for src, dst in pairs if not self.crosses(src, dst)}
        sent = self._passed({src for src, _ in across})
        received = self._passed({dst for _, dst in across})
        arriving = self._sum(inside) + min(sent, received)
        total = min(arriving, self._sum({dst for _, dst in pairs}))
        return None if math.isinf(total) else round(total)

    def _passed(self, nodes: set[int]) -> float:
        """Return the sum of the rates at which the uplinks of these nodes' racks carry the nodes' traffic, one way."""
        uplink = math.inf if self.uplink is None else self.uplink
        return sum(
            min(uplink, self._sum({n for n in nodes if self.racks[n] == rack}))
            for rack in {self.racks[node] for node in nodes}
        )

    def _sum(self, nodes: set[int]) -> float:
        return sum(math.inf if rate is None else rate for rate in (self.rates[node] for node in nodes))
