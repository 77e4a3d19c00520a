"""The probe over loopback: all links measured, and nothing hangs when a node fails."""

from __future__ import annotations

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
    measure,
    meet,
    pace,
    probe_node,
    read_clock,
    receipt_of,
    schedule,
    steady,
    window,
)
from testbed.net.tcp import burst_bytes, efficiency
from testbed.results.receipt import Receipt
from testbed.spec.errors import ProbeError
from testbed.spec.run import RunSpec

LOOPBACK = "127.0.0.1"
MBIT = 10**6
BASE: dict[str, Any] = {"mode": "ring", "nodes": 2, "batch": 16}
SPEC = RunSpec.load(BASE, "test")


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_every_link_is_used_once_and_no_node_sends_while_it_receives(n: int) -> None:
    *halves, last = schedule(n)
    assert sorted(pair for half in halves for pair in half) == sorted(itertools.permutations(range(n), 2))
    assert last == [(src, 0) for src in range(1, n)]
    for half in halves:
        ends = [end for pair in half for end in pair]
        assert len(ends) == len(set(ends)), half


def test_four_nodes_take_seven_steps_and_one_takes_none() -> None:
    assert len(schedule(4)) == 7 and schedule(1) == []


@pytest.mark.parametrize("rate", [10**6, 10**7, 10**8, 10**9])
def test_at_least_50_bursts_are_counted(rate: int) -> None:
    plan = pace([rate] * 4, [(0, 1), (2, 3)])
    assert 3 * plan.slice_s >= 50 * burst_bytes(rate) * 8 / rate and plan.slow_start_s >= 0.25


def test_four_nodes_at_100_mbit_take_about_4_seconds_and_unshaped_ones_less() -> None:
    def whole(rates: list[int | None]) -> float:
        return sum(plan.slow_start_s + 3 * plan.slice_s for plan in (pace(rates, pairs) for pairs in schedule(4)))

    assert 3.0 < whole([10**8] * 4) < 4.5 and whole([None] * 4) < 2.5


def test_the_slowest_link_of_a_step_sets_its_length() -> None:
    assert pace([10**6, 10**9, 10**9, 10**9], [(0, 1), (2, 3)]) == pace([10**6] * 4, [(0, 1), (2, 3)])


def test_slow_links_get_a_bounded_window_and_fast_or_long_ones_the_kernels() -> None:
    pairs = [(0, 1)]
    assert window([10**7, 10**7], pairs, 1, round_trip=0.0001) == 25_000
    assert window([10**9, 10**9], pairs, 1, round_trip=0.0001) is None
    assert window([10**7, 10**7], pairs, 1, round_trip=0.04) is None
    assert window([None, None], pairs, 1, round_trip=0.0001) is None
    fan_in = window([2 * 10**7] * 4, schedule(4)[-1], 0, round_trip=0.0001)
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
    assert sorted({event["step"] for event in events}) == list(range(1, len(schedule(3)) + 1))


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
    receipt = receipt_of(measurement([50 * MBIT] * 6, 3, 50 * MBIT), rates)
    requested = {(link.src, link.dst): link.requested for link in receipt.links}
    assert requested[0, 1] == requested[1, 0] == requested[1, 2] == 50 * MBIT
    assert requested[0, 2] == requested[2, 0] == 200 * MBIT


def test_the_requested_rate_of_the_fan_in_is_what_the_senders_can_bring() -> None:
    receipt = receipt_of(measurement([10 * MBIT] * 6, 3, 20 * MBIT), [100 * MBIT, 10 * MBIT, 10 * MBIT])
    assert receipt.fan_in is not None
    assert receipt.fan_in.requested == 20 * MBIT and receipt.fan_in.senders == (1, 2)


def test_a_single_node_has_no_link() -> None:
    receipt = receipt_of(Measurement([], 1500, [""], 0.1), [10 * MBIT])
    assert receipt.valid() and receipt.fan_in is None and "one node" in receipt.sentence()


@pytest.mark.parametrize(
    ("rates", "retry", "probes", "notes"),
    [([200, 200], True, 1, 0), ([150, 200], True, 2, 1), ([150, 150], True, 2, 1), ([150, 200], False, 1, 0)],
)
def test_an_invalid_receipt_is_measured_once_more_and_the_last_one_counts(
    rates: list[int], retry: bool, probes: int, notes: int
) -> None:
    receipts = [receipt_of(measurement([rate * MBIT] * 2, 2, rate * MBIT), [200 * MBIT] * 2) for rate in rates]
    waiting, said = iter(receipts), list[str]()
    check = measure(SPEC, lambda: next(waiting), said.append, retry=retry)
    assert check.receipt is receipts[probes - 1] and len(check.notes) == notes
    assert said[-1] == check.network == check.receipt.sentence() and len(said) == 1 + probes
    assert check.invalid is (rates[probes - 1] == 150)


@pytest.mark.parametrize(
    ("values", "network", "notes"),
    [({"mode": "single"}, "one node, no network", 0), ({"probe": False}, "not measured (probe = false)", 1)],
)
def test_without_links_or_without_a_probe_nothing_is_measured(values: dict[str, Any], network: str, notes: int) -> None:
    def fail() -> Receipt:
        raise AssertionError("probed")

    check = measure(RunSpec.load(BASE | values, "test"), fail, fail_to_announce)
    assert check.network == network and check.receipt is None and not check.invalid and len(check.notes) == notes


def fail_to_announce(sentence: str) -> None:
    raise AssertionError(sentence)
