"""A sample of `make soak` on namespaces: a pulled cable, a slow link, a processor and a memory that shrink."""

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
    outcome = faults._fatal(mode, "netns", f"cut:rank{rank}@step5", rank, limit=faults.DEADLINE + 5)
    assert outcome["ok"] and outcome["named"], outcome


def test_a_slow_spell_changes_times_and_nothing_else() -> None:
    outcome = faults._same(faults._short("ring", 60, "netns"), ["--fault", "rate:rank1@step5+3s=10mbit"], {})
    assert outcome["ok"], outcome


def test_a_rank_that_meets_its_memory_limit_is_killed_and_named() -> None:
    outcome = faults._fatal("ring", "netns", "oom:rank2@step5", 2, limit=10.0)
    assert outcome["ok"] and outcome["named"], outcome


def test_a_rate_is_changed_both_ways_and_back() -> None:
    with NetnsSubstrate([NodePlan(name="node0", link=Link(rate=100_000_000)), NodePlan(name="node1")]) as substrate:
        for node, rate, shown in ((0, 10_000_000, "10Mbit"), (0, None, "100Mbit"), (1, 10_000_000, "10Mbit")):
            substrate.set_rate(node, rate)
            for device in ("eth0", "ifb0"):
                assert f"rate {shown}" in substrate.exec(node, ["tc", "qdisc", "show", "dev", device], 10)
        substrate.set_rate(1, None)
        assert "tbf" not in substrate.exec(1, ["tc", "qdisc", "show"], 10)


def test_a_node_without_a_share_gets_one_while_it_runs_and_nothing_is_left(tmp_path: Path) -> None:
    burn = [sys.executable, "-c", "while True: pass"]
    with NetnsSubstrate([NodePlan(name="node0")]) as substrate:
        process = substrate.start(0, burn, {}, tmp_path / "log")
        time.sleep(0.3)
        substrate.set_cpus(0, 0.2)
        before, begun = _seconds(process.pid), time.monotonic()
        time.sleep(1.5)
        share = (_seconds(process.pid) - before) / (time.monotonic() - begun)
        assert share < 0.3, f"asked for 0.2 of a core, used {share:.2f}"
        substrate.limit_memory(0)
        assert any(who == ownership.current() for who in cgroups.owners(cgroups.find_hierarchy(controller="memory")))
    left = [str(each) for each in ownership.find(everything=True) if each.owner == ownership.current()]
    assert left == []


@pytest.mark.parametrize("cpus", [None, 1.0])
def test_a_memory_limit_is_lifted_again_for_who_runs_and_for_who_starts_then(
    tmp_path: Path, cpus: float | None
) -> None:
    with NetnsSubstrate([NodePlan(name="node0", cpus=cpus)]) as substrate:
        limited, freed = (_hungry(substrate, tmp_path / name) for name in ("limited", "freed"))
        substrate.limit_memory(0)
        assert limited() == -signal.SIGKILL
        substrate.unlimit_memory(0)
        assert freed() == 0
        assert _hungry(substrate, tmp_path / "again")() == 0


def _hungry(substrate: NetnsSubstrate, meal: Path) -> Callable[[], int]:
    """A process that is there and waits; call it and it takes more than a limit leaves it: its exit code."""
    eat = f"import os, time\nprint('here', flush=True)\nwhile not os.path.exists({str(meal)!r}): time.sleep(0.05)\n"
    log = meal.with_suffix(".log")
    process = substrate.start(0, [sys.executable, "-c", f"{eat}b'1' * {2 * MEMORY_HEADROOM_BYTES}"], {}, log)
    while "here" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)

    def take() -> int:
        meal.touch()
        return process.wait(30)

    return take


def _seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
