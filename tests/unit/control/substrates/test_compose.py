"""The compose substrate without an engine: which `docker` commands it runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from testbed.control.substrates.base import MEMORY_HEADROOM_BYTES, NodePlan
from testbed.control.substrates.compose import ComposeSubstrate, idle
from testbed.spec.errors import CommandFailed, TestbedError


class FakeEngine:
    """One container: only a running one can be paused, only a paused one unpaused."""

    def __init__(self) -> None:
        self.paused = False
        self.broken = False
        self.commands: list[list[str]] = []

    def __call__(self, argv: Sequence[str], timeout_s: float) -> str:
        self.commands.append(list(argv))
        match list(argv):
            case ["docker", "pause", _]:
                self.paused = True
            case ["docker", "unpause", _]:
                if self.broken or not self.paused:
                    raise CommandFailed("docker unpause", 1, "Container is not paused")
                self.paused = False
            case ["docker", "inspect", *_]:
                return "0 0\n"
            case ["docker", "stats", *_]:
                return "100MiB / 2GiB\n"
            case ["docker", "info", *_]:
                return "1000000000\n"
        return ""


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def substrate(tmp_path: Path, engine: FakeEngine) -> ComposeSubstrate:
    made = ComposeSubstrate([NodePlan(name="node0", cpus=0.4)], tmp_path / "r", engine)
    made._containers = ["c0"]
    return made


def test_a_paused_container_is_resumed_by_stop_and_only_once(substrate: ComposeSubstrate, engine: FakeEngine) -> None:
    """With --retries a run stops its ranks, which resumes them, and then reverts the fault."""
    substrate.pause(0)
    substrate.stop()
    assert not engine.paused
    substrate.resume(0)
    substrate.pause(0)
    engine.broken = True
    substrate.stop()
    with pytest.raises(TestbedError):  # the container is still paused, so the error is not hidden
        substrate.resume(0)


def test_none_restores_the_planned_quota(substrate: ComposeSubstrate, engine: FakeEngine) -> None:
    substrate.set_cpus(0, 0.1)
    substrate.set_cpus(0, None)
    quotas = [argv[argv.index("--cpu-quota") + 1] for argv in engine.commands]
    assert quotas == ["1000", "4000"]


def test_a_memory_limit_is_the_usage_and_a_headroom_and_is_reverted_to_all_memory_where_there_was_none(
    substrate: ComposeSubstrate, engine: FakeEngine
) -> None:
    substrate.limit_memory(0)
    substrate.unlimit_memory(0)
    substrate.unlimit_memory(0)
    limits = [argv[argv.index("--memory") + 1] for argv in engine.commands if "--memory" in argv]
    assert limits == [str((100 << 20) + MEMORY_HEADROOM_BYTES), "1000000000"]


def test_idle_containers_have_the_owners_mark() -> None:
    service = idle(2, ["/a:/a"])["services"]["rank1"]
    assert service["entrypoint"] == ["sleep", "infinity"]
    assert str(os.getpid()) in service["labels"]["testbed.owner"]
