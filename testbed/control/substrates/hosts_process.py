"""A container on a host, with the calls of any other process; its files come home while it runs.

The container needs nobody: when the connection breaks it goes on. A thread here starts it, copies what its files
have gained a few times a second, and waits for its end; after a break it connects again and reads on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import paramiko

from testbed.control.substrates.hosts_remote import Container
from testbed.control.substrates.hosts_ssh import LOST, CommandFailed, ConnectionLost, Host, HostFailed
from testbed.spec.errors import RankFailed, TestbedError

LOOK = 0.4  # seconds between looks at the files
START = 60.0  # seconds for an engine to start a container
FOREVER = 30 * 86400.0  # seconds; longer than any run
RECONNECT = 15.0  # seconds of trying after a connection broke
DELIVER = 20.0  # seconds for a signal to arrive


class Mirror:
    """A file on a host and its copy here, which grows as the original does."""

    def __init__(self, remote: PurePosixPath, local: Path) -> None:
        self.remote, self.local = remote, local
        self._offset = local.stat().st_size if local.exists() else 0  # a rank that starts again writes on
        self._file: paramiko.SFTPFile | None = None
        self._session: paramiko.SFTPClient | None = None

    def copy(self, session: paramiko.SFTPClient) -> None:
        """What is new; a file that is not there yet is fine."""
        if session is not self._session:  # after a break the old handle is worth nothing
            self._file, self._session = None, session
        if self._file is None:
            try:
                self._file = session.open(str(self.remote), "rb")
            except FileNotFoundError:
                return
        size = self._file.stat().st_size or 0
        if size > self._offset:
            self._file.seek(self._offset)
            data = self._file.read(size - self._offset)
            with self.local.open("ab") as out:
                out.write(data)
            self._offset += len(data)


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
