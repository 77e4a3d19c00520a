"""How the bench starts Open MPI on nodes that have no ssh, and what it does where it is not installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.bench import openmpi
from tests.bench.openmpi import Timing

TIMING = Timing(seconds=[2.0, 3.0, 4.0], sent=150.2, library="Open MPI v5")


def test_the_agent_enters_the_namespace_of_the_node_that_mpirun_names(tmp_path: Path) -> None:
    said = tmp_path / "ip"
    said.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    agent = tmp_path / "agent.sh"
    agent.write_text(openmpi.agent_script("testbed-1-2-"))
    for script in (said, agent):
        script.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = [str(agent), "node3", "A=1;export A;prted", "--uri", '"a;b"']
    words = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:3] == ["netns", "exec", "testbed-1-2-node3"]
    assert words[-2:] == ["node3", 'A=1;export A;prted --uri "a;b"'], "one line for a shell, as ssh would hand it over"


def test_what_is_not_installed_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmpi, "PACKAGES", ("no-such-package", "pytest"))
    assert openmpi.missing() == (
        "Open MPI is not measured, no-such-package not installed: pip install -r requirements-bench.txt"
    )
    monkeypatch.setattr(openmpi, "PACKAGES", ("pytest",))
    assert openmpi.missing() is None


def test_a_figure_is_the_median_over_our_ring_and_has_no_limit() -> None:
    (figure,) = openmpi.figures("200mbit", [1.0, 2.0, 2.5], 150.0, {"its ring": TIMING})
    assert figure.name == "Open MPI's Allreduce, its ring / ring/flat, 200mbit"
    assert (figure.value, figure.low, figure.high) == (1.5, None, None)
    assert "3.000 s (2.000-4.000, n=3), bytes / least 1.001" in figure.detail


def test_bytes_that_were_not_on_the_links_are_no_figure() -> None:
    with pytest.raises(SystemExit, match=r"0\.501 of the least bytes"):
        list(openmpi.figures("200mbit", [2.0], 300.0, {"its ring": TIMING}))
