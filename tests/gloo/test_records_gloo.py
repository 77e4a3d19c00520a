"""What real ranks record, read by the report: parts add up, buffers count once, whatever the mode calls them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testbed.report.load import load
from testbed.report.model import Cell, chapters
from tests.support.command import run_command

pytestmark = [pytest.mark.gloo, pytest.mark.quiet]
MODES = ["none", "ring", "ring/bucket:64KiB/overlap", "ring/bucket:64KiB/pipeline", "server", "ddp/bucket:64KiB"]
WITHIN = 0.05
MICRO = 1e-4  # seconds
FILE = f"""
title = "what is recorded"
[base]
model = "lenet5"
data = {{ name = "synthetic" }}
nodes = 2
batch = 64
steps = 14
evaluate = "never"
probe = false
[axes]
mode = {MODES}
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cell]:
    """One sweep of all modes, two processes each, a few seconds a mode."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "recorded.toml").write_text(FILE)
    done = run_command("sweep", "recorded.toml", "--on", "process", cwd=folder)
    assert done.returncode == 0, done.stderr
    return {cell.label: cell for cell in chapters(load([Path(folder, "runs")]))[0].cells}


@pytest.mark.parametrize("mode", MODES)
def test_phases_of_a_real_step_add_up(cells: dict[str, Cell], mode: str) -> None:
    """The median of each step's sum: on a busy machine the medians of the phases come from different steps."""
    for steps in cells[mode].steps:
        gap = np.median(np.abs(steps.compute + steps.copies + steps.blocked + steps.rest - steps.total) / steps.total)
        assert gap <= WITHIN, gap
        assert np.median(steps.compute) > 0 and np.median(steps.rest / steps.total) >= -0.001


@pytest.mark.parametrize("mode", MODES)
def test_copies_are_recorded_in_every_mode_that_sends(cells: dict[str, Cell], mode: str) -> None:
    for steps in cells[mode].steps:
        assert np.all(steps.copies > 0) if mode != "none" else np.all(steps.copies == 0)
        assert np.all(steps.copies <= steps.total) and np.all(steps.copies_cpu <= steps.cpu)


@pytest.mark.parametrize("mode", MODES)
def test_blocked_and_hidden_time_add_up_to_busy_time(cells: dict[str, Cell], mode: str) -> None:
    """An inequality, not an equation: how well they add up depends on how busy the machine is."""
    for steps in cells[mode].steps:
        assert np.all(steps.busy <= steps.blocked + steps.hidden + MICRO), "a transfer was not recorded"
        assert np.all(steps.hidden <= steps.busy + MICRO)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
def test_the_buffers_of_one_synchronisation_are_the_gradient(cells: dict[str, Cell], mode: str) -> None:
    cell = cells[mode]
    assert cell.buffers[1] == pytest.approx(cell.first.gradient, rel=0.01)
    # One exchange may be missing: the last may begin after the last step's record is closed on some ranks.
    assert cell.waiting.exchanges >= len(cell.steps[0].total) - 1
