"""Turn: one test alone, or several in parallel."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.turns import Turn


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # this test itself may hold the real lock files


def start(alone: bool, entered: threading.Event, leave: threading.Event) -> threading.Thread:
    def work() -> None:
        turn = Turn()
        turn.take(alone)
        entered.set()
        leave.wait(10)
        turn.end()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_test_that_runs_alone_waits_and_later_tests_wait_for_it() -> None:
    entered, leave = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]
    threads = [start(False, entered[0], leave[0])]
    assert entered[0].wait(10)
    threads.append(start(True, entered[1], leave[1]))
    assert not entered[1].wait(0.2), "another test is running"
    threads.append(start(False, entered[2], leave[2]))
    assert not entered[2].wait(0.2), "a test waits to run alone"
    leave[0].set()
    assert entered[1].wait(10) and not entered[2].is_set()
    leave[1].set()
    assert entered[2].wait(10)
    leave[2].set()
    for thread in threads:
        thread.join(10)


def test_other_tests_run_in_parallel() -> None:
    entered, leave = [threading.Event() for _ in range(2)], threading.Event()
    threads = [start(False, each, leave) for each in entered]
    assert all(each.wait(10) for each in entered)
    leave.set()
    for thread in threads:
        thread.join(10)


def test_a_test_that_follows_without_an_end_between_keeps_the_turn() -> None:
    """Otherwise another worker would begin a test between two that measure, and the second would wait for it."""
    turn, entered, leave = Turn(), threading.Event(), threading.Event()
    turn.take(alone=True)
    thread = start(False, entered, leave)
    turn.take(alone=True)
    assert not entered.wait(0.2)
    turn.end()
    assert entered.wait(10)
    leave.set()
    thread.join(10)
