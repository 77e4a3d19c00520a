"""The parts under `fab`, with hosts that only play their role: facts, outcomes, the life of a remote process."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import paramiko
import pytest

from testbed.control.substrates.hosts import doctor, substrate
from testbed.control.substrates.hosts.deploy import BLOCK, compress, pack_data
from testbed.control.substrates.hosts.group import Outcome, each, values
from testbed.control.substrates.hosts.node import (
    Endpoint,
    content_on_host,
    endpoint,
    engine,
    first_endpoint,
)
from testbed.control.substrates.hosts.ssh import Host, KeyRefused, check_host_keys, known_hosts
from testbed.control.substrates.hosts.substrate import Mirror, RemoteProcess
from testbed.spec.errors import (
    AuthenticationFailed,
    CommandFailed,
    ConnectionLost,
    HostFailed,
    KeyUnknown,
    RankFailed,
    TestbedError,
)
from testbed.spec.inventory import HostNode
from tests.unit.control.substrates.hosts.test_node import container

Say = Callable[[Sequence[str]], str]


class ScriptedHost(Host):
    """Answers commands by `say`; raising there is the command's failure."""

    def __init__(self, say: Say, name: str = "node0", **node: object) -> None:
        super().__init__(HostNode.model_validate({"name": name, "address": "192.0.2.1"} | node))
        self.say = say
        self.asked: list[list[str]] = []

    def run(self, argv: Sequence[str], timeout: float) -> str:
        self.asked.append(list(argv))
        return self.say(argv)


def failing(code: int, said: str) -> Say:
    def say(argv: Sequence[str]) -> str:
        raise CommandFailed(f"node0: {argv[0]}: {said}", code, said)

    return say


@pytest.mark.parametrize(
    ("code", "said", "fix"),
    [
        (127, "timeout: failed to run command 'docker': No such file or directory", "apt-get install docker.io"),
        (1, "Got permission denied while trying to connect to the Docker daemon socket", "usermod -aG docker"),
        (1, "Cannot connect to the Docker daemon. Is the docker daemon running?", "systemctl start docker"),
    ],
)
def test_a_host_without_an_engine_is_told_with_the_fix(code: int, said: str, fix: str) -> None:
    with pytest.raises(HostFailed, match=r"^node0: ") as refusal:
        engine(ScriptedHost(failing(code, said)))
    assert fix in str(refusal.value)


def test_no_image_is_no_error() -> None:
    assert content_on_host(ScriptedHost(failing(1, "Error: No such image: testbed:latest"))) is None
    assert content_on_host(ScriptedHost(lambda argv: "abc\n")) == "abc"


def ip(argv: Sequence[str]) -> str:
    """A host with eth0 and ib0; all goes through eth0 by itself."""
    if argv[2:4] == ["route", "get"]:
        return json.dumps([{"dst": argv[4], "dev": "eth0", "prefsrc": "10.0.0.7"}])
    if argv[2:5] == ["address", "show", "dev"] and argv[5] == "ib0":
        infos = [{"family": "inet6", "local": "fd00::7", "scope": "global"}, {"local": "169.254.1.1", "scope": "link"}]
        return json.dumps([{"addr_info": [*infos, {"family": "inet", "local": "10.9.0.7", "scope": "global"}]}])
    raise CommandFailed("node0: ip", 1, f'Device "{argv[-1]}" does not exist.')


def test_the_interface_is_the_inventorys_else_the_routes() -> None:
    assert endpoint(ScriptedHost(ip, interface="ib0"), "10.0.0.1") == Endpoint("ib0", "10.9.0.7")
    assert endpoint(ScriptedHost(ip), "10.0.0.1") == Endpoint("eth0", "10.0.0.7")
    assert first_endpoint(ScriptedHost(ip), "192.0.2.9") == Endpoint("eth0", "10.0.0.7")
    assert first_endpoint(ScriptedHost(ip), None) == Endpoint("lo", "127.0.0.1")
    with pytest.raises(HostFailed, match=r"interface eth9: .*does not exist"):
        endpoint(ScriptedHost(ip, interface="eth9"), "10.0.0.1")


def test_without_ip_on_the_host_the_images_is_asked() -> None:
    def say(argv: Sequence[str]) -> str:
        if argv[0] == "ip":
            raise CommandFailed("node0: ip", 127, "not found")
        return ip(argv[argv.index("testbed:latest") :])

    assert endpoint(ScriptedHost(say), "10.0.0.1") == Endpoint("eth0", "10.0.0.7")


def test_all_hosts_are_asked_and_all_failures_told_together() -> None:
    hosts = [ScriptedHost(lambda argv: "", name=f"node{k}") for k in range(4)]

    def call(host: Host) -> str:
        if host.name in ("node1", "node3"):
            raise HostFailed(f"{host}: is broken. Mend it")
        return host.name

    outcomes = each(hosts, call)
    assert [outcome.value for outcome in outcomes] == ["node0", None, "node2", None]
    with pytest.raises(TestbedError) as both:
        values(outcomes)
    assert str(both.value) == "node1: is broken. Mend it; node3: is broken. Mend it" and both.value.exit_code == 2


def test_a_mistake_of_ours_on_one_host_is_an_outcome_too() -> None:
    outcomes = each([ScriptedHost(lambda argv: "")], lambda host: 1 / 0)
    assert "node0: ZeroDivisionError" in str(outcomes[0].error)


def test_a_rank_that_is_not_started_fails_and_names_the_host() -> None:
    host = ScriptedHost(failing(125, "OCI runtime create failed"))
    process = RemoteProcess(host, container(rank=2), [])
    with pytest.raises(RankFailed, match="node0: rank 2 was not started: OCI runtime create failed"):
        process.wait(5)


class Waiting:
    """`docker wait` that says a code after some looks."""

    def __init__(self, said: bytes, looks: int) -> None:
        self.said, self.looks = said, looks

    def exit_status_ready(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def recv_exit_status(self) -> int:
        return 0

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.said)

    def close(self) -> None: ...


class Files:
    """A file session on a local folder."""

    def __init__(self) -> None:
        self.closing = contextlib.ExitStack()

    def open(self, path: str, mode: str) -> object:
        file = self.closing.enter_context(Path(path).open(mode))  # noqa: SIM115 - it does
        calls = {"seek": file.seek, "read": file.read, "close": file.close}
        return type("File", (), {"stat": lambda _: Path(path).stat(), **calls})()

    def close(self) -> None:
        self.closing.close()


class Reconnecting(ScriptedHost):
    """Loses the connection `breaks` times, then stays."""

    def __init__(self, breaks: int, back: bool = True) -> None:
        super().__init__(lambda argv: "")
        self.breaks, self.back = breaks, back

    def files(self) -> paramiko.SFTPClient:
        return Files()  # type: ignore[return-value]

    def start(self, argv: Sequence[str], timeout: float) -> paramiko.Channel:
        if self.breaks:
            self.breaks -= 1
            raise ConnectionLost("node0: the connection broke")
        return Waiting(b"137\n", looks=1)  # type: ignore[return-value]

    def open(self) -> None:
        if not self.back:
            raise HostFailed("node0: no SSH connection to 192.0.2.1:22 (refused). Is it up?")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(substrate, "LOOK", 0.01)
    monkeypatch.setattr(substrate, "RECONNECT", 0.0)


def test_after_a_break_it_reads_on_and_no_byte_comes_twice(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("one\ntwo\n")
    host = Reconnecting(breaks=2)
    process = RemoteProcess(host, container(), [Mirror(tmp_path / "there", tmp_path / "here")])  # type: ignore[arg-type]
    assert process.wait(10) == -9, "137 is a death by SIGKILL"
    assert (tmp_path / "here").read_text() == "one\ntwo\n"


def test_a_lost_connection_says_that_the_rank_goes_on() -> None:
    process = RemoteProcess(Reconnecting(breaks=1, back=False), container(), [])
    with pytest.raises(ConnectionLost, match=r"node0: connection lost .*goes on; `fab collect`"):
        process.wait(10)


def test_compressed_pieces_are_one_gzip_file() -> None:
    data = bytes(range(256)) * (BLOCK // 100)
    out = io.BytesIO()
    compress(io.BytesIO(data), out)
    assert gzip.decompress(out.getvalue()) == data and len(out.getvalue()) < len(data) / 10


def test_a_data_set_that_cannot_be_read_leaves_no_half_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    (tmp_path / "data" / "mnist" / "a.npy").write_bytes(b"x" * 100)
    with pytest.raises(TestbedError, match=r"mnist: cannot be packed .*b\.npy.*testbed data verify mnist"):
        pack_data("mnist", {"a.npy": "1", "b.npy": "2"})
    assert list((tmp_path / "cache").rglob("*.gz")) == []


class Stuck:
    """A channel whose other end takes nothing."""

    def settimeout(self, seconds: float) -> None: ...

    def sendall(self, data: bytes) -> None:
        raise TimeoutError

    def close(self) -> None: ...


def test_a_host_that_takes_nothing_any_more_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    host = ScriptedHost(lambda argv: "")
    monkeypatch.setattr(host, "start", lambda argv, timeout: Stuck())
    with pytest.raises(ConnectionLost, match=r"node0: it took nothing for 60 s during docker load.*Run it again"):
        host.send(["docker", "load"], io.BytesIO(b"image"), 10, lambda count: None)


@pytest.mark.parametrize(
    ("error", "reachable", "key"),
    [
        (None, "yes", "known"),
        (KeyUnknown("node0: the key is not known"), "not let in", "refused"),
        (AuthenticationFailed("node0: user ann"), "not let in", "known"),
        (HostFailed("node0: no SSH connection; host key, not let in"), "no", "-"),
    ],
)
def test_doctor_tells_apart_who_does_not_answer(error: HostFailed | None, reachable: str, key: str) -> None:
    row = doctor._first(Outcome(ScriptedHost(lambda argv: ""), error=error))
    assert (row.cells["reachable"], row.cells["key"], len(row.troubles)) == (reachable, key, error is not None)


def connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept_new: bool) -> paramiko.SSHClient:
    monkeypatch.setenv("HOME", str(tmp_path))
    host = Host(HostNode(name="node0", address="192.0.2.1"), accept_new)
    made = host._describe()
    check_host_keys(made, accept_new)
    return made.client  # type: ignore[no-any-return]


def test_an_unknown_key_is_refused_with_the_command_that_adds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connection(tmp_path, monkeypatch, accept_new=False)
    with pytest.raises(KeyRefused, match=r"ssh-keyscan -p 22 192\.0\.2\.1 >> ~/\.ssh/known_hosts, or .*--accept-new"):
        client._policy.missing_host_key(client, "192.0.2.1", paramiko.RSAKey.generate(1024))
    assert not (tmp_path / ".ssh").exists()


def test_opting_in_writes_the_key_down_for_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connection(tmp_path, monkeypatch, accept_new=True)
    key = paramiko.RSAKey.generate(1024)
    client._policy.missing_host_key(client, "192.0.2.1", key)
    again = connection(tmp_path, monkeypatch, accept_new=False)
    assert again._system_host_keys.check("192.0.2.1", key)
    assert (tmp_path / ".ssh" / "known_hosts").stat().st_mode & 0o777 == 0o600


def test_known_hosts_are_where_the_ssh_configuration_says() -> None:
    assert known_hosts({"userknownhostsfile": "/a none /b"}) == [Path("/a"), Path("/b")]
