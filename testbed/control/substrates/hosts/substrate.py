"""Real hosts: one rank per host, in a container of the same image, on the network of the hosts.

The network is measured and never shaped; no interface is changed. Containers have the host's network and no privilege.
At the end of the context every container and file of the run is removed from the hosts, with one exception: after a
lost connection the ranks continue on the hosts, and `fab collect` finds them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import stat
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

import paramiko

from testbed.control.substrates.base import MEMORY_HEADROOM_BYTES, NodeHandle, NodePlan, Process, UnchangedNodes
from testbed.control.substrates.clone import content_hash
from testbed.control.substrates.docker_cli import (
    DATA_FOLDER,
    IMAGE,
    RUN_LABEL,
    SCRIPT_FOLDER,
    Container,
    exit_code,
    memory_argv,
    mount_option,
    parse_memory,
    set_memory_argv,
    stop_argv,
)
from testbed.control.substrates.hosts.node import (
    HOME,
    QUERY_TIMEOUT_S,
    Account,
    account,
    engine_version,
    find_endpoints,
    find_port,
    image_content,
    remove_containers,
    run_id,
)
from testbed.control.substrates.hosts.ssh import CONNECTION_ERRORS, Host, connected, results_or_raise, run_on_all
from testbed.results.folder import RunFolder, write_whole
from testbed.spec.datasets import MARKER, data_dir, dataset_info
from testbed.spec.disk import is_full, os_failure
from testbed.spec.errors import CommandFailed, ConnectionLost, HostFailed, RankFailed, TestbedError, Unavailable
from testbed.spec.inventory import Inventory
from testbed.spec.run import DEFAULT_PORT, RunSpec
from testbed.spec.script import MAX_COLLECTED_BYTES, MAX_COLLECTED_FILES, ScriptSpec, walk

LOG = logging.getLogger(__name__)
NEVER_CHANGED = "a fault never changes the interface, CPU or disk of a real host. Use --on compose or netns"
HOSTS_FILE = "hosts.json"  # in the run's folder; `fab collect` finds the folder by this file
STOP_GRACE_S = 5  # between SIGTERM and SIGKILL
START_TIMEOUT_S = 60.0  # for an engine to start a container
SIGNAL_TIMEOUT_S = 20.0
TRANSFER_TIMEOUT_S = 3600.0  # for a host to receive a script's folder
MAX_RUN_S = 30 * 86400.0  # timeout of `docker wait`: longer than any run


@dataclass(frozen=True)
class Pace:
    """How often remote files are copied, and for how long a host is contacted again after its connection broke."""

    poll_s: float = 0.4
    reconnect_s: float = 15.0


Version = tuple[int | None, int | None]  # size and modification time of a file


def file_version(stat: paramiko.SFTPAttributes) -> Version:
    """Return size and modification time, by which a file differs from a new file of the same name."""
    return stat.st_size, stat.st_mtime


def remote_version(host: Host, path: PurePosixPath) -> Version | None:
    """Return the version of a file on a host; None if there is no file. Raises ConnectionLost."""
    try:
        with contextlib.closing(host.files()) as session:
            return file_version(session.stat(str(path)))
    except FileNotFoundError:
        return None
    except CONNECTION_ERRORS as error:
        raise host.connection_lost(error) from None


def retry_until_connected(call: Callable[[], object], pace: Pace) -> None:
    """Repeat a call until it does not raise ConnectionLost. Another thread reopens the connection meanwhile.

    Raises ConnectionLost after `pace.reconnect_s`.
    """
    deadline = time.monotonic() + pace.reconnect_s
    while True:
        try:
            call()
            return
        except ConnectionLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(pace.poll_s)


class Mirror:
    """A file on a host and its copy here. `copy` appends what the original has gained; an existing copy is continued.

    `old` is the version of the file of an earlier attempt. It is not copied, because the rank renames it.
    """

    def __init__(self, remote: PurePosixPath, local: Path, old: Version | None = None) -> None:
        self.remote, self.local, self._old = remote, local, old
        self._offset = local.stat().st_size if local.is_file() else 0
        self._file: paramiko.SFTPFile | None = None
        self._session: paramiko.SFTPClient | None = None

    def copy(self, session: paramiko.SFTPClient) -> None:
        """Append what is new. Do nothing if the remote file does not exist yet."""
        if session is not self._session:  # the connection was reopened, so the old file handle is invalid
            self._file, self._session = None, session
        if self._file is None:
            try:
                file = session.open(str(self.remote), "rb")
            except FileNotFoundError:
                return
            if self._old is not None and file_version(file.stat()) == self._old:
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
        """Write at the offset. Raises TestbedError, because the caller takes an OSError for a broken connection.

        Appending would be wrong: an earlier write of the same data may have been incomplete (full disk).
        """
        try:
            handle = os.open(self.local, os.O_WRONLY | os.O_CREAT, 0o644)
            with os.fdopen(handle, "wb") as out:
                out.seek(self._offset)
                out.write(data)
        except OSError as error:
            if is_full(error):
                raise os_failure(error, self.local) from None
            way_out = "Change its mode, then run again."
            raise TestbedError(f"{self.local}: cannot be written ({error.strerror}). {way_out}") from None


class RemoteProcess:
    """A container on a host. Its files are copied here while it runs.

    The container does not need the connection. A thread starts the container, copies what its files have gained, and
    waits for its end. After a lost connection the thread reconnects and continues. `poll` and `wait` raise RankFailed
    if the container did not start, and ConnectionLost if the host is no longer reached.
    """

    def __init__(self, host: Host, container: Container, mirrors: Sequence[Mirror], pace: Pace) -> None:
        self.host = host
        self.pid = 0  # a pid of another machine has no meaning here
        self.name = container.name
        self._container = container
        self._mirrors = mirrors
        self._pace = pace
        self._code: int | None = None
        self.error: TestbedError | None = None
        self._ended = threading.Event()
        self._started = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self._ended.is_set() and self.error is not None:
            raise self.error
        return self._code if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises TimeoutError."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.name} on {self.host} still runs after {timeout} s")
        code = self.poll()
        assert code is not None
        return code

    def signal(self, signum: int) -> None:
        """Send a signal by the engine. Do nothing if the container has ended."""
        if not self._ended.is_set() and self._started.wait(START_TIMEOUT_S):
            with contextlib.suppress(CommandFailed):
                self.host.run(["docker", "kill", "--signal", str(int(signum)), self.name], SIGNAL_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._start()
            self._code = self._follow()
        except TestbedError as error:
            self.error = error
        except Exception as error:  # kept for `poll`, because an exception in a thread does not reach the caller
            self.error = TestbedError(f"{self.host}: {type(error).__name__}: {error}")
        finally:
            self._started.set()
            self._ended.set()

    def _start(self) -> None:
        try:
            self.host.run(self._container.start_argv(), START_TIMEOUT_S)
            self._started.set()
        except CommandFailed as error:
            problem = f"rank {self._container.rank} was not started: {error.output or error}"
            raise RankFailed(f"{self.host}: {problem}. `fab doctor` checks the host") from None

    def _follow(self) -> int:
        """Copy files until the container ends, and return its exit code. Reconnect if the connection breaks."""
        while True:
            try:
                return self._copy_until_end()
            except (*CONNECTION_ERRORS, ConnectionLost):
                self._reconnect()

    def _reconnect(self) -> None:
        deadline = time.monotonic() + self._pace.reconnect_s
        self.host.close()
        while True:
            try:
                return self.host.open()
            except HostFailed as error:
                if time.monotonic() > deadline:
                    reason = str(error).removeprefix(f"{self.host}: ")
                    way_out = "Its rank continues; `fab collect` copies the results when it has ended"
                    raise ConnectionLost(f"{self.host}: connection lost ({reason}). {way_out}") from None
                time.sleep(min(1.0, self._pace.reconnect_s))

    def _copy_until_end(self) -> int:
        """Wait until the container has ended and its files are copied completely, and return the exit code."""
        with contextlib.closing(self.host.files()) as session:
            with contextlib.closing(self.host.start(["docker", "wait", self.name], MAX_RUN_S)) as waiting:
                while not waiting.exit_status_ready():
                    self._copy(session)
                    time.sleep(self._pace.poll_s)
                output = waiting.makefile("rb").read().decode(errors="replace").strip()
                if waiting.recv_exit_status() == -1:
                    raise ConnectionLost(f"{self.host}: the connection broke")
            self._copy(session)
        if not output.isdigit():
            problem = f"the container of rank {self._container.rank} no longer exists"
            raise RankFailed(f"{self.host}: {problem}. Check `docker events` there")
        return exit_code(int(output))

    def _copy(self, session: paramiko.SFTPClient) -> None:
        for mirror in self._mirrors:
            mirror.copy(session)


class AggregatingProcess:
    """One rank's process. If it fails, its error contains the errors of all hosts, those of failed ranks first."""

    def __init__(self, process: RemoteProcess, all_processes: Sequence[RemoteProcess]) -> None:
        self._process, self._all = process, all_processes
        self.pid = process.pid

    def poll(self) -> int | None:
        """Return the exit code; None while it runs. Raises one error for all hosts."""
        try:
            return self._process.poll()
        except TestbedError as error:
            raise self._aggregate(error) from None

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def signal(self, signum: int) -> None:
        self._process.signal(signum)

    def forbid_writing(self) -> None:
        raise Unavailable(NEVER_CHANGED)

    def _aggregate(self, first: TestbedError) -> TestbedError:
        errors = [first, *(p.error for p in self._all if p.error is not None and p.error is not first)]
        kinds: list[type[TestbedError]] = [ConnectionLost, RankFailed]
        kind = next((kind for kind in kinds if any(isinstance(e, kind) for e in errors)), TestbedError)
        errors.sort(key=lambda error: not isinstance(error, RankFailed))
        return kind("; ".join(dict.fromkeys(str(error).rstrip(".") for error in errors)) + ".")


class HostsSubstrate(UnchangedNodes):
    """The hosts of an inventory, in rank order. Only the memory of a rank's container is ever limited."""

    name = "hosts"
    unchanged = NEVER_CHANGED
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
        pace: Pace | None = None,
    ) -> None:
        self._plans = tuple(plans)
        self._folder = folder.resolve()
        self._spec, self._script = spec, spec.script
        self._with_data: set[Host] = set()  # hosts that have a folder of data sets, which a script may read
        self._inventory = inventory.first(len(plans))
        self._accept_new = accept_new
        self._pace = pace or Pace()
        self.notes = notes
        self._id = run_id(folder)
        self._cleanup = ExitStack()
        self._hosts: list[Host] = []
        self._accounts: list[Account] = []
        self._started: list[RemoteProcess] = []
        self._unreachable: set[Host] = set()  # hosts that could not be reached to stop their ranks
        self._count = itertools.count()
        self._port = DEFAULT_PORT
        self.nodes: Sequence[NodeHandle] = ()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._hosts = results_or_raise(undo.enter_context(connected(self._inventory.nodes, self._accept_new)))
            self._accounts = results_or_raise(run_on_all(self._hosts, self._check))
            ends = find_endpoints(self._hosts)
            self._port = find_port(self._hosts, ends, self._spec.port)
            self.nodes = tuple(
                NodeHandle(name=host.name, address=end.address, interface=end.interface)
                for host, end in zip(self._hosts, ends, strict=True)
            )
            undo.callback(self._remove)
            make = ["mkdir", "-p"]
            results_or_raise(
                run_on_all(self._hosts, lambda host: host.run([*make, str(self._run_dir(host))], QUERY_TIMEOUT_S))
            )
            if self._script:
                undo.callback(self._collect_files)
            undo.callback(self.stop)
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def _collect_files(self) -> None:
        """Copy the files that the script wrote on each host to the run folder. An error of a host is only logged."""
        folder = RunFolder(self._folder)
        if self._ranks_continue() or not folder.path.is_dir():
            return

        def collect(host: Host) -> None:
            local = folder.files(self._hosts.index(host))
            copy_files(host, self._run_dir(host) / local.name, local)

        for outcome in run_on_all([host for host in self._hosts if host not in self._unreachable], collect):
            if outcome.error is not None:
                LOG.warning("%s. The files that the script wrote there were not copied", outcome.error)

    def _check(self, host: Host) -> Account:
        """Return the account on a host. Raises HostFailed if engine, image or data are missing."""
        engine_version(host)
        own = self._script.image if self._script else ""
        found, wanted = image_content(host, own or IMAGE), content_hash()
        if found != wanted:
            problem = "is missing" if found is None else f"has content {found}, and the code here has {wanted}"
            way_out = f"docker save {own} | ssh {host.node.address} docker load" if own else "fab deploy"
            raise HostFailed(f"{host}: the image {f'{own} ' if own else ''}{problem}. Send it: {way_out}")
        user, name = account(host), self._spec.data.name
        if self._script:
            with contextlib.suppress(CommandFailed):
                host.run(["test", "-d", str(user.data)], QUERY_TIMEOUT_S)
                self._with_data.add(host)
            return user
        if not dataset_info(name).generated:
            try:
                there = host.run(["cat", str(user.data / name / MARKER)], QUERY_TIMEOUT_S)
            except CommandFailed:
                there = ""
            if there.strip() != (data_dir() / name / MARKER).read_text().strip():
                raise HostFailed(f"{host}: data {name} is missing or differs. Send it: fab deploy --data {name}")
        return user

    def _run_dir(self, host: Host) -> PurePosixPath:
        """Return this run's folder on a host."""
        return self._accounts[self._hosts.index(host)].runs / self._id

    def _remove(self) -> None:
        """Remove containers and files of this run, unless the ranks continue or the host cannot be reached."""
        if self._ranks_continue():
            return
        reachable = [host for host in self._hosts if host not in self._unreachable]
        for outcome in run_on_all(reachable, lambda host: remove_run(host, self._id, self._run_dir(host))):
            if outcome.error is not None:
                LOG.warning("%s. `fab clean` removes what was left there", outcome.error)

    def _ranks_continue(self) -> bool:
        """Return True if a connection is lost and the run was not stopped. Then nothing may be stopped or removed."""
        lost = (process for process in self._started if isinstance(process.error, ConnectionLost))
        return any(process.host not in self._unreachable for process in lost)

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str], log: Path, quota: bool = True) -> Process:
        """Start a container and return its process at once. Its log and records are copied here as they grow."""
        host, number = self._hosts[node], next(self._count)
        run_dir, is_rank = self._run_dir(host), log.parent.resolve() == self._folder
        output = log.name if is_rank else f"probe{number}.log"
        if self._script:
            env = {**env, "TESTBED_SCRIPT": SCRIPT_FOLDER, "TESTBED_DATA": DATA_FOLDER}
        container = Container(
            name=f"testbed-{self._id}-{number}",
            run=self._id,
            rank=node,
            user=self._accounts[node].rank_user,
            argv=argv,
            output=self._folder / output,
            mounts=self._mounts(node, run_dir),
            env=env,
            cpus=self._plans[node].cpus if quota else None,
            purpose="rank" if is_rank else "probe",
            image=(self._script.image if self._script else "") or IMAGE,
            script=self._script is not None and is_rank,
        )
        mirrors = [Mirror(run_dir / output, log), *([self._mirror_records(node)] if is_rank else [])]
        self._started.append(process := RemoteProcess(host, container, mirrors, self._pace))
        return AggregatingProcess(process, self._started)

    def _mirror_records(self, node: int) -> Mirror:
        """Return the mirror of a rank's records. Records of an earlier attempt are renamed here now.

        On the host the rank renames them when it starts.
        """
        folder = RunFolder(self._folder)
        there = self._run_dir(self._hosts[node]) / folder.records(node).name
        earlier = folder.set_records_aside(node)
        return Mirror(there, folder.records(node), old=remote_version(self._hosts[node], there) if earlier else None)

    def _mounts(self, node: int, run_dir: PurePosixPath) -> list[list[str]]:
        """Return the mounts. Folders have the same paths in the container as on this machine."""
        mounts = [mount_option(run_dir, self._folder)]
        if self._script:
            mounts.append(mount_option(run_dir / "script", Path(SCRIPT_FOLDER), read_only=True))
            if self._hosts[node] in self._with_data:
                mounts.append(mount_option(self._accounts[node].data, Path(DATA_FOLDER), read_only=True))
            more = self._script.mounts
            return mounts + [
                mount_option(PurePosixPath(each.source), Path(each.target), not each.writable) for each in more
            ]
        if not dataset_info(self._spec.data.name).generated:
            mounts.append(mount_option(self._accounts[node].data, data_dir().resolve(), read_only=True))
        return mounts

    def port(self, wanted: int = 0) -> int:
        """Return the port at which all hosts have reached each other."""
        return self._port

    def prepare_folder(self, folder: Path) -> None:
        """Send spec.json, the user's own files and the script's folder to every host."""
        write_hosts_file(folder, self._id, self._hosts)
        with tempfile.NamedTemporaryFile(prefix="testbed-script-", suffix=".tar") as archive:
            if self._script:
                pack_folder(self._script, archive.name)
            results_or_raise(run_on_all(self._hosts, lambda host: self._send_request(host, Path(archive.name))))

    def _send_request(self, host: Host, archive: Path) -> None:
        user, run_dir = self._accounts[self._hosts.index(host)], self._run_dir(host)
        _put(host, RunFolder(self._folder).spec, run_dir / "spec.json")
        for file in sorted(path for path in RunFolder(self._folder).own_files.rglob("*") if path.is_file()):
            there = run_dir / file.relative_to(self._folder).as_posix()
            host.run(["mkdir", "-p", str(there.parent)], QUERY_TIMEOUT_S)
            _put(host, file, there)
        if self._script:
            place = str(run_dir / "script")
            host.run(["mkdir", "-p", place], QUERY_TIMEOUT_S)
            with archive.open("rb") as content:
                host.send(["tar", "-xf", "-", "-C", place], content, TRANSFER_TIMEOUT_S, lambda size: None)
        if user.uid == 0:  # then the rank runs as nobody
            host.run(["chown", "-R", user.rank_user, str(run_dir)], QUERY_TIMEOUT_S)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after STOP_GRACE_S. Do nothing if ranks continue after a lost connection.

        The ranks on all hosts that can be reached are stopped. Then ConnectionLost is raised with the names of the
        other hosts, if there are any.
        """
        running = [p for p in self._started if not p.ended and p.host not in self._unreachable]
        if self._ranks_continue() or not running:
            return

        def end(host: Host) -> None:
            names = [process.name for process in running if process.host is host]
            with contextlib.suppress(CommandFailed):  # the container has ended meanwhile
                retry_until_connected(lambda: host.run(stop_argv(names, STOP_GRACE_S), QUERY_TIMEOUT_S), self._pace)

        outcomes = run_on_all(list(dict.fromkeys(process.host for process in running)), end)
        lost = [outcome.host for outcome in outcomes if isinstance(outcome.error, ConnectionLost)]
        self._unreachable |= set(lost)
        deadline = time.monotonic() + QUERY_TIMEOUT_S
        for process in (process for process in running if process.host not in lost):
            with contextlib.suppress(TestbedError, TimeoutError):
                process.wait(max(0.0, deadline - time.monotonic()))
        if lost:
            fix = "the ranks continue until `fab stop` stops them"
            raise ConnectionLost(f"{', '.join(map(str, lost))}: could not be reached to stop the ranks; {fix}")

    def kill(self, node: int) -> None:
        """Send SIGKILL to the host's containers."""
        self._on_containers(node, "kill")

    def pause(self, node: int) -> None:
        """Freeze the host's containers."""
        self._on_containers(node, "pause")

    def resume(self, node: int) -> None:
        """Unfreeze the host's containers."""
        self._on_containers(node, "unpause")

    def _on_containers(self, node: int, verb: str) -> None:
        names = self._running_on(node)
        if names:
            with contextlib.suppress(CommandFailed):  # a container has ended meanwhile
                self._hosts[node].run(["docker", verb, *names], QUERY_TIMEOUT_S)

    def _running_on(self, node: int) -> list[str]:
        """Return the names of this run's containers on a host that have not ended."""
        return [process.name for process in self._started if process.host is self._hosts[node] and not process.ended]

    def limit_memory(self, node: int) -> None:
        """Limit the rank's container to the memory that it uses now plus MEMORY_HEADROOM_BYTES."""
        host = self._hosts[node]
        for name in self._running_on(node):
            used = parse_memory(host.run(memory_argv(name), QUERY_TIMEOUT_S))
            host.run(set_memory_argv(name, used + MEMORY_HEADROOM_BYTES), QUERY_TIMEOUT_S)

    def unlimit_memory(self, node: int) -> None:
        """Do nothing: a rank that starts again gets a new container."""


def pack_folder(script: ScriptSpec, path: str) -> None:
    """Write a script's folder to a tar file, without the files that `walk` leaves out."""
    with tarfile.open(path, "w") as archive:
        for entry, relative in walk(Path(script.folder), script.exclude):
            if entry.is_symlink() or entry.is_dir() or entry.is_file():  # no pipes, sockets or devices
                archive.add(entry.path, arcname=relative, recursive=False, filter=_without_owner)


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def copy_files(host: Host, remote: PurePosixPath, local: Path) -> None:
    """Copy the regular files below a folder of a host, up to the limits that a launcher has for collected files."""
    left_files, left_bytes = MAX_COLLECTED_FILES, MAX_COLLECTED_BYTES
    with contextlib.closing(host.files()) as session:
        queue = [(remote, local)]
        while queue:
            folder, target = queue.pop()
            try:
                entries = session.listdir_attr(str(folder))
            except FileNotFoundError:  # the script wrote nothing
                continue
            for entry in entries:
                name, mode, size = PurePosixPath(entry.filename).name, entry.st_mode or 0, entry.st_size or 0
                if stat.S_ISDIR(mode) and name not in ("", "..") and len(queue) < MAX_COLLECTED_FILES:
                    queue.append((folder / name, target / name))
                elif stat.S_ISREG(mode) and left_files > 0 and size <= left_bytes:
                    target.mkdir(parents=True, exist_ok=True)
                    session.get(str(folder / name), str(target / name))
                    left_files, left_bytes = left_files - 1, left_bytes - size


def _put(host: Host, local: Path, remote: PurePosixPath) -> None:
    with contextlib.closing(host.files()) as session:
        session.put(str(local), str(remote))


def write_hosts_file(folder: Path, run: str, hosts: Sequence[Host]) -> None:
    """Write the id of a run and the names of its hosts to hosts.json in the run folder."""
    write_whole(folder / HOSTS_FILE, json.dumps({"id": run, "nodes": [host.name for host in hosts]}, indent=1))


def remove_run(host: Host, run: str, run_dir: PurePosixPath) -> None:
    """Remove the containers and the folder of one run, then our folders above it if they are empty."""
    remove_containers(host, f"{RUN_LABEL}={run}")
    host.run(["rm", "-rf", str(run_dir)], QUERY_TIMEOUT_S)
    home = run_dir.parent.parent
    assert home.name == HOME
    host.run(["sh", "-c", 'rmdir "$0" "$1" 2>/dev/null || true', str(run_dir.parent), str(home)], QUERY_TIMEOUT_S)
