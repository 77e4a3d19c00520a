"""Durations of collectives: against the recurrence they solve, the formulas of the rows, and SimGrid."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed.predict.collectives import Wire, chain, duration, halves, loads_of, messages_of, parts_of
from testbed.results import theory
from testbed.spec.fabric import Racks
from testbed.spec.mode import ALGORITHMS, SyncMode
from tests.support.max_plus import ends

SIZE = 36_924_456.0
WIRE = Wire(rate=1e7, latency=0.0005, message=0.0001)
WITH_ROUNDS = [name for name, row in ALGORITHMS.items() if row.rounds]
RACKS = ((0, 1, 2, 3), (4, 5, 6, 7))


def seconds(name: str, n: int, wire: Wire = WIRE, size: float = SIZE) -> float:
    mode = SyncMode.parse(name)
    return duration(loads_of(mode, n), mode.segments, size, wire).seconds


@pytest.mark.parametrize("latency", [0.0, 0.001, 0.01, 0.2])
@pytest.mark.parametrize(("count", "window"), [(1, 1), (7, 1), (8, 2), (9, 2), (30, 5), (31, 8)])
def test_a_chain_is_the_solution_of_its_recurrence(count: int, window: int, latency: float) -> None:
    own, ended = 0.01, []
    for k in range(count):
        before = ended[k - 1] if k else 0.0
        ended.append(max(before, ended[k - window] + latency if k >= window else 0.0) + own)
    assert chain(count, own, window, latency) == pytest.approx(ended[-1] + latency)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_without_latency_and_messages_it_is_the_lower_bound_of_the_report(name: str, n: int) -> None:
    bound = theory.bound(SyncMode.parse(name), n, SIZE, 1e7, 0.0, 1)
    assert seconds(name, n, Wire(rate=1e7)) == pytest.approx(bound)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_equal_ranks_that_start_together_end_when_the_closed_form_says(name: str, n: int) -> None:
    mode = SyncMode.parse(name)
    ended = ends(mode, SIZE, np.zeros(n), np.full(n, WIRE.rate), WIRE)
    assert ended.max() == pytest.approx(seconds(name, n), rel=0.002)


def test_a_late_rank_delays_a_ring_and_a_slow_link_limits_it() -> None:
    mode, n, rates = SyncMode.parse("ring"), 8, np.full(8, WIRE.rate)
    together = ends(mode, SIZE, np.zeros(n), rates, WIRE).max()
    late, slow = np.zeros(n), rates.copy()
    late[3], slow[5] = 2.0, WIRE.rate / 2
    assert together + 1.5 < ends(mode, SIZE, late, rates, WIRE).max() <= together + 2.0 + 1e-9
    assert 1.9 * together < ends(mode, SIZE, np.zeros(n), slow, WIRE).max() < 2.1 * together


def test_segments_hide_a_delay_that_is_shorter_than_what_is_under_way() -> None:
    near, far = WIRE, Wire(rate=1e7, latency=0.05, message=0.0001)
    assert seconds("ring", 4, far) - seconds("ring", 4, near) < 0.06  # of 6 hops: only the last is seen
    assert seconds("halving", 4, far) - seconds("halving", 4, near) == pytest.approx(4 * (0.05 - 0.0005))


def test_a_delay_is_paid_once_a_hop_where_messages_are_small() -> None:
    far = Wire(rate=1e7, latency=0.05)
    assert seconds("ring", 64, far, size=6400) == pytest.approx(2 * 63 * 0.05, rel=0.01)


def test_the_window_and_lost_packets_limit_the_rate_of_a_connection() -> None:
    far = Wire(rate=1e8, latency=0.05, window=1e6)
    assert far.payload == pytest.approx(1e7)
    lossy = Wire(rate=1e8, latency=0.05, loss=1e-4)
    assert lossy.payload == pytest.approx(1.22 * 1448 / 0.1 / 0.01)
    assert Wire(rate=1e8, loss=0.1, window=1e5).payload == 1e8  # without a round trip nothing waits


def test_an_uplink_that_is_slower_than_a_link_makes_a_ring_wait_and_hierarchical_less() -> None:
    wire = Wire(rate=1e7, uplink=2e6)
    ring, inside = SyncMode.parse("ring"), SyncMode.parse("hierarchical")
    slow = duration(loads_of(ring, 8, RACKS), ring.segments, SIZE, wire).seconds
    less = duration(loads_of(inside, 8, RACKS), inside.segments, SIZE, wire).seconds
    assert slow == pytest.approx(2 * 7 / 8 * SIZE / 2e6)
    assert less == pytest.approx(2 * 3 / 4 * SIZE / 1e7 + 2 * 1 / 2 * SIZE / 2e6)


@pytest.mark.parametrize("name", ["ring", "direct", "tree", "halving"])
def test_halves_are_the_whole(name: str) -> None:
    mode = SyncMode.parse(name)
    parts = [duration(half, None, SIZE, WIRE).seconds for half in halves(mode, 8)]
    assert sum(parts) == pytest.approx(duration(loads_of(mode, 8), None, SIZE, WIRE).seconds)


@pytest.mark.parametrize(("low", "high"), [*pairwise([2, 4, 16, 64, 256, 1024])])
def test_more_ranks_take_longer(low: int, high: int) -> None:
    for name in ("ring", "allreduce", "gather", "tree"):
        assert seconds(name, low) < seconds(name, high)


@pytest.mark.quiet
def test_a_thousand_ranks_are_fast() -> None:
    mode, n = SyncMode.parse("ring"), 1024

    def closed_form() -> None:
        theory.round_loads.cache_clear()
        seconds("ring", n)

    closed, whole = least(closed_form), least(lambda: ends(mode, SIZE, np.zeros(n), np.full(n, WIRE.rate), WIRE))
    assert closed < 0.05, f"{1000 * closed:.0f} ms"
    assert whole < 0.05, f"{1000 * whole:.0f} ms"


def least(call: Callable[[], object]) -> float:
    """The least processor time of five calls, in seconds."""
    times = []
    for _ in range(5):
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return min(times)


def test_acknowledgements_take_a_part_of_a_link_that_sends_and_receives() -> None:
    acks = Wire(rate=1e7, acks=0.02)
    assert seconds("ring", 4, acks) == pytest.approx(1.02 * seconds("ring", 4, Wire(rate=1e7)))
    assert seconds("tree", 4, acks) == seconds("tree", 4, Wire(rate=1e7))  # a link is used one way at a time
    ended = ends(SyncMode.parse("ring"), SIZE, np.zeros(4), np.full(4, 1e7), acks)
    assert ended.max() == pytest.approx(seconds("ring", 4, acks), rel=1e-3)


def test_a_mode_whose_messages_are_unknown_is_refused() -> None:
    assert loads_of(SyncMode.parse("none"), 4) == ()
    assert math.isclose(duration((), None, SIZE, WIRE).use, 1.0)


def test_messages_are_the_segments_of_all_rounds() -> None:
    ring, gather = SyncMode.parse("ring"), SyncMode.parse("gather")
    assert messages_of(loads_of(ring, 4), ring.segments, SIZE) == 6 * 5  # shards of 9.2 MB in segments of 2 MiB
    assert messages_of(loads_of(gather, 4), gather.segments, SIZE) == 2 * 3


# --- SimGrid ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simgrid() -> str:
    """The interpreter that has SimGrid: Debian's package belongs to that of the system."""
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([python, "-c", "import simgrid"], capture_output=True, timeout=60).returncode == 0:
            return python
    reason = "needs SimGrid: apt-get install python3-simgrid"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def simulated(python: str, mode: SyncMode, n: int, wire: Wire, racks: Racks = ()) -> float:
    """Seconds of one synchronisation as SimGrid simulates its messages, in a process of its own."""
    rounds = mode.rounds(n, racks)
    assert rounds is not None
    messages = [[(t.sender, t.receiver, float(t.share) * SIZE) for t in each] for each in rounds.reduce + rounds.gather]
    case: dict[str, Any] = {"nodes": n, "racks": racks, "rounds": messages}
    case |= {"rate": wire.rate, "uplink": wire.uplink, "latency": wire.latency}
    case |= {"parts": parts_of(loads_of(mode, n, racks)[0], mode.segments, SIZE)}
    script = Path(__file__).parents[2] / "support" / "simgrid_rounds.py"
    done = subprocess.run([python, str(script)], input=json.dumps(case), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


@pytest.mark.parametrize("latency", [0.0005, 0.02])
@pytest.mark.parametrize("n", [4, 8, 16])
def test_a_ring_takes_as_long_as_in_simgrid(simgrid: str, n: int, latency: float) -> None:
    wire = Wire(rate=1e7, latency=latency)
    assert seconds("ring", n, wire) == pytest.approx(simulated(simgrid, SyncMode.parse("ring"), n, wire), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "n"),
    [(name, n) for name in ("gather", "tree", "direct") for n in (4, 6, 8)] + [("halving", 4), ("halving", 8)],
)
def test_other_algorithms_take_as_long_as_in_simgrid(simgrid: str, name: str, n: int) -> None:
    wire = Wire(rate=1e7, latency=0.005)
    assert seconds(name, n, wire) == pytest.approx(simulated(simgrid, SyncMode.parse(name), n, wire), rel=1e-3)


def test_halving_among_other_than_powers_of_two_takes_longer_than_its_rounds(simgrid: str) -> None:
    """As docs/predict.md says: ranks without a part in the first round send at once, on the links of those in it."""
    wire = Wire(rate=1e7, latency=0.005)
    longer = simulated(simgrid, SyncMode.parse("halving"), 6, wire) / seconds("halving", 6, wire)
    assert 1.1 < longer < 1.2


@pytest.mark.parametrize("name", ["ring", "hierarchical"])
def test_a_slow_uplink_takes_as_long_as_in_simgrid(simgrid: str, name: str) -> None:
    mode, wire = SyncMode.parse(name), Wire(rate=1e7, latency=0.0005, uplink=3e6)
    ours = duration(loads_of(mode, 8, RACKS), mode.segments, SIZE, wire).seconds
    assert ours == pytest.approx(simulated(simgrid, mode, 8, wire, RACKS), rel=1e-3)
