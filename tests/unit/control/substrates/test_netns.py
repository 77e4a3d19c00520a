"""Namespaces, as far as nothing is created. tests/net has the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.control.substrates import netns
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.spec.errors import Unavailable
from testbed.spec.link import Link


def test_more_nodes_than_addresses_are_refused_with_a_way_out() -> None:
    netns.check_count(240)
    with pytest.raises(Unavailable, match=r"241 nodes, .*\. Use --nodes 240 or fewer$"):
        netns.check_count(241)


def without_cgroups(monkeypatch: pytest.MonkeyPatch, uid: int = 1000) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(netns, "has_controller", lambda controller: False)


def test_without_a_quota_idle_nodes_get_copies_and_a_note_says_what_is_not_applied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_cgroups(monkeypatch)
    plan = NodePlan(name="node0", cpus=0.4, link=Link(rate=10**8))
    found = NetnsSubstrate([plan], tmp_path, idle=3)
    assert len(found.nodes) == 1 and len(found._plans) == 4 and not found._plans[3].link.shaped
    assert list(found.notes) == [netns.no_quota(0.4)]


def test_without_a_requested_quota_or_as_root_there_are_no_copies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_cgroups(monkeypatch)
    assert len(NetnsSubstrate([NodePlan(name="node0")], tmp_path, idle=3)._plans) == 1
    without_cgroups(monkeypatch, uid=0)
    assert len(NetnsSubstrate([NodePlan(name="node0", cpus=0.4)], tmp_path, idle=3)._plans) == 1
