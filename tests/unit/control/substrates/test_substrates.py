"""The seam: plain processes and the fake, and what stands on it (the measuring of a network)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from testbed.control.machine import leftovers, ownership
from testbed.control.runs.run import _complaint, probe
from testbed.control.substrates import netns
from testbed.control.substrates.base import NodePlan, Substrate
from testbed.control.substrates.fake import FakeSubstrate
from testbed.control.substrates.process import ProcessSubstrate
from testbed.net.tcp import efficiency
from testbed.spec.errors import NetworkInvalid, TestbedError, Unavailable
from testbed.spec.link import Link

PLANS = [NodePlan(name=f"node{k}") for k in range(3)]
SLEEP = ["sleep", "60"]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def state(pid: int) -> str:
    """R, S, T ... of a process; '' when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("make", [ProcessSubstrate, lambda plans: FakeSubstrate(len(plans))])
def test_each_satisfies_the_protocol(make: Callable[[Sequence[NodePlan]], Substrate]) -> None:
    with make(PLANS) as substrate:
        assert [node.name for node in substrate.nodes] == ["node0", "node1", "node2"]
        assert list(substrate.notes) == []


def test_exec_returns_what_was_printed() -> None:
    with ProcessSubstrate(PLANS) as substrate:
        assert substrate.exec(0, ["echo", "hello"], timeout=10) == "hello\n"


def test_exec_fails_with_command_code_and_words() -> None:
    with ProcessSubstrate(PLANS) as substrate:
        with pytest.raises(TestbedError, match=r"sh -c .*: exit code 3: no luck"):
            substrate.exec(0, ["sh", "-c", "echo no luck >&2; exit 3"], timeout=10)


def test_exec_ends_at_its_timeout_with_all_it_forked() -> None:
    began = time.monotonic()
    with ProcessSubstrate(PLANS) as substrate:
        with pytest.raises(TestbedError, match=r"not finished after 0\.2 s"):
            substrate.exec(0, ["sh", "-c", "sleep 60 & sleep 60"], timeout=0.2)
    assert time.monotonic() - began < 5


def test_a_started_process_gets_its_environment_and_log(tmp_path: Path) -> None:
    log = tmp_path / "logs/rank0.log"
    with ProcessSubstrate(PLANS) as substrate:
        argv = ["sh", "-c", 'echo "$COLOUR"; echo oops >&2; exit 7']
        assert substrate.start(0, argv, {"COLOUR": "green"}, log).wait(10) == 7
    assert sorted(log.read_text().split()) == ["green", "oops"]


def test_waiting_has_an_end(tmp_path: Path) -> None:
    with ProcessSubstrate(PLANS) as substrate:
        process = substrate.start(0, SLEEP, {}, tmp_path / "log")
        with pytest.raises(TimeoutError):
            process.wait(0.05)
        process.signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL


def test_leaving_ends_everything_paused_or_stubborn_or_forked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ProcessSubstrate(PLANS) as substrate:
        paused = substrate.start(0, SLEEP, {}, log)
        substrate.pause(0)
        orphan = substrate.start(1, ["sh", "-c", "sleep 60 & echo $!"], {}, log)
        assert orphan.wait(10) == 0
        child = int(log.read_text())
        assert state(child)
    assert paused.poll() == -signal.SIGTERM
    until(lambda: state(child) in ("", "Z"))


def test_kill_pause_and_resume_touch_one_node_with_its_children(tmp_path: Path) -> None:
    with ProcessSubstrate(PLANS) as substrate:
        first, second = (substrate.start(k, SLEEP, {}, tmp_path / "log") for k in range(2))
        substrate.pause(0)
        until(lambda: state(first.pid) == "T")
        assert state(second.pid) != "T"
        substrate.resume(0)
        until(lambda: state(first.pid) != "T")
        substrate.kill(0)
        assert first.wait(10) == -signal.SIGKILL and second.poll() is None


def test_plain_processes_say_what_they_leave_out() -> None:
    plans = [NodePlan(name="node0", cpus=0.4, link=Link(rate=200_000_000), congestion="cubic")] * 2
    notes = ProcessSubstrate(plans).notes
    assert notes[0] == "rate 200mbit not applied: plain processes share the loopback"
    assert len(notes) == 3 and "0.4 CPUs" in notes[1] and "cubic" in notes[2]


def test_plain_processes_have_no_link_to_cut() -> None:
    with ProcessSubstrate(PLANS) as substrate:
        with pytest.raises(Unavailable, match="--on netns"):
            substrate.cut(0)


def test_put_and_get_copy(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with ProcessSubstrate(PLANS) as substrate:
        substrate.put(0, tmp_path / "a", tmp_path / "far/b")
        substrate.get(0, tmp_path / "far/b", tmp_path / "c")
        substrate.put(0, tmp_path / "a", tmp_path / "a")  # the same file: nothing to do
    assert (tmp_path / "c").read_text() == (tmp_path / "a").read_text() == "x"


def test_ranks_get_sigterm_when_the_controller_is_killed(tmp_path: Path) -> None:
    controller = start_controller(tmp_path, "trap 'echo told to end; exit' TERM; while :; do sleep 0.02; done")
    controller.kill()
    controller.wait(10)
    until(lambda: "told to end" in (tmp_path / "log").read_text())


def test_what_ignores_that_is_a_leftover_and_found_by_its_mark(tmp_path: Path) -> None:
    controller = start_controller(tmp_path, "trap '' TERM; echo $$; while :; do sleep 0.02; done")
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().strip().isdigit())
    pid = (tmp_path / "log").read_text().strip()
    mine = [each for each in leftovers.find(everything=True) if each.name == pid]
    assert len(mine) == 1 and mine[0].in_use and mine[0] not in leftovers.find()
    controller.kill()
    controller.wait(10)
    assert pid in [each.name for each in leftovers.remove() if each.kind == "process"]
    assert state(int(pid)) in ("", "Z")


def start_controller(folder: Path, script: str) -> subprocess.Popen[bytes]:
    """Another process that starts `script` on a node and then waits to be killed."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from testbed.control.substrates.base import NodePlan\n"
        "from testbed.control.substrates.process import ProcessSubstrate\n"
        "with ProcessSubstrate([NodePlan(name='node0')]) as substrate:\n"
        "    substrate.start(0, ['sh', '-c', sys.argv[1]], {}, Path(sys.argv[2]) / 'log')\n"
        "    print('started', flush=True); time.sleep(60)\n"
    )
    controller = subprocess.Popen([sys.executable, "-c", program, script, str(folder)], stdout=subprocess.PIPE)
    assert controller.stdout is not None
    with controller.stdout:
        assert controller.stdout.readline() == b"started\n"
    time.sleep(0.3)  # the shell sets its trap after it has started; nothing tells us when
    return controller


def test_an_owner_is_alive_only_with_the_same_start_time() -> None:
    assert ownership.alive(ownership.current())
    assert not ownership.alive(f"{os.getpid()}-1") and not ownership.alive("nonsense")


def test_who_is_of_another_machine_or_container_counts_as_alive() -> None:
    """Its pid means another process here, or none: an engine that serves both must not lose its project by that."""
    mine, realm = ownership.current(), ownership.current().rpartition("-")[2]
    elsewhere = f"{2**22 + 1}-1-{'0' * 16}"  # no process here has that number
    assert ownership.foreign(elsewhere) and ownership.alive(elsewhere)
    assert leftovers.Leftover("project", "x", elsewhere).in_use
    assert not ownership.foreign(mine) and not ownership.alive(f"{2**22 + 1}-1-{realm}")
    assert not ownership.foreign(f"{os.getpid()}-1")  # as marks were: without a realm


def test_a_realm_is_this_boot_and_this_pid_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def realm(boot: str, inode: str) -> str:
        proc = tmp_path / f"{boot}-{inode}"
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
        (proc / "self/ns").mkdir(parents=True)
        (proc / "self/ns/pid").hardlink_to(tmp_path / inode)
        monkeypatch.setattr(ownership, "_PROC", proc)
        return ownership._realm.__wrapped__()

    for name in ("inode1", "inode2"):
        (tmp_path / name).touch()
    assert len({realm(boot, inode) for boot in ("a", "b") for inode in ("inode1", "inode2")}) == 4


@pytest.mark.parametrize("mark", ["12-34", f"12-34-{'0123abcd' * 2}"])
def test_a_namespace_and_a_folder_are_known_by_their_owner_of_old_too(mark: str) -> None:
    for name in (f"testbed-{mark}-node0", f"testbed-{mark}-deadbeef"):
        match = leftovers._NAMESPACE.fullmatch(name)
        assert match is not None and match[1] == mark
    assert ownership.PATTERN.fullmatch(mark)


def answer(node: int, argv: Sequence[str], log: Path) -> int:
    """Play a probe of two nodes that got exactly what was asked."""
    size = round(10**8 * efficiency(1500) / 8)
    flows = [{"src": src, "dst": dst, "bytes": size, "seconds": 1.0} for src, dst in ((0, 1), (1, 0), (None, 0))]
    flow = {"event": "flow", "step": 1, "of": 3, "src": 0, "dst": 1, "goodput": size * 8}
    result = {
        "event": "result",
        "flows": flows,
        "mtu": 1500,
        "congestion": ["cubic", "cubic"],
        "seconds": 4.0,
        "clocks": [],
    }
    log.write_text("a warning that is no JSON\n" + json.dumps(flow) + "\n" + json.dumps(result) + "\n")
    return 0


def test_a_probe_is_one_process_per_node_outside_the_quota() -> None:
    plans = [NodePlan(name=f"node{k}", link=Link(rate=10**8)) for k in range(2)]
    events: list[dict[str, Any]] = []
    with FakeSubstrate(2, answer) as substrate:
        receipt = probe(substrate, plans, events.append)
    starts = [call for call in substrate.calls if call[0] == "start"]
    assert [call[1] for call in starts] == [0, 1] and not any(call[-1] for call in starts)
    assert receipt.valid() and receipt.worst_error == pytest.approx(0, abs=1e-6) and len(events) == 2


def test_a_failed_probe_says_why_in_the_nodes_words() -> None:
    def fail(node: int, argv: Sequence[str], log: Path) -> int:
        log.write_text(json.dumps({"event": "error", "rank": node, "sentence": "node1 left the probe"}) + "\n")
        return 1

    with FakeSubstrate(2, fail) as substrate:
        with pytest.raises(NetworkInvalid, match=r"failed: node1 left the probe\. Try again.*probe=false"):
            probe(substrate, PLANS[:2], lambda event: None)


def test_a_probe_of_plain_processes_is_unshaped() -> None:
    plans = [NodePlan(name=f"node{k}", link=Link(rate=10**8)) for k in range(2)]
    with ProcessSubstrate(plans) as substrate:
        receipt = probe(substrate, plans, lambda event: None)
    assert receipt.worst_error is None and len(receipt.links) == 2 and receipt.fan_in is not None


def test_a_probe_that_failed_names_nodes_as_the_user_does(tmp_path: Path) -> None:
    logs = [tmp_path / "anna.log", tmp_path / "node0.log"]
    logs[0].write_text(json.dumps({"event": "error", "sentence": "node0: no connection from node1"}) + "\n")
    assert "failed: anna: no connection from node0; no end of it on node0. Try" in _complaint([1, None], logs)


def test_more_namespaces_than_there_are_addresses_for_are_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(netns.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: tool)
    with pytest.raises(Unavailable, match=r"241 nodes, .*\. Use --nodes 240 or fewer$"):
        netns.check([NodePlan(name=f"node{k}") for k in range(241)])
