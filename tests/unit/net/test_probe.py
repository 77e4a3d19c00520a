"""The probe over loopback: all links measured, and nothing hangs when a node fails."""

from __future__ import annotations

import dataclasses
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from testbed.net.probe import (
    CLOCK_EXCHANGES,
    Flow,
    Measurement,
    Peer,
    fan_in_steps,
    link_steps,
    link_steps_of,
    meet,
    pace,
    plan_steps,
    probe_node,
    read_clock,
    receipt_of,
    schedule,
    steady,
    uplink_steps,
    window,
)
from testbed.net.tcp import efficiency
from testbed.spec.errors import ProbeError
from testbed.spec.fabric import Fabric
from testbed.spec.units import burst_bytes

LOOPBACK = "127.0.0.1"
MBIT = 10**6


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_every_link_is_used_once_and_no_node_sends_while_it_receives(n: int) -> None:
    halves = link_steps(n)
    assert sorted(pair for half in halves for pair in half) == sorted(itertools.permutations(range(n), 2))
    for half in halves:
        ends = [end for pair in half for end in pair]
        assert len(ends) == len(set(ends)), half


@pytest.mark.parametrize("n", [3, 4, 5, 7, 16, 64])
def test_the_fan_ins_go_round_all_nodes_and_fill_their_links(n: int) -> None:
    rates: list[int | None] = [10 * MBIT] * n
    steps = fan_in_steps(Fabric.of(rates))
    assert steps[0] == [(src, 0) for src in range(1, n)]
    assert sorted({dst for step in steps for _, dst in step}) == list(range(n))
    for step in steps:
        receivers = {dst for _, dst in step}
        senders = [src for src, _ in step]
        assert len(senders) == len(set(senders)) and not receivers & set(senders), step
        assert all(sum(to == dst for _, to in step) >= 2 for dst in receivers), step
    assert sum(dst == 1 for step in steps for _, dst in step) == 2  # as few as fill the link


def test_a_fast_node_gets_as_many_senders_as_fill_its_link() -> None:
    steps = fan_in_steps(Fabric.of([10 * MBIT, 35 * MBIT, 10 * MBIT, 10 * MBIT, 10 * MBIT, 20 * MBIT]))
    senders = {dst: sorted(src for step in steps for src, to in step if to == dst) for dst in range(6)}
    assert len(senders[1]) == 4 and 5 in senders[1]  # 20 + 3 x 10 are 50 Mbit/s
    assert len(senders[2]) == 2


def test_a_node_whose_link_nobody_can_fill_gets_all_the_others() -> None:
    steps = fan_in_steps(Fabric.of([10 * MBIT, 1000 * MBIT, 10 * MBIT, 10 * MBIT]))
    assert sorted(src for step in steps for src, to in step if to == 1) == [0, 2, 3]


def test_unshaped_nodes_have_one_fan_in_and_so_have_two_nodes() -> None:
    assert fan_in_steps(Fabric.of([None] * 4)) == [[(1, 0), (2, 0), (3, 0)]]
    assert fan_in_steps(Fabric.of([10 * MBIT] * 2)) == [[(1, 0)]]


def test_four_nodes_take_ten_steps_and_one_takes_none() -> None:
    assert len(schedule(Fabric.of([MBIT] * 4))) == 10 and schedule(Fabric.of([MBIT])) == []


def test_above_16_nodes_a_sample_is_taken_in_which_every_node_sends_and_receives() -> None:
    assert sum(map(len, link_steps(16))) == 16 * 15
    for n in (17, 64, 256):
        steps = link_steps(n)
        assert len({pair for step in steps for pair in step}) == sum(map(len, steps)) == 8 * n
        assert all(sum(src == node for step in steps for src, _ in step) == 8 for node in range(n))
        assert all(sum(dst == node for step in steps for _, dst in step) == 8 for node in range(n))


@pytest.mark.parametrize("n", [2, 3, 4, 7, 64])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_a_sample_uses_every_node_both_ways_once_and_one_fan_in(n: int, seed: int) -> None:
    rates: list[int | None] = [10 * MBIT] * n
    links, fan_ins, _ = plan_steps(Fabric.of(rates), seed)
    pairs = [pair for step in links for pair in step]
    assert sorted(src for src, _ in pairs) == sorted(dst for _, dst in pairs) == list(range(n)) and len(links) <= 3
    assert len(fan_ins) == (n > 2) and all(len({dst for _, dst in step}) == 1 for step in fan_ins)
    assert all(len(step) >= 2 for step in fan_ins)
    assert schedule(Fabric.of(rates), seed) == [*links, *fan_ins]


def test_samples_of_different_seeds_differ() -> None:
    assert len({str(plan_steps(Fabric.of([MBIT] * 4), seed)) for seed in range(12)}) == 12


def test_64_nodes_take_about_as_long_as_16() -> None:
    def whole(n: int) -> float:
        rates: list[int | None] = [10**8] * n
        return sum(
            plan.slow_start_s + 3 * plan.slice_s
            for plan in (pace(Fabric.of(rates), each) for each in schedule(Fabric.of(rates)))
        )

    assert whole(16) < 21 and whole(64) < 15


@pytest.mark.parametrize("rate", [10**6, 10**7, 10**8, 10**9])
def test_at_least_50_bursts_are_counted(rate: int) -> None:
    plan = pace(Fabric.of([rate] * 4), [(0, 1), (2, 3)])
    assert 3 * plan.slice_s >= 50 * burst_bytes(rate) * 8 / rate and plan.slow_start_s >= 0.25


def test_four_nodes_at_100_mbit_take_about_6_seconds_and_unshaped_ones_less() -> None:
    def whole(rates: list[int | None]) -> float:
        return sum(
            plan.slow_start_s + 3 * plan.slice_s
            for plan in (pace(Fabric.of(rates), pairs) for pairs in schedule(Fabric.of(rates)))
        )

    assert 4.5 < whole([10**8] * 4) < 6.5 and whole([None] * 4) < 2.5


def test_the_slowest_link_of_a_step_sets_its_length() -> None:
    assert pace(Fabric.of([10**6, 10**9, 10**9, 10**9]), [(0, 1), (2, 3)]) == pace(
        Fabric.of([10**6] * 4), [(0, 1), (2, 3)]
    )


def test_slow_links_get_a_bounded_window_and_fast_or_long_ones_the_kernels() -> None:
    pairs = [(0, 1)]
    assert window(Fabric.of([10**7, 10**7]), pairs, 1, round_trip=0.0001) == 25_000
    assert window(Fabric.of([10**9, 10**9]), pairs, 1, round_trip=0.0001) is None
    assert window(Fabric.of([10**7, 10**7]), pairs, 1, round_trip=0.04) is None
    assert window(Fabric.of([None, None]), pairs, 1, round_trip=0.0001) is None
    fan_in = window(Fabric.of([2 * 10**7] * 4), fan_in_steps(Fabric.of([2 * 10**7] * 4))[0], 0, round_trip=0.0001)
    assert fan_in is not None and 3 * fan_in == pytest.approx(50_000, abs=3)


def test_counting_ends_when_the_slices_agree_or_time_is_up() -> None:
    assert not steady([100.0, 100.0], max_slices=9)
    assert steady([100.0, 100.1, 99.9], max_slices=9)
    assert not steady([100.0, 100.0, 80.0], max_slices=9)
    assert steady([100.0, 100.0, 80.0], max_slices=3)


def test_three_nodes_on_loopback_agree_on_what_they_measured() -> None:
    port, events = free_port(), list[dict[str, Any]]()

    def node(rank: int) -> Measurement:
        return probe_node(rank, [LOOPBACK] * 3, port, None, events.append)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(node, range(3)))
    assert results[0].flows == results[1].flows == results[2].flows
    links = [(flow.src, flow.dst) for flow in results[0].flows]
    assert links == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (None, 0)]
    assert all(flow.goodput > 10**6 for flow in results[0].flows)
    assert len(results[0].congestion) == 3 and all(results[0].congestion)
    assert results[0].mtu > 1500  # loopback's, not an assumption
    assert sorted({event["step"] for event in events}) == list(range(1, len(schedule(Fabric.of([None] * 3))) + 1))


def test_as_processes_they_print_flows_and_a_result() -> None:
    common = ["--addresses", f"{LOOPBACK},{LOOPBACK}", "--port", str(free_port())]
    command = [sys.executable, "-m", "testbed.net.probe", *common, "--rank"]
    nodes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    outputs = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    events = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    assert [event["event"] for event in events[1]] == ["flow", "result"]
    assert events[0][-1]["flows"] == events[1][-1]["flows"] and len(events[0][-1]["flows"]) == 3


def test_the_probe_imports_neither_torch_nor_pydantic() -> None:
    script = "import sys, testbed.net.probe; sys.exit(sum(name in sys.modules for name in ('torch', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_a_node_that_leaves_ends_the_probe_for_all_with_its_name() -> None:
    port = free_port()

    def leaves() -> None:
        with meet(1, [LOOPBACK] * 3, port, Peer(LOOPBACK, None)):
            pass  # introduces itself and closes the connection

    def node(rank: int) -> str:
        with pytest.raises(ProbeError) as caught:
            probe_node(rank, [LOOPBACK] * 3, port, None, lambda event: None)
        return str(caught.value)

    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        pool.submit(leaves)
        words = [pool.submit(node, rank) for rank in (0, 2)]
        assert "node1 closed the connection" in words[0].result(timeout=30)
        assert "node1 closed the connection" in words[1].result(timeout=30)
    assert time.monotonic() - began < 10


def test_the_reason_sent_together_with_an_earlier_line_is_raised() -> None:
    port = free_port()

    def hub() -> None:
        with socket.create_server((LOOPBACK, port)) as server, server.accept()[0] as member:
            member.recv(4096)
            welcome = {"token": "0" * 32, "peers": [{"address": LOOPBACK, "rate": None}] * 2}
            lines = [{"welcome": welcome}, {"outcomes": [{}, {}]}, {"fail": "node1 closed the connection"}]
            member.sendall("".join(json.dumps(line) + "\n" for line in lines).encode())
            member.recv(1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hub)
        with pytest.raises(ProbeError, match="node1 closed the connection"):
            probe_node(1, [LOOPBACK] * 2, port, None, lambda event: None, timeout_s=5)


def test_a_node_that_never_comes_is_named() -> None:
    with pytest.raises(ProbeError, match="timeout while waiting for node1"):
        probe_node(0, [LOOPBACK] * 2, free_port(), None, lambda event: None, timeout_s=0.3)


def test_a_hub_that_does_not_answer_is_reported() -> None:
    with pytest.raises(ProbeError, match="node0 does not answer at 127"):
        probe_node(1, [LOOPBACK] * 2, free_port(), None, lambda event: None, timeout_s=0.3)


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        with pytest.raises(ProbeError, match="in use"):
            probe_node(0, [LOOPBACK] * 2, server.getsockname()[1], None, lambda event: None)


def test_connections_of_other_programs_are_ignored() -> None:
    port = free_port()

    def disturb() -> None:
        deep, endless = b"[" * 100_000 + b"\n", b'{"rank": 1e999, "peer": {"address": "x", "rate": 1}}\n'
        plain = (b"GET / HTTP/1.0\r\n\r\n", b"{}\n", b'{"rank": 7}\n', b"\xff" * 1000, b"")
        for rubbish in (deep, endless, *plain):
            while True:
                try:
                    with socket.create_connection((LOOPBACK, port), timeout=5) as sock:
                        sock.sendall(rubbish)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)

    def join_late() -> None:
        disturber = threading.Thread(target=disturb)
        disturber.start()
        disturber.join(20)
        with meet(1, [LOOPBACK] * 2, port, Peer(LOOPBACK, 5)) as member:
            assert [peer.rate for peer in member.peers] == [None, 5]

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(join_late)
        with meet(0, [LOOPBACK] * 2, port, Peer(LOOPBACK, None)) as hub:
            assert [peer.rate for peer in hub.peers] == [None, 5]
        late.result(timeout=30)


def test_a_clock_is_read_by_its_quickest_answer() -> None:
    def ask(number: int) -> float:
        time.sleep(0.03 if number != 5 else 0.001)
        return time.time() + 100.0

    found = read_clock(ask)
    assert CLOCK_EXCHANGES > 5 and found.error < 0.014
    assert abs(found.offset - 100.0) <= found.error + 0.002


def measurement(rates: list[float], n: int, fan_in: float) -> Measurement:
    """Every link reaches the rate on the wire given for it, in the order 0->1, 0->2, ..., 1->0, ..."""
    pairs = [(src, dst) for src in range(n) for dst in range(n) if src != dst]
    flows = [Flow(src, dst, _payload(rate), 1.0) for (src, dst), rate in zip(pairs, rates, strict=True)]
    return Measurement([*flows, Flow(None, 0, _payload(fan_in), 1.0)], 1500, ["cubic"] * n, 4.0)


def _payload(rate: float) -> int:
    return round(rate * efficiency(1500) / 8)


def test_the_requested_rate_of_a_link_is_the_smaller_of_its_two_ends() -> None:
    rates = [200 * MBIT, 50 * MBIT, None]
    receipt = receipt_of(measurement([50 * MBIT] * 6, 3, 50 * MBIT), Fabric.of(rates))
    requested = {(link.src, link.dst): link.requested for link in receipt.links}
    assert requested[0, 1] == requested[1, 0] == requested[1, 2] == 50 * MBIT
    assert requested[0, 2] == requested[2, 0] == 200 * MBIT


def test_the_requested_rate_of_the_fan_in_is_what_the_senders_can_bring() -> None:
    receipt = receipt_of(measurement([10 * MBIT] * 6, 3, 20 * MBIT), Fabric.of([100 * MBIT, 10 * MBIT, 10 * MBIT]))
    assert receipt.fan_in is not None
    assert receipt.fan_in.requested == 20 * MBIT and receipt.fan_in.senders == (1, 2)


def test_a_receipt_has_the_fan_in_of_every_node_and_the_number_of_links_it_is_a_sample_of() -> None:
    rates: list[int | None] = [10 * MBIT] * 3
    links = [Flow(src, dst, _payload(10 * MBIT), 1.0) for src, dst in [(0, 1), (1, 2), (2, 0)]]
    fan_ins = [Flow(None, dst, _payload((10 + 10 * (dst == 2)) * MBIT), 1.0) for dst in range(3)]
    receipt = receipt_of(Measurement([*links, *fan_ins], 1500, ["cubic"] * 3, 4.0), Fabric.of(rates))
    assert receipt.sampled_from == 6 and receipt.fan_in is not None and receipt.fan_in.dst == 0
    assert [(each.dst, sorted(each.senders)) for each in receipt.fan_in_others] == [(1, [0, 2]), (2, [0, 1])]
    assert not receipt.valid() and "the fan-in of node2: requested 10mbit, measured 20 Mbit/s" in receipt.sentence()


def test_a_single_node_has_no_link() -> None:
    receipt = receipt_of(Measurement([], 1500, [""], 0.1), Fabric.of([10 * MBIT]))
    assert receipt.valid() and receipt.fan_in is None and "one node" in receipt.sentence()


# --- racks -----------------------------------------------------------------------------------------------------------

RACKED = Fabric.of([100 * MBIT] * 4, (0, 0, 1, 1), 50 * MBIT)


@pytest.mark.parametrize("racks", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2)])
def test_with_racks_every_link_is_measured_once_and_no_uplink_is_shared(racks: tuple[int, ...]) -> None:
    fabric = Fabric.of([100 * MBIT] * len(racks), racks, 50 * MBIT)
    steps = link_steps_of(fabric)
    pairs = [pair for step in steps for pair in step]
    assert len(pairs) == len(set(pairs)) == len(racks) * (len(racks) - 1)
    for step in steps:
        nodes = [node for pair in step for node in pair]
        assert len(nodes) == len(set(nodes))
        passed = [racks[node] for pair in step if fabric.crosses(*pair) for node in pair]
        assert len(passed) == len(set(passed))


def test_of_many_links_across_racks_some_are_measured() -> None:
    fabric = Fabric.of([100 * MBIT] * 16, [k // 8 for k in range(16)], 50 * MBIT)
    across = [pair for step in link_steps_of(fabric) for pair in step if fabric.crosses(*pair)]
    assert len(across) == len(set(across)) == 24 and len({src for src, _ in across}) >= 8


def test_uplinks_are_filled_by_all_pairs_at_once_out_of_and_into_each_rack() -> None:
    assert uplink_steps(RACKED) == [
        (0, True, [(0, 2), (0, 3), (1, 2), (1, 3)]),
        (1, True, [(2, 0), (2, 1), (3, 0), (3, 1)]),
    ]
    three = uplink_steps(Fabric.of([MBIT] * 6, (0, 0, 1, 1, 2, 2), MBIT))
    assert [(rack, out) for rack, out, _ in three] == [(rack, out) for rack in range(3) for out in (True, False)]
    assert uplink_steps(Fabric.of([MBIT] * 4, (0, 0, 1, 1))) == [] and uplink_steps(Fabric.of([MBIT] * 4)) == []


def test_all_receivers_of_an_uplink_count_for_the_same_time() -> None:
    plan = pace(RACKED, uplink_steps(RACKED)[0][2], together=True)
    assert plan.min_slices == plan.max_slices


def test_a_receipt_has_links_inside_and_across_and_what_an_uplink_passed() -> None:
    wire = efficiency()
    links = [
        Flow(src, dst, round((50 if RACKED.crosses(src, dst) else 100) * MBIT * wire / 8), 1.0)
        for src in range(4)
        for dst in range(4)
        if src != dst
    ]
    parts = [Flow(None, dst, round(25 * MBIT * wire / 8), 1.0, uplink=(0, True)) for dst in (2, 3)]
    receipt = receipt_of(Measurement([*links, *parts], 1500, ["cubic"] * 4, 4.0), RACKED)
    assert receipt.valid() and {link.requested for link in receipt.links if link.across} == {50 * MBIT}
    assert {link.requested for link in receipt.links if not link.across} == {100 * MBIT}
    (uplink,) = receipt.uplinks
    assert (uplink.requested, uplink.rack, uplink.outgoing) == (50 * MBIT, 0, True)
    assert uplink.measured == pytest.approx(50 * MBIT, rel=1e-6)
    fast = [dataclasses.replace(part, bytes=part.bytes * 2) for part in parts]
    wrong = receipt_of(Measurement([*links, *fast], 1500, ["cubic"] * 4, 4.0), RACKED)
    assert wrong.too_fast() and "the uplink out of rack 0, 4 pairs at once: requested 50mbit" in wrong.sentence()
    assert wrong.better(receipt) == receipt
