"""The progress of a run: figures of this attempt, not of two."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from testbed.control.runs.progress import Plain, Speed
from testbed.spec.run import RunSpec


def record(number: int, sent: int, attempt: int | None = None) -> dict[str, Any]:
    return {"step": number, "at": float(number), "total": 1.0, "sent": sent, "received": 0, "attempt": attempt}


def test_the_speed_of_a_restarted_run_does_not_mix_counters_of_two_attempts() -> None:
    speed = Speed()
    for number in range(4):
        speed.records.append(record(number, 1_000_000 * number, attempt=1))
    assert speed.megabytes_per_s() == pytest.approx(1.0)
    speed.records.append(record(4, 0))
    assert speed.megabytes_per_s() is None
    for number in range(5, 10):
        speed.records.append(record(number, 2_000_000 * (number - 4)))
    assert speed.megabytes_per_s() == pytest.approx(2.0)


def test_without_counters_in_every_step_there_is_no_speed() -> None:
    speed = Speed()
    speed.records.append(record(0, 0))
    speed.records.append(record(1, 1_000_000) | {"received": None})
    assert speed.megabytes_per_s() is None


def test_a_title_from_a_file_is_printed_on_one_line_without_control_characters() -> None:
    said = io.StringIO()
    Plain(Console(file=said, soft_wrap=True)).headline(f"Which?\n\x1b]0;owned\x07{'x' * 100_000}")
    (line,) = said.getvalue().splitlines()
    assert line.startswith("Which? ?]0;owned?xxx") and line.isprintable() and len(line) < 500


@pytest.mark.parametrize(("evaluate", "said"), [("split", True), ("never", False)])
def test_after_the_last_step_it_says_that_the_model_is_evaluated(evaluate: str, said: bool) -> None:
    """On a slow machine that takes longer than all steps, and would look like a hang."""
    written = io.StringIO()
    shown = Plain(Console(file=written, soft_wrap=True))
    shown.begin(RunSpec.load({"nodes": 1, "mode": "single", "steps": 2, "warmup": 0, "evaluate": evaluate}, "test"))
    for number in range(2):
        shown.step(0, record(number, 0) | {"loss": 1.0, "epoch": 0})
    *_, last = written.getvalue().splitlines()
    assert "step 2/2" in last and last.endswith("now evaluating") is said
