"""A receipt compares what was measured with what was requested, and reads back what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.results.receipt import ClockReceipt, FanIn, LinkReceipt, Network, Receipt, WayReceipt, read_network
from testbed.spec.errors import SchemaError, SpecError
from testbed.spec.run import SCHEMA, RunSpec

MBIT = 10**6
SPEC = RunSpec.load({"mode": "ring", "nodes": 2, "batch": 16, "link": {"delay": "20ms"}}, "test")


def made(links: list[float], fan_in: float, requested: int | None = 200 * MBIT, **more: Any) -> Receipt:
    """Two nodes: the rates on the wire of 0 -> 1 and 1 -> 0, and of the fan-in."""

    def rate(measured: float) -> dict[str, Any]:
        error = None if requested is None else measured / requested - 1
        return {"requested": requested, "goodput": 0.95 * measured, "measured": measured, "error": error}

    receipts = [LinkReceipt(src=src, dst=1 - src, **rate(measured)) for src, measured in enumerate(links)]
    facts: dict[str, Any] = {"mtu": 1500, "congestion": ("cubic",) * 2, "duration": 4.0, **more}
    return Receipt(links=tuple(receipts), fan_in=FanIn(senders=(1,), **rate(fan_in)), **facts)


def test_within_5_percent_is_valid_and_says_where_it_was_worst() -> None:
    receipt = made([200 * MBIT, 195 * MBIT], 201 * MBIT)
    assert receipt.worst_error == pytest.approx(-0.025, abs=1e-5)
    assert receipt.valid() and not receipt.valid(tolerance=0.02)
    assert receipt.sentence() == (
        "network: 2 links and the fan-in within 5 %;"
        " worst -2.5 % on node1 -> node0: requested 200mbit, measured 195 Mbit/s"
    )


def test_a_fan_in_beyond_tolerance_is_invalid() -> None:
    receipt = made([200 * MBIT] * 2, 600 * MBIT)
    assert not receipt.valid()
    assert "NOT within 5 %" in receipt.sentence() and "the fan-in of node0: requested 200mbit" in receipt.sentence()


def test_a_fan_in_of_another_node_beyond_tolerance_is_invalid_and_named() -> None:
    facts = {"senders": (0, 1), "requested": 200 * MBIT, "goodput": 380.0 * MBIT, "measured": 400.0 * MBIT}
    others = (FanIn(dst=2, error=1.0, **facts),)
    receipt = made([200 * MBIT] * 2, 200 * MBIT, fan_in_others=others)
    assert not receipt.valid()
    assert "2 links and 2 fan-ins NOT within 5 %; worst +100.0 % on the fan-in of node2" in receipt.sentence()


def test_a_receipt_of_a_sample_says_of_how_many_links() -> None:
    receipt = made([200 * MBIT] * 2, 200 * MBIT, sampled_from=4032)
    assert receipt.sentence().startswith("network: 2 of 4032 links and the fan-in within 5 %")
    assert Network.of(receipt, SPEC).sampled_from == 4032


def test_a_sample_without_the_fan_in_of_node_0_has_one_fan_in() -> None:
    facts = {"senders": (0, 1), "requested": 200 * MBIT, "goodput": 190.0 * MBIT, "measured": 200.0 * MBIT}
    receipt = made([200 * MBIT] * 2, 200 * MBIT, fan_in_others=(FanIn(dst=2, error=0.0, **facts),))
    assert "2 links and 2 fan-ins" in receipt.sentence()
    assert "2 links and the fan-in" in receipt.model_copy(update={"fan_in": None}).sentence()


def test_a_receipt_without_the_keys_for_samples_and_other_fan_ins_is_read(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    made([200 * MBIT] * 2, 200 * MBIT).write(path)
    values = json.loads(path.read_text())
    del values["sampled_from"], values["fan_in_others"], values["fan_in"]["dst"]
    path.write_text(json.dumps(values))
    receipt = Receipt.read(path)
    assert receipt.fan_in is not None and receipt.fan_in.dst == 0 and receipt.fan_in_others == ()


def test_a_receipt_without_requested_rates_is_valid_and_says_unshaped() -> None:
    receipt = made([5e9, 4e9], 6e9, requested=None)
    assert receipt.valid() and receipt.worst_error is None
    assert (
        receipt.sentence() == "network: unshaped; 2 links and the fan-in measured, slowest 4000 Mbit/s (node1 -> node0)"
    )


def test_it_reads_back_what_it_wrote(tmp_path: Path) -> None:
    receipt = made([200 * MBIT, 195 * MBIT], 201 * MBIT)
    receipt.write(tmp_path / "receipt.json")
    assert Receipt.read(tmp_path / "receipt.json") == receipt
    assert [entry.name for entry in tmp_path.iterdir()] == ["receipt.json"]


def test_a_receipt_of_another_schema_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    made([200 * MBIT] * 2, 200 * MBIT).write(path)
    values = json.loads(path.read_text())
    assert values["schema"] == SCHEMA
    path.write_text(json.dumps(values | {"schema": SCHEMA + 1}))
    with pytest.raises(SchemaError, match=rf"receipt\.json: schema {SCHEMA + 1}, this testbed reads schema {SCHEMA}"):
        Receipt.read(path)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "[" * 100_000, json.dumps({"schema": SCHEMA})])
def test_what_is_no_receipt_is_refused_with_its_path(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "receipt.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError, match=r"receipt\.json"):
        Receipt.read(path)


def test_the_network_of_a_receipt_has_bytes_per_second() -> None:
    network = Network.of(made([200 * MBIT, 160 * MBIT], 200 * MBIT), SPEC)
    assert network.measured == {(0, 1): 25 * MBIT, (1, 0): 20 * MBIT}
    assert network.requested == {(0, 1): 25 * MBIT, (1, 0): 25 * MBIT}
    assert network.slowest == pytest.approx(19 * MBIT) and network.worst_error == pytest.approx(-0.2)
    assert network.node(0) == pytest.approx(19 * MBIT) and network.node(0, network.measured) == 20 * MBIT
    assert network.node(2) is None and network.delay == 0.02  # as requested: no round trip was measured


def test_the_delay_is_half_the_shortest_round_trip() -> None:
    receipt = made([200 * MBIT] * 2, 200 * MBIT)
    links = tuple(link.model_copy(update={"rtt": rtt}) for link, rtt in zip(receipt.links, (0.5, 0.3), strict=True))
    assert Network.of(receipt.model_copy(update={"links": links}), SPEC).delay == 0.15


def test_a_clock_offset_within_its_error_is_none() -> None:
    clocks = (ClockReceipt(offset=0.0, error=0.0), ClockReceipt(offset=0.001, error=0.002))
    same = Network.of(made([200 * MBIT] * 2, 200 * MBIT, clock=clocks), SPEC)
    assert same.offsets == {} and same.offset_error == 0.0
    apart = Network.of(
        made([200 * MBIT] * 2, 200 * MBIT, clock=(clocks[0], ClockReceipt(offset=-1.5, error=0.002))), SPEC
    )
    assert apart.offsets == {1: -1.5} and apart.offset_error == 0.002


def test_a_run_without_a_receipt_has_no_rates(tmp_path: Path) -> None:
    network = read_network(tmp_path / "receipt.json", SPEC)
    assert network == Network() and network.slowest is None and network.node(0) is None


def test_the_receipt_of_a_slower_network_is_read_as_that_of_the_network_it_stands_for(tmp_path: Path) -> None:
    slower = made([66_666_667] * 2, 66_666_667, requested=66_666_667, clock=())
    links = tuple(link.model_copy(update={"rtt": 0.3}) for link in slower.links)
    receipt = slower.model_copy(update={"links": links}).undilated(3.0)
    assert [link.requested for link in receipt.links] == [200 * MBIT] * 2, "the rounding of the slower rate is undone"
    assert [link.rtt for link in receipt.links] == [pytest.approx(0.1)] * 2
    assert receipt.links[0].error == slower.links[0].error and receipt.dilation == 3.0
    receipt.model_copy(update={"after": receipt}).write(tmp_path / "receipt.json")
    raw = json.loads((tmp_path / "receipt.json").read_text())
    assert raw["links"][0]["requested"] == raw["after"]["links"][0]["requested"] == 66_666_667
    assert raw["links"][0]["rtt"] == pytest.approx(0.3)
    back = Receipt.read(tmp_path / "receipt.json")
    assert back.links[0].requested == 200 * MBIT and back.links[0].measured == pytest.approx(receipt.links[0].measured)
    assert back.after is not None and back.after.links[0].requested == 200 * MBIT


def far(**values: float) -> Receipt:
    """A receipt whose first link has a delay or a loss, as requested but for `values`."""
    way = {"rtt_requested": 0.04, "rtt": 0.0403, "loss_requested": 0.01, "packets": 2000, "lost": 21} | values
    receipt = made([200 * MBIT] * 2, 200 * MBIT)
    link = receipt.links[0].model_copy(update={"way": WayReceipt.model_validate(way), "far": True})
    return receipt.model_copy(update={"links": (link, *receipt.links[1:])})


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, ""),
        ({"rtt": 0.0419}, ""),
        ({"rtt": 0.0421}, "round trip requested 40 ms, measured 42.1 ms"),
        ({"rtt": 0.0379}, "round trip requested 40 ms, measured 37.9 ms"),
        ({"rtt_requested": 0.01, "rtt": 0.0109}, ""),
        ({"rtt_requested": 0.01, "rtt": 0.0111}, "round trip requested 10 ms, measured 11.1 ms"),
        ({"rtt": 0.0421, "jitter": 0.004}, ""),
        ({"rtt": 0.0449, "jitter": 0.004}, ""),
        ({"rtt": 0.0451, "jitter": 0.004}, "round trip requested 40 ms, measured 45.1 ms"),
        ({"lost": 3}, "loss requested 1 %, measured 3 of 2000 packets"),
        ({"lost": 5}, ""),
        ({"lost": 41}, ""),
        ({"lost": 47}, "loss requested 1 %, measured 47 of 2000 packets"),
        ({"loss_requested": 0.0, "packets": 0, "lost": 0}, ""),
    ],
)
def test_a_delay_or_a_loss_that_is_off_makes_the_receipt_invalid(values: dict[str, float], problem: str) -> None:
    receipt = far(**values)
    assert receipt.valid() is (problem == "")
    assert (f"NOT as requested: {problem} on node0 -> node1" if problem else "round trips as requested") in (
        receipt.sentence()
    )


def test_less_delay_is_a_network_that_is_too_fast_and_more_is_not() -> None:
    assert far(rtt=0.02).too_fast() and not far(rtt=0.08).too_fast()
    assert far(lost=0).too_fast() and not far(lost=60).too_fast()


def lossy(nodes: int, loss: float, packets: int, lost: int) -> Receipt:
    """A receipt of which each link has a requested loss, and lost so many of its packets."""
    way = WayReceipt(rtt_requested=0.0, rtt=0.0001, loss_requested=loss, packets=packets, lost=lost)
    receipt = made([200 * MBIT] * (nodes * (nodes - 1)), 200 * MBIT)
    return receipt.model_copy(update={"links": tuple(each.model_copy(update={"way": way}) for each in receipt.links)})


def test_a_small_loss_that_is_missing_shows_in_the_packets_of_all_links() -> None:
    missing = lossy(4, 0.001, 10_000, 0)
    assert not any(link.way is None or link.way.problem() for link in missing.links)  # no link shows it alone
    assert not missing.valid() and missing.too_fast()
    assert "loss requested 0.1 %, measured 0 of 120000 packets on 12 links together" in missing.sentence()
    assert lossy(4, 0.001, 10_000, 10).valid()
    doubled = lossy(4, 0.001, 10_000, 20)
    assert not doubled.valid() and not doubled.too_fast()


def test_a_loss_that_even_all_links_cannot_show_is_said() -> None:
    said = "0 of 20000 packets lost (too few to show that a loss of 0.01 % is missing)"
    assert said in lossy(2, 0.0001, 10_000, 0).sentence()
    assert "too few" not in lossy(4, 0.0001, 10_000, 1).sentence()


def test_the_packets_of_very_many_links_are_judged_at_once() -> None:
    packets = 40_000_000
    way = WayReceipt(rtt_requested=0.0, rtt=0.0, loss_requested=0.001, packets=packets, lost=40_000)
    assert way.doubt == pytest.approx(0.5, abs=0.01)
    assert way.model_copy(update={"lost": 39_000}).problem() and way.model_copy(update={"lost": 41_000}).problem()


def test_rates_beside_a_delay_have_a_wider_tolerance() -> None:
    receipt = far()
    off = receipt.links[0].model_copy(update={"error": 0.07})
    assert receipt.model_copy(update={"links": (off, *receipt.links[1:])}).valid()
    near = receipt.links[1].model_copy(update={"error": 0.07})
    assert not receipt.model_copy(update={"links": (receipt.links[0], near)}).valid()


def test_of_two_probes_the_nearer_round_trip_and_the_packets_of_both_count() -> None:
    (link, *_) = far(rtt=0.06, lost=10).better(far(rtt=0.041, lost=30)).links
    assert link.way is not None and (link.way.rtt, link.way.packets, link.way.lost) == (0.041, 4000, 40)
