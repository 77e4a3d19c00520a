"""The instrument that counts bytes: known bytes in, the same number out."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.rank import counters
from testbed.rank.counters import (
    CpuMeter,
    CpuTime,
    InterfaceCounter,
    SocketCounter,
    machine_id,
    open_counter,
    read_cpu_time,
)

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


WORK_S = 0.2
BURN = f"import time\nwhile time.process_time() < {WORK_S}: pass"


def own_cpu() -> float:
    found = read_cpu_time()
    assert found is not None
    return found.own


def burn() -> None:
    until = time.thread_time() + WORK_S
    while time.thread_time() < until:
        pass


def test_the_machines_time_is_that_of_its_cores_without_idle_time_and_interrupts(tmp_path: Path) -> None:
    """User, nice and system are sampled at ticks, so they are not used."""
    stat, found = tmp_path / "stat", list[CpuTime]()
    for unused in ("9000 70 400 300 30", "9010 80 420 330 60"):
        stat.write_text(f"cpu  500 20 80 {unused} 0 0\ncpu0 1 1 1 1 1 1 1 0 0 0\ncpu1 1 1 1 1 1 1 1 0 0 0\nintr 1\n")
        reading = read_cpu_time(stat)
        assert reading is not None
        found.append(reading)
    first, second = found
    elapsed = second.at - first.at
    assert second.machine - first.machine == pytest.approx(2 * elapsed - 100 / os.sysconf("SC_CLK_TCK"), abs=1e-6)


@pytest.mark.parametrize("text", [None, "", "cpu\n", "cpu 1 2 3 a b c d e\n", "cpu 1 2 3 4 5 6 7 8\n", "intr 1 2 3\n"])
def test_a_kernel_that_counts_nothing_is_no_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert read_cpu_time(tmp_path / "stat") is None
    assert machine_id(tmp_path / "none") == ""


def test_other_threads_of_the_rank_count_as_its_own() -> None:
    before = own_cpu()
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    assert own_cpu() - before >= WORK_S


def test_children_of_the_rank_count_as_its_own() -> None:
    before = own_cpu()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert own_cpu() - before >= WORK_S


def test_the_machine_counts_other_processes_and_the_rank_does_not() -> None:
    """A process that still runs is no ended child: the rank's own time leaves it out."""
    before = read_cpu_time()
    with subprocess.Popen([sys.executable, "-c", f"{BURN}\nprint(flush=True)\ninput()"], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        after = read_cpu_time()
        other.communicate(b"\n")
    assert before is not None and after is not None
    assert after.machine - before.machine >= WORK_S / 2 > after.own - before.own  # ticks of up to 10 ms


def test_a_meter_measures_from_the_first_begin_to_the_last_end(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([CpuTime(10.0, 100.0, 1.0, 5.0), CpuTime(12.0, 103.0, 2.0, 7.0), CpuTime(15.0, 107.0, 2.5, 9.0)])
    monkeypatch.setattr(counters, "read_cpu_time", lambda: next(readings))
    meter = CpuMeter()
    meter.end()  # no step was measured yet: an epoch of warm-up alone
    assert meter.fields() == {}
    for call in (meter.begin, meter.begin, meter.end, meter.end):
        call()
    assert meter.fields() == {"machine": machine_id(), "measured": 5.0, "machine_cpu": 7.0, "own_cpu": 1.5} | {
        "machine_idle": 4.0
    }
