"""Shares of a profile: intervals in, fractions out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from testbed.rank.profiler import time_shares


def event(name: str, start: float, end: float) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_time_divides_into_compute_communication_and_other() -> None:
    shares = time_shares(
        [
            event("aten::conv2d", 0, 40),
            event("aten::mkldnn_convolution", 5, 35),  # inside the other
            event("gloo:all_reduce", 30, 60),  # ten of it while an operator runs
            event("communication", 60, 80),
            event("aten::add_", 70, 75),  # an operator while the loop waits is not compute
            event("python", 90, 100),
        ]
    )
    assert shares == pytest.approx({"compute": 0.4, "communication": 0.4, "overlap": 0.1, "other": 0.2})


def test_no_events_no_shares() -> None:
    assert time_shares([]) == {}
