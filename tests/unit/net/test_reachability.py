"""Meeting at one port, and reading each other's clocks: real sockets on loopback addresses."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from testbed.net.reachability import meet

ADDRESSES = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def all_meet(ranks: list[int], port: int, patience: float) -> dict[int, dict[str, object]]:
    answers: dict[int, dict[str, object]] = {}

    def take_part(rank: int) -> None:
        answers[rank] = meet(rank, port, ADDRESSES, patience)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_those_who_reach_each_other_say_so_at_once() -> None:
    begun = time.monotonic()
    answers = all_meet([0, 1, 2], free_port(), patience=20)
    assert list(answers.values()) == [{"busy": "", "missing": []}] * 3 and time.monotonic() - begun < 15


def test_one_that_does_not_come_is_named_by_the_others() -> None:
    answers = all_meet([0, 2], free_port(), patience=1.0)
    assert [answer["missing"] for answer in answers.values()] == [[1], [1]]


def test_whoever_answers_without_saying_who_it_is_does_not_count() -> None:
    with socket.create_server(("127.0.0.2", 0), backlog=8) as stranger:
        answer = meet(0, stranger.getsockname()[1], ADDRESSES[:2], patience=1.0)
    assert answer == {"busy": "", "missing": [1]}


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = meet(0, server.getsockname()[1], ADDRESSES, patience=0.5)
    assert "in use" in str(answer["busy"])


@pytest.mark.parametrize("address", ["127.0.0.1"])
def test_the_interface_of_an_address_is_found(address: str) -> None:
    from testbed.rank.presence import interface_of

    assert interface_of(address) == "lo" and interface_of("192.0.2.77") == ""
