"""Inventory: nodes in rank order; values that a shell, ssh or a path treats specially are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.spec.errors import SpecError
from testbed.spec.inventory import Inventory

GOOD: dict[str, Any] = {
    "name": "node0",
    "address": "10.0.0.1",
    "user": "ann",
    "port": 2222,
    "key": "~/.ssh/id_ed25519",
    "interface": "eth0",
    "cpus": 0.4,
    "jump": "bastion.example.org",
}


def load(**changes: Any) -> Inventory:
    return Inventory.load({"nodes": [GOOD | changes]}, "nodes.toml")


def test_a_file_lists_the_nodes_in_rank_order(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text('nodes = [{name = "b", address = "fe80::1"}, {name = "a", address = "host-7.lan", port = 2200}]')
    inventory = Inventory.read(path)
    assert [(node.name, node.address, node.port) for node in inventory.nodes] == [
        ("b", "fe80::1", None),
        ("a", "host-7.lan", 2200),
    ]


def test_a_node_with_every_key_is_accepted() -> None:
    assert load().nodes[0].model_dump() == GOOD


HOSTILE = [
    "",
    " ",
    "-oProxyCommand=reboot",
    "a b",
    "a;reboot",
    "$(reboot)",
    "`reboot`",
    "a|b",
    "a&b",
    "a>b",
    "a\nb",
    "node0\n",
    "a\x00b",
    "a'b",
    'a"b',
    "a\\b",
    "{a,b}",
    "*",
    "ü",
    "a" * 300,
]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", ["name", "address", "user", "key", "interface", "jump"])
def test_a_hostile_value_is_refused_and_named(key: str, value: str) -> None:
    with pytest.raises(SpecError) as refusal:
        load(**{key: value})
    assert f"nodes.0.{key} = " in str(refusal.value)


@pytest.mark.parametrize("value", ["../up", "a/b", ".hidden", "a-", "a."])
@pytest.mark.parametrize("key", ["name", "jump"])
def test_a_name_is_no_path(key: str, value: str) -> None:
    with pytest.raises(SpecError, match=f"nodes.0.{key}"):
        load(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("port", 0), ("port", 65536), ("cpus", 0), ("cpus", -1), ("cpus", float("inf"))]
)
def test_a_number_out_of_range_is_refused(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"nodes.0.{key} = "):
        load(**{key: value})


@given(st.text(max_size=20))
def test_whatever_is_accepted_as_an_address_has_only_plain_characters(text: str) -> None:
    try:
        address = load(address=text).nodes[0].address
    except SpecError:
        return
    assert not address.startswith(("-", ".")) and all(c.isascii() and (c.isalnum() or c in ".:-") for c in address)


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match=r"nodes \['node0'\]: node names must be unique. Rename all but one"):
        Inventory.load({"nodes": [GOOD, GOOD]}, "nodes.toml")


def test_no_nodes_and_unknown_keys_are_refused() -> None:
    with pytest.raises(SpecError, match="nodes"):
        Inventory.load({"nodes": []}, "nodes.toml")
    with pytest.raises(SpecError, match=r"unknown key 'nodes\.0\.pasword'; known keys: address, cpus, interface"):
        load(pasword="x")


@pytest.mark.parametrize("address", ["[fe80::1]", "fe80::1", "[2001:db8::7]"])
def test_an_ipv6_address_may_be_in_brackets(address: str) -> None:
    assert load(address=address).nodes[0].address == address.strip("[]")


@pytest.mark.parametrize("address", ["[fe80::1]:22", "[fe80::1", "fe80::1]", "host:22/x", "[]"])
def test_an_address_of_another_form_is_refused_with_the_rule(address: str) -> None:
    with pytest.raises(SpecError) as refusal:
        load(address=address)
    value = repr("" if address == "[]" else address)
    rule = "a host name, an IPv4 or IPv6 address, or an SSH alias: letters, digits, ., : and -, without a port"
    way_out = "Write e.g. nodes.0.address = '192.0.2.11'."
    assert str(refusal.value) == f"nodes.toml: nodes.0.address = {value}: must be {rule}. {way_out}"
