"""Namespaces: requested against measured rates, quotas and congestion control, and what remains after them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from testbed.control.machine import cgroups, ownership, processes
from testbed.control.runs.run import probe
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.netns import NetnsSubstrate, check
from testbed.results.receipt import Receipt
from testbed.spec.errors import NetworkInvalid, TestbedError, Unavailable
from testbed.spec.link import Link
from tests.support.processes import until

pytestmark = [
    pytest.mark.net,
    pytest.mark.quiet,
    pytest.mark.skipif(os.geteuid() != 0 and not os.environ.get("CI"), reason="needs root"),
]

# Both clocks are read as differences: the start of the interpreter costs processor time before the loop begins.
BUSY = """
import time
wall, cpu = time.monotonic(), time.process_time()
while time.monotonic() < wall + 2: pass
print((time.process_time() - cpu) / (time.monotonic() - wall))
"""


def plans(
    n: int = 4, rate: int | None = None, cpus: float | None = None, congestion: str | None = None
) -> list[NodePlan]:
    return [NodePlan(name=f"node{k}", link=Link(rate=rate), cpus=cpus, congestion=congestion) for k in range(n)]


def leftovers() -> list[str]:
    """Everything on this machine that has this process's mark."""
    return [str(each) for each in ownership.find(everything=True) if each.owner == ownership.current()]


def links() -> list[str]:
    """Links outside our namespaces with names like ours; links of a Docker engine are left out."""
    names = [line.split(":")[1].strip() for line in _run("ip", "-o", "link").splitlines()]
    return [name for name in names if re.match(r"(br|eth|ifb|port)\d", name)]


def _run(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout


@pytest.fixture(autouse=True)
def _nothing_remains() -> Iterator[None]:
    before = links()
    yield
    assert leftovers() == [] and links() == before


def assert_within(receipt: Receipt, tolerance: float = 0.05) -> None:
    rows = [(f"node{each.src} -> node{each.dst}", each) for each in receipt.links]
    fan_ins = [*([receipt.fan_in] if receipt.fan_in else []), *receipt.fan_in_others]
    rows += [(f"fan-in of node{each.dst}", each) for each in fan_ins]  # type: ignore[misc]
    report = [
        f"{name}: expected {each.requested}, measured {each.measured:.0f}, "
        f"bounds {(each.requested or 0) * (1 - tolerance):.0f}..{(each.requested or 0) * (1 + tolerance):.0f} bit/s"
        for name, each in rows
    ]
    assert receipt.valid(tolerance), "\n".join(report)


def measured(substrate: NetnsSubstrate, requested: list[NodePlan]) -> Receipt:
    """As a run does it: probe again if something disturbed the first probe."""
    first = probe(substrate, requested, lambda event: None)
    return first if first.valid() else probe(substrate, requested, lambda event: None)


@pytest.mark.parametrize("rate", [10**7, 2 * 10**8, 10**9])
def test_every_link_and_the_fan_in_have_the_requested_rate(rate: int) -> None:
    requested = plans(4, rate, congestion="cubic")
    with NetnsSubstrate(requested) as substrate:
        receipt = measured(substrate, requested)
    assert len(receipt.links) == 12 and receipt.fan_in is not None and receipt.fan_in.requested == rate
    assert all(link.requested == rate for link in receipt.links)
    assert_within(receipt)


def test_above_16_nodes_a_sample_of_the_links_is_measured_and_every_fan_in() -> None:
    requested = plans(17, 3 * 10**7)
    with NetnsSubstrate(requested) as substrate:
        receipt = measured(substrate, requested)
    assert (len(receipt.links), receipt.sampled_from, len(receipt.fan_in_others)) == (8 * 17, 17 * 16, 16)
    assert {link.src for link in receipt.links} == {link.dst for link in receipt.links} == set(range(17))
    assert_within(receipt)


def test_one_slow_link_affects_only_its_own_paths() -> None:
    requested = [*plans(2, 2 * 10**8), NodePlan(name="node2", link=Link(rate=5 * 10**7))]
    with NetnsSubstrate(requested) as substrate:
        receipt = measured(substrate, requested)
    assert [link.requested for link in receipt.links if 2 in (link.src, link.dst)] == [5 * 10**7] * 4
    assert [link.requested for link in receipt.links if 2 not in (link.src, link.dst)] == [2 * 10**8] * 2
    assert_within(receipt)


def test_an_unshaped_network_is_fast_and_has_no_requested_rate() -> None:
    with NetnsSubstrate(plans(2)) as substrate:
        receipt = probe(substrate, plans(2), lambda event: None)
    assert receipt.worst_error is None and min(link.measured for link in receipt.links) > 10**8


@pytest.mark.parametrize("name", ["cubic", "reno"])
def test_connections_use_the_requested_congestion_control(name: str) -> None:
    """Both ways to set it: by sysctl if the machine allows the name to everybody, else through the route."""
    with NetnsSubstrate(plans(2, congestion=name)) as substrate:
        receipt = probe(substrate, plans(2, congestion=name), lambda event: None)
    assert receipt.congestion == (name, name)


def test_the_quota_limits_and_can_be_changed(tmp_path: Path) -> None:
    with NetnsSubstrate(plans(1, cpus=0.4)) as substrate:
        prefer_over_others("node0")
        assert_share(substrate, 0.4, tmp_path)
        substrate.set_cpus(0, 0.2)
        assert_share(substrate, 0.2, tmp_path)


def prefer_over_others(node: str) -> None:
    """Give the cgroup the largest weight, so that other processes take little of its quota away."""
    hierarchy = cgroups.find_hierarchy()
    file, weight = ("cpu.weight", "10000") if hierarchy.version == 2 else ("cpu.shares", "262144")
    (hierarchy.top / ownership.current() / node / file).write_text(weight)


def assert_share(substrate: NetnsSubstrate, expected: float, folder: Path) -> None:
    """Never more than the quota, and in one of five attempts all of it: other processes may take some away."""
    measured: list[float] = []
    while len(measured) < 5 and not any(share >= 0.85 * expected for share in measured):
        log = folder / f"{expected}-{len(measured)}.log"
        assert substrate.start(0, [sys.executable, "-c", BUSY], {}, log).wait(30) == 0
        measured.append(float(log.read_text()))
    bounds = f"expected {expected} cores, measured {measured}, bounds {0.85 * expected:.2f}..{1.15 * expected:.2f}"
    assert 0.85 * expected <= max(measured) <= 1.15 * expected, bounds


def test_without_quota_a_process_starts_outside_the_cgroup(tmp_path: Path) -> None:
    with NetnsSubstrate(plans(1, cpus=0.4)) as substrate:
        for quota in (True, False):
            log = tmp_path / f"{quota}.log"
            assert substrate.start(0, ["cat", "/proc/self/cgroup"], {}, log, quota=quota).wait(10) == 0
            assert (f"/{cgroups.TOP}/{ownership.current()}/node0" in log.read_text()) is quota


def test_a_process_keeps_its_pid_through_all_prefixes_and_sees_only_its_network(tmp_path: Path) -> None:
    script = "echo $$; ls /sys/class/net"
    with NetnsSubstrate(plans(1, rate=10**8, cpus=0.5)) as substrate:
        process = substrate.start(0, ["sh", "-c", script], {}, tmp_path / "log")
        assert process.wait(10) == 0
    assert (tmp_path / "log").read_text().split() == [str(process.pid), "eth0", "ifb0", "lo"]


def test_a_cut_link_carries_nothing_and_is_shaped_after_join() -> None:
    requested = plans(2, rate=10**8)
    with NetnsSubstrate(requested) as substrate:
        substrate.cut(1)
        assert not reaches(substrate)
        substrate.reconnect(1)
        until(lambda: reaches(substrate))
        receipt = measured(substrate, requested)
    assert_within(receipt)


def reaches(substrate: NetnsSubstrate) -> bool:
    """Return True if node 1 answers node 0; a refused connection is an answer."""
    script = (
        f"import socket; s = socket.socket(); s.settimeout(1); print(s.connect_ex(('{substrate.nodes[1].address}', 9)))"
    )
    return substrate.exec(0, [sys.executable, "-c", script], timeout_s=10).strip() == "111"  # ECONNREFUSED


def test_faults_affect_every_process_of_the_node_and_no_other(tmp_path: Path) -> None:
    with NetnsSubstrate(plans(2)) as substrate:
        victim = substrate.start(0, ["sh", "-c", "setsid sleep 60 & wait"], {}, tmp_path / "log")
        other = substrate.start(1, ["sleep", "60"], {}, tmp_path / "log")
        name = ownership.owned_name("node0")
        until(lambda: len(processes.pids_in_namespace(name)) == 2)
        substrate.pause(0)
        substrate.kill(0)
        assert victim.wait(10) == -signal.SIGKILL and processes.pids_in_namespace(name) == [] and other.poll() is None


class WrongRates(NetnsSubstrate):
    """Every rate is a word that tc does not accept."""

    def exec(self, node: int, argv: Sequence[str], timeout_s: float = 20.0) -> str:
        return super().exec(node, ["fast" if word == "100mbit" else word for word in argv], timeout_s)


def test_a_tc_command_that_fails_stops_the_run() -> None:
    with pytest.raises(NetworkInvalid, match=r"node0: .*tc qdisc add dev eth0 root tbf rate fast .*rate"):
        with WrongRates(plans(2, rate=10**8)):
            pytest.fail("must not be entered")


def test_what_the_kernel_lacks_is_refused_before_anything_is_created() -> None:
    with pytest.raises(Unavailable, match=r"congestion control nonsense"):
        check(plans(2, congestion="nonsense"))
    requested = [NodePlan(name="node0", link=Link(delay=0.01))]
    try:
        check(requested)
        with NetnsSubstrate(requested) as substrate:
            assert "netem" in substrate.exec(0, ["tc", "qdisc"], timeout_s=10)  # this kernel has it
    except Unavailable as error:
        assert "delay and loss (netem)" in str(error)


def test_a_second_substrate_in_the_same_process_is_refused_and_the_first_stays() -> None:
    with NetnsSubstrate(plans(1)) as first:
        with pytest.raises(TestbedError, match="already exists: another run in this Python process"):
            NetnsSubstrate(plans(1)).__enter__()
        assert "eth0" in first.exec(0, ["ip", "-o", "link"], timeout_s=10)


CONTROLLER = """
import sys, time
from pathlib import Path
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.netns import NetnsSubstrate
from testbed.spec.link import Link
plans = [NodePlan(name=f"node{k}", cpus=0.2, link=Link(rate=10**8)) for k in range(2)]
with NetnsSubstrate(plans) as substrate:
    for node in range(2):
        substrate.start(node, ["sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"], {}, Path(sys.argv[1]) / "log")
    print("up", flush=True)
    time.sleep(60)
"""


def start_controller(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Another controller on this machine, and its mark."""
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    with controller.stdout:
        assert controller.stdout.readline() == "up\n"
    marks = {each.owner for each in ownership.find(everything=True) if each.owner.startswith(f"{controller.pid}-")}
    assert len(marks) == 1
    return controller, marks.pop()


def of_owner(mark: str) -> list[ownership.OwnedResource]:
    return [each for each in ownership.find(everything=True) if each.owner == mark]


@pytest.mark.quiet  # a run of another test kills what dead controllers left
def test_a_killed_controller_leaves_what_clean_removes_and_a_living_one_is_not_touched(tmp_path: Path) -> None:
    killed, mark = start_controller(tmp_path)
    living, other = start_controller(tmp_path)  # two controllers at once
    try:
        killed.kill()
        killed.wait(10)
        kinds = [each.kind for each in of_owner(mark)]
        assert kinds.count("namespace") == 3 and kinds.count("cgroup") == 2 and kinds.count("process") >= 2
        before = [each for each in of_owner(other) if each.kind != "process"]
        removed = ownership.remove()
        assert {each.kind for each in removed if each.owner == mark} == {"process", "namespace", "cgroup"}
        assert not [each for each in removed if each.owner == other]
        assert of_owner(mark) == [] and [each for each in of_owner(other) if each.kind != "process"] == before
        assert ownership.remove() == []
    finally:
        living.send_signal(signal.SIGINT)
        living.wait(20)
    assert of_owner(other) == []  # after Ctrl-C nothing remains
