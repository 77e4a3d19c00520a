"""A container on a host, with the calls of any other process; its files come home while it runs.

The container needs nobody: when the connection breaks it goes on. A thread here starts it, copies what its files
have gained a few times a second, and waits for its end; after a break it connects again and reads on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

import paramiko

from testbed.control.substrates.hosts_remote import UNTOUCHED, Container
from testbed.control.substrates.hosts_ssh import LOST, CommandFailed, ConnectionLost, Host, HostFailed
from testbed.spec.errors import RankFailed, TestbedError, Unavailable

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
