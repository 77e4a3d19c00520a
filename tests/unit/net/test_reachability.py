"""Nodes that reach each other at one port, and nodes that do not: real sockets on loopback addresses."""

from __future__ import annotations

import socket
import threading
import time

from testbed.net.reachability import reach_all

ADDRESSES = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def all_reach(ranks: list[int], port: int, timeout_s: float) -> dict[int, dict[str, object]]:
    answers: dict[int, dict[str, object]] = {}

    def take_part(rank: int) -> None:
        answers[rank] = reach_all(rank, port, ADDRESSES, timeout_s)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_nodes_that_reach_each_other_say_so_at_once() -> None:
    begun = time.monotonic()
    answers = all_reach([0, 1, 2], free_port(), timeout_s=20)
    assert list(answers.values()) == [{"busy": "", "missing": []}] * 3 and time.monotonic() - begun < 15


def test_a_node_that_does_not_come_is_named_by_the_others() -> None:
    answers = all_reach([0, 2], free_port(), timeout_s=1.0)
    assert [answer["missing"] for answer in answers.values()] == [[1], [1]]


def test_a_program_that_answers_without_saying_its_rank_does_not_count() -> None:
    with socket.create_server(("127.0.0.2", 0), backlog=8) as stranger:
        answer = reach_all(0, stranger.getsockname()[1], ADDRESSES[:2], timeout_s=1.0)
    assert answer == {"busy": "", "missing": [1]}


def test_a_port_that_is_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = reach_all(0, server.getsockname()[1], ADDRESSES, timeout_s=0.5)
    assert "in use" in str(answer["busy"])
