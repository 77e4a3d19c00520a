"""The instrument that counts bytes: known bytes in, the same number out."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.rank.counters import InterfaceCounter, SocketCounter, open_counter

BYTES = 1_234_567


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one TCP connection over loopback, both in this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname(), timeout=10) as near:
            far, _ = server.accept()
            with far:
                far.settimeout(10)
                yield near, far


def push(near: socket.socket, far: socket.socket, count: int) -> None:
    """Send `count` bytes in blocks that fit the socket's buffer, and receive them."""
    while count:
        size = min(count, 16_384)
        near.sendall(b"x" * size)
        count -= size
        while size:
            size -= len(far.recv(size))


def test_the_sockets_counter_counts_exactly_what_was_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    counter = SocketCounter()
    sent, received = counter.read()
    push(*pair, BYTES)
    after = counter.read()
    assert (after[0] - sent, after[1] - received) == (BYTES, BYTES)  # type: ignore[operator]


def test_a_new_socket_is_counted_also_under_a_number_that_was_in_use(tmp_path: Path) -> None:
    counter = SocketCounter()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with (tmp_path / "file").open("wb") as file:
            before, number = counter.read(), file.fileno()
        with socket.create_connection(server.getsockname(), timeout=10) as near:
            assert near.fileno() == number  # the lowest free one
            near.sendall(b"x" * 1000)
            assert counter.read()[0] - before[0] == 1000  # type: ignore[operator]
        assert counter.read() == before  # closed


def test_counting_neither_closes_nor_leaks_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(50):
        SocketCounter().read()
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    push(*pair, 1000)


def test_descriptors_that_are_no_tcp_sockets_are_not_counted(tmp_path: Path) -> None:
    before = SocketCounter().read()
    one, other = socket.socketpair()  # a unix pair
    with one, other, (tmp_path / "file").open("wb") as out:
        one.sendall(b"x" * 5000)
        out.write(b"x" * 5000)
        assert SocketCounter().read() == before


def test_an_interfaces_counter_sees_payload_and_headers(pair: tuple[socket.socket, socket.socket]) -> None:
    counter = InterfaceCounter("lo")
    sent, received = counter.read()
    push(*pair, BYTES)
    after = counter.read()
    assert after[0] - sent >= BYTES  # type: ignore[operator]
    assert after[1] - received >= BYTES  # type: ignore[operator]


def test_a_missing_interface_counts_nothing() -> None:
    assert InterfaceCounter("nope0").read() == (None, None)


def test_loopback_is_shared_so_sockets_are_counted_and_elsewhere_the_interface() -> None:
    assert open_counter("lo").name == "tcp sockets"
    assert open_counter("eth7").name == "interface eth7"
