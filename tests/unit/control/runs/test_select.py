"""Where a run goes, and what is asked of its nodes."""

from __future__ import annotations

import pytest

from testbed.control.runs import select
from testbed.spec.errors import SpecError, Unavailable
from testbed.spec.inventory import Inventory
from testbed.spec.run import RunSpec


def spec(**values):
    return RunSpec.load({"nodes": 4, "link": {"rate": "200mbit"}, "node": {"cpus": 0.4}, **values}, "test")


def test_an_override_changes_one_node_and_no_other():
    overrides = {"node2": {"link": {"rate": "50mbit"}}, "node3": {"cpus": 0.2}}
    plans = select.plans(spec(overrides=overrides))
    assert [plan.link.rate for plan in plans] == [200_000_000, 200_000_000, 50_000_000, 200_000_000]
    assert [plan.cpus for plan in plans] == [0.4, 0.4, 0.4, 0.2]


def test_single_gets_one_nodes_share():
    (plan,) = select.plans(spec(mode="single"))
    assert (plan.name, plan.cpus) == ("node0", 0.4)


def refusing(reason):
    def check(plans):
        raise Unavailable(reason)

    return check


def test_auto_takes_the_best_that_is_there_and_says_what_is_not(monkeypatch):
    kinds = dict(select.KINDS)
    for name, reason in {"compose": "no engine", "netns": "no root"}.items():
        kind = kinds[name]
        kinds[name] = select.Kind(kind.make, refusing(reason), kind.what, kind.shapes)
    monkeypatch.setattr(select, "KINDS", kinds)
    chosen = select.choose("auto", spec())
    assert chosen.name == "process" and "no engine" in chosen.why and "no root" in chosen.why


def test_where_nothing_is_shaped_the_spec_says_so():
    chosen = select.choose("process", spec())
    fitted = chosen.fit(spec(overrides={"node1": {"cpus": 0.1}}))
    assert not fitted.link.shaped and fitted.node.cpus is None and fitted.overrides == {}


def test_a_link_of_one_node_is_refused_like_one_of_all_where_nothing_is_shaped():
    one = spec(link={}, overrides={"node2": {"link": {"rate": "50mbit"}}, "node3": {"cpus": 0.2}})
    with pytest.raises(Unavailable, match=r'^link \{"rate":"50mbit"\} of node2: cannot be shaped here.*--on netns'):
        select.check_shaping(one, select.choose("process", one), "process")
    with pytest.raises(Unavailable, match=r'^link \{"segment":"16KiB"\}: cannot be shaped here'):
        select.check_shaping(spec(link={"segment": "16KiB"}), select.choose("process", one), "process")
    select.check_shaping(one, select.Place("netns", "", True), "netns")
    plain = spec(link={}, faults=["cut:rank0@step3"])  # a fault is no link, and checked elsewhere
    select.check_shaping(plain, select.choose("process", plain), "process")


def test_an_unknown_place_is_refused():
    with pytest.raises(SpecError, match=r"'mars'.*process"):
        select.choose("mars", spec())


def test_the_example_inventory_is_a_valid_one(repository):
    inventory = Inventory.read(repository / "inventory" / "hosts.example.toml")
    assert [node.name for node in inventory.nodes] == ["node0", "node1", "node2", "node3"]
