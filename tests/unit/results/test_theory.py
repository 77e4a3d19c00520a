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


@pytest.mark.parametrize(
    ("size", "ranks", "rate", "bucket"),
    [
        (36_924_456, 4, 331e6 / 8, 2 << 20),  # VGG-11
        (36_924_456, 4, None, 2 << 20),
        (36_924_456, 64, 331e6 / 8, 4 << 20),  # with more ranks a segment is a smaller part of a bucket
        (36_924_456, 4, 10e6 / 8, 256 << 10),  # no bucket takes seconds
        (246_824, 2, 1e9, 256 << 10),  # LeNet-5
        (528_000_000, 16, 1e9, 8 << 20),  # VGG-16
    ],
)
def test_the_bucket_of_a_pipeline_that_is_given_none(size: int, ranks: int, rate: float | None, bucket: int) -> None:
    assert theory.pipeline_bucket(size, ranks, rate) == bucket


@pytest.mark.parametrize(
    ("mode", "ranks", "buckets"),
    # 36.9 MB in buckets of 2 MiB (N = 32, chosen) and of 8 MiB, and the smaller ones at the end of the gradient
    [("ring/pipeline", 32, 20), ("ring/bucket:8MiB/pipeline", 32, 7), ("ring/bucket:8MiB/pipeline", 4, 7)],
)
def test_a_pipeline_sends_a_segment_in_each_round_of_each_bucket(mode: str, ranks: int, buckets: int) -> None:
    assert theory.pipeline_segments(SyncMode.parse(mode), 36_924_456, ranks, 12.5e6) == 2 * (ranks - 1) * buckets


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


@pytest.mark.parametrize(
    ("name", "sent", "received"),
    [  # what the kernel counted for Gloo at N = 4, in multiples of the size
        ("all_reduce main.py:1", [1.5, 1.5, 1.5, 1.5], [1.5, 1.5, 1.5, 1.5]),
        ("reduce_scatter", [1.5, 1.5, 1.5, 1.5], [1.5, 1.5, 1.5, 1.5]),
        ("all_gather", [0.75, 0.75, 0.75, 0.75], [0.75, 0.75, 0.75, 0.75]),
        ("all_to_all", [0.75, 0.75, 0.75, 0.75], [0.75, 0.75, 0.75, 0.75]),
        ("broadcast a.py:1", [2, 1, 0, 0], [0, 1, 1, 1]),
        ("broadcast a.py:1, root 1", [0, 2, 1, 0], [1, 0, 1, 1]),
        ("reduce", [0.75, 1, 1, 1], [1.5, 0.75, 0.75, 0.75]),
        ("reduce, root 1", [1, 0.75, 1, 1], [0.75, 1.5, 0.75, 0.75]),
        ("gather", [0, 1, 1, 1], [3, 0, 0, 0]),
        ("scatter, root 1", [0, 3, 0, 0], [1, 0, 1, 1]),
        ("barrier", [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_bytes_of_an_observed_collective(name: str, sent: list[float], received: list[float]) -> None:
    loads = [theory.observed_load([(name, 0.0, 1.0, 1000)], rank, 4) or theory.Load() for rank in range(4)]
    assert [load.sent for load in loads] == [1000 * share for share in sent]
    assert [load.received for load in loads] == [1000 * share for share in received]


def test_a_broadcast_over_five_ranks_is_a_tree() -> None:
    loads = [theory.observed_load([("broadcast", 0.0, 1.0, 1)], rank, 5) or theory.Load() for rank in range(5)]
    assert [load.sent for load in loads] == [3, 1, 0, 0, 0]


def test_a_collective_of_a_group_counts_its_own_ranks() -> None:
    name = "all_reduce a.py:1, ranks 1 3"
    inside, outside = theory.observed_load([(name, 0, 1, 100)], 3, 4), theory.observed_load([(name, 0, 1, 100)], 0, 4)
    assert inside is not None and inside.sent == 100 and outside is None


def test_collectives_in_flight_together_share_the_link_and_later_ones_follow() -> None:
    comm = [("gather", 0.0, 1.0, 100), ("scatter", 0.5, 1.0, 100)]
    together, apart = (
        theory.observed_load(comm, 0, 4),
        theory.observed_load([comm[0], ("scatter", 1.0, 1.0, 100)], 0, 4),
    )
    assert together is not None and (together.in_turn, together.hops) == (300, 1)
    assert apart is not None and (apart.in_turn, apart.hops) == (600, 2)
    assert apart.seconds(100.0, 0.5) == 7.0


def test_a_collective_that_continues_is_counted_in_the_step_in_which_it_began() -> None:
    load = theory.observed_load([("all_reduce (cont.)", 0.0, 1.0, 100), ("all_reduce", 1.0, 1.0, 100)], 0, 2)
    assert load is not None and load.sent == 100


def test_an_unknown_collective_makes_the_whole_step_unknown() -> None:
    assert theory.observed_load([("all_reduce", 0.0, 1.0, 100), ("bucket 3", 0.0, 1.0, 100)], 0, 4) is None
    assert theory.observed_load([("gather, root 9", 0.0, 1.0, 100)], 0, 4) is None


# --- racks -----------------------------------------------------------------------------------------------------------

NEAR, FAR = ((0, 1), (2, 3)), ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("mode", "racks", "slower", "load", "formula"),
    [
        ("ring", NEAR, 0.0, 1.5, "1.5 S/B"),
        ("ring", NEAR, 4.0, 6.0, "1.5 S/U"),
        ("ring", FAR, 4.0, 12.0, "3 S/U"),
        ("ddp", FAR, 4.0, 12.0, "3 S/U"),
        ("hierarchical", NEAR, 4.0, 5.0, "1 S/B + 1 S/U"),
        ("hierarchical", FAR, 4.0, 5.0, "1 S/B + 1 S/U"),
        ("hierarchical", ((0,), (1, 2, 3)), 4.0, 4 / 3 + 4, "1.33 S/B + 1 S/U"),
        ("gather", NEAR, 4.0, 16.0, "4 S/U"),
    ],
)
def test_the_uplink_is_part_of_the_bound(
    mode: str, racks: tuple[tuple[int, ...], ...], slower: float, load: float, formula: str
) -> None:
    known = theory.cost(SyncMode.parse(mode), 4, theory.Uplinks(racks, slower))
    assert known is not None and known.load == pytest.approx(load) and known.formula == formula
    bound = theory.bound(SyncMode.parse(mode), 4, S, B, 0.0, 1, theory.Uplinks(racks, slower))
    assert bound == pytest.approx(load * S / B)


def test_a_ring_that_leaves_its_racks_at_every_hop_sends_twice_as_much_through_the_uplinks() -> None:
    ring = SyncMode.parse("ring")
    assert theory.rack_shares(ring, 4, NEAR) == [(1.5, 1.5)] * 2
    assert theory.rack_shares(ring, 4, FAR) == [(3.0, 3.0)] * 2
    assert theory.rack_shares(SyncMode.parse("none"), 4, NEAR) is None
