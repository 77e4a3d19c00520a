"""A hard-coded master address and interface are replaced, and nothing else."""

from __future__ import annotations

from testbed.attach.rewrite import request, rewrite_url, rewrite_variables

WANTED = {"address": ["10.10.1.1", "127.0.0.1"], "interface": ["eth1", "lo"]}


def test_only_what_differs_is_requested() -> None:
    assert request("10.10.1.1", "eth1", "127.0.0.1", "lo") == WANTED
    assert request("10.10.1.1", "eth1", "10.10.1.1", "eth1") == {} == request("", "", "127.0.0.1", "lo")


def test_the_address_in_a_url_is_replaced_and_the_port_kept() -> None:
    changed: list[str] = []
    assert rewrite_url(WANTED, "tcp://10.10.1.1:6585", changed) == "tcp://127.0.0.1:6585"
    assert changed == [
        "init_process_group used tcp://127.0.0.1:6585 instead of tcp://10.10.1.1:6585:"
        " no node has the address 10.10.1.1 here"
    ]
    for url in ("env://", "tcp://10.10.1.11:6585", "tcp://10.10.1.2:6585"):
        assert rewrite_url(WANTED, url, changed) == url
    assert len(changed) == 1


def test_variables_that_the_script_has_set_are_replaced() -> None:
    changed: list[str] = []
    variables = {"MASTER_ADDR": "10.10.1.1", "GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth7", "MINE": "eth1"}
    rewrite_variables(WANTED, variables, changed)
    assert variables["MASTER_ADDR"] == "127.0.0.1" and variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert variables["NCCL_SOCKET_IFNAME"] == "eth7" and variables["MINE"] == "eth1" and len(changed) == 2
