"""Names and addresses of interfaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.net import interfaces
from testbed.net.interfaces import address_of, interface_of, route_to

IPV6 = """\
fe80000000000000021122fffe334455 02 40 20 80     eth7
20010db8000000000000000000000007 02 40 00 80     eth7
"""


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.77") == ""


def test_the_address_of_an_interface_is_found() -> None:
    assert address_of("lo") == "127.0.0.1" and address_of("no-such") == ""


def test_an_interface_without_ipv4_has_its_global_ipv6_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "if_inet6").write_text(IPV6)
    monkeypatch.setattr(interfaces, "IPV6_ADDRESSES", tmp_path / "if_inet6")
    assert address_of("eth7") == "2001:db8::7" and interface_of("2001:db8::7") == "eth7"


def test_the_own_address_on_the_way_to_a_host() -> None:
    assert route_to("127.0.0.1", 1) == "127.0.0.1"
