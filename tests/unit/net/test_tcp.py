"""Wire arithmetic, and what the kernel reports about a connection."""

from __future__ import annotations

import os
import platform
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from testbed.net import tcp
from testbed.net.tcp import (
    byte_counts,
    check_congestion_control,
    congestion_control,
    congestion_controls,
    congestion_in_use,
    efficiency,
    min_round_trip,
    path_mtu,
    tcp_sockets,
    wire_rate,
)
from testbed.spec.errors import Unavailable
from testbed.spec.words import Place, reading


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one TCP connection over loopback, both in this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname(), timeout=10) as near, server.accept()[0] as far:
            yield near, far


def test_the_kernel_counts_bytes_round_trip_and_mtu_of_a_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    near.sendall(b"x" * 10_000)
    assert far.recv(10_000, socket.MSG_WAITALL)
    assert byte_counts(near) == (10_000, 0) and byte_counts(far) == (0, 10_000)
    assert 0 < min_round_trip(near) < 1.0
    assert path_mtu(near) > 1500  # loopback's, not an assumption


def test_bytes_that_tcp_sent_again_count_once() -> None:
    """Both halves of tcp_info that count bytes, as in include/uapi/linux/tcp.h."""

    class Connection:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            info = bytearray(240)
            struct.pack_into("=Q", info, 128, 500)  # tcpi_bytes_received
            struct.pack_into("=QQ", info, 200, 10_300, 300)  # tcpi_bytes_sent, tcpi_bytes_retrans
            return bytes(info[:size])

    assert byte_counts(cast(socket.socket, Connection())) == (10_000, 500)


def test_the_congestion_control_of_a_connection_is_read_back(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    assert congestion_control(pair[0]) == "reno"


def test_connections_of_a_node_to_itself_do_not_count(pair: tuple[socket.socket, socket.socket]) -> None:
    assert congestion_in_use() == "no connection"


def test_all_tcp_sockets_and_no_other_descriptors_are_found(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    unix, other = socket.socketpair()
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with unix, other, udp, (tmp_path / "file").open("wb"):
        found = {sock.fileno() for sock in tcp_sockets()}
        assert {end.fileno() for end in pair} <= found
        assert not {end.fileno() for end in (unix, other, udp)} & found
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_headers_leave_0_956_of_the_wire() -> None:
    assert efficiency(1500) == pytest.approx(0.9564, abs=1e-4)
    assert wire_rate(1448, 1500) == pytest.approx(1514)


@pytest.mark.parametrize("place", [Place.COMMAND_LINE, Place.COMPOSE])
def test_a_congestion_control_that_does_not_exist_is_refused_with_those_that_do(place: Place) -> None:
    known = ", ".join(congestion_controls())
    name = {Place.COMMAND_LINE: "--set node.congestion", Place.COMPOSE: "CONGESTION"}[place]
    with reading(place), pytest.raises(Unavailable) as refusal:
        check_congestion_control("foo")
    rule = "this kernel has no such TCP congestion control"
    assert str(refusal.value) == f"{name}='foo': {rule}. Use one of {known}."


def test_those_that_exist_are_accepted() -> None:
    assert "reno" in congestion_controls()  # part of every kernel
    for name in [None, *tcp.LOADED.read_text().split()]:
        check_congestion_control(name)


def test_a_module_that_is_not_loaded_counts_as_existing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / platform.release()
    folder.mkdir()
    lines = ["kernel/net/ipv4/tcp_fooish.ko.xz:", "kernel/net/ipv4/tcp_diag.ko: kernel/net/ipv4/inet_diag.ko"]
    (folder / "modules.dep").write_text("\n".join(lines))
    monkeypatch.setattr(tcp, "MODULES", tmp_path)
    check_congestion_control("fooish")
    assert "diag" not in congestion_controls()


def test_nothing_is_refused_where_the_kernel_has_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "LOADED", tmp_path / "none")
    check_congestion_control("foo")
