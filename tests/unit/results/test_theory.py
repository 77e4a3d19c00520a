"""Theory: known bounds at N = 4, conservation of bytes for every algorithm, delays and every:K."""

from __future__ import annotations

import pytest

from testbed.results import theory
from testbed.spec.mode import ALGORITHMS, SyncMode

S, B = 36_924_456.0, 1e9 / 8


@pytest.mark.parametrize(
    ("mode", "loads"),
    [
        ("gather", 6.0),
        ("server", 6.0),
        ("ring", 1.5),
        ("direct", 1.5),
        ("allreduce", 1.5),
        ("ddp", 1.5),
        ("tree", 4.0),
        ("halving", 1.5),
        ("ring-reduce", 6.0),
        ("ring/fp16", 1.5),
        ("direct/int8", 1.5),
        ("direct/topk:0.01", 3.0),
    ],
)
def test_the_bound_at_four_ranks(mode: str, loads: float) -> None:
    assert theory.bound(SyncMode.parse(mode), 4, S, B, 0.0, 1) == pytest.approx(loads * S / B)


def test_the_bound_of_vgg11_at_one_gigabit() -> None:
    assert theory.bound(SyncMode.parse("ring"), 4, S, B, 0.0, 1) == pytest.approx(0.443, abs=0.001)


def test_delay_counts_per_hop_and_per_buffer() -> None:
    ring = SyncMode.parse("ring")
    assert theory.bound(ring, 4, 0.0, B, 0.01, 3) == pytest.approx(0.01 * 6 * 3)
    assert theory.bound(SyncMode.parse("gather"), 4, 0.0, B, 0.01, 1) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("mode", "turns"),
    [("ring/bucket:2MiB", 8), ("ring/bucket:2MiB/overlap", 8), ("ring/bucket:2MiB/pipeline", 1), ("ddp", 1)],
)
def test_buffers_on_the_wire_at_once_count_the_delay_once(mode: str, turns: int) -> None:
    assert theory.bound(SyncMode.parse(mode), 4, 0.0, B, 0.01, 8) == pytest.approx(0.01 * 6 * turns)


@pytest.mark.parametrize("mode", [name for name in ALGORITHMS if name not in ("single", "none")])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
def test_all_ranks_together_send_at_least_2_n_minus_1_times_s(mode: str, ranks: int) -> None:
    """Every rank's gradient must leave it once, and every mean must come back: 2(N-1) S in all."""
    shares = [theory.sent_share(SyncMode.parse(mode), ranks, rank) for rank in range(ranks)]
    known = [share for share in shares if share is not None]
    assert len(known) == ranks and sum(known) >= 2 * (ranks - 1) - 1e-9
    assert theory.bound(SyncMode.parse(mode), ranks, S, B, 0.0, 1) is not None


@pytest.mark.parametrize(
    ("mode", "first", "last", "per_step"),
    [("ring", 2, 11, 1.0), ("ring/every:4", 0, 7, 0.25), ("ring/every:4@4", 0, 7, 5 / 8), ("single", 0, 9, 0.0)],
)
def test_syncs_per_step_of_every_k(mode: str, first: int, last: int, per_step: float) -> None:
    assert theory.syncs_per_step(SyncMode.parse(mode), range(first, last + 1)) == pytest.approx(per_step)


TURNS = {"gather": 4.0, "gather/bucket:2MiB": 4.0, "server": 4.0, "tree": 3.0, "ring": None, "ddp": None}


@pytest.mark.parametrize(("mode", "share"), [*TURNS.items(), ("gather/bucket:2MiB/overlap", None), ("none", None)])
def test_a_root_sends_after_it_has_received_the_last_part(mode: str, share: float | None) -> None:
    found = theory.turnaround(SyncMode.parse(mode), 4)
    known = theory.cost(SyncMode.parse(mode), 4)
    assert found == share and (found is None or known is None or found <= known.load)
