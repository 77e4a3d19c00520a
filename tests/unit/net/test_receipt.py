"""A receipt holds what was measured against what was asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.net.probe import Flow, Measurement
from testbed.net.receipt import Receipt
from testbed.net.tcp import efficiency
from testbed.spec.errors import SchemaError, SpecError
from testbed.spec.run import SCHEMA

MBIT = 10**6


def measured(rates: list[float], n: int, fan_in: float) -> Measurement:
    """Every link reaches the rate on the wire given for it, in the order 0->1, 0->2, ..., 1->0, ..."""
    pairs = [(src, dst) for src in range(n) for dst in range(n) if src != dst]
    flows = [Flow(src, dst, _payload(rate), 1.0) for (src, dst), rate in zip(pairs, rates, strict=True)]
    return Measurement([*flows, Flow(None, 0, _payload(fan_in), 1.0)], 1500, ["cubic"] * n, 4.0)


def _payload(rate: float) -> int:
    return round(rate * efficiency(1500) / 8)


def test_a_link_is_asked_the_smaller_of_its_two_ends() -> None:
    rates = [200 * MBIT, 50 * MBIT, None]
    receipt = Receipt.of(measured([50 * MBIT] * 6, 3, 50 * MBIT), rates)
    asked = {(link.src, link.dst): link.asked for link in receipt.links}
    assert asked[0, 1] == asked[1, 0] == asked[1, 2] == 50 * MBIT
    assert asked[0, 2] == asked[2, 0] == 200 * MBIT


def test_the_fan_in_is_asked_what_the_senders_can_bring() -> None:
    receipt = Receipt.of(measured([10 * MBIT] * 6, 3, 20 * MBIT), [100 * MBIT, 10 * MBIT, 10 * MBIT])
    assert receipt.fan_in is not None
    assert receipt.fan_in.asked == 20 * MBIT and receipt.fan_in.senders == (1, 2)


def test_within_5_percent_is_valid_and_says_where_it_was_worst() -> None:
    receipt = Receipt.of(measured([200 * MBIT, 195 * MBIT], 2, 201 * MBIT), [200 * MBIT] * 2)
    assert receipt.worst_error == pytest.approx(-0.025, abs=1e-5)
    assert receipt.valid() and not receipt.valid(tolerance=0.02)
    assert receipt.sentence() == (
        "network: 2 links and the fan-in within 5 %; worst -2.5 % on node1 -> node0: asked 200mbit, got 195 Mbit/s"
    )


def test_a_fan_in_beyond_tolerance_is_invalid() -> None:
    receipt = Receipt.of(measured([200 * MBIT] * 2, 2, 600 * MBIT), [200 * MBIT] * 2)
    assert not receipt.valid()
    assert "NOT within 5 %" in receipt.sentence() and "the fan-in: asked 200mbit" in receipt.sentence()


def test_nothing_asked_is_valid_and_says_unshaped() -> None:
    receipt = Receipt.of(measured([5e9, 4e9], 2, 6e9), [None, None])
    assert receipt.valid() and receipt.worst_error is None
    assert (
        receipt.sentence() == "network: unshaped; 2 links and the fan-in measured, slowest 4000 Mbit/s (node1 -> node0)"
    )


def test_a_single_node_has_no_link() -> None:
    receipt = Receipt.of(Measurement([], 1500, [""], 0.1), [10 * MBIT])
    assert receipt.valid() and receipt.fan_in is None and "one node" in receipt.sentence()


def test_it_reads_back_what_it_wrote(tmp_path: Path) -> None:
    receipt = Receipt.of(measured([200 * MBIT, 195 * MBIT], 2, 201 * MBIT), [200 * MBIT] * 2)
    receipt.write(tmp_path / "receipt.json")
    assert Receipt.read(tmp_path / "receipt.json") == receipt
    assert [entry.name for entry in tmp_path.iterdir()] == ["receipt.json"]


def test_a_receipt_of_another_schema_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    Receipt.of(measured([200 * MBIT] * 2, 2, 200 * MBIT), [200 * MBIT] * 2).write(path)
    values = json.loads(path.read_text())
    assert values["schema"] == SCHEMA
    path.write_text(json.dumps(values | {"schema": SCHEMA + 1}))
    with pytest.raises(SchemaError, match=rf"receipt\.json: schema {SCHEMA + 1}, this testbed reads schema {SCHEMA}"):
        Receipt.read(path)


@pytest.mark.parametrize("text", [None, "", "{", "[]", json.dumps({"schema": SCHEMA})])
def test_what_is_no_receipt_is_refused_with_its_path(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "receipt.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises((SpecError, SchemaError), match=r"receipt\.json"):
        Receipt.read(path)
