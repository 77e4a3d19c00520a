"""Runs that lie on hosts, and the end of a run on them: hosts that only play their role, with real folders."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import paramiko
import pytest

from testbed.control.cli import hosts
from testbed.control.cli.progress import Silent
from testbed.control.runs.commands import exit_code
from testbed.control.runs.run import execute, resume
from testbed.control.runs.select import on_hosts
from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.hosts import runs as hosts_runs
from testbed.control.substrates.hosts import substrate as hosts_process
from testbed.control.substrates.hosts.node import Account, Endpoint, check_apart, user
from testbed.control.substrates.hosts.ssh import Host
from testbed.control.substrates.hosts.substrate import NOTE, HostsSubstrate, Mirror, version
from testbed.results.folder import RunFolder
from testbed.spec.errors import (
    CommandFailed,
    ConnectionLost,
    HostFailed,
    NetworkInvalid,
    SpecError,
    TestbedError,
    UsageError,
)
from testbed.spec.inventory import HostNode, Inventory
from testbed.spec.run import RunSpec
from tests.unit.control.substrates.hosts.test_hosts_parts import Files, ScriptedHost

RUN = "ring-n2-abc123"
SPEC = RunSpec.load({"nodes": 2, "model": "lenet5", "data": {"name": "synthetic"}, "batch": 8, "steps": 6}, "")
END = '{"kind":"end"}\n'


class Machine(ScriptedHost):
    """A host whose home is a folder, and whose engine has these containers: (id, rank, purpose, state, code, user)."""

    def __init__(self, home: Path, name: str, containers: Sequence[tuple[str, int, str, str, int, str]] = ()) -> None:
        super().__init__(self._answer, name)
        self.home, self.containers = home, list(containers)
        self.place = home / ".testbed" / "runs" / RUN

    def files(self) -> paramiko.SFTPClient:
        files = Files()
        files.get = lambda there, here: shutil.copy(there, here)  # type: ignore[attr-defined]
        files.stat = lambda there: Path(there).stat()  # type: ignore[attr-defined]
        return files  # type: ignore[return-value]

    def _answer(self, argv: Sequence[str]) -> str:
        match list(argv):
            case ["sh", "-c", script, *_] if "id -u" in script:
                return f"1000\n1000\n{self.home}\n"
            case ["docker", "version", *_]:
                return "28"
            case ["docker", "ps", *rest] if "{{json .}}" in rest:
                return "\n".join(map(self._listed, self.containers))
            case ["docker", "ps", *rest] if f"label=testbed.user={user()}" in rest:
                return "\n".join(each[0] for each in self.containers if each[5] == user())
            case ["docker", "ps", *_]:
                return "\n".join(each[0] for each in self.containers)
            case ["docker", "inspect", *_, container]:
                return next(f"{each[3]} {each[4]}" for each in self.containers if each[0] == container)
            case ["docker", "rm", "--force", "--volumes", *ids]:
                self.containers = [each for each in self.containers if each[0] not in ids]
                return ""
            case ["docker", "image", *_]:
                return ""
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise CommandFailed(f"{self}: {argv[0]}", done.returncode, done.stderr)
        return done.stdout

    @staticmethod
    def _listed(container: tuple[str, int, str, str, int, str]) -> str:
        name, rank, purpose, *_, owner = container
        labels = f"testbed=hosts,testbed.run={RUN},testbed.rank={rank},testbed.purpose={purpose},testbed.user={owner}"
        return json.dumps({"ID": name, "Labels": labels})


def machine(tmp_path: Path, rank: int, records: str | None = END, **container: object) -> Machine:
    values = {"purpose": "rank", "state": "exited", "code": 0, "user": user()} | container
    row = (f"c{rank}", rank, values["purpose"], values["state"], values["code"], values["user"])
    made = Machine(tmp_path / f"home{rank}", f"node{rank}", [row])  # type: ignore[list-item]
    made.place.mkdir(parents=True)
    (made.place / "spec.json").write_text(SPEC.to_json())
    if records is not None:
        (made.place / f"rank{rank}.jsonl").write_text(records)
    return made


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESTBED_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_a_run_is_ok_when_every_rank_finished_and_then_the_hosts_are_empty(tmp_path: Path) -> None:
    machines = [machine(tmp_path, 0), machine(tmp_path, 1)]
    (found,), troubles = hosts_runs.find(machines)
    summary, folder, failures = hosts_runs.collect(found)
    assert (summary.status, troubles, failures) == ("ok", [], [])
    assert (folder / NOTE).is_file() and not any(each.place.exists() or each.containers for each in machines)


def test_a_lost_probe_is_no_ok_run_and_its_collection_exits_with_3(tmp_path: Path) -> None:
    machines = [machine(tmp_path, rank, records=None, purpose="probe") for rank in (0, 1)]
    (found,), _ = hosts_runs.find(machines)
    summary, _, _ = hosts_runs.collect(found)
    assert summary.status == "failed" and "rank 0 did not finish" in summary.reason and exit_code([summary]) == 3


def test_a_rank_says_more_of_a_run_than_the_probe_before_or_after_it(tmp_path: Path) -> None:
    there = machine(tmp_path, 1, state="running")
    there.containers.insert(0, ("probe", 1, "probe", "exited", 0, user()))
    (found,), _ = hosts_runs.find([there])
    assert (found.parts[0].state, found.parts[0].code, found.running) == ("running", None, True)
    assert hosts._line(RUN, found.parts[0])[-1] == "-", "nothing has ended, so there is no code"


def test_what_is_missing_is_named_and_a_later_collect_makes_the_run_whole(tmp_path: Path) -> None:
    first, second = machine(tmp_path, 0), machine(tmp_path, 1)
    (found,), _ = hosts_runs.find([first])
    summary, folder, _ = hosts_runs.collect(found)
    assert summary.status == "failed" and "rank 1 did not finish, or its records are not here" in summary.reason
    (rest,), _ = hosts_runs.find([first, second])
    again, same, _ = hosts_runs.collect(rest)
    assert (again.status, same) == ("ok", folder)


def test_a_host_whose_files_do_not_come_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = [machine(tmp_path, 0), machine(tmp_path, 1)]

    def broken() -> paramiko.SFTPClient:
        raise ConnectionLost("node1: the connection broke")

    monkeypatch.setattr(machines[1], "files", broken)
    (found,), _ = hosts_runs.find(machines)
    summary, _, failures = hosts_runs.collect(found)
    assert summary.status == "failed" and [str(error) for error in failures] == ["node1: the connection broke"]
    assert machines[1].place.exists() and not machines[0].place.exists()


def test_a_container_that_was_only_created_does_not_run(tmp_path: Path) -> None:
    machines = [machine(tmp_path, 0), machine(tmp_path, 1, records=None, state="created")]
    (found,), _ = hosts_runs.find(machines)
    assert not found.running and hosts_runs.collect(found)[0].status == "failed"


def test_a_rank_whose_container_somebody_pruned_is_found_by_its_records(tmp_path: Path) -> None:
    machines = [machine(tmp_path, 0), machine(tmp_path, 1)]
    machines[1].containers = []
    (found,), _ = hosts_runs.find(machines)
    assert hosts_runs.collect(found)[0].status == "ok"


def test_a_host_with_a_dead_engine_hides_no_other(tmp_path: Path) -> None:
    def dead(argv: Sequence[str]) -> str:
        raise CommandFailed("node1: docker", 1, "Cannot connect to the Docker daemon")

    found, troubles = hosts_runs.find([machine(tmp_path, 0), ScriptedHost(dead, "node1")])
    assert [each.id for each in found] == [RUN] and "node1: no Docker engine answers" in str(troubles[0])


def test_what_another_user_of_the_engine_runs_is_neither_seen_nor_removed(tmp_path: Path) -> None:
    theirs = machine(tmp_path, 0, state="running", user="somebody@else")
    assert hosts_runs.find([theirs]) == ([], [])
    said = hosts_runs.clean(theirs, everything=True)
    assert theirs.containers and theirs.place.exists() and said == ["not the image, which others use"]
    ours = machine(tmp_path, 1, state="running")
    hosts_runs.clean(ours, everything=True)
    assert not ours.containers and not ours.place.exists()


# --- a run on hosts ----------------------------------------------------------------------------------------------


class Started:
    """A rank's process, as far as the end of a run cares."""

    def __init__(self, host: Host) -> None:
        self.host, self.name, self.ended, self.error = host, f"testbed-{host}", False, None

    def wait(self, timeout: float | None = None) -> int:
        self.ended = True
        return 0


@pytest.fixture
def substrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostsSubstrate]:
    monkeypatch.setattr(hosts_process, "RECONNECT", 0.0)
    monkeypatch.setattr(hosts_process, "LOOK", 0.0)
    nodes = [HostNode(name=f"node{k}", address=f"192.0.2.{k}") for k in (0, 1)]
    plans = [NodePlan(name=f"node{k}") for k in (0, 1)]
    (tmp_path / "run").mkdir()
    made = HostsSubstrate(plans, tmp_path / "run", SPEC, Inventory(nodes=tuple(nodes)))
    made._hosts = [Machine(tmp_path / f"home{k}", f"node{k}") for k in (0, 1)]
    made._accounts = [Account(1000, 1000, PurePosixPath(tmp_path / f"home{k}")) for k in (0, 1)]
    yield made


def test_ctrl_c_stops_and_empties_every_host_that_can_be_reached_and_names_the_rest(
    substrate: HostsSubstrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = substrate._hosts
    for host in (first, second):
        Path(substrate._place(host)).mkdir(parents=True)
    substrate._started = [Started(first), Started(second)]  # type: ignore[list-item]
    answer = first.say  # type: ignore[attr-defined]
    first.say = lambda argv: "" if argv[:2] == ["docker", "stop"] else answer(argv)  # type: ignore[attr-defined]

    def gone(argv: Sequence[str]) -> str:
        raise ConnectionLost("node1: the connection is lost")

    second.say = gone  # type: ignore[attr-defined]
    with pytest.raises(ConnectionLost, match=r"^node1: not reached .*`fab stop`"):
        substrate.stop()
    substrate.stop()  # once more on the way out: nobody is left to be told
    substrate._started[1].error = ConnectionLost("node1: connection lost")
    substrate._remove()
    assert ["docker", "stop", "--time", "5", "testbed-node0"] in first.asked  # type: ignore[attr-defined]
    assert not Path(substrate._place(first)).exists() and Path(substrate._place(second)).exists()


def test_a_host_that_is_not_emptied_is_told_beside_the_results(
    substrate: HostsSubstrate, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output holds one JSON document with --json."""

    def full(argv: Sequence[str]) -> str:
        raise CommandFailed("node1: rm", 1, "read-only file system")

    substrate._hosts[1].say = full  # type: ignore[attr-defined]
    substrate._remove()
    said = capsys.readouterr()
    assert said.out == "" and "node1: rm" in said.err and "`fab clean`" in said.err


def test_after_a_lost_connection_all_ranks_go_on(substrate: HostsSubstrate) -> None:
    substrate._started = [Started(host) for host in substrate._hosts]  # type: ignore[misc]
    substrate._started[1].error = ConnectionLost("node1: connection lost")
    substrate.stop()
    substrate._remove()
    assert all(host.asked == [] for host in substrate._hosts)  # type: ignore[attr-defined]


def test_a_rank_that_ended_just_before_its_fault_is_fine(substrate: HostsSubstrate) -> None:
    def ended(argv: Sequence[str]) -> str:
        raise CommandFailed("node0: docker kill", 1, "container is not running")

    substrate._hosts[0].say = ended  # type: ignore[attr-defined]
    substrate._started = [Started(substrate._hosts[0])]  # type: ignore[list-item]
    substrate.kill(0)


def test_records_of_a_second_attempt_begin_anew(substrate: HostsSubstrate, tmp_path: Path) -> None:
    """The rank there sets its old records aside a moment after it started; until then they must not be copied."""
    host, folder = substrate._hosts[0], RunFolder(tmp_path / "run")
    there = Path(substrate._place(host)) / "rank0.jsonl"
    there.parent.mkdir(parents=True)
    for path in (there, folder.records(0)):
        path.write_text("first attempt, a long one\n")
    os.utime(there, (1, 1))
    mirror = substrate._records(0)
    with contextlib.closing(host.files()) as session:
        mirror.copy(session)
        assert not folder.records(0).exists(), "still the old ones"
        there.rename(there.with_name("rank0.attempt1.jsonl"))
        there.write_text("second\n")
        mirror.copy(session)
        with there.open("a") as file:
            file.write("more\n")
        mirror.copy(session)
    assert folder.records(0).read_text() == "second\nmore\n"
    assert (tmp_path / "run" / "rank0.attempt1.jsonl").read_text() == "first attempt, a long one\n"


def test_a_disk_that_is_full_here_is_told_and_no_byte_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_bytes(b"one two three\n")
    (tmp_path / "here").mkdir()
    mirror = Mirror(PurePosixPath(tmp_path / "there"), tmp_path / "here")
    mirror._offset = 0
    with contextlib.closing(Files()) as session:
        with pytest.raises(TestbedError, match=r"here: cannot be written \(Is a directory\)"):
            mirror.copy(session)  # type: ignore[arg-type]
        (tmp_path / "here").rmdir()
        (tmp_path / "here").write_bytes(b"one t")  # what a full disk took of it
        mirror.copy(session)  # type: ignore[arg-type]
    assert (tmp_path / "here").read_bytes() == b"one two three\n"


def test_a_file_is_told_from_the_one_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    os.utime(tmp_path / "a", (1, 1))
    assert version((tmp_path / "a").stat()) == (1, 1)  # type: ignore[arg-type]


def place() -> Inventory:
    return Inventory.load({"nodes": [{"name": "a", "address": "h1"}, {"name": "b", "address": "h2"}]}, "")


def test_a_run_on_hosts_is_not_resumed_and_the_way_out_is_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.create(SPEC)
    with pytest.raises(UsageError, match=r"--resume .*checkpoints lie there.*--retries N"):
        resume(on_hosts(place(), SPEC), folder, Silent(), 0)


@pytest.mark.parametrize("fault", ["cut:rank0@step1", "rate:rank0@step1=1mbit", "slow:rank0@step1=0.5cpu"])
def test_faults_that_would_touch_a_host_are_refused_with_the_reason(tmp_path: Path, fault: str) -> None:
    spec = SPEC.model_copy(update={"faults": RunSpec.load({"nodes": 2, "faults": [fault]}, "").faults})
    with pytest.raises(SpecError, match=r"cannot be done on hosts, where these can: kill, exit, pause, oom\."):
        execute(spec, on_hosts(place(), spec), RunFolder(tmp_path / "run"), Silent())


def test_two_hosts_with_one_address_are_refused() -> None:
    pair = [ScriptedHost(lambda argv: "", name) for name in ("a", "b")]
    with pytest.raises(NetworkInvalid, match=r"hosts a, b: all have the address 10\.0\.0\.1"):
        check_apart(pair, [Endpoint("eth0", "10.0.0.1"), Endpoint("eth1", "10.0.0.1")])
    check_apart(pair, [Endpoint("eth0", "10.0.0.1"), Endpoint("eth1", "10.0.0.2")])


def test_a_key_that_is_not_here_is_told_as_that(tmp_path: Path) -> None:
    node = HostNode(name="a", address="192.0.2.1", key=str(tmp_path / "none"), user="first.last")
    with pytest.raises(HostFailed, match=r"^a: key .*none: no such file here"):
        Host(node).open()
