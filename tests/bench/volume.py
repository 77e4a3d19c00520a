"""Bytes of every exact mode, as the interfaces counted them, against what an all-reduce must move.

Whoever passes them on, 2(N-1) S cross the network in a step, so the mean over ranks is the same for all: 2(N-1)/N S.
"""

from __future__ import annotations

from collections.abc import Iterator

from testbed.spec.mode import ALGORITHMS
from tests.bench.cases import CONTROL, NODES, PIPELINE, case, train
from tests.bench.figures import Figure
from tests.bench.shaped import network
from tests.bench.step import byte_figure

RATE = "1gbit"
SCHEDULED = ("ring/bucket:2MiB/overlap", "allreduce/bucket:2MiB/overlap", PIPELINE, "direct/bucket:2MiB/pipeline")


def measure() -> Iterator[Figure]:
    modes = [*(name for name in ALGORITHMS if name not in ("single", CONTROL)), *SCHEDULED]
    with network(RATE, NODES) as (substrate, _, folder):
        found = train(substrate, folder, [case(mode, 6, batch_per_rank=8) for mode in modes])
    for mode, ranks in zip(modes, found, strict=True):
        yield byte_figure(f"bytes of {mode} / least", ranks.sent, f"{RATE}, mean over ranks")
