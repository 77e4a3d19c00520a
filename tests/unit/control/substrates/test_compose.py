"""The compose substrate without an engine: what it removes before it begins, and what it asks of a paused container."""

from __future__ import annotations

from pathlib import Path

import pytest
from docker.errors import APIError
from typer.testing import CliRunner

from testbed.control.cli import main
from testbed.control.machine import leftovers, ownership
from testbed.control.substrates import compose, engine
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.compose import ComposeSubstrate
from testbed.spec.errors import TestbedError, Unavailable

DEAD = f"{2**22 + 1}-1-{ownership.current().rpartition('-')[2]}"  # no process has that number
FOREIGN = f"{2**22 + 1}-1-{'0' * 16}"
PROJECTS = {
    "mine": ownership.current(),
    "killed": DEAD,
    "elsewhere": FOREIGN,
    "up": engine.RUNNING,
    "down": engine.NOBODY,  # of `docker compose up`, ended: its logs are the user's
}


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An engine with these projects, and nothing else of ours on this machine; what is removed from it."""
    found: list[str] = []
    monkeypatch.setattr(engine, "projects", lambda: {k: v for k, v in PROJECTS.items() if k not in found})
    monkeypatch.setattr(engine, "remove_project", found.append)
    for kind in ("_processes", "_namespaces", "_groups", "_folders"):
        monkeypatch.setattr(leftovers, kind, list)
    return found


def test_containers_whose_controller_was_killed_go_before_any_are_made(
    removed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_further() -> None:
        raise Unavailable("far enough")

    monkeypatch.setattr(compose, "check", lambda plans: None)
    monkeypatch.setattr(compose, "connect", no_further)
    substrate = ComposeSubstrate([NodePlan(name="node0")], tmp_path / "r")
    with pytest.raises(Unavailable, match="far enough"):
        substrate.__enter__()
    assert removed == ["killed"]
    elsewhere, killed = substrate.notes
    assert killed.startswith("project killed was removed") and elsewhere.startswith("project elsewhere on this engine")


def test_clean_keeps_what_may_be_in_use_elsewhere_and_says_so(removed: list[str]) -> None:
    result = CliRunner().invoke(main.app, ["clean"])
    assert result.exit_code == 0 and sorted(removed) == ["down", "killed"]
    assert result.stdout == "project down\nproject killed\n"
    assert result.stderr.startswith("project elsewhere stays: ") and "--all" in result.stderr
    assert "mine" not in result.output


class Container:
    """As the engine has it: only a paused one is unpaused."""

    def __init__(self) -> None:
        self.paused = False
        self.broken = False

    def pause(self) -> None:
        self.paused = True

    def unpause(self) -> None:
        if self.broken or not self.paused:
            raise APIError("Container is not paused")
        self.paused = False


def test_a_paused_container_that_was_stopped_has_gone_on_already(tmp_path: Path) -> None:
    """`pause` for good and --retries: the ranks are stopped, which thaws them, and then the fault is mended."""
    substrate, container = ComposeSubstrate([NodePlan(name="node0")], tmp_path / "r"), Container()
    substrate._containers = [container]
    substrate.pause(0)
    substrate.stop()
    assert not container.paused
    substrate.resume(0)
    substrate.pause(0)
    container.broken = True
    substrate.stop()
    with pytest.raises(TestbedError, match="not paused"):  # it stays frozen, and that must be known
        substrate.resume(0)
