"""Round trips, lost packets and rates between two ends of a connection, on loopback, where nothing is added."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from testbed.net.distance import (
    EXCHANGES,
    MAX_BATCH,
    OVERLOAD,
    PAYLOAD_BYTES,
    PORT,
    WIRE_BYTES,
    Plan,
    Receiver,
    answer,
    batch_for,
    packets_for,
)
from testbed.spec.errors import ProbeError
from testbed.spec.fabric import Distance, Fabric

TOKEN = b"0123456789abcdef0123456789abcdef"
MBIT = 10**6


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    with there, here:
        yield there, here


def sending(sock: socket.socket, plan: Plan, token: bytes = TOKEN) -> threading.Thread:
    thread = threading.Thread(target=answer, args=(sock, token, plan, 20.0), daemon=True)
    thread.start()
    return thread


def test_round_trips_loss_and_rate_are_measured_over_one_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    plan = Plan(exchanges=EXCHANGES, packets=1200, batch=MAX_BATCH, fill=20 * MBIT, segments=2)
    sender = sending(pair[0], plan)
    with Receiver([pair[1]], TOKEN, 20.0) as receiver:
        trips = receiver.round_trips(EXCHANGES)
        lost = receiver.lost(plan, jitter=0.0)
        packets, seconds = receiver.count(0.1, 0.2, lambda rates: len(rates) == 3)
        receiver.go()
        sender.join(10)
    assert len(trips) == EXCHANGES and 0 < min(trips) < 0.1
    assert lost == 0
    assert (
        10 * MBIT < 8 * WIRE_BYTES * packets / seconds < 30 * MBIT
    )  # no link limits it, so it is what was sent, or less on a busy machine
    assert not sender.is_alive()


def test_a_delay_of_the_sender_is_in_every_round_trip(pair: tuple[socket.socket, socket.socket]) -> None:
    def late() -> None:
        pair[0].recv(2)
        for _ in range(3):
            data = pair[0].recv(1)
            time.sleep(0.02)
            pair[0].sendall(data)

    threading.Thread(target=late, daemon=True).start()
    with Receiver([pair[1]], TOKEN, 20.0) as receiver:
        assert min(receiver.round_trips(3)) >= 0.02


def test_packets_of_others_do_not_count_and_missing_ones_are_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    plan = Plan(packets=100, batch=50)
    sender = sending(pair[0], plan, token=b"another" * 5)
    with Receiver([pair[1]], TOKEN, 20.0) as receiver:
        assert receiver.lost(plan, jitter=0.0) == 100
        receiver.go()
        sender.join(10)


def test_the_kernel_counts_datagrams_of_the_right_size_and_beginning_alone(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    right = TOKEN[:16].ljust(PAYLOAD_BYTES, b"\0")
    wrong = [right[:-1], right + b"\0", TOKEN[:12].ljust(PAYLOAD_BYTES, b"\0"), b""]

    def slice_(rates: Sequence[float]) -> bool:
        if rates:
            return True
        for _ in range(3000):  # more than the socket's buffer could hold
            udp.send(right)
        for each in wrong:
            udp.send(each)
        return False

    with Receiver([pair[1]], TOKEN, 20.0) as receiver, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        (port,) = PORT.unpack(pair[0].recv(PORT.size))
        udp.connect(("127.0.0.1", port))
        udp.send(right)
        assert receiver.count(0.0, 0.5, slice_)[0] == 3000


def test_a_sender_that_is_silent_is_not_waited_for_without_end(pair: tuple[socket.socket, socket.socket]) -> None:
    with Receiver([pair[1]], TOKEN, 0.3) as receiver:
        with pytest.raises(ProbeError, match=r"^127\.0\.0\.1 has not sent 100 datagrams in 0\.3 s$"):
            receiver.lost(Plan(packets=100, batch=50), jitter=0.0)


def test_a_sender_that_ends_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    with Receiver([pair[1]], TOKEN, 20.0) as receiver, pytest.raises((ProbeError, OSError)):
        receiver.round_trips(2)


def test_both_ends_of_a_pair_have_the_same_plan_by_what_is_requested() -> None:
    near, lossy = Distance(0.02), Distance(0.05, loss=0.01)
    fabric = Fabric.of([20 * MBIT] * 4, distances=[lossy, near, near, near])
    assert Plan.of(fabric, [(1, 2)], (1, 2), single=True) == Plan(EXCHANGES, 0, 250, None)
    assert Plan.of(fabric, [(0, 1)], (0, 1), single=True) == Plan(EXCHANGES, 2000, 250, OVERLOAD * 20 * MBIT, 3, 3)
    assert Plan.of(fabric, [(1, 0)], (1, 0), single=True).packets == 0  # its acknowledgements are lost, not its data
    into = [(0, 3), (1, 3), (2, 3)]
    assert Plan.of(fabric, into, (1, 3), single=False).fill == 10 * MBIT
    fast = Fabric.of([100 * MBIT] * 2, distances=[lossy, near])
    assert Plan.of(fast, [(0, 1)], (0, 1), single=True).segments == 16
    assert packets_for(0.001) == 10_000 and packets_for(0.5) == 1000 and batch_for(MBIT) < batch_for(None)
