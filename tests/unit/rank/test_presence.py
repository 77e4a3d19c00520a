"""Rank 0's door: ranks are let in whatever strangers do in front of it, and its closing is what they wait for."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator

import pytest

from testbed.rank import presence

HERE = "127.0.0.1"


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(presence, "PATIENCE", 1.0)
    monkeypatch.setattr(presence, "LOOK", 0.05)
    with presence.listen(HERE, 0, 3) as listener:
        yield listener


def is_kept(connection: socket.socket, seconds: float = 0.3) -> bool:
    begun = time.monotonic()
    presence.outlast(connection, seconds)
    return time.monotonic() - begun >= seconds


def test_fifty_strangers_do_not_keep_the_ranks_out(door: socket.socket) -> None:
    """Some say nothing, some talk garbage, some hang up."""
    port, rng = door.getsockname()[1], random.Random(7)
    with contextlib.ExitStack() as stay:
        for number in range(50):
            with contextlib.suppress(OSError):  # a door that is blocked
                stranger = stay.enter_context(socket.create_connection((HERE, port), timeout=0.1))
                stranger.sendall(rng.randbytes(number) if number % 3 == 1 else b"")
                if number % 3 == 2:
                    stranger.close()
        ranks = [stay.enter_context(presence.attend(HERE, port)) for _ in range(2)]
        assert all(map(is_kept, ranks))
        door.close()
        assert not any(is_kept(rank, 5.0) for rank in ranks)


def test_who_holds_most_connections_loses_the_oldest(door: socket.socket) -> None:
    port = door.getsockname()[1]
    with contextlib.ExitStack() as stay:
        rank = stay.enter_context(presence.attend(HERE, port))
        crowd = presence.ROOM + 3 + 20
        strangers = [
            stay.enter_context(socket.create_connection((HERE, port), timeout=5, source_address=("127.0.0.2", 0)))
            for _ in range(crowd)
        ]
        assert not is_kept(strangers[0], 5.0)
        assert is_kept(rank) and is_kept(strangers[-1])


def test_a_rank_asks_now_and_then_whether_rank_0s_machine_is_there(door: socket.socket) -> None:
    with presence.attend(HERE, door.getsockname()[1]) as rank:
        assert rank.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert rank.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == presence.IDLE


def test_the_interface_of_an_address_is_found() -> None:
    assert presence.interface_of("127.0.0.1") == "lo" and presence.interface_of("192.0.2.77") == ""
