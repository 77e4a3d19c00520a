"""Plain processes on the loopback, and the fake beside them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from testbed.control.substrates.base import NodePlan, Substrate
from testbed.control.substrates.fake import FakeSubstrate
from testbed.control.substrates.process import ProcessSubstrate, spawn
from testbed.spec.errors import SpecError, Unavailable
from testbed.spec.link import Link
from tests.support.processes import state, until

PLANS = [NodePlan(name=f"node{k}") for k in range(3)]
SLEEP = ["sleep", "60"]


@pytest.mark.parametrize("make", [ProcessSubstrate, lambda plans: FakeSubstrate(len(plans))])
def test_each_satisfies_the_protocol(make: Callable[[Sequence[NodePlan]], Substrate]) -> None:
    with make(PLANS) as substrate:
        assert [node.name for node in substrate.nodes] == ["node0", "node1", "node2"]
        assert list(substrate.notes) == []


def test_a_started_process_gets_its_environment_and_log(tmp_path: Path) -> None:
    log = tmp_path / "logs/rank0.log"
    with ProcessSubstrate(PLANS) as substrate:
        argv = ["sh", "-c", 'echo "$COLOUR"; echo oops >&2; exit 7']
        assert substrate.start(0, argv, {"COLOUR": "green"}, log).wait(10) == 7
    assert sorted(log.read_text().split()) == ["green", "oops"]


def test_wait_has_a_timeout(tmp_path: Path) -> None:
    with ProcessSubstrate(PLANS) as substrate:
        process = substrate.start(0, SLEEP, {}, tmp_path / "log")
        with pytest.raises(TimeoutError):
            process.wait(0.05)
        process.signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL


def test_leaving_ends_paused_processes_and_orphans(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ProcessSubstrate(PLANS) as substrate:
        paused = substrate.start(0, SLEEP, {}, log)
        substrate.pause(0)
        parent = substrate.start(1, ["sh", "-c", "sleep 60 & echo $!"], {}, log)
        assert parent.wait(10) == 0
        orphan = int(log.read_text())
        assert state(orphan)
    assert paused.poll() == -signal.SIGTERM
    until(lambda: state(orphan) in ("", "Z"))


def test_kill_pause_and_resume_affect_one_node(tmp_path: Path) -> None:
    with ProcessSubstrate(PLANS) as substrate:
        first, second = (substrate.start(k, SLEEP, {}, tmp_path / "log") for k in range(2))
        substrate.pause(0)
        until(lambda: state(first.pid) == "T")
        assert state(second.pid) != "T"
        substrate.resume(0)
        until(lambda: state(first.pid) != "T")
        substrate.kill(0)
        assert first.wait(10) == -signal.SIGKILL and second.poll() is None


def test_notes_say_what_is_not_applied() -> None:
    plans = [NodePlan(name="node0", cpus=0.4, link=Link(rate=200_000_000), congestion="cubic")] * 2
    notes = ProcessSubstrate(plans).notes
    assert notes[0] == "rate 200mbit not applied: plain processes share the loopback"
    assert len(notes) == 3 and "0.4 CPUs" in notes[1] and "cubic" in notes[2]
    racks = [NodePlan(name=f"node{rack}", rack=rack, uplink=Link(delay=0.005)) for rack in range(2)]
    assert ProcessSubstrate(racks).notes == ("uplinks of racks not applied: plain processes share the loopback",)


def test_links_quotas_and_memory_limits_are_unavailable() -> None:
    with ProcessSubstrate(PLANS) as substrate:
        for fault in (substrate.cut, substrate.reconnect, substrate.limit_memory, substrate.unlimit_memory):
            with pytest.raises(Unavailable, match="--on netns"):
                fault(0)
        with pytest.raises(Unavailable, match="--on netns"):
            substrate.set_rate(0, 10)
        with pytest.raises(Unavailable, match="--on netns"):
            substrate.set_cpus(0, 0.5)


def test_a_log_that_is_a_link_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").symlink_to(tmp_path / "victim")
    with pytest.raises(SpecError, match=r"rank0\.log: is a symlink"):
        spawn(["echo", "text"], {}, tmp_path / "rank0.log")
    assert not (tmp_path / "victim").exists()
