"""receipt.json: what a probe measured on every directed link and on the fan-ins, beside what was requested.

`net.probe` makes a Receipt. The controller writes it to the run folder; without a controller, rank 0 does. `Network` is
the same receipt in the units of the report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from testbed.results import theory
from testbed.results.folder import read_json, write_whole
from testbed.spec.base import Spec
from testbed.spec.errors import SpecError
from testbed.spec.fabric import Racks, rack_numbers
from testbed.spec.run import SCHEMA, RunSpec, check_schema
from testbed.spec.units import format_rate

RATE_VARIABLE = "TESTBED_MEASURED_RATE"  # in the environment of a rank under a controller: `Network.slowest`
TOLERANCE = 0.05  # largest |measured / requested - 1| of a valid receipt
FAR_TOLERANCE = 0.08  # the same for a link with a requested delay or loss
DELAY_TOLERANCE, DELAY_TOLERANCE_S = 0.05, 0.001  # of a round trip, relative and in seconds; the larger one counts
LOSS_DOUBT = 1e-5  # a count of lost packets is wrong if the probability of a count so far off is less than this
# The median of the probe's 8 round trips may be off by this share of the jitter of both directions. Chance makes it
# larger with a probability of 0.00001 if both ends have the same jitter, and of 0.0045 if only one end has jitter
# (netem's jitter is uniform).
MEDIAN_OF_JITTER = 0.75
SMALL_PART = 1e-12  # terms below this share of a sum are left out


class MeasuredRate(Spec):
    """A rate in bit/s; `error` is measured / requested - 1, or None where no rate was requested."""

    requested: int | None
    goodput: float  # payload
    measured: float  # on the wire, headers included
    error: float | None
    far: bool = False  # True if a delay or a loss is requested on the way

    def limit(self, tolerance: float = TOLERANCE) -> float:
        """Return the largest allowed error; `tolerance` is for a link with neither delay nor loss."""
        return max(tolerance, FAR_TOLERANCE) if self.far else tolerance

    def within(self, tolerance: float = TOLERANCE) -> bool:
        """Return True if the error is allowed, or if no rate was requested."""
        return self.error is None or abs(self.error) <= self.limit(tolerance)


class WayReceipt(Spec):
    """Delay and loss of a link, requested and measured: the round trip in seconds, and lost packets."""

    rtt_requested: float
    rtt: float  # shortest of several round trips; with jitter their median
    jitter: float = 0.0  # seconds, sum of both directions
    loss_requested: float = 0.0  # share of the packets
    packets: int = 0  # that were sent to measure it
    lost: int = 0

    @property
    def allowed(self) -> float:
        """Seconds that the round trip may differ from the request."""
        return max(DELAY_TOLERANCE_S, DELAY_TOLERANCE * self.rtt_requested) + MEDIAN_OF_JITTER * self.jitter

    @property
    def late(self) -> float:
        """Seconds that the round trip is longer than requested."""
        return self.rtt - self.rtt_requested

    @property
    def doubt(self) -> float:
        """The probability that the requested loss gives a count that is as far off to the same side."""
        if not self.packets:
            return 1.0
        return tail(self.lost, self.packets, self.loss_requested)

    @property
    def blind(self) -> bool:
        """True if the requested loss often gives a count of 0, so that a count of 0 does not show a missing loss."""
        return self.packets > 0 and tail(0, self.packets, self.loss_requested) >= LOSS_DOUBT

    def problem(self, faster_only: bool = False) -> str:
        """Return what is not as requested, with the measured value; empty if nothing is.

        `faster_only`: report only a round trip that is too short and a loss that is too small.
        """
        if self.late < -self.allowed or (self.late > self.allowed and not faster_only):
            return f"round trip requested {_ms(self.rtt_requested)}, measured {_ms(self.rtt)}"
        if self.doubt < LOSS_DOUBT and not (faster_only and self.lost > self.loss_requested * self.packets):
            wanted = f"{100 * self.loss_requested:g} %"
            return f"loss requested {wanted}, measured {self.lost} of {self.packets} packets"
        return ""

    def better(self, other: WayReceipt) -> WayReceipt:
        """Return the round trip of the two that is nearer to the request, and the packets of both measurements."""
        nearer = min(self, other, key=lambda way: abs(way.late))
        return nearer.model_copy(
            update={"packets": self.packets + other.packets, "lost": self.lost + other.lost},
        )


def tail(count: int, of: int, share: float) -> float:
    """Return the probability of `count` successes in `of` trials, or of any number that is further from the mean.

    A trial succeeds with probability `share`; only numbers on the same side of the mean count.
    """

    def one(k: int) -> float:
        ways = math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
        return math.exp(ways + k * math.log(share) + (of - k) * math.log1p(-share))

    total = 0.0
    for k in range(count, of + 1) if count > of * share else range(count, -1, -1):  # the terms become smaller
        more = one(k)
        total += more
        if more <= SMALL_PART * total:
            break
    return min(1.0, total)


class LinkReceipt(MeasuredRate):
    """One directed link."""

    src: int
    dst: int
    across: bool = False  # True if the link passes the uplinks of two racks
    rtt: float | None = None  # round-trip time in seconds on an idle network
    way: WayReceipt | None = None  # None: neither delay nor loss is requested


class FanIn(MeasuredRate):
    """Several nodes send to one node at once."""

    dst: int = 0
    senders: tuple[int, ...]


class UplinkReceipt(MeasuredRate):
    """The uplink of a rack in one direction, measured while all of its `pairs` send at the same time."""

    rack: int
    outgoing: bool
    pairs: tuple[tuple[int, int], ...]


class ClockReceipt(Spec):
    """A node's clock minus the clock of node 0, and the largest possible error of this difference, in seconds."""

    offset: float
    error: float


class Receipt(Spec):
    """Written before training, and again with `after`. Tables leave out a run whose receipt is not valid."""

    version: int = Field(default=SCHEMA, alias="schema")
    links: tuple[LinkReceipt, ...]
    sampled_from: int | None = None  # directed links of which `links` is a sample; None: `links` has all of them
    fan_in: FanIn | None  # all other nodes send to node 0; None with a single node
    fan_in_others: tuple[FanIn, ...] = ()  # of the other nodes whose links are shaped
    uplinks: tuple[UplinkReceipt, ...] = ()  # of racks whose uplink has a rate
    mtu: int  # bytes; the smallest on any path
    congestion: tuple[str, ...]  # TCP congestion control of each node's connections
    duration: float  # seconds
    clock: tuple[ClockReceipt, ...] = ()  # of each node
    measured_before: float | None = None  # seconds before this run, on the same nodes; None: just before training
    after: Receipt | None = None  # a sample of the links, measured again after training
    # Time dilation of the run. The file has the rates and round trips of the slower network. This object has those of
    # the requested network; `read` and `write` convert.
    dilation: float = Field(default=1.0, ge=1)

    @property
    def worst_error(self) -> float | None:
        """The error with the largest absolute value; None if no rate was requested."""
        errors = [rate.error for rate in self._rates() if rate.error is not None]
        return max(errors, key=abs, default=None)

    def valid(self, tolerance: float = TOLERANCE) -> bool:
        """Return True if every requested value was measured within its tolerance, or if nothing was requested.

        `tolerance` is for the rates of links without a requested delay or loss.
        """
        rates = (rate.within(tolerance) for rate in self._rates())
        return all(rates) and not self._problems()

    def too_fast(self, tolerance: float = TOLERANCE) -> bool:
        """Return True if a rate is above the request by more than the tolerance, or a delay or a loss is too small."""
        fast = (rate for rate in self._rates() if rate.error is not None and rate.error > 0)
        return any(not rate.within(tolerance) for rate in fast) or bool(self._problems(faster_only=True))

    def sentence(self, tolerance: float = TOLERANCE, fastest: bool = False) -> str:
        """Return one line with the worst error and its link. `fastest`: the rate furthest above its request instead."""
        if not self.links:
            return "network: one node, no link to measure"
        sample = f" of {self.sampled_from}" if self.sampled_from else ""
        measured = len(self.fan_in_others) + (self.fan_in is not None)
        fan_ins = f"{measured} fan-ins" if measured > 1 else "the fan-in"
        uplinks = f" and {len(self.uplinks)} uplink{'s' * (len(self.uplinks) > 1)}" if self.uplinks else ""
        count = f"{len(self.links)}{sample} links{',' if uplinks else ' and'} {fan_ins}{uplinks}"
        ways = self._sentence_of_ways(fastest)
        if self.worst_error is None:
            slowest = min(self._rates(), key=lambda rate: rate.measured)
            unshaped = f"network: unshaped; {count} measured, slowest {_mbit(slowest.measured)} ({_name(slowest)})"
            return unshaped.replace("unshaped", "no rate requested" if ways else "unshaped", 1) + ways + self._age()
        errors = [(rate.error, rate) for rate in self._rates() if rate.error is not None]
        error, worst = max(errors, key=lambda each: (each[0] if fastest else abs(each[0])) / each[1].limit(tolerance))
        verdict = "within" if all(rate.within(tolerance) for _, rate in errors) else "NOT within"
        limit = worst.limit(tolerance)
        rates = f"requested {format_rate(worst.requested or 0)}, measured {_mbit(worst.measured)}"
        sentence = f"network: {count} {verdict} {100 * limit:g} %; worst {100 * error:+.1f} % on {_name(worst)}"
        return f"{sentence}: {rates}{ways}{self._age()}"

    def _problems(self, faster_only: bool = False) -> list[str]:
        """Return the round trips and losses that are not as requested, by link and by pool (see `_pools`)."""
        ways = [(f"on {_name(link)}", link.way) for link in self.links if link.way is not None]
        pools = [(f"on {count} links together", pool) for count, pool in self._pools() if count > 1]
        return [f"{problem} {place}" for place, way in ways + pools if (problem := way.problem(faster_only))]

    def _pools(self) -> list[tuple[int, WayReceipt]]:
        """Return for each requested loss the number of its links and the sum of their packets.

        With more packets a smaller deviation of the loss can be detected.
        """
        by_loss: dict[float, list[WayReceipt]] = {}
        for link in self.links:
            if link.way is not None and link.way.packets:
                by_loss.setdefault(link.way.loss_requested, []).append(link.way)
        return [
            (
                len(ways),
                WayReceipt(
                    rtt_requested=0.0,
                    rtt=0.0,
                    loss_requested=loss,
                    packets=sum(way.packets for way in ways),
                    lost=sum(way.lost for way in ways),
                ),
            )
            for loss, ways in by_loss.items()
        ]

    def _sentence_of_ways(self, fastest: bool) -> str:
        """Return the first round trip or loss that is not as requested; else the worst round trip, and all losses."""
        found = [(link, way) for link in self.links if (way := link.way) is not None]
        if not found:
            return ""
        if wrong := self._problems(fastest):
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            return f"; NOT as requested: {wrong[0]}{more}"
        link, worst = max(found, key=lambda each: abs(each[1].late) / each[1].allowed)
        trip = f"; round trips as requested, worst {_ms(worst.rtt)} of {_ms(worst.rtt_requested)} on {_name(link)}"
        packets = sum(way.packets for _, way in found)
        lost = sum(way.lost for _, way in found)
        blind = [f"{100 * pool.loss_requested:g} %" for _, pool in self._pools() if pool.blind]
        unseen = f" (too few to show that a loss of {' or '.join(blind)} is missing)" if blind else ""
        return trip + (f"; {lost} of {packets} packets lost{unseen}" if packets else "")

    def _age(self) -> str:
        if self.measured_before is None:
            return ""
        return f"; measured {self.measured_before:.0f} s before this run, on the same nodes"

    def better(self, other: Receipt) -> Receipt:
        """Return a receipt with, for each rate, the measurement nearer to the request. Both have the same links."""
        rates = zip(self._rates(), other._rates(), strict=True)
        best = [_better(*pair) for pair in rates]
        fan_ins = [rate for rate in best if isinstance(rate, FanIn)]
        return other.model_copy(
            update={
                "links": tuple(rate for rate in best if isinstance(rate, LinkReceipt)),
                "fan_in": next((rate for rate in fan_ins if rate.dst == 0), None),
                "fan_in_others": tuple(rate for rate in fan_ins if rate.dst != 0),
                "uplinks": tuple(rate for rate in best if isinstance(rate, UplinkReceipt)),
            }
        )

    def write(self, path: Path) -> None:
        """Write the file in one rename, so that a reader never reads an incomplete file."""
        raw = self._faster(1 / self.dilation) if self.dilation != 1.0 else self
        write_whole(path, raw.model_dump_json(by_alias=True, indent=1))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read receipt.json. Raises SpecError if it is damaged, SchemaError if another version wrote it."""
        try:
            values = read_json(path)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{path}: damaged, not JSON ({error}). Run it again.") from None
        if not isinstance(values, dict):
            raise SpecError(
                f"{path}: damaged: a JSON object is expected, this is a {type(values).__name__}. Repeat the run."
            )
        check_schema(values.get("schema"), str(path))
        raw = cls.load_written(values, path)
        return raw.undilated(raw.dilation)

    def undilated(self, dilation: float) -> Self:
        """Return the receipt of the requested network, from this receipt of a network `dilation` times slower."""
        if dilation == 1.0:
            return self
        return self._faster(dilation).model_copy(update={"dilation": dilation})

    def _faster(self, factor: float) -> Self:
        def faster(rate: MeasuredRate) -> Any:
            requested = None if rate.requested is None else _round_rate(rate.requested * factor, max(1.0, factor))
            changes: dict[str, Any] = {
                "requested": requested,
                "goodput": rate.goodput * factor,
                "measured": rate.measured * factor,
            }
            if isinstance(rate, LinkReceipt) and rate.rtt is not None:
                changes["rtt"] = rate.rtt / factor
            if isinstance(rate, LinkReceipt) and rate.way is not None:
                times = {name: getattr(rate.way, name) / factor for name in ("rtt_requested", "rtt", "jitter")}
                changes["way"] = rate.way.model_copy(update=times)
            return rate.model_copy(update=changes)

        return self.model_copy(
            update={
                "links": tuple(map(faster, self.links)),
                "fan_in": faster(self.fan_in) if self.fan_in else None,
                "fan_in_others": tuple(map(faster, self.fan_in_others)),
                "uplinks": tuple(map(faster, self.uplinks)),
                "after": self.after._faster(factor) if self.after else None,
            }
        )

    def _rates(self) -> list[MeasuredRate]:
        return [*self.links, *([self.fan_in] if self.fan_in else []), *self.fan_in_others, *self.uplinks]


def _round_rate(rate: float, error: float) -> int:
    """Return the rate in whole kbit/s if it differs from that by at most `error`, the rounding of the slower rate."""
    whole = round(rate, -3)
    return round(whole if abs(whole - rate) <= error else rate)


def _better(one: MeasuredRate, other: MeasuredRate) -> MeasuredRate:
    nearer = min(one, other, key=lambda rate: abs(rate.error or 0.0))
    if isinstance(one, LinkReceipt) and isinstance(other, LinkReceipt) and one.way and other.way:
        return nearer.model_copy(update={"way": one.way.better(other.way)})
    return nearer


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"


def _name(rate: MeasuredRate) -> str:
    if isinstance(rate, FanIn):
        return f"the fan-in of node{rate.dst}"
    if isinstance(rate, UplinkReceipt):
        return f"the uplink {'out of' if rate.outgoing else 'into'} rack {rate.rack}, {len(rate.pairs)} pairs at once"
    assert isinstance(rate, LinkReceipt)
    return f"node{rate.src} -> node{rate.dst}"


def _mbit(rate: float) -> str:
    return f"{rate / 1e6:.4g} Mbit/s" if rate < 9.9995e9 else f"{rate / 1e9:.1f} Gbit/s"


@dataclass(frozen=True)
class Network:
    """A receipt in the report's units: rates in byte/s by (src, dst). Empty or None if nothing was measured."""

    links: dict[tuple[int, int], float] = field(default_factory=dict)  # payload
    requested: dict[tuple[int, int], float] = field(default_factory=dict)  # on the wire
    measured: dict[tuple[int, int], float] = field(default_factory=dict)  # on the wire
    sampled_from: int | None = None  # number of directed links of which these are a sample; None: all were measured
    uplinks: dict[tuple[int, bool], float] = field(default_factory=dict)  # payload, by rack and direction (True: out)
    uplinks_measured: tuple[float, ...] = ()  # the same on the wire
    racks: Racks = ()  # the ranks of each rack; empty: one switch
    worst_error: float | None = None  # measured / requested - 1 with the largest absolute value
    tolerance: float = TOLERANCE  # for worst_error
    ways: tuple[WayReceipt, ...] = ()  # of links with a requested delay or loss
    delay: float = 0.0  # seconds, one way: half of the shortest round trip, else the requested delay
    offsets: dict[int, float] = field(default_factory=dict)  # seconds to subtract from a rank's clock to get rank 0's
    offset_error: float = 0.0  # seconds; 0 if ranks share one clock

    @classmethod
    def of(cls, receipt: Receipt, spec: RunSpec) -> Self:
        """Convert a receipt. A clock offset that is smaller than its error is taken as 0, as on one machine."""
        links = {(link.src, link.dst): link for link in receipt.links}
        round_trips = [link.rtt for link in receipt.links if link.rtt]
        ahead = {rank: clock for rank, clock in enumerate(receipt.clock) if abs(clock.offset) > abs(clock.error)}
        return cls(
            links={pair: link.goodput / 8 for pair, link in links.items()},
            requested={pair: link.requested / 8 for pair, link in links.items() if link.requested is not None},
            measured={pair: link.measured / 8 for pair, link in links.items()},
            sampled_from=receipt.sampled_from,
            uplinks={(each.rack, each.outgoing): each.goodput / 8 for each in receipt.uplinks},
            uplinks_measured=tuple(each.measured / 8 for each in receipt.uplinks),
            racks=spec.topology.racks if spec.world > 1 else (),
            worst_error=receipt.worst_error,
            tolerance=max((link.limit() for link in receipt.links), default=TOLERANCE),
            ways=tuple(link.way for link in receipt.links if link.way is not None),
            delay=min(round_trips) / 2 if round_trips else spec.link.delay or 0.0,
            offsets={rank: clock.offset for rank, clock in ahead.items()},
            offset_error=max((abs(clock.error) for clock in ahead.values()), default=0.0),
        )

    @property
    def slowest(self) -> float | None:
        """Payload rate of the slowest directed link. With uplinks only links inside racks count, if there are any."""
        rack_of = rack_numbers(self.racks, 1 + max(map(max, self.links), default=0))
        inside = [rate for (src, dst), rate in self.links.items() if rack_of[src] == rack_of[dst]]
        return min((self.uplinks and inside) or self.links.values(), default=None)

    @property
    def rack_uplinks(self) -> theory.Uplinks:
        """The racks, and the factor by which their uplinks are slower than the slowest link."""
        if not self.uplinks or not self.slowest:
            return theory.Uplinks(self.racks, 0.0)
        return theory.Uplinks(self.racks, self.slowest / min(self.uplinks.values()))

    def node(self, rank: int, rates: dict[tuple[int, int], float] | None = None) -> float | None:
        """Return a node's rate: of the fastest link in each direction, the slower one. None if it was not measured.

        It is a payload rate by default. With `measured` as `rates` it compares to counted bytes, which have headers.
        """
        rates = self.links if rates is None else rates
        sent, received = ([rate for pair, rate in rates.items() if pair[end] == rank] for end in (0, 1))
        return min(max(sent), max(received)) if sent and received else None


def read_network(path: Path, spec: RunSpec) -> Network:
    """Read the receipt of a run; return a Network without rates if there is none."""
    return Network.of(Receipt.read(path), spec) if path.is_file() else Network()
