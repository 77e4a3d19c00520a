"""Wire arithmetic, and what the kernel reports about a connection."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.net.tcp import (
    bottleneck,
    byte_counts,
    congestion_control,
    congestion_in_use,
    efficiency,
    min_round_trip,
    path_mtu,
    tcp_sockets,
    wire_rate,
)


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


def test_the_bottleneck_is_the_receiver_or_all_senders_together() -> None:
    assert bottleneck(100, [30, 30]) == 60
    assert bottleneck(50, [30, 30]) == 50
    assert bottleneck(None, [30]) == 30
    assert bottleneck(50, [None, 30]) == 50
    assert bottleneck(None, [None]) is None
