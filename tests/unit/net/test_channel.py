"""Control connections: messages arrive whole, and anything else ends the connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from testbed.net.channel import Channel, listen, new_token, token_matches
from testbed.spec.errors import ChannelClosed

MAX_LINE_BYTES = 4096
Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A channel, and the socket at its other end."""
    with listen("127.0.0.1", 0, backlog=1) as server:
        with socket.create_connection(server.getsockname(), timeout=10) as there, server.accept()[0] as here:
            here.settimeout(10)
            yield Channel(here, "node7", MAX_LINE_BYTES), there


def test_a_message_arrives_whole_wherever_it_is_cut(ends: Ends) -> None:
    channel, there = ends
    for part in (b'{"a": ', b"1}", b'\n{"b": 2}\n{"c'):
        assert channel.next_message() is None
        there.sendall(part)
        assert channel.read_once()
    assert [channel.next_message(), channel.next_message(), channel.next_message()] == [{"a": 1}, {"b": 2}, None]


def test_what_is_sent_is_one_line(ends: Ends) -> None:
    channel, there = ends
    channel.send({"text": "two\nlines"})
    assert there.recv(100) == b'{"text": "two\\nlines"}\n'


@pytest.mark.parametrize("line", [b"GET / HTTP/1.0\r\n", b"[]\n", b"[" * 4000 + b"\n", b"\xff\n", b"\n"])
def test_a_line_that_is_no_object_ends_the_connection(ends: Ends, line: bytes) -> None:
    channel, there = ends
    there.sendall(line)
    channel.read_once()
    with pytest.raises(ChannelClosed, match="node7 sent a line that is not a JSON object"):
        channel.next_message()


def test_a_line_without_end_is_refused(ends: Ends) -> None:
    channel, there = ends
    there.sendall(b"x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(ChannelClosed, match="more than 4096 bytes"):
        for _ in range(100):
            channel.read_once()


def test_many_short_lines_at_once_are_not_too_long(ends: Ends) -> None:
    channel, there = ends
    there.sendall(b'{"a": 1}\n' * 1000)
    there.shutdown(socket.SHUT_WR)
    taken = 0
    with pytest.raises(ChannelClosed, match="node7 closed the connection"):
        while True:
            channel.read_once()
            while channel.next_message() is not None:
                taken += 1
    assert taken == 1000


def test_nothing_has_arrived_on_a_connection_that_does_not_block(ends: Ends) -> None:
    channel, _ = ends
    channel.sock.setblocking(False)
    assert not channel.read_once() and channel.next_message() is None


def test_an_offer_that_does_not_fit_is_finished_before_the_next(ends: Ends) -> None:
    channel, there = ends
    channel.sock.setblocking(False)
    for number in range(200):
        channel.try_send({"number": number, "filler": "x" * 100_000})
    received = Channel(there, "node0")
    there.settimeout(0.2)
    numbers = []
    for last in (False, True):
        with pytest.raises(ChannelClosed, match="timed out"):
            while True:
                received.read_once()
                while (message := received.next_message()) is not None:
                    numbers.append(message["number"])
        if not last:
            channel.try_send({"number": -1})  # sends what is left of the earlier one
    assert numbers == sorted(numbers) and 0 < len(numbers) < 200 and -1 not in numbers


def test_sending_to_a_closed_end_says_who_closed_it(ends: Ends) -> None:
    channel, there = ends
    there.close()
    with pytest.raises(ChannelClosed, match="node7 closed the connection"):
        for _ in range(100):
            channel.send({"a": "x" * 100_000})


def test_only_the_token_matches() -> None:
    token = new_token()
    assert token_matches(token, token) and len(token) == 32 and new_token() != token
    assert not any(token_matches(given, token) for given in ("", None, 1, [token], token[:-1], "\ud800"))
