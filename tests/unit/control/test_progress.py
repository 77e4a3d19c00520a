"""What a person sees while a run goes on: figures of this attempt, not of two."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.control.progress import Speed


def record(number: int, sent: int, attempt: int | None = None) -> dict[str, Any]:
    return {"step": number, "at": float(number), "total": 1.0, "sent": sent, "received": 0, "attempt": attempt}


def test_the_speed_of_a_restarted_run_compares_no_two_attempts_counters() -> None:
    speed = Speed()
    for number in range(4):
        speed.records.append(record(number, 1_000_000 * number, attempt=1))
    assert speed.megabytes() == pytest.approx(1.0)
    speed.records.append(record(4, 0))
    assert speed.megabytes() is None
    for number in range(5, 10):
        speed.records.append(record(number, 2_000_000 * (number - 4)))
    assert speed.megabytes() == pytest.approx(2.0)
