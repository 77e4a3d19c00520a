"""The event model of a step: its limits, its buckets, and what moves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testbed.predict.collectives import Duration, Wire, duration, loads_of
from testbed.predict.step import (
    Node,
    Step,
    Work,
    buckets_of,
    median_of_largest,
    overlapped,
    predict,
    sized,
)
from testbed.results.profile import Profile
from testbed.spec.mode import SyncMode

MIB = 1 << 20
WIRE = Wire(rate=25e6, latency=0.0001, message=0.0001)
SCHEDULES = [
    *("ring", "allreduce", "gather", "ring/bucket:2MiB/overlap", "ddp", "ddp/bucket:1MiB"),
    *("ring/bucket:2MiB/pipeline", "ring/bucket:2MiB", "halving", "direct/bucket:1MiB/overlap/int8"),
]


def profile(layers: int = 8, size: int = 2 * MIB, seconds: float = 0.05, **others: Any) -> Profile:
    each = [
        {"name": f"layer {k}", "sizes": [size, 4096], "forward_s": seconds / 2, "backward_s": seconds}
        for k in range(layers)
    ]
    others = {"data_s": 0.01, "zero_s": 0.0, "loss_s": 0.002, "optimizer_s": 0.01} | others
    return Profile.load({"schema": 1, "model": "made", "batch_per_rank": 8, "layers": each, **others}, "made")


WORK = Work.of(profile())


def step(mode: str, n: int = 4, node: Node | None = None, wire: Wire = WIRE, work: Work = WORK) -> Step:
    return predict(work, node or Node(), wire, SyncMode.parse(mode), n)


def wire_time(mode: str, n: int = 4, wire: Wire = WIRE) -> float:
    parsed = SyncMode.parse(mode)
    share = 0.25 if parsed.codec == "int8" else 1.0
    buckets = buckets_of(parsed, WORK)
    return sum(duration(loads_of(parsed, n), parsed.segments, share * b.size, wire).seconds for b in buckets)


@pytest.mark.parametrize("mode", ["none", "single"])
def test_a_mode_that_sends_nothing_takes_what_computing_takes(mode: str) -> None:
    assert step(mode) == Step(WORK.compute, WORK.compute)


@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("mode", SCHEDULES)
def test_a_step_is_between_the_larger_of_compute_and_wire_and_their_sum(mode: str, n: int) -> None:
    found, sent = step(mode, n), wire_time(mode, n)
    assert max(WORK.compute - WORK.update, 0.99 * sent) <= found.seconds <= 1.01 * (WORK.compute + sent)


@pytest.mark.parametrize("mode", ["ring", "halving", "tree", "gather", "ring/bucket:2MiB"])
def test_after_backward_a_step_is_the_sum(mode: str) -> None:
    assert step(mode).seconds == pytest.approx(WORK.compute + wire_time(mode))


def test_what_hides_communication_is_faster() -> None:
    after, ddp, pipeline = (step(m).seconds for m in ("ring", "ddp/bucket:1MiB", "ring/bucket:2MiB/pipeline"))
    assert pipeline < ddp < after


def test_on_a_fast_network_overlap_shows_the_last_bucket_only() -> None:
    fast = Wire(rate=1e9)
    last_bucket = buckets_of(SyncMode.parse("ddp/bucket:1MiB"), WORK)[-1]
    last = duration(loads_of(SyncMode.parse("ring"), 4), None, last_bucket.size, fast)
    found = step("ddp/bucket:1MiB", wire=fast)
    assert found.exposed == pytest.approx(last.seconds, rel=0.02)


def test_every_k_pays_a_kth_of_one_synchronisation() -> None:
    assert step("ring/every:8").seconds == pytest.approx(WORK.compute + wire_time("ring") / 8)


def test_moving_bytes_slows_compute_under_overlap_but_not_where_compute_sleeps() -> None:
    mode, fast = "ddp/bucket:1MiB", Wire(rate=1e8)
    busy = Node(byte_cpu=2.5e-9, cpus=0.5)  # a quarter of a core while the wire is full: half of what compute has
    free = step(mode, wire=fast).seconds
    assert step(mode, node=busy, wire=fast).seconds > 1.1 * free
    assert step(mode, node=replace(busy, sleeps=True), wire=fast).seconds == pytest.approx(free)
    assert step(mode, node=replace(busy, cpus=2.0), wire=fast).seconds == pytest.approx(free)  # a core for each


@pytest.mark.parametrize("mode", ["direct/int8", "ddp/fp16", "direct/bucket:1MiB/overlap/int8"])
def test_copies_and_codecs_of_emulated_nodes_are_as_fast_as_the_machine_that_measures(mode: str) -> None:
    """Only what sleeps is shorter with another speed."""
    copy, code = 1e-9, 2e-9
    asleep, awake = (Node(speed=10.0, copy=copy, code=code, sleeps=sleeps) for sleeps in (True, False))
    real = WORK.size * (copy + code)
    assert step(mode, node=asleep).compute == pytest.approx(WORK.compute / 10 + real)
    assert step(mode, node=awake).compute == pytest.approx((WORK.compute + real) / 10)


def test_a_node_carries_no_more_than_its_processor_can_move() -> None:
    node, fast = Node(byte_cpu=2e-9, cpus=0.1), Wire(rate=1e10)  # 50 MB/s
    assert step("ring", node=node, wire=fast).seconds == pytest.approx(step("ring", wire=Wire(rate=5e7)).seconds)
    assert step("ring", node=replace(node, sleeps=True), wire=fast) == step("ring", wire=fast)


def test_a_faster_processor_leaves_the_wire() -> None:
    found = step("ring", node=Node(speed=10.0))
    assert found.seconds == pytest.approx(WORK.compute / 10 + wire_time("ring"))


def test_the_slowest_of_more_ranks_takes_longer_and_several_steps_level_it() -> None:
    node = Node(jitter=tuple(sorted(1 + 0.01 * (k - 50) for k in range(101))))
    slow = [node.slowest(n) for n in (1, 2, 8, 64, 512)]
    assert slow[0] == pytest.approx(1.0) and slow == sorted(slow) and slow[3] < 1.6 < slow[4] + 0.2
    assert node.slowest(8, steps=16) - 1 == pytest.approx((node.slowest(8) - 1) / 4)
    assert median_of_largest((1.0,), 100) == 1.0
    assert step("ring", 64, node).seconds - step("ring", 64).seconds == pytest.approx((slow[3] - 1) * WORK.compute)


def test_two_in_flight_share_the_wire_and_hide_each_other_s_latency() -> None:
    wired, waits = Duration(1.0, 1.0), Duration(1.0, 0.5)
    assert overlapped(0.0, [0.0] * 4, [wired] * 4, 2, 0.0, 0.0)[0] == pytest.approx(4.0)
    assert overlapped(0.0, [0.0] * 4, [waits] * 4, 1, 0.0, 0.0)[0] == pytest.approx(4.0)
    assert overlapped(0.0, [0.0] * 4, [waits] * 4, 2, 0.0, 0.0)[0] == pytest.approx(2.0)


def test_a_collective_begins_when_backward_has_come_to_it() -> None:
    ended, busy = overlapped(1.0, [0.5, 1.0], [Duration(0.2, 0.2)] * 2, 1, 0.0, 0.0)
    assert (ended, busy) == (pytest.approx(1.2), pytest.approx(0.4))
    slowed, _ = overlapped(1.0, [0.0], [Duration(0.5, 0.5)], 1, 0.5, 0.0)
    assert slowed == pytest.approx(1.25)  # half a second at half the pace


def test_ddp_closes_a_bucket_that_has_reached_its_limit() -> None:
    sizes = [bucket.size for bucket in buckets_of(SyncMode.parse("ddp"), WORK)]
    assert sizes == [2 * MIB + 4096, 14 * MIB + 7 * 4096]
    three = [bucket.size for bucket in buckets_of(SyncMode.parse("ddp/bucket:5MiB"), WORK)]
    assert three == [6 * MIB + 3 * 4096, 6 * MIB + 3 * 4096, 4 * MIB + 2 * 4096]


@pytest.mark.parametrize("mode", SCHEDULES)
def test_buckets_hold_the_whole_gradient_and_go_from_the_last_layer_to_the_first(mode: str) -> None:
    buckets = buckets_of(SyncMode.parse(mode), WORK)
    assert sum(bucket.size for bucket in buckets) == WORK.size
    assert [bucket.first for bucket in buckets] == sorted((b.first for b in buckets), reverse=True)
    assert buckets[0].last == 7 and buckets[-1].first == 0


def test_layers_without_parameters_belong_to_the_one_before() -> None:
    layers = [
        {"name": "conv", "sizes": [400], "forward_s": 0.1, "backward_s": 0.2},
        {"name": "relu", "forward_s": 0.01, "backward_s": 0.02},
        {"name": "linear", "sizes": [800, 8], "forward_s": 0.3, "backward_s": 0.4},
    ]
    values = profile().model_dump(by_alias=True) | {"layers": layers}
    made = Work.of(Profile.load(values, "made"))
    assert made.forward == pytest.approx((0.11, 0.3)) and made.backward == pytest.approx((0.22, 0.4))
    assert made.tensors == ((8, 1), (800, 1), (400, 0))


def test_the_pipeline_of_a_slow_network_takes_what_the_wire_takes() -> None:
    slow = Wire(rate=2e6)
    assert step("ring/bucket:2MiB/pipeline", wire=slow).seconds == pytest.approx(2 * 3 / 4 * WORK.size / 2e6, rel=0.03)


def test_a_pipeline_that_leaves_its_size_open_gets_the_size_of_the_slowest_link_and_not_of_the_processor() -> None:
    mode, fast = SyncMode.parse("ring/pipeline"), Wire(rate=1e9)
    busy = Node(byte_cpu=1e-7)  # carries 10 MB/s
    sizes = [len(buckets_of(sized(mode, WORK, 4, wire), WORK)) for wire in (fast, Wire(rate=1e9, uplink=1e6))]
    assert sizes[0] < sizes[1]
    named = sized(mode, WORK, 4, fast)
    assert predict(WORK, busy, fast, mode, 4) == predict(WORK, busy, fast, named, 4)


@pytest.mark.parametrize("mode", ["ddp", "ring/bucket:2MiB/overlap"])
def test_a_very_slow_processor_is_predicted(mode: str) -> None:
    assert step(mode, node=Node(speed=1e-4)).seconds > WORK.compute * 1e4 * 0.99


def test_only_the_last_of_several_passes_sends_and_only_the_first_waits() -> None:
    single, several = WORK, Work.of(profile(), passes=4)
    a_pass = sum(WORK.forward) + WORK.after + sum(WORK.backward)
    assert several.compute == pytest.approx(single.compute + 3 * a_pass)
    assert step("ring", work=several).seconds == pytest.approx(step("ring").seconds + 3 * a_pass)
    slow = Wire(rate=5e6)
    for mode in ("ddp/bucket:1MiB", "ring/bucket:2MiB/overlap"):  # nothing more is hidden
        assert step(mode, work=several, wire=slow).seconds == pytest.approx(step(mode, wire=slow).seconds + 3 * a_pass)
    hidden = step("ring/bucket:2MiB/pipeline", work=several, wire=slow).seconds
    assert hidden < step("ring/bucket:2MiB/pipeline", wire=slow).seconds + 3 * a_pass


def test_a_segment_of_a_pipeline_takes_at_least_the_time_of_its_thread() -> None:
    mode, n = "ring/bucket:1MiB/pipeline", 64
    segments = 2 * (n - 1) * len(buckets_of(SyncMode.parse(mode), WORK))
    usual = step(mode, n, wire=Wire(rate=1e9)).seconds
    slow = step(mode, n, wire=Wire(rate=1e9, segment=0.001)).seconds
    assert usual < 1.0 < segments * 0.001 <= slow < 1.2 * segments * 0.001
    assert step(mode, n, wire=Wire(rate=1e6, segment=0.001)).seconds == step(mode, n, wire=Wire(rate=1e6)).seconds
