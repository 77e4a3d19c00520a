"""What the environment of a container asks for."""

from __future__ import annotations

import pytest

from testbed.rank.asked import ask
from testbed.spec.errors import SpecError
from testbed.spec.link import Link


def test_nothing_asked_is_the_spec_s_own_defaults() -> None:
    asked = ask({})
    assert (str(asked.spec.mode), asked.spec.nodes, asked.spec.link, asked.rank) == ("ring", 4, Link(), 0)
    assert (asked.spec.experiment, asked.spec.name) == ("compose", "ring-n4")


def test_every_variable_reaches_its_key() -> None:
    env = {"MODE": "gather/flat", "NODES": "2", "RATE": "200mbit", "MODEL": "lenet5", "DATA": "mnist", "BATCH": "64"}
    env |= {"STEPS": "7", "SEED": "3", "CPU_QUOTA": "2500", "CONGESTION": "reno", "RANK": "1"}
    asked = ask(env | {"SET": "warmup=1 optimizer.lr=0.5"})
    spec = asked.spec
    assert (str(spec.mode), spec.nodes, spec.model, spec.data.name) == ("gather/flat", 2, "lenet5", "mnist")
    assert (spec.link.rate, spec.batch, spec.steps, spec.seed) == (200_000_000, 64, 7, 3)
    assert (spec.node.cpus, spec.node.congestion, asked.rank) == (0.25, "reno", 1)
    assert (spec.warmup, spec.optimizer.lr) == (1, 0.5)


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert ask({"MODE": "", "RATE": "", "STEPS": "", "SET": "", "SHAPING": ""}) == ask({})


def test_a_node_has_the_link_of_its_override() -> None:
    env = {"RATE": "1gbit", "SET": "overrides.node2.link.rate=100mbit"}
    assert [ask(env | {"RANK": str(k)}).link.rate for k in range(4)] == [10**9, 10**9, 10**8, 10**9]


def test_shaping_off_takes_the_rate_out_of_the_spec_and_says_so() -> None:
    asked = ask({"RATE": "1gbit", "SHAPING": "off"})
    assert asked.spec.link.rate is None
    assert "SHAPING=off" in asked.unshaped
    assert ask({"RATE": "1gbit", "SHAPING": "egress"}).spec.link.rate == 10**9


def test_a_launcher_says_how_many_ranks_there_are_and_leaves_the_network_alone() -> None:
    asked = ask({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "h0", "MASTER_PORT": "29999"})
    assert (asked.spec.nodes, asked.rank, asked.master, asked.port) == (2, 1, "h0", 29999)
    assert (asked.place, asked.spec.experiment, asked.shaping, asked.unshaped) == ("launched", "launched", "none", "")
    assert asked.interface == "" and asked.spec.node.congestion is None
    both = ask({"WORLD_SIZE": "2", "NODES": "4"})
    assert (both.place, both.spec.nodes, both.interface) == ("compose", 4, "eth0")


REFUSALS = {
    "a rate under a launcher": ({"WORLD_SIZE": "2", "RATE": "1gbit"}, "RATE '1gbit': ranks that a launcher starts"),
    "a share under a launcher": ({"WORLD_SIZE": "2", "CPU_QUOTA": "4000"}, "CPU_QUOTA '4000': ranks that a launcher"),
    "congestion under a launcher": ({"WORLD_SIZE": "2", "CONGESTION": "reno"}, "CONGESTION 'reno'"),
    "rate": ({"RATE": "fast"}, "'fast'"),
    "mode": ({"MODE": "rong"}, "'rong'"),
    "mode with quotes": ({"MODE": 'ri"ng'}, "unknown algorithm"),
    "shaping": ({"SHAPING": "some"}, "'some'"),
    "rank": ({"RANK": "4"}, "4 nodes"),
    "rank that is no number": ({"RANK": "-1"}, "'-1'"),
    "quota": ({"CPU_QUOTA": "0.4"}, "'0.4'"),
    "steps": ({"STEPS": "many"}, "steps"),
    "setting": ({"SET": "lr"}, "'lr'"),
    "open quote": ({"SET": "a='b"}, "No closing quotation"),
    "unknown key": ({"SET": "speed=9"}, "'speed'"),
}


@pytest.mark.parametrize(("env", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_bad_value_is_refused_with_a_sentence(env: dict[str, str], words: str) -> None:
    with pytest.raises(SpecError) as refusal:
        ask(env)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "setting", ["link.rate=50mbit", "overrides.node1.link.rate=50mbit", "node.congestion=reno", "node.cpus=0.4"]
)
def test_a_setting_that_nobody_would_apply_under_a_launcher_is_refused(setting: str) -> None:
    with pytest.raises(SpecError, match=rf"SET '{setting}': ranks that a launcher starts .*docker compose up"):
        ask({"WORLD_SIZE": "2", "SET": f"warmup=1 {setting}"})


@pytest.mark.parametrize("setting", ["faults=['kill:rank1@step2']", "retries=2"])
def test_what_needs_a_controller_is_refused(setting: str) -> None:
    with pytest.raises(SpecError, match=r"faults, retries.*testbed run --on compose"):
        ask({"SET": f'"{setting}"'})
