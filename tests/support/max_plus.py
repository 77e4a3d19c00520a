"""When each rank has the mean, message by message: ranks start when they like, on links of any rate (max-plus algebra).

An oracle for `duration` in testbed/predict/collectives.py, which has a closed form for equal ranks that start together:

    begin = max(the sender has what it sends, its link is free, the receiver's link is free)
    end   = begin + bytes / rate + message;  the receiver has it a latency and a wake-up later
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testbed.predict.collectives import Wire
from testbed.spec.fabric import Racks
from testbed.spec.mode import Rotated, Round, Segments, SyncMode

Column = NDArray[np.float64]


def ends(mode: SyncMode, size: float, starts: Column, rates: Column, wire: Wire, racks: Racks = ()) -> Column:
    """When each rank has the mean of a buffer of `size` bytes, if rank k starts at starts[k] and sends at rates[k].

    Segments in flight are those of `duration`. Uplinks are left out: racks decide who sends to whom.
    """
    n = len(starts)
    rounds = mode.rounds(n, racks)
    ready = np.array(starts, dtype=np.float64)
    if rounds is None or mode.silent or n < 2:
        return ready
    out, into = ready.copy(), np.full(n, -np.inf)
    for _, group in groupby(enumerate((*rounds.reduce, *rounds.gather)), key=alike):
        same = [round_ for _, round_ in group]
        columns = Columns.of(same[0], n, size, rates, mode.segments, wire)
        columns.carry_out(ready, out, into, wire.latency + wire.wakeup, times=len(same))
    return np.maximum(ready, out)


def alike(numbered: tuple[int, Round]) -> Any:
    """Equal for rounds in which every rank does the same with another shard."""
    number, round_ = numbered
    return tuple((t.receiver, t.share) for t in round_.first) if isinstance(round_, Rotated) else number


@dataclass(frozen=True)
class Columns:
    """The messages of a round: who sends, who receives, seconds on the wire, and how much earlier one may begin.

    With several segments in flight the first of a round needs only what came before the rest of the round before.
    """

    senders: NDArray[np.int64]
    receivers: NDArray[np.int64]
    seconds: Column
    lead: Column
    single: bool  # no rank sends or receives two of them

    @classmethod
    def of(cls, round_: Round, n: int, size: float, rates: Column, segments: Segments | None, wire: Wire) -> Columns:
        if isinstance(round_, Rotated):
            steps, ranks = np.array([t.receiver for t in round_.first]), np.arange(n)
            senders, receivers = np.repeat(ranks, len(steps)), (ranks[:, None] + steps[None, :]).ravel() % n
            shares = np.tile([float(t.share) for t in round_.first], n)
        else:
            rows = np.array([(t.sender, t.receiver, float(t.share)) for t in round_])
            senders, receivers, shares = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64), rows[:, 2]
        single = len({*senders.tolist()}) == len({*receivers.tolist()}) == len(senders)
        parts = segments.count(float(shares.max()) * size) if segments and single else 1
        window = min(parts, (segments.in_flight or parts) if segments else 1)
        back = np.bincount(receivers, weights=shares, minlength=n)[senders] if single else 0.0  # acknowledged meanwhile
        rate = np.minimum(rates[senders], rates[receivers])
        own = (shares + wire.acks * back) * size / rate / parts + wire.message
        return cls(senders, receivers, own * parts, (window - 1) * own, single)

    def carry_out(self, ready: Column, out: Column, into: Column, latency: float, times: int) -> None:
        """Update when each rank is ready, and when its link is free each way, after so many equal rounds."""
        if not self.single:
            for _ in range(times):
                self._shared(ready, out, into, latency)
            return
        senders, receivers = self.senders, self.receivers
        begun = np.maximum(np.maximum(ready[senders] - self.lead, out[senders]), into[receivers])
        end = begun + self.seconds
        ready[receivers] = np.maximum(ready[receivers], end + latency)
        if times > 1:  # every rank sends and receives, and both links of a message are free when the one before ends
            source = np.argsort(receivers)[senders]  # the message that each sender receives
            have, came = ready[senders], np.empty_like(end)
            for _ in range(times - 1):
                np.maximum(np.subtract(have, self.lead, out=begun), end, out=begun)
                np.take(np.add(begun, self.seconds, out=end), source, out=came)
                np.maximum(have, np.add(came, latency, out=came), out=have)
            ready[senders] = have
        out[senders] = into[receivers] = end

    def _shared(self, ready: Column, out: Column, into: Column, latency: float) -> None:
        """A round in which a rank sends or receives several messages, which share its link."""
        senders, receivers = self.senders, self.receivers
        begun = np.maximum(np.maximum(ready[senders] - self.lead, out[senders]), into[receivers])
        first, leaving = np.full(len(ready), np.inf), np.full(len(ready), -np.inf)
        np.minimum.at(first, receivers, begun)
        np.maximum.at(leaving, senders, begun)
        np.maximum.at(into, receivers, begun + self.seconds)
        busy = np.bincount(receivers, weights=self.seconds, minlength=len(ready))
        np.maximum(into, first + busy, out=into, where=busy > 0)
        busy = np.bincount(senders, weights=self.seconds, minlength=len(ready))
        np.copyto(out, leaving + busy, where=busy > 0)
        np.maximum.at(ready, receivers, np.maximum(into[receivers], out[senders]) + latency)
