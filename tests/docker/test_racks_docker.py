"""Racks in containers: a network per rack, a router between them, and what a run makes of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import testbed
from testbed.control.runs.select import SUBSTRATES, SubstrateType, node_plans
from testbed.control.substrates import engine
from testbed.control.substrates.base import NodePlan, Process
from testbed.control.substrates.compose import ComposeSubstrate
from testbed.control.substrates.docker_cli import PROJECT_LABEL
from testbed.results.conclude import Summary
from testbed.results.folder import RunFolder
from testbed.results.receipt import Receipt
from testbed.spec.link import Link
from tests.docker.cluster import wait_for
from tests.docker.test_isolation import REACH, Listener, gateway_of

pytestmark = pytest.mark.docker
RACKS = [[0, 1], [2, 3]]
SMALL = {"model": "lenet5", "data": "synthetic", "batch": 12, "steps": 8, "nodes": 4, "rate": "40mbit"}
Change = Callable[["Changing"], None]


class Changing(ComposeSubstrate):
    """`before_ranks` is called when the first rank starts."""

    def __init__(self, plans: Sequence[NodePlan], folder: Path, before_ranks: Change | None) -> None:
        super().__init__(plans, folder)
        self._before_ranks = before_ranks

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        if self._before_ranks and node == 0 and "testbed.rank" in argv:
            self._before_ranks(self)
        return super().start(node, argv, env, log, quota)


def run(folder: Path, before_ranks: Change | None = None, **keys: Any) -> Summary:
    kind = SubstrateType(
        name="compose",
        description="its uplinks are changed",
        make=lambda spec, path: Changing(node_plans(spec), path, before_ranks),
        check=SUBSTRATES["compose"].check,
    )
    values = SMALL | {"topology": {"racks": RACKS, "uplink": "20mbit"}} | keys
    return testbed.run(on=kind, out=folder, quiet=True, allow_concurrent=True, **values).summary


def left_of(project: str) -> list[str]:
    """The names of the containers and networks of a project."""
    with contextlib.closing(engine.connect()) as client:
        named = {"label": f"{PROJECT_LABEL}={project}"}
        found = [*client.containers.list(all=True, filters=named), *client.networks.list(filters=named)]
        return [each.name for each in found]


@pytest.mark.quiet
def test_a_run_across_racks_has_a_receipt_of_each_kind_before_and_after_training(tmp_path: Path) -> None:
    summary = run(tmp_path / "runs/r", mode="hierarchical")
    assert (summary.status, summary.reason) == ("ok", "") and summary.replicas_agree
    receipt = Receipt.read(RunFolder(tmp_path / "runs/r").receipt)
    assert {(link.across, link.requested) for link in receipt.links} == {(True, 20_000_000), (False, 40_000_000)}
    assert [(each.rack, each.outgoing, len(each.pairs)) for each in receipt.uplinks] == [(0, True, 4), (1, True, 4)]
    assert receipt.after is not None and len(receipt.after.uplinks) == 1 and receipt.after.valid()


def test_an_uplink_that_loses_its_shaping_during_training_makes_the_run_invalid(tmp_path: Path) -> None:
    """All buckets are there, but what leaves rack 0 no longer passes one."""

    def unshape(substrate: Changing) -> None:
        substrate._router.exec_run(["tc", "qdisc", "del", "dev", "down0", "ingress"])

    summary = run(tmp_path / "runs/r", before_ranks=unshape, probe=False)
    assert summary.status == "invalid" and len(summary.losses) == 8 and summary.replicas_agree
    assert "uplink of rack 0: egress is not shaped as requested: requested 20mbit, and only 0 MB of" in summary.reason


def test_ranks_reach_all_racks_and_nothing_else_and_clean_removes_the_router_and_its_networks(tmp_path: Path) -> None:
    uplink = Link(rate=20_000_000)
    plans = [NodePlan(name=f"node{k}", rack=k, uplink=uplink, congestion="cubic") for k in range(2)]
    with ComposeSubstrate(plans, tmp_path / "runs/r") as substrate:
        serving = ["python3", "-m", "http.server", "8000", "--bind", substrate.nodes[0].address]
        substrate.start(0, serving, {}, tmp_path / "server.log")
        peer = f"{substrate.nodes[0].address}:8000"
        with contextlib.closing(Listener("0.0.0.0")) as host:
            port = host.where.rpartition(":")[2]
            outside = [f"{gateway_of(network)}:{port}" for network in ("bridge", f"{substrate._project}_rack1")]

            def reached() -> list[bool]:
                log = tmp_path / "reach.log"
                log.unlink(missing_ok=True)
                command = ["python3", "-c", REACH, peer, *outside, "router"]
                assert substrate.start(1, command, {}, log).wait(60) == 0, log.read_text()
                found: list[bool] = json.loads(log.read_text())
                return found

            wait_for(lambda: reached()[0], "the peer to listen")
            substrate.cut(1)
            substrate.reconnect(1)
            assert reached() == [True, False, False, False]
            assert "congctl cubic" in substrate.exec(1, ["ip", "route", "get", substrate.nodes[0].address])
            assert host.lines == []
        settings = substrate._router.attrs["HostConfig"]
        assert (settings["CapDrop"], settings["CapAdd"]) == (["ALL"], ["NET_ADMIN"]) and not settings["Binds"]
        assert "default" not in substrate._router.exec_run(["ip", "route"]).output.decode()
        assert len(left_of(substrate._project)) == 5
        (project,) = [found for found in engine.projects() if found.name == substrate._project]
        engine.remove_project(project)  # as `testbed clean` does
        assert left_of(substrate._project) == []
