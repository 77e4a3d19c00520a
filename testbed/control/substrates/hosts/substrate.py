"""Real hosts: one rank each, in a container of the same image, on the network that is there.

The network is measured and never shaped; no interface is touched. Containers get the host's network and no privilege.
Leave it and every container and file of this run is gone from the hosts, with one exception: when a connection broke,
what runs goes on there, and `fab collect` finds it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Self

import paramiko

from testbed.control.substrates.base import MEMORY_LEFT, NODE_PORT, NodeHandle, NodePlan, Process
from testbed.control.substrates.content import content_hash
from testbed.control.substrates.hosts.group import connected, each, values
from testbed.control.substrates.hosts.node import (
    HOME,
    RUN_LABEL,
    SOON,
    STOP_GRACE,
    UNTOUCHED,
    Account,
    Container,
    account,
    content_on_host,
    endpoints,
    engine,
    meeting_port,
    mount,
    once,
    remove_containers,
    run_id,
)
from testbed.control.substrates.hosts.ssh import LOST, Host
from testbed.results.folder import RunFolder, write_whole
from testbed.spec.datasets import MARKER, data_dir, dataset_info
from testbed.spec.errors import CommandFailed, ConnectionLost, HostFailed, RankFailed, TestbedError, Unavailable
from testbed.spec.inventory import Inventory
from testbed.spec.mode import ALGORITHMS, methods_dir
from testbed.spec.run import RunSpec
from testbed.spec.units import parse_size

# A container on a host, with the calls of any other process; its files come home while it runs.
#
# The container needs nobody: when the connection breaks it goes on. A thread here starts it, copies what its files
# have gained a few times a second, and waits for its end; after a break it connects again and reads on.

LOOK = 0.4  # seconds between looks at the files
START = 60.0  # seconds for an engine to start a container
FOREVER = 30 * 86400.0  # seconds; longer than any run
RECONNECT = 15.0  # seconds of trying after a connection broke
DELIVER = 20.0  # seconds for a signal to arrive


Version = tuple[int | None, int | None]


def version(stat: paramiko.SFTPAttributes) -> Version:
    """Size and time by which a file is told from the one that takes its place."""
    return stat.st_size, stat.st_mtime


def version_of(host: Host, path: PurePosixPath) -> Version | None:
    """What a file on a host is like now; None where there is none."""
    try:
        with contextlib.closing(host.files()) as session:
            return version(session.stat(str(path)))
    except FileNotFoundError:
        return None
    except LOST as error:
        raise ConnectionLost(f"{host}: the connection broke ({error or type(error).__name__})") from None


def when_back(call: Callable[[], object]) -> None:
    """Try until the connection, which another thread mends, has had its time to come back."""
    deadline = time.monotonic() + RECONNECT
    while True:
        try:
            call()
            return
        except ConnectionLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK)


class Mirror:
    """A file on a host and its copy here, which grows as the original does; a copy that exists is continued.

    `old` is what a file of an earlier attempt was like, which its rank will set aside: nothing of it is copied.
    """

    def __init__(self, remote: PurePosixPath, local: Path, old: Version | None = None) -> None:
        self.remote, self.local, self._old = remote, local, old
        self._offset = local.stat().st_size if local.exists() else 0
        self._file: paramiko.SFTPFile | None = None
        self._session: paramiko.SFTPClient | None = None

    def copy(self, session: paramiko.SFTPClient) -> None:
        """What is new; a file that is not there yet is fine."""
        if session is not self._session:  # after a break the old handle is worth nothing
            self._file, self._session = None, session
        if self._file is None:
            try:
                file = session.open(str(self.remote), "rb")
            except FileNotFoundError:
                return
            if self._old is not None and version(file.stat()) == self._old:
                file.close()
                return
            self._file, self._old = file, None
        size = self._file.stat().st_size or 0
        if size > self._offset:
            self._file.seek(self._offset)
            data = self._file.read(size - self._offset)
            self._write(data)
            self._offset += len(data)

    def _write(self, data: bytes) -> None:
        """Where it belongs, as half of it may be there already. A full disk here is no broken connection."""
        try:
            handle = os.open(self.local, os.O_WRONLY | os.O_CREAT, 0o644)
            with os.fdopen(handle, "wb") as out:
                out.seek(self._offset)
                out.write(data)
        except OSError as error:
            reason = error.strerror or error
            raise TestbedError(f"{self.local}: cannot be written ({reason}). Make room here, then run again") from None


class RemoteProcess:
    """`poll` and `wait` raise once nothing more can be known: RankFailed if it never began, else ConnectionLost."""

    def __init__(self, host: Host, container: Container, mirrors: Sequence[Mirror]) -> None:
        self.host = host
        self.pid = 0  # a number of another machine means nothing here
        self.name = container.name
        self._container = container
        self._mirrors = mirrors
        self._code: int | None = None
        self.error: TestbedError | None = None
        self._ended = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._ended.is_set() and self.error is not None:
            raise self.error
        return self._code if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutError."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.name} on {self.host} still runs after {timeout} s")
        code = self.poll()
        assert code is not None
        return code

    def signal(self, signum: int) -> None:
        """Through the engine; a container that has ended is left alone."""
        if not self._ended.is_set() and self._started.wait(START):
            with contextlib.suppress(CommandFailed):
                self.host.run(["docker", "kill", "--signal", str(int(signum)), self.name], DELIVER)

    def _live(self) -> None:
        try:
            self._start()
            self._code = self._follow()
        except TestbedError as error:
            self.error = error
        except Exception as error:  # a thread must not die unheard
            self.error = TestbedError(f"{self.host}: {type(error).__name__}: {error}")
        finally:
            self._started.set()
            self._ended.set()

    def _start(self) -> None:
        try:
            self.host.run(self._container.start(), START)
            self._started.set()
        except CommandFailed as error:
            said = error.said or str(error)
            raise RankFailed(
                f"{self.host}: rank {self._container.rank} was not started: {said}. Is `fab doctor` happy with it?"
            ) from None

    def _follow(self) -> int:
        """Copy and wait, across breaks of the connection."""
        while True:
            try:
                return self._watch()
            except (*LOST, ConnectionLost) as error:
                self._reconnect(error)

    def _reconnect(self, cause: Exception) -> None:
        deadline = time.monotonic() + RECONNECT
        self.host.close()
        while True:
            try:
                return self.host.open()
            except HostFailed as error:
                if time.monotonic() > deadline:
                    reason = str(error).removeprefix(f"{self.host}: ")
                    goes_on = "Its rank goes on; `fab collect` brings the results when all is done"
                    raise ConnectionLost(f"{self.host}: connection lost ({reason}). {goes_on}") from None
                time.sleep(1.0)

    def _watch(self) -> int:
        """The exit code, when all files are here to the last byte."""
        with contextlib.closing(self.host.files()) as session:
            with contextlib.closing(self.host.start(["docker", "wait", self.name], FOREVER)) as waiting:
                while not waiting.exit_status_ready():
                    self._copy(session)
                    time.sleep(LOOK)
                said = waiting.makefile("rb").read().decode(errors="replace").strip()
                if waiting.recv_exit_status() == -1:
                    raise ConnectionLost(f"{self.host}: the connection broke")
            self._copy(session)
        if not said.isdigit():
            raise RankFailed(f"{self.host}: the container of rank {self._container.rank} is gone. Who removed it?")
        code = int(said)
        return code if code <= 128 else 128 - code  # 137 is a death by signal 9

    def _copy(self, session: paramiko.SFTPClient) -> None:
        for mirror in self._mirrors:
            mirror.copy(session)


class Together:
    """One process whose failure tells what happened on all hosts, the guilty first."""

    def __init__(self, process: RemoteProcess, all_: Sequence[RemoteProcess]) -> None:
        self._process, self._all = process, all_
        self.pid = process.pid

    def poll(self) -> int | None:
        try:
            return self._process.poll()
        except TestbedError as error:
            raise self._told(error) from None

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def signal(self, signum: int) -> None:
        self._process.signal(signum)

    def forbid_writing(self) -> None:
        raise Unavailable(f"{UNTOUCHED}. Use --on compose or netns.")

    def _told(self, first: TestbedError) -> TestbedError:
        errors = [first, *(p.error for p in self._all if p.error is not None and p.error is not first)]
        kinds: list[type[TestbedError]] = [ConnectionLost, RankFailed]
        kind = next((kind for kind in kinds if any(isinstance(e, kind) for e in errors)), TestbedError)
        guilty = sorted(errors, key=lambda error: not isinstance(error, RankFailed))
        return kind("; ".join(dict.fromkeys(str(error).rstrip(".") for error in guilty)) + ".")


NOTE = "hosts.json"  # in the run's folder: what `fab collect` needs to find the run again


class HostsSubstrate:
    """The hosts of an inventory, in rank order."""

    name = "hosts"
    shaped = False
    one_clock = False
    python = "python3"  # of the image

    def __init__(
        self,
        plans: Sequence[NodePlan],
        folder: Path,
        spec: RunSpec,
        inventory: Inventory,
        *,
        accept_new: bool = False,
        notes: Sequence[str] = (),
    ) -> None:
        self._plans = tuple(plans)
        self._folder = folder.resolve()
        self._spec = spec
        self._inventory = inventory.first(len(plans))
        self._accept_new = accept_new
        self.notes = notes
        self._id = run_id(folder)
        self._cleanup = ExitStack()
        self._hosts: list[Host] = []
        self._accounts: list[Account] = []
        self._started: list[RemoteProcess] = []
        self._out_of_reach: set[Host] = set()  # when the run was to be stopped
        self._count = itertools.count()
        self._port = NODE_PORT
        self.nodes: Sequence[NodeHandle] = ()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._hosts = values(undo.enter_context(connected(self._inventory.nodes, self._accept_new)))
            self._accounts = values(each(self._hosts, self._check))
            ends = endpoints(self._hosts)
            self._port = meeting_port(self._hosts, ends, self._spec.port)
            self.nodes = tuple(
                NodeHandle(name=host.name, address=end.address, interface=end.interface)
                for host, end in zip(self._hosts, ends, strict=True)
            )
            undo.callback(self._remove)
            values(each(self._hosts, lambda host: host.run(["mkdir", "-p", str(self._place(host))], SOON)))
            undo.callback(self.stop)
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def _check(self, host: Host) -> Account:
        """Engine, image and data are there."""
        engine(host)
        found, wanted = content_on_host(host), content_hash()
        if found != wanted:
            what = "the image is missing" if found is None else f"the image has content {found}, the code here {wanted}"
            raise HostFailed(f"{host}: {what}. Send it: fab deploy")
        who, name = account(host), self._spec.data.name
        if not dataset_info(name).generated:
            try:
                there = host.run(["cat", str(who.data / name / MARKER)], SOON)
            except CommandFailed:
                there = ""
            if there.strip() != (data_dir() / name / MARKER).read_text().strip():
                raise HostFailed(f"{host}: data {name} is not there. Send it: fab deploy --data {name}")
        return who

    def _place(self, host: Host) -> PurePosixPath:
        """This run's folder on a host."""
        return self._accounts[self._hosts.index(host)].runs / self._id

    def _remove(self) -> None:
        """Containers and files of this run; a run that goes on keeps them, and so does a host out of reach."""
        if self._goes_on():
            return
        there = [host for host in self._hosts if host not in self._out_of_reach]
        for outcome in each(there, lambda host: remove_run(host, self._id, self._place(host))):
            if outcome.error is not None:
                print(f"{outcome.error}. `fab clean` removes what was left there", file=sys.stderr, flush=True)

    def _goes_on(self) -> bool:
        """A connection broke for good while nobody wanted the run to end: it is left alone, on all hosts."""
        lost = (process for process in self._started if isinstance(process.error, ConnectionLost))
        return any(process.host not in self._out_of_reach for process in lost)

    def exec(self, node: int, argv: Sequence[str], timeout: float) -> str:
        """Run to the end in a container of its own."""
        return self._hosts[node].run(once(self._accounts[node].who, argv[0], *argv[1:]), timeout)

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a container and return at once; its log and its records are copied home as they grow."""
        host, number = self._hosts[node], next(self._count)
        place, is_rank = self._place(host), log.parent.resolve() == self._folder
        output = log.name if is_rank else f"probe{number}.log"
        container = Container(
            name=f"testbed-{self._id}-{number}",
            run=self._id,
            rank=node,
            who=self._accounts[node].who,
            argv=argv,
            output=self._folder / output,
            mounts=self._mounts(node, place),
            env=env,
            cpus=self._plans[node].cpus if quota else None,
            purpose="rank" if is_rank else "probe",
        )
        mirrors = [Mirror(place / output, log), *([self._records(node)] if is_rank else [])]
        self._started.append(process := RemoteProcess(host, container, mirrors))
        return Together(process, self._started)

    def _records(self, node: int) -> Mirror:
        """From the first byte: what an earlier attempt recorded is set aside, here now and there by its rank."""
        folder = RunFolder(self._folder)
        there = self._place(self._hosts[node]) / folder.records(node).name
        earlier = folder.set_records_aside(node)
        return Mirror(there, folder.records(node), old=version_of(self._hosts[node], there) if earlier else None)

    def _mounts(self, node: int, place: PurePosixPath) -> list[list[str]]:
        """Under the paths they have here, so that a path means the same there."""
        mounts = [mount(place, self._folder)]
        if not dataset_info(self._spec.data.name).generated:
            mounts.append(mount(self._accounts[node].data, data_dir().resolve(), read_only=True))
        if self._spec.mode.algorithm not in ALGORITHMS:
            mounts.append(mount(place / "methods", methods_dir().resolve(), read_only=True))
        return mounts

    def port(self, wanted: int = 0) -> int:
        """The one at which all hosts could reach each other."""
        return self._port

    def share(self, folder: Path) -> None:
        """Send what a rank is told: spec.json, and the user's own method."""
        write_note(folder, self._id, self._hosts)
        values(each(self._hosts, self._tell))

    def _tell(self, host: Host) -> None:
        node, place = self._hosts.index(host), self._place(host)
        self.put(node, RunFolder(self._folder).spec, Path(place / "spec.json"))
        if self._spec.mode.algorithm not in ALGORITHMS:
            host.run(["mkdir", "-p", str(place / "methods")], SOON)
            name = f"{self._spec.mode.algorithm.replace('-', '_')}.py"
            self.put(node, methods_dir() / name, Path(place / "methods" / name))
        if self._accounts[node].uid == 0:  # where we are root, the rank is nobody
            host.run(["chown", "-R", self._accounts[node].who, str(place)], SOON)

    def stop(self) -> None:
        """SIGTERM, some seconds to write things down, then SIGKILL. After a lost connection ranks go on instead.

        A host that cannot be reached stops no other from being stopped; it is named in the end.
        """
        running = [p for p in self._started if not p.ended and p.host not in self._out_of_reach]
        if self._goes_on() or not running:
            return

        def end(host: Host) -> None:
            names = [process.name for process in running if process.host is host]
            with contextlib.suppress(CommandFailed):  # it has ended meanwhile
                when_back(lambda: host.run(["docker", "stop", "--time", str(STOP_GRACE), *names], SOON))

        outcomes = each(list(dict.fromkeys(process.host for process in running)), end)
        lost = [outcome.host for outcome in outcomes if isinstance(outcome.error, ConnectionLost)]
        self._out_of_reach |= set(lost)
        deadline = time.monotonic() + SOON
        for process in (process for process in running if process.host not in lost):
            with contextlib.suppress(TestbedError, TimeoutError):
                process.wait(max(0.0, deadline - time.monotonic()))
        if lost:
            fix = "what runs there goes on until `fab stop` reaches it"
            raise ConnectionLost(f"{', '.join(map(str, lost))}: not reached to stop the ranks; {fix}")

    def put(self, node: int, local: Path, remote: Path) -> None:
        """Copy a file to a host."""
        with contextlib.closing(self._hosts[node].files()) as session:
            session.put(str(local), str(remote))

    def get(self, node: int, remote: Path, local: Path) -> None:
        """Copy a file from a host."""
        with contextlib.closing(self._hosts[node].files()) as session:
            session.get(str(remote), str(local))

    def kill(self, node: int) -> None:
        """SIGKILL the host's containers."""
        self._engine(node, "kill")

    def pause(self, node: int) -> None:
        """Freeze them."""
        self._engine(node, "pause")

    def resume(self, node: int) -> None:
        """Let them go on."""
        self._engine(node, "unpause")

    def _engine(self, node: int, verb: str) -> None:
        host = self._hosts[node]
        names = [process.name for process in self._started if process.host is host and not process.ended]
        if names:
            with contextlib.suppress(CommandFailed):  # it has ended meanwhile
                host.run(["docker", verb, *names], SOON)

    def limit_memory(self, node: int) -> None:
        """A little more than the rank's container uses now."""
        host = self._hosts[node]
        for process in self._started:
            if process.host is host and not process.ended:
                shown = host.run(["docker", "stats", "--no-stream", "--format", "{{.MemUsage}}", process.name], SOON)
                limit = str(parse_size(shown.split("/")[0].strip()) + MEMORY_LEFT)
                host.run(["docker", "update", "--memory", limit, "--memory-swap", limit, process.name], SOON)

    def unlimit_memory(self, node: int) -> None:
        """Nothing to do: a rank that starts again does so in a new container."""

    def cut(self, node: int) -> None:
        """Not here, nor anything else that touches what a host has for others too."""
        raise Unavailable(f"{UNTOUCHED}. Use --on compose or netns.")

    def join(self, node: int) -> None:
        self.cut(node)

    def set_rate(self, node: int, rate: int | None) -> None:
        self.cut(node)

    def set_cpus(self, node: int, cpus: float | None) -> None:
        self.cut(node)


def write_note(folder: Path, run: str, hosts: Sequence[Host]) -> None:
    """Which run on which hosts this folder is of."""
    write_whole(folder / NOTE, json.dumps({"id": run, "nodes": [host.name for host in hosts]}, indent=1))


def remove_run(host: Host, run: str, place: PurePosixPath) -> None:
    """The containers and the folder of one run."""
    remove_containers(host, f"{RUN_LABEL}={run}")
    host.run(["rm", "-rf", str(place)], SOON)
    home = place.parent.parent
    assert home.name == HOME
    host.run(["sh", "-c", 'rmdir "$0" "$1" 2>/dev/null || true', str(place.parent), str(home)], SOON)
