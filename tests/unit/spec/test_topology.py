"""Topology: racks that hold every node once, and what a run may request of their uplinks."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.spec.errors import SpecError
from testbed.spec.experiment import Experiment, spec_from_flags
from testbed.spec.run import RunSpec
from testbed.spec.topology import Topology

SMALL = {"model": "lenet5", "data": {"name": "synthetic"}, "batch": 12, "nodes": 4}


def spec_of(**values: Any) -> RunSpec:
    return RunSpec.load(SMALL | values, "here")


def test_racks_and_uplink_are_kept_as_written() -> None:
    spec = spec_of(topology={"racks": [[0, 1], [2, 3]], "uplink": "200mbit", "delay": "5ms"})
    assert spec.topology.model_dump(mode="json") == {"racks": [[0, 1], [2, 3]], "uplink": "200mbit", "delay": "5ms"}
    assert RunSpec.from_json(spec.to_json(), "spec.json") == spec
    assert spec.topology.trunk is not None and spec.topology.trunk.needs_netem


def test_racks_alone_request_nothing_of_the_network() -> None:
    spec = spec_of(topology={"racks": [[0, 1], [2, 3]]})
    assert spec.topology.trunk is None and spec.links_requested == "" and spec.fabric.shared_uplinks == []


def test_one_rack_has_no_uplink_that_anything_passes() -> None:
    spec = spec_of(topology={"racks": [[0, 1, 2, 3]], "uplink": "10mbit"})
    assert spec.topology.trunk is None and spec.fabric.shared_uplinks == []


REFUSED = {
    "a missing node": ({"racks": [[0, 1], [2]]}, "node 3 is in no rack, and there are 4 nodes. Name every node"),
    "a repeated node": ({"racks": [[0, 1], [1, 2, 3]]}, "node 1 is in more than one place. Name each node once."),
    "an unknown node": ({"racks": [[0, 1], [2, 3, 4]]}, "there is no node 4: 4 nodes are 0 to 3. Name every node"),
    "an empty rack": ({"racks": [[0, 1, 2, 3], []]}, "must have at least 1 entry, and has 0"),
    "an uplink without racks": ({"uplink": "1mbit"}, "topology.uplink = '1mbit': is between racks, and there are none"),
    "a delay without racks": ({"delay": "5ms"}, "topology.delay = '5ms': is between racks, and there are none"),
    "a rate of nothing": ({"racks": [[0, 1], [2, 3]], "uplink": "0mbit"}, "must be greater than 0"),
    "no number": ({"racks": [["a"], [1, 2, 3]]}, "must be a whole number"),
}


@pytest.mark.parametrize(("topology", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_racks_are_refused_with_a_sentence(topology: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec_of(topology=topology)
    assert words in str(refused.value).replace('"', "'")


def test_hierarchical_without_racks_is_refused_with_racks_to_add() -> None:
    with pytest.raises(SpecError, match=r"and there are none. Add e.g. --set topology.racks=\[\[0, 1\]"):
        spec_from_flags({"mode": "hierarchical", "nodes": 4})
    with pytest.raises(SpecError, match=r"\[\[0, 1, 2\], \[3, 4\]\]"):
        spec_from_flags({"mode": "hierarchical", "nodes": 5, "batch": 20})


def test_racks_are_set_on_the_command_line() -> None:
    settings = ["topology.racks=[[0,2],[1,3]]", "topology.uplink=50mbit"]
    spec = spec_from_flags({"mode": "hierarchical"}, settings)
    assert spec.topology == Topology(racks=((0, 2), (1, 3)), uplink=50_000_000)


def test_a_network_without_shaping_keeps_the_racks() -> None:
    spec = spec_of(topology={"racks": [[0, 1], [2, 3]], "uplink": "200mbit"}).without_shaping()
    assert spec.topology == Topology(racks=((0, 1), (2, 3)))


def test_the_uplink_is_named_among_what_is_requested() -> None:
    spec = spec_of(topology={"racks": [[0, 1], [2, 3]], "uplink": "200mbit"})
    assert spec.links_requested == 'uplink {"rate":"200mbit"} between racks'


def test_racks_as_an_axis_name_their_runs() -> None:
    axes = {"topology.racks": [[[0, 1], [2, 3]], [[0], [1, 2, 3]]], "mode": ["ring"]}
    found = Experiment(name="x", title="?", base=SMALL, axes=axes).runs()
    assert [run.name for run in found] == ["racks_0-1_2-3-ring", "racks_0_1-2-3-ring"]
