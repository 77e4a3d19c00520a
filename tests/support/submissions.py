"""Evidence on a submission, built by hand: three ranks that average their gradients by all_reduce."""

from __future__ import annotations

from typing import Any

from testbed.control.grading.evidence import Node, Outside, PartEvidence
from testbed.results.observations import Batch, Call, Calls, Gradients, Parameters, Setup
from testbed.results.records import Record, Step
from testbed.spec.grading import Part

STEPS, WORLD, IMAGES = 10, 3, 48
GRADIENT_BYTES = 400_000
SAMPLED = (0, 1, 3, 7)  # updates
LOCAL = [[1.0, 2.0, -1.0], [3.0, 0.0, 1.0], [2.0, 4.0, 0.5]]  # gradients by rank
MEAN = [sum(values) / WORLD for values in zip(*LOCAL, strict=True)]


def part(**keys: Any) -> Part:
    own = {"name": "2b", "file": "a.py", "argv": ["python", "a.py"], "nodes": WORLD, "steps": STEPS}
    return Part.load(own | {"demands": [{"kind": "runs", "points": 1}]} | keys, "a.toml")


def evidence(
    *,
    name: str = "2b",
    seconds: float = 0.1,  # of a step
    gradient_bytes: int = GRADIENT_BYTES,
    rate: int | None = None,
    given: list[list[float]] | None = None,  # gradients as the optimizers get them, by rank
    given_last: list[list[float]] | None = None,  # the same at the last update that is sampled
    operations: tuple[str, ...] = ("all_reduce",),
    calling: tuple[int, ...] | None = None,  # steps that call the operations; None: all
    wrappers: tuple[str, ...] = (),
    steps: int = STEPS,
    loss: float = 2.5,
    images: int = IMAGES,
    hashes: tuple[str, ...] = ("same", "same", "same"),
    batches: tuple[str, ...] = ("a", "b", "c"),
    codes: tuple[int, ...] = (0, 0, 0),
) -> PartEvidence:
    """A part that meets every demand, unless an argument says otherwise."""
    sent = 2 * (WORLD - 1) * gradient_bytes // WORLD  # per step and rank
    records: list[list[Record]] = []
    for rank in range(WORLD):
        rows: list[Record] = [Setup(rank=rank, world=WORLD, wrappers={each: {} for each in wrappers})]
        rows.append(Parameters(step=0, moment="start", hash=hashes[rank]))
        for step in range(steps):
            called = operations if calling is None or step in calling else ()
            rows.append(_step(step, seconds, loss, images // WORLD, 1_000_000 + sent * (step + 1), called))
            rows.append(Batch(step=step, hash=f"{batches[rank]}{step}", images=images // WORLD))
            rows.append(Parameters(step=step, moment="step", hash=hashes[rank]))
        for update in SAMPLED:
            own = ((update == SAMPLED[-1] and given_last) or given or [MEAN] * WORLD)[rank]
            rows.append(Gradients(step=update, passes=1, names=["w"], local=[LOCAL[rank]], given=[own]))
        calls = [
            Call(operation=each, site="a.py:9", phase="sync", count=steps, bytes=steps * gradient_bytes)
            for each in operations
        ]
        rows.append(Calls(first=0, last=steps - 1, rows=calls))
        records.append(rows)
    nodes = [Node(code=code, sent=sent * steps, received=sent * steps, unreachable=0, refused=0) for code in codes]
    outside = Outside(seconds=seconds * steps + 5, nodes=nodes)
    return PartEvidence(part=part(name=name, rate=rate), outside=outside, records=records)


def _step(step: int, seconds: float, loss: float, images: int, sent: int, operations: tuple[str, ...]) -> Step:
    times = {"data": 0.0, "forward": 0.0, "backward": 0.0, "sync": 0.0, "update": 0.0}
    comm = [(f"{each} a.py:9", 0.0, seconds, GRADIENT_BYTES) for each in operations]
    counts = {"loss": loss, "images": images, "sent": sent, "received": sent}
    return Step(step=step, epoch=0, at=0.0, total=seconds, comm=comm, **counts, **times)
