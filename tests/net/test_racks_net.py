"""Racks in real namespaces: receipts of all three kinds, a training run, and an uplink that is not as requested."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

import testbed
from testbed.control.runs.run import probe
from testbed.control.runs.select import SUBSTRATES, SubstrateType, node_plans
from testbed.control.substrates.base import NodePlan, Process
from testbed.control.substrates.netns import NetnsSubstrate, check
from testbed.results.conclude import Summary
from testbed.results.folder import RunFolder
from testbed.results.receipt import Receipt
from testbed.spec.errors import Unavailable
from testbed.spec.run import RunSpec

pytestmark = [
    pytest.mark.net,
    pytest.mark.gloo,
    pytest.mark.skipif(os.geteuid() != 0 and not os.environ.get("CI"), reason="needs root"),
]
RACKS = [[0, 1], [2, 3]]
SMALL = {"model": "lenet5", "data": "synthetic", "batch": 12, "steps": 8, "nodes": 4, "rate": "40mbit"}
Change = Callable[["Changing"], None]


class Changing(NetnsSubstrate):
    """`before_probe` is called when the nodes exist, `before_ranks` when the first rank starts."""

    def __init__(
        self, plans: Sequence[NodePlan], before_probe: Change | None = None, before_ranks: Change | None = None
    ) -> None:
        super().__init__(plans)
        self._before_probe, self._before_ranks = before_probe, before_ranks

    def __enter__(self) -> Self:
        super().__enter__()
        if self._before_probe:
            self._before_probe(self)
        return self

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        if self._before_ranks and node == 0 and "testbed.rank" in argv:
            self._before_ranks(self)
        return super().start(node, argv, env, log, quota)


def run(folder: Path, *, uplink: str = "20mbit", racks: list[list[int]] = RACKS, **keys: Any) -> Summary:
    changes = {name: keys.pop(name) for name in ("before_probe", "before_ranks") if name in keys}
    kind = SubstrateType(
        name="netns",
        description="its uplinks are changed",
        make=lambda spec, path: Changing(node_plans(spec), **changes),
        check=SUBSTRATES["netns"].check,
    )
    topology = {"racks": racks, "uplink": uplink}
    values = SMALL | {"topology": topology} | keys
    return testbed.run(on=kind, out=folder, quiet=True, allow_concurrent=True, **values).summary


def set_rate(*devices: str, rate: str = "1gbit") -> Change:
    def change(substrate: Changing) -> None:
        for device in devices:
            bucket = ["tbf", "rate", rate, "burst", "500000b", "latency", "50ms"]
            substrate._in_switch(["tc", "qdisc", "change", "dev", device, "root", *bucket])

    return change


def remove(*devices: str) -> Change:
    def change(substrate: Changing) -> None:
        for device in devices:
            substrate._in_switch(["tc", "qdisc", "del", "dev", device, "root"])

    return change


@pytest.mark.quiet
@pytest.mark.parametrize("racks", [[[0], [1, 2, 3]], [[0, 3], [1, 4], [2, 5]]], ids=str)
def test_links_inside_and_across_and_the_uplinks_are_within_5_percent(racks: list[list[int]]) -> None:
    nodes = sum(map(len, racks))
    values = {"nodes": nodes, "batch": nodes, "link": {"rate": "80mbit"}}
    plans = node_plans(RunSpec.load(values | {"topology": {"racks": racks, "uplink": "40mbit"}}, "test"))
    with NetnsSubstrate(plans) as substrate:
        receipt = probe(substrate, plans, lambda event: None)
        if not receipt.valid():
            receipt = receipt.better(probe(substrate, plans, lambda event: None))
    assert receipt.valid(), receipt.sentence()
    requested = {each.across: each.requested for each in receipt.links}
    assert requested[True] == 40_000_000 and requested.get(False, 80_000_000) == 80_000_000
    assert {each.requested for each in receipt.uplinks} == {40_000_000}
    assert len(receipt.uplinks) == (2 if len(racks) == 2 else 6)


@pytest.mark.quiet
def test_a_run_across_racks_has_a_receipt_of_each_kind_before_and_after_training(tmp_path: Path) -> None:
    summary = run(tmp_path / "r", mode="hierarchical")
    assert (summary.status, summary.reason) == ("ok", "") and summary.replicas_agree
    receipt = Receipt.read(RunFolder(tmp_path / "r").receipt)
    assert len([link for link in receipt.links if link.across]) == 8 and len(receipt.uplinks) == 2
    assert receipt.after is not None and len(receipt.after.uplinks) == 1 and receipt.after.valid()


def test_an_uplink_that_is_not_shared_is_found_by_the_probe_and_nothing_is_trained(tmp_path: Path) -> None:
    """All links across are right, because each is as slow as the uplink should be."""
    faster = set_rate("up0", "down1", rate="40mbit")
    summary = run(tmp_path / "r", rate="20mbit", before_probe=faster)
    assert (summary.status, summary.steps) == ("invalid", 0)
    assert "the uplink out of rack 0, 4 pairs at once: requested 20mbit, measured" in summary.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove("up1"), "uplink of rack 1: egress is not shaped as requested: requested 20mbit, found no token bucket"),
        (set_rate("down0"), "uplink of rack 0: ingress is not shaped as requested: requested 20mbit, found 1gbit"),
    ],
)
def test_an_uplink_changed_during_training_makes_the_run_invalid(tmp_path: Path, change: Change, words: str) -> None:
    summary = run(tmp_path / "r", before_ranks=change, probe=False)
    assert summary.status == "invalid" and words in summary.reason and len(summary.losses) == 8


@pytest.mark.parametrize("mode", ["ring", "ring/bucket:64KiB/pipeline"])
def test_legal_runs_stay_valid(tmp_path: Path, mode: str) -> None:
    summary = run(tmp_path / "r", mode=mode, probe=False, racks=[[0, 2], [1, 3]])
    assert (summary.status, summary.reason) == ("ok", "")


def test_a_delay_between_racks_is_refused_where_the_kernel_has_no_netem() -> None:
    topology = {"racks": RACKS, "uplink": "40mbit", "delay": "5ms"}
    plans = node_plans(RunSpec.load({"nodes": 4, "topology": topology}, "test"))
    try:
        check(plans)
    except Unavailable as refused:
        assert "lacks delay and loss (netem)" in str(refused)
