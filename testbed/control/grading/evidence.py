"""The evidence on one part of a submission: what the controller counted from outside, and the script's records.

Records come from the observer, which runs inside the script's process, so a script can forge them. `contradictions`
compares them with what the controller counted itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from testbed.results.observations import Call, Calls, Setup
from testbed.results.records import Record, Step
from testbed.results.timeline import CONTINUED, Observed
from testbed.spec.grading import Part

SLACK_BYTES = 1 << 20  # for traffic that no record has: rendezvous, connections, object collectives
FEWER, MORE = 0.9, 1.25  # smallest and largest ratio of counted to claimed bytes
SLACK_S = 1.0  # by which claimed times may exceed measured ones


@dataclass(frozen=True, kw_only=True)
class Node:
    """What was counted for one node while its rank ran. None: the node has no counter of its own for this."""

    code: int | None = None  # exit code of the rank
    sent: int | None = None  # bytes of the node's interface
    received: int | None = None
    unreachable: int | None = None  # packets to addresses outside the nodes' network, which the kernel refused
    refused: int | None = None  # processes that were not started because of the limit

    @property
    def is_counted(self) -> bool:
        return self.sent is not None and self.received is not None


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What the controller measured. None of it comes from the script's process."""

    seconds: float = 0.0  # from the start of the ranks to their end
    nodes: Sequence[Node] = ()

    @property
    def counted(self) -> bool:
        """True if the bytes of every node were counted."""
        return bool(self.nodes) and all(node.is_counted for node in self.nodes)

    def incidents(self) -> list[str]:
        """Return one sentence for each attempt to leave the sandbox."""
        found = []
        for number, node in enumerate(self.nodes):
            if node.unreachable:
                found.append(f"node {number} tried {node.unreachable} times to reach an address beyond its nodes")
            if node.refused:
                found.append(f"node {number} tried {node.refused} times to exceed its limit of processes")
        return found


@dataclass(frozen=True, kw_only=True)
class PartEvidence:
    """All evidence on one part of one submission."""

    part: Part  # with nodes, steps and rate
    failure: str = ""  # why the part failed; empty: it ended well
    outside: Outside = field(default_factory=Outside)
    records: Sequence[Sequence[Record]] = ()  # by rank
    unreadable: str = ""  # why the records cannot be used: they are damaged, or the run is invalid
    trusted: bool = True  # False: no demand is met unless the bytes of every node were counted from outside
    busy: str = ""  # a sentence if other processes used the machine, so that times prove nothing

    @property
    def world(self) -> int:
        return self.part.nodes or 1

    @property
    def uncounted(self) -> str:
        """Why the evidence from outside is not complete; empty if it is complete or not needed."""
        missing = [number for number, node in enumerate(self.outside.nodes) if not node.is_counted]
        if self.trusted or not missing:
            return ""
        return f"the counters of node {missing[0]} could not be read, e.g. because the script used all processes"

    def steps(self, rank: int) -> list[Step]:
        return [record for record in self.records[rank] if isinstance(record, Step)]

    def calls(self, rank: int) -> list[Call]:
        """Return all collectives of a rank. A record replaces an earlier record that began at the same step."""
        latest = {record.first: record for record in self.records[rank] if isinstance(record, Calls)}
        return [row for record in latest.values() for row in record.rows]

    def operations(self, step: Step) -> set[str]:
        """Return the operations of a step's collectives, e.g. all_reduce."""
        return {Observed.parse(name.removesuffix(CONTINUED)).operation for name, *_ in step.comm}

    def wrappers(self, rank: int) -> set[str]:
        return {name for record in self.records[rank] if isinstance(record, Setup) for name in record.wrappers}

    def seconds(self) -> list[float]:
        """Return the seconds of every step, the mean over ranks. The first two steps are left out."""
        by_rank = [[step.total for step in self.steps(rank)][2:] for rank in range(len(self.records))]
        return [sum(each) / len(each) for each in zip(*by_rank, strict=False)]


def contradictions(found: PartEvidence) -> list[str]:
    """Return one sentence for each claim of the records that the evidence from outside refutes."""
    if not found.records:
        return []
    return [*_time(found), *(_bytes(found) if found.outside.counted and found.world > 1 else ())]


def _time(found: PartEvidence) -> Iterable[str]:
    by_rank = [[step.total for step in found.steps(rank)] for rank in range(len(found.records))]
    if wrong := [seconds for own in by_rank for seconds in own if not 0 <= seconds < math.inf]:
        yield f"the records claim a step of {wrong[0]:g} s"  # nan would agree with every limit below
        return
    claimed = max(map(sum, by_rank), default=0.0)
    outside = found.outside
    if outside.seconds and claimed > outside.seconds + SLACK_S:
        yield f"the records claim steps of {claimed:.1f} s, and the whole run took {outside.seconds:.1f} s"
    if found.part.rate and outside.counted:
        most = max(max(node.sent or 0, node.received or 0) for node in outside.nodes)
        least = FEWER * 8 * max(0, most - SLACK_BYTES) / found.part.rate
        if claimed + SLACK_S < least:
            yield f"the records claim steps of {claimed:.1f} s, and a link needs {least:.1f} s for the bytes it sent"


def _bytes(found: PartEvidence) -> Iterable[str]:
    for rank, node in enumerate(found.outside.nodes):
        steps = [step.sent for step in found.steps(rank) if step.sent is not None]
        if len(steps) < 2 or node.sent is None:
            continue
        claimed = (steps[-1] - steps[0]) * len(steps) / (len(steps) - 1)
        if not FEWER * claimed - SLACK_BYTES <= node.sent <= MORE * claimed + SLACK_BYTES:
            yield f"rank {rank} claims {_mb(claimed)} sent, and its interface counted {_mb(node.sent)}"
    claimed = sent_by_collectives([found.calls(rank) for rank in range(len(found.records))])
    counted = sum(node.sent or 0 for node in found.outside.nodes)
    if not FEWER * claimed <= counted <= MORE * claimed + SLACK_BYTES:
        shown = f"{_mb(claimed)}, and the interfaces of all nodes counted {_mb(counted)}"
        yield f"the collectives that the records claim send {shown}"


def _mb(size: float) -> str:
    return f"{size / 1e6:.2f} MB"


def sent_by_collectives(calls: Sequence[Sequence[Call]]) -> float:
    """Return the bytes that all ranks together send for these calls, which are given by rank.

    The size of a call is that of one rank's tensor, or of all parts (attach/events.py). Of N ranks each one keeps 1/N
    of it, or receives this part from itself, so only (N-1)/N is sent.
    """
    world, total = len(calls), 0.0
    for row in (row for rows in calls for row in rows):
        if row.operation == "send":
            total += row.bytes
        elif row.operation not in ("recv", "barrier"):
            turns = 2 if row.operation == "all_reduce" else 1
            total += turns * (world - 1) / world * row.bytes
    return total
