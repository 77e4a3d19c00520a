"""Faults on namespaces: a cut link, a slow link, a smaller CPU quota, a memory limit. A sample of `make soak`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.control.machine import cgroups, ownership
from testbed.control.substrates.base import MEMORY_HEADROOM_BYTES, NodePlan
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.spec.link import Link
from tests.soak import faults

pytestmark = [pytest.mark.net, pytest.mark.gloo, pytest.mark.quiet]


@pytest.mark.parametrize(("mode", "rank"), [("allreduce", 3), ("ring/bucket:2MiB/pipeline", 0)])
def test_a_rank_that_is_cut_off_is_named_after_the_deadline(mode: str, rank: int) -> None:
    outcome = faults.fatal_case(mode, "netns", f"cut:rank{rank}@step5", rank, limit=faults.DEADLINE_S + 30)
    assert outcome["ok"] and outcome["named"], outcome


def test_a_slow_link_for_a_while_changes_only_times() -> None:
    outcome = faults.identical_case(
        faults.run_flags("ring", 60, "netns"), ["--fault", "rate:rank1@step5+3s=10mbit"], {}
    )
    assert outcome["ok"], outcome


def test_a_rank_that_reaches_its_memory_limit_is_killed_and_named() -> None:
    flags = ["--set", "deadline=60"]
    outcome = faults.fatal_case("ring", "netns", "oom:rank2@step5", 2, limit=40.0, flags=flags)
    assert outcome["ok"] and outcome["named"], outcome


def test_a_rate_is_changed_both_ways_and_back() -> None:
    with NetnsSubstrate([NodePlan(name="node0", link=Link(rate=100_000_000)), NodePlan(name="node1")]) as substrate:
        for node, rate, shown in ((0, 10_000_000, "10Mbit"), (0, None, "100Mbit"), (1, 10_000_000, "10Mbit")):
            substrate.set_rate(node, rate)
            for device in ("eth0", "ifb0"):
                assert f"rate {shown}" in substrate.exec(node, ["tc", "qdisc", "show", "dev", device], 10)
        substrate.set_rate(1, None)
        assert "tbf" not in substrate.exec(1, ["tc", "qdisc", "show"], 10)


def test_a_node_without_a_quota_gets_one_while_it_runs_and_nothing_remains(tmp_path: Path) -> None:
    burn = [sys.executable, "-c", "while True: pass"]
    with NetnsSubstrate([NodePlan(name="node0")]) as substrate:
        process = substrate.start(0, burn, {}, tmp_path / "log")
        time.sleep(0.3)
        substrate.set_cpus(0, 0.2)
        before, begun = _seconds(process.pid), time.monotonic()
        time.sleep(1.5)
        share = (_seconds(process.pid) - before) / (time.monotonic() - begun)
        assert share < 0.3, f"requested 0.2 of a core, used {share:.2f}"
        substrate.limit_memory(0)
        assert any(who == ownership.current() for who in cgroups.owners(cgroups.find_hierarchy(controller="memory")))
    left = [str(each) for each in ownership.find(everything=True) if each.owner == ownership.current()]
    assert left == []


@pytest.mark.parametrize("cpus", [None, 1.0])
def test_a_memory_limit_is_removed_for_running_and_for_new_processes(tmp_path: Path, cpus: float | None) -> None:
    with NetnsSubstrate([NodePlan(name="node0", cpus=cpus)]) as substrate:
        limited, freed = (_allocator(substrate, tmp_path / name) for name in ("limited", "freed"))
        substrate.limit_memory(0)
        assert limited() == -signal.SIGKILL
        substrate.unlimit_memory(0)
        assert freed() == 0
        assert _allocator(substrate, tmp_path / "again")() == 0


def _allocator(substrate: NetnsSubstrate, go: Path) -> Callable[[], int]:
    """Start a process that waits for the file `go` and then allocates more than a limit allows.

    The function that is returned creates the file and returns the process's exit code.
    """
    wait = f"import os, time\nprint('here', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
    log = go.with_suffix(".log")
    process = substrate.start(0, [sys.executable, "-c", f"{wait}b'1' * {2 * MEMORY_HEADROOM_BYTES}"], {}, log)
    while "here" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)

    def allocate() -> int:
        go.touch()
        return process.wait(30)

    return allocate


def _seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
