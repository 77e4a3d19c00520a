"""Shaping that is missing or removed in real namespaces: before the probe or after it, on all nodes or one way of one.

The runs are real: `testbed.run` on the substrate netns, whose shaping is changed at a chosen moment; and ranks without
a controller, with the variables of Compose. Most are not probed: what they show does not depend on a quiet machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

import testbed
from testbed.control.runs.select import SUBSTRATES, SubstrateType, node_plans
from testbed.control.substrates.base import NodePlan, Process
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.net.shaping import Shaping
from testbed.results.conclude import Summary
from testbed.results.folder import RunFolder
from testbed.results.receipt import Receipt
from testbed.spec.errors import NetworkInvalid
from testbed.spec.link import Link
from tests.support.command import wait_for_steps
from tests.support.processes import until

pytestmark = [
    pytest.mark.net,
    pytest.mark.gloo,
    pytest.mark.skipif(os.geteuid() != 0 and not os.environ.get("CI"), reason="needs root"),
]
NODES = 3
SMALL = {"model": "lenet5", "data": "synthetic", "batch": 12, "steps": 8, "nodes": NODES, "rate": "20mbit"}
INVALID = NetworkInvalid.exit_code
Change = Callable[["Changing"], None]


class Changing(NetnsSubstrate):
    """`before_probe` is called when the nodes exist, `before_ranks` when the first rank starts.

    `blind`: it says that no rate is requested, so that nothing but the records can show a wrong one.
    """

    def __init__(
        self,
        plans: Sequence[NodePlan],
        before_probe: Change | None = None,
        before_ranks: Change | None = None,
        blind: bool = False,
    ) -> None:
        super().__init__(plans)
        self._before_probe, self._before_ranks, self._blind = before_probe, before_ranks, blind

    def __enter__(self) -> Self:
        super().__enter__()
        if self._before_probe:
            self._before_probe(self)
        return self

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        if self._before_ranks and node == 0 and "testbed.rank" in argv:
            self._before_ranks(self)
        return super().start(node, argv, env, log, quota)

    def shaping(self, node: int) -> Shaping:
        return Shaping() if self._blind else super().shaping(node)


def remove_all(substrate: NetnsSubstrate) -> None:
    for node in range(NODES):
        substrate.exec(node, ["tc", "qdisc", "del", "dev", "eth0", "root"])
        remove_ingress(substrate, node)


def remove_ingress(substrate: NetnsSubstrate, node: int) -> None:
    substrate.exec(node, ["tc", "qdisc", "del", "dev", "eth0", "ingress"])
    substrate.exec(node, ["ip", "link", "del", "ifb0"])


def run(folder: Path, changes: Mapping[str, Any], **keys: Any) -> Summary:
    kind = SubstrateType(
        name="netns",
        description="its shaping is changed",
        make=lambda spec, path: Changing(node_plans(spec), **changes),
        check=SUBSTRATES["netns"].check,
    )
    return testbed.run(on=kind, out=folder, quiet=True, allow_concurrent=True, **SMALL | keys).summary


def test_one_node_without_ingress_shaping_is_found_by_the_probe_and_nothing_is_trained(tmp_path: Path) -> None:
    summary = run(tmp_path / "r", {"before_probe": lambda substrate: remove_ingress(substrate, 2)})
    assert (summary.status, summary.steps) == ("invalid", 0)
    assert "the fan-in of node2: requested 20mbit, measured" in summary.reason and "keep_going=True" in summary.reason
    receipt = Receipt.read(RunFolder(tmp_path / "r").receipt)
    errors = {each.dst: each.error for each in receipt.fan_in_others}
    assert (errors[2] or 0) > 0.5 > (errors[1] or 0)
    assert not list((tmp_path / "r").glob("rank*.jsonl"))


def test_shaping_removed_from_all_nodes_after_the_probe_makes_the_run_invalid(tmp_path: Path) -> None:
    summary = run(tmp_path / "r", {"before_ranks": remove_all}, probe=False)
    assert (summary.status, len(summary.losses)) == ("invalid", 8)
    words = "after training: node0: egress is not shaped as requested: requested 20mbit, found no token bucket on eth0"
    assert summary.reason == words


def test_another_rate_on_one_way_of_one_node_is_named(tmp_path: Path) -> None:
    def raise_ingress(substrate: NetnsSubstrate) -> None:
        bucket = ["tbf", "rate", "1gbit", "burst", "500000b", "latency", "50ms"]
        substrate.exec(1, ["tc", "qdisc", "change", "dev", "ifb0", "root", *bucket])

    summary = run(tmp_path / "r", {"before_ranks": raise_ingress}, probe=False)
    assert summary.status == "invalid"
    assert "node1: ingress is not shaped as requested: requested 20mbit, found 1gbit on ifb0" in summary.reason


def test_packets_that_go_round_a_bucket_are_found_by_its_counter(tmp_path: Path) -> None:
    """The rates are right, but nothing is redirected to the ifb any more."""

    def unhook(substrate: NetnsSubstrate) -> None:
        substrate.exec(1, ["tc", "filter", "del", "dev", "eth0", "parent", "ffff:"])

    summary = run(tmp_path / "r", {"before_ranks": unhook}, probe=False)
    assert summary.status == "invalid"
    assert "node1: ingress is not shaped as requested" in summary.reason and "bucket on ifb0" in summary.reason


def test_ingress_that_is_missing_between_two_nodes_ends_the_run_before_training(tmp_path: Path) -> None:
    """No probe shows it: the only sender is as slow as the link."""
    summary = run(
        tmp_path / "r", {"before_probe": lambda substrate: remove_ingress(substrate, 1)}, probe=False, nodes=2
    )
    assert (summary.status, summary.steps) == ("invalid", 0)
    assert "node1: ingress is not shaped as requested: requested 20mbit, found no token bucket" in summary.reason


def test_an_impossible_speed_is_found_by_the_records_alone(tmp_path: Path) -> None:
    """A step of 0.33 MB takes at least 2.6 s at this rate."""
    summary = run(tmp_path / "r", {"before_ranks": remove_all, "blind": True}, probe=False, rate="1mbit")
    assert (summary.status, len(summary.losses)) == ("invalid", 8)
    assert "at 1mbit that takes at least" in summary.reason and "at most 103 % is possible" in summary.reason


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("ring", {}),
        ("single", {"probe": True}),
        ("ring/bucket:64KiB/pipeline", {}),
        ("ring/bucket:64KiB/overlap", {}),
        ("ring/every:3", {}),
        ("gather", {}),
        ("direct/topk:0.01", {}),
        ("ddp", {}),
        ("ring", {"overrides": {"node1": {"link": {"rate": "5mbit"}}}}),
        ("ring", {"faults": ["rate:rank1@step2+1s=5mbit"]}),
        ("ring", {"rate": None, "steps": 60, "faults": ["rate:rank1@step20=20mbit"]}),
        ("ring", {"faults": ["rate:rank1@step2=100mbit", "rate:rank0@step3=40mbit"]}),
    ],
)
def test_legal_runs_stay_valid(tmp_path: Path, mode: str, keys: dict[str, Any]) -> None:
    summary = run(tmp_path / "r", {}, **{"probe": False, "mode": mode} | keys)
    assert (summary.status, summary.reason) == ("ok", "")


@pytest.mark.quiet
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"mode": "gather"},
        {"overrides": {"node1": {"link": {"rate": "5mbit"}}}},
        {"faults": ["rate:rank1@step2+1s=5mbit"], "steps": 20},
    ],
)
def test_a_run_with_an_intact_network_is_probed_again_and_stays_valid(tmp_path: Path, keys: dict[str, Any]) -> None:
    summary = run(tmp_path / "r", {}, **keys)
    assert (summary.status, summary.reason) == ("ok", "")
    receipt = Receipt.read(RunFolder(tmp_path / "r").receipt)
    assert receipt.after is not None and receipt.after.valid() and len(receipt.after.links) == NODES
    assert len(receipt.links) == 6 and len(receipt.fan_in_others) == 2


# --- ranks without a controller ------------------------------------------------------------------------------------


def start_ranks(substrate: NetnsSubstrate, runs: Path, **variables: str) -> list[Process]:
    """Start the ranks as the entrypoint of a container does, which has shaped its network."""
    common = {"NODES": str(NODES), "MASTER_ADDR": substrate.nodes[0].address, "GLOO_SOCKET_IFNAME": "eth0"}
    common |= {"MODEL": "lenet5", "DATA": "synthetic", "BATCH": "12", "TESTBED_RUNS": str(runs)} | variables
    argv = [sys.executable, "-m", "testbed.rank"]
    return [
        substrate.start(rank, argv, common | {"RANK": str(rank)}, runs.parent / f"output{rank}.txt")
        for rank in range(NODES)
    ]


def plans(rate: int) -> list[NodePlan]:
    return [NodePlan(name=f"node{k}", link=Link(rate=rate)) for k in range(NODES)]


def only_folder(runs: Path) -> Path:
    (folder,) = (runs / "compose").iterdir()
    return folder


def test_without_a_controller_shaping_that_is_removed_makes_the_run_invalid(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with NetnsSubstrate(plans(10**6)) as substrate:
        ranks = start_ranks(substrate, runs, RATE="1mbit", STEPS="12", SET="probe=false evaluate=never")
        until(lambda: (runs / "compose").is_dir() and any((runs / "compose").iterdir()))
        wait_for_steps(only_folder(runs), 0, 1)
        remove_all(substrate)
        codes = [rank.wait(120) for rank in ranks]
    assert codes == [INVALID] * NODES, (tmp_path / "output0.txt").read_text()
    summary = json.loads((only_folder(runs) / "summary.json").read_text())
    assert summary["status"] == "invalid" and len(summary["losses"]) == 12
    assert "after training: node0: egress is not shaped as requested: requested 1mbit, found no" in summary["reason"]


@pytest.mark.quiet
def test_without_a_controller_an_intact_network_is_probed_again_and_stays_valid(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with NetnsSubstrate(plans(2 * 10**7)) as substrate:
        ranks = start_ranks(substrate, runs, RATE="20mbit", STEPS="8", SET="evaluate=never")
        codes = [rank.wait(120) for rank in ranks]
    assert codes == [0] * NODES, (tmp_path / "output0.txt").read_text()
    receipt = Receipt.read(RunFolder(only_folder(runs)).receipt)
    assert receipt.after is not None and receipt.after.valid() and len(receipt.after.links) == NODES
