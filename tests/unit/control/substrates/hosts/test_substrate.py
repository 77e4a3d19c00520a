"""Ranks on hosts: copying files, lost connections, the end of a run. The hosts answer by a function."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import paramiko
import pytest

from testbed.control.substrates.base import NodePlan
from testbed.control.substrates.hosts.node import Account
from testbed.control.substrates.hosts.ssh import Host
from testbed.control.substrates.hosts.substrate import (
    HostsSubstrate,
    Mirror,
    Pace,
    RemoteProcess,
    file_version,
    pack_folder,
)
from testbed.results.folder import RunFolder
from testbed.spec.errors import ConnectionLost, HostCommandFailed, HostFailed, RankFailed, TestbedError
from testbed.spec.inventory import HostNode, Inventory
from testbed.spec.run import RunSpec
from testbed.spec.script import ScriptSpec
from tests.support.scripted_hosts import LocalFiles, Machine, ScriptedHost, failing, silent
from tests.unit.control.substrates.test_docker_cli import container

SPEC = RunSpec.load({"nodes": 2, "model": "lenet5", "data": {"name": "synthetic"}, "batch": 8, "steps": 6}, "")
PACE = Pace(poll_s=0.01, reconnect_s=0.0)


def test_a_rank_that_is_not_started_fails_and_names_the_host() -> None:
    host = ScriptedHost(failing(125, "OCI runtime create failed"))
    process = RemoteProcess(host, container(rank=2), [], PACE)
    with pytest.raises(RankFailed, match="node0: rank 2 was not started: OCI runtime create failed"):
        process.wait(5)


class WaitChannel:
    """The channel of `docker wait`, which prints a code after some polls."""

    def __init__(self, output: bytes, polls: int) -> None:
        self.output, self.polls = output, polls

    def exit_status_ready(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def recv_exit_status(self) -> int:
        return 0

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.output)

    def close(self) -> None: ...


class ReconnectingHost(ScriptedHost):
    """Loses the connection `breaks` times; then `back` decides if it can be opened again."""

    def __init__(self, breaks: int, back: bool = True, output: bytes = b"137\n") -> None:
        super().__init__(silent)
        self.breaks, self.back, self.output = breaks, back, output

    def files(self) -> paramiko.SFTPClient:
        return LocalFiles()  # type: ignore[return-value]

    def start(self, argv: Sequence[str], timeout_s: float) -> paramiko.Channel:
        if self.breaks:
            self.breaks -= 1
            raise ConnectionLost("node0: the connection broke")
        return WaitChannel(self.output, polls=1)  # type: ignore[return-value]

    def open(self) -> None:
        if not self.back:
            raise HostFailed("node0: no SSH connection to 192.0.2.1:22 (refused). Is it up?")


def test_after_a_lost_connection_copying_continues_and_no_byte_comes_twice(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("one\ntwo\n")
    mirror = Mirror(PurePosixPath(tmp_path / "there"), tmp_path / "here")
    process = RemoteProcess(ReconnectingHost(breaks=2), container(), [mirror], PACE)
    assert process.wait(10) == -9, "137 is a death by SIGKILL"
    assert (tmp_path / "here").read_text() == "one\ntwo\n"


def test_a_lost_connection_says_that_the_rank_continues() -> None:
    process = RemoteProcess(ReconnectingHost(breaks=1, back=False), container(), [], PACE)
    with pytest.raises(ConnectionLost, match=r"node0: connection lost .*rank continues; `fab collect`"):
        process.wait(10)


def test_a_container_that_was_removed_is_a_failed_rank() -> None:
    process = RemoteProcess(ReconnectingHost(breaks=0, output=b""), container(rank=1), [], PACE)
    with pytest.raises(RankFailed, match=r"node0: the container of rank 1 no longer exists.*docker events"):
        process.wait(10)


def test_a_full_disk_here_is_an_error_and_no_byte_comes_twice(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"one two three\n")
    (tmp_path / "here").mkdir()
    mirror = Mirror(PurePosixPath(tmp_path / "there"), tmp_path / "here")
    with contextlib.closing(LocalFiles()) as session:
        with pytest.raises(TestbedError, match=r"here: cannot be written \(Is a directory\)"):
            mirror.copy(session)  # type: ignore[arg-type]
        (tmp_path / "here").rmdir()
        (tmp_path / "here").write_bytes(b"one t")  # as much as was written before the disk was full
        mirror.copy(session)  # type: ignore[arg-type]
    assert (tmp_path / "here").read_bytes() == b"one two three\n"


def test_a_version_is_size_and_modification_time(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    os.utime(tmp_path / "a", (1, 1))
    assert file_version((tmp_path / "a").stat()) == (1, 1)  # type: ignore[arg-type]


class StartedProcess:
    """A rank's process, as far as `stop` needs it."""

    def __init__(self, host: Host) -> None:
        self.host, self.name, self.ended, self.error = host, f"testbed-{host}", False, None

    def wait(self, timeout: float | None = None) -> int:
        self.ended = True
        return 0


@pytest.fixture
def machines(tmp_path: Path) -> list[Machine]:
    return [Machine(tmp_path / f"home{k}", f"node{k}") for k in (0, 1)]


@pytest.fixture
def substrate(tmp_path: Path, machines: list[Machine]) -> HostsSubstrate:
    nodes = [HostNode(name=f"node{k}", address=f"192.0.2.{k}") for k in (0, 1)]
    plans = [NodePlan(name=f"node{k}") for k in (0, 1)]
    (tmp_path / "run").mkdir()
    made = HostsSubstrate(plans, tmp_path / "run", SPEC, Inventory(nodes=tuple(nodes)), pace=PACE)
    made._hosts = list(machines)
    made._accounts = [Account(1000, 1000, PurePosixPath(tmp_path / f"home{k}")) for k in (0, 1)]
    return made


def test_ctrl_c_stops_and_cleans_every_reachable_host_and_names_the_others(
    substrate: HostsSubstrate, machines: list[Machine]
) -> None:
    first, second = machines
    for host in machines:
        Path(substrate._run_dir(host)).mkdir(parents=True)
    substrate._started = [StartedProcess(first), StartedProcess(second)]  # type: ignore[list-item]
    answer = first.answer
    first.answer = lambda argv: "" if argv[:2] == ["docker", "stop"] else answer(argv)

    def lost(argv: Sequence[str]) -> str:
        raise ConnectionLost("node1: the connection is lost")

    second.answer = lost
    with pytest.raises(ConnectionLost, match=r"^node1: could not be reached .*`fab stop`"):
        substrate.stop()
    substrate.stop()  # a second call has nothing to do
    substrate._started[1].error = ConnectionLost("node1: connection lost")
    substrate._remove()
    assert ["docker", "stop", "--time", "5", "testbed-node0"] in first.commands
    assert not Path(substrate._run_dir(first)).exists() and Path(substrate._run_dir(second)).exists()


def test_a_host_that_cannot_be_cleaned_is_named_in_the_log(
    substrate: HostsSubstrate,
    machines: list[Machine],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command line prints the log to stderr; a notebook with quiet=True prints nothing."""

    def read_only(argv: Sequence[str]) -> str:
        raise HostCommandFailed("node1: rm", 1, "read-only file system")

    machines[1].answer = read_only
    substrate._remove()
    assert "node1: rm" in caplog.text and "`fab clean`" in caplog.text
    assert capsys.readouterr() == ("", "")


def test_after_a_lost_connection_all_ranks_continue(substrate: HostsSubstrate, machines: list[Machine]) -> None:
    substrate._started = [StartedProcess(host) for host in machines]  # type: ignore[misc]
    substrate._started[1].error = ConnectionLost("node1: connection lost")
    substrate.stop()
    substrate._remove()
    assert all(host.commands == [] for host in machines)


def test_a_rank_that_ended_just_before_its_fault_is_ignored(substrate: HostsSubstrate, machines: list[Machine]) -> None:
    machines[0].answer = failing(1, "container is not running")
    substrate._started = [StartedProcess(machines[0])]  # type: ignore[list-item]
    substrate.kill(0)
    assert machines[0].commands == [["docker", "kill", "testbed-node0"]]


def test_records_of_a_second_attempt_start_from_the_first_byte(
    substrate: HostsSubstrate, machines: list[Machine], tmp_path: Path
) -> None:
    """The rank renames its old records a moment after it has started; until then they must not be copied."""
    host, folder = machines[0], RunFolder(tmp_path / "run")
    there = Path(substrate._run_dir(host)) / "rank0.jsonl"
    there.parent.mkdir(parents=True)
    for path in (there, folder.records(0)):
        path.write_text("first attempt, a long one\n")
    os.utime(there, (1, 1))
    mirror = substrate._mirror_records(0)
    with contextlib.closing(host.files()) as session:
        mirror.copy(session)
        assert not folder.records(0).exists(), "the old records are not copied"
        there.rename(there.with_name("rank0.attempt1.jsonl"))
        there.write_text("second\n")
        mirror.copy(session)
        with there.open("a") as file:
            file.write("more\n")
        mirror.copy(session)
    assert folder.records(0).read_text() == "second\nmore\n"
    assert (tmp_path / "run" / "rank0.attempt1.jsonl").read_text() == "first attempt, a long one\n"


def test_the_folder_of_a_script_is_packed_without_what_no_rank_needs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / ".git").mkdir(parents=True)
    (source / ".git" / "config").touch()
    (source / "lib").mkdir()
    (source / "lib" / "main.py").write_text("print()")
    (source / "big.bin").touch()
    (source / "link").symlink_to("lib")
    os.mkfifo(source / "pipe")
    script = ScriptSpec(argv=("python", "lib/main.py"), folder=str(source), exclude=("*.bin",))
    pack_folder(script, str(tmp_path / "a.tar"))
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert sorted(archive.getnames()) == ["lib", "lib/main.py", "link"]
        assert all(member.uid == 0 and member.uname == "" for member in archive)
