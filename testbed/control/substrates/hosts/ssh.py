"""One host over SSH: connections by the user's OpenSSH configuration, checked host keys, commands with timeouts.

A command is a list of arguments; only `command_line` quotes it. The program `timeout` on the host ends a command that
takes too long. `run_on_all` calls a function for all hosts at the same time and keeps every outcome; `results_or_raise`
raises one error with the names of all failed hosts.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import paramiko
from fabric import Config, Connection
from invoke.exceptions import CommandTimedOut, ThreadException
from paramiko.ssh_exception import NoValidConnectionsError

from testbed.control.machine.processes import TIMEOUT_CODE
from testbed.net.probe import Clock, read_clock
from testbed.spec.errors import (
    AuthenticationFailed,
    ConnectionLost,
    HostCommandFailed,
    HostFailed,
    KeyUnknown,
    TestbedError,
    Unavailable,
)
from testbed.spec.inventory import HostNode

CONNECT_TIMEOUT_S = 10  # for each stage of a connection
KEEPALIVE_S = 15
STALL_TIMEOUT_S = 60.0  # a transfer that sends no byte for so long has failed
KILL_AFTER_S = 5  # between SIGTERM and SIGKILL of `timeout` on the host
CHUNK_BYTES = 1 << 18
CONNECTION_ERRORS = (EOFError, OSError, paramiko.SSHException, ThreadException)  # errors of a broken connection


# Host keys: known keys are checked, unknown keys are refused without --accept-new, changed keys are always refused

GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_known_hosts_lock = threading.Lock()  # connections are opened in parallel, and each one may write a line


class KeyRefused(paramiko.SSHException):
    """A host's key is in no known_hosts file."""


def known_hosts(ssh_config: dict[str, object]) -> list[Path]:
    """Return the user's known_hosts files, as OpenSSH finds them."""
    names = str(ssh_config.get("userknownhostsfile", USER_KNOWN_HOSTS)).split()
    return [Path(name).expanduser() for name in names if name != "none"]


def check_host_keys(connection: Connection, accept_new: bool) -> None:
    """Configure a connection and its jump host to accept only known host keys, with `accept_new` also unknown keys.

    This is needed because Fabric accepts every key by default.
    """
    own = known_hosts(connection.ssh_config)
    for path in [*own, *map(Path, GLOBAL_KNOWN_HOSTS)]:
        if path.is_file():
            connection.client.load_system_host_keys(str(path))
    target = own[0] if own and accept_new else None
    connection.client.set_missing_host_key_policy(_Policy(connection, target))
    if isinstance(connection.gateway, Connection):
        check_host_keys(connection.gateway, accept_new)


class _Policy(paramiko.MissingHostKeyPolicy):
    """Adds an unknown key to the file `target`. Without `target` it raises KeyRefused with the command that adds it."""

    def __init__(self, connection: Connection, target: Path | None) -> None:
        self._connection = connection
        self._target = target

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        if self._target is None:
            raise KeyRefused(_refusal(self._connection, key))
        with _known_hosts_lock:
            self._target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(f"{hostname} {key.get_name()} {key.get_base64()}\n")


def _refusal(connection: Connection, key: paramiko.PKey) -> str:
    if connection.gateway:
        add = f"ssh {connection.original_host} true"  # because ssh-keyscan does not use the jump host
    else:
        add = f"ssh-keyscan -p {connection.port} {connection.host} >> ~/.ssh/known_hosts"
    problem = f"the host key of {connection.host} is not known ({key.fingerprint})"
    return f"{problem}. Compare it, then add it: {add}, or accept all unknown keys with --accept-new"


def _key_changed(error: paramiko.BadHostKeyException) -> str:
    seen, known = error.key.fingerprint, error.expected_key.fingerprint
    problem = f"the host key has changed: known_hosts has {known}, the host presents {seen}"
    fix = f"Another machine may answer there. If the host was replaced: ssh-keygen -R {shlex.quote(error.hostname)}"
    return f"{problem}. {fix}"


def host_and_port(address: str, port: int) -> str:
    """Return "address:port", with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _reason(error: BaseException) -> str:
    """Return why a connection failed. Paramiko collects the errors of all addresses in a NoValidConnectionsError."""
    if isinstance(error, NoValidConnectionsError):
        found = dict.fromkeys(_reason(each) for each in error.errors.values())
        return ", ".join(found) or "no address answers"
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    return " ".join(str(error).split()) or type(error).__name__


class Host:
    """A node of the inventory. Call `open` before the other methods."""

    def __init__(self, node: HostNode, accept_new: bool = False) -> None:
        self.node = node
        self.name = node.name
        self._accept_new = accept_new
        self._connection: Connection | None = None

    def __str__(self) -> str:
        return self.name

    def open(self) -> None:
        """Connect unless the connection is open. Raises HostFailed with the reason and the fix."""
        if self._connection is not None and self._connection.is_connected:
            return
        if self.node.key and not Path(self.node.key).expanduser().is_file():
            fix = "Correct it in the inventory, or leave it out to use the keys of the SSH configuration"
            raise HostFailed(f"{self.name}: key {self.node.key}: no such file here. {fix}")
        connection: Connection | None = None
        try:
            self._connection = connection = self.describe_connection()
            check_host_keys(connection, self._accept_new)
            connection.open()
            assert connection.transport is not None
            connection.transport.set_keepalive(KEEPALIVE_S)
        except KeyRefused as error:
            raise KeyUnknown(f"{self.name}: {error}") from None
        except paramiko.BadHostKeyException as error:
            raise KeyUnknown(f"{self.name}: {_key_changed(error)}") from None
        except paramiko.AuthenticationException as error:
            raise AuthenticationFailed(f"{self.name}: {self._not_accepted(error)}") from None
        except (OSError, EOFError, paramiko.SSHException, ValueError) as error:
            fix = "Check that the host is up, and its address and port in the inventory"
            where = host_and_port(self.node.address, connection.port if connection else self.node.port or 22)
            raise HostFailed(f"{self.name}: no SSH connection to {where} ({_reason(error)}). {fix}.") from None

    def describe_connection(self) -> Connection:
        """Return a connection that is not open yet. The inventory overrides the SSH configuration."""
        config, node, limit = Config(), self.node, CONNECT_TIMEOUT_S
        options: dict[str, Any] = {"banner_timeout": limit, "auth_timeout": limit, "channel_timeout": limit}
        if node.key:
            options |= {"key_filename": [str(Path(node.key).expanduser())], "look_for_keys": False}
        return Connection(
            node.address,
            user=node.user,
            port=node.port,
            config=config,
            gateway=Connection(node.jump, config=config, connect_timeout=limit) if node.jump else None,
            connect_timeout=limit,
            connect_kwargs=options,
        )

    def _not_accepted(self, error: Exception) -> str:
        user, key = self._connection.user if self._connection else self.node.user, self.node.key
        if isinstance(error, paramiko.PasswordRequiredException):
            return f"the key {key or ''} has a passphrase. Add it to the SSH agent: ssh-add {key or ''}"
        identity = f"-i {key} " if key else ""
        port = f"-p {self.node.port} " if self.node.port else ""
        fix = f"Use the right key, or add it there: ssh-copy-id {identity}{port}{user}@{self.node.address}"
        return f"user {user} is not accepted{f' with key {key}' if key else ''}. {fix}"

    def close(self) -> None:
        """Close the connection and the jump host's. Errors of a broken connection are ignored."""
        if self._connection is not None:
            with contextlib.suppress(*CONNECTION_ERRORS):
                self._connection.close()
            with contextlib.suppress(*CONNECTION_ERRORS):
                if isinstance(self._connection.gateway, Connection):
                    self._connection.gateway.close()
            self._connection = None

    @property
    def connection(self) -> Connection:
        if self._connection is None or not self._connection.is_connected:
            raise ConnectionLost(f"{self.name}: the connection is lost")
        return self._connection

    def run(self, argv: Sequence[str], timeout_s: float) -> str:
        """Run a command to its end and return its stdout. Raises HostCommandFailed or ConnectionLost."""
        line, limit = command_line(argv, timeout_s), timeout_s + 2 * KILL_AFTER_S
        try:
            result = self.connection.run(line, hide=True, warn=True, in_stream=False, pty=False, timeout=limit)
        except CommandTimedOut:
            problem = f"{self.name}: {_short(argv)}: not finished after {timeout_s:g} s"
            raise HostCommandFailed(f"{problem}. Check the load of the host.", TIMEOUT_CODE, "") from None
        except CONNECTION_ERRORS as error:
            raise self.connection_lost(error) from None
        return self._outcome(argv, timeout_s, result.exited, result.stdout, result.stderr)

    def _outcome(self, argv: Sequence[str], timeout_s: float, code: int, out: str, err: str) -> str:
        if code == -1:
            problem = f"the connection broke during {_short(argv)}"
            raise ConnectionLost(f"{self.name}: {problem}. Check its link, and run the command again")
        output = " ".join((err or out).split())
        if code == TIMEOUT_CODE:
            raise HostCommandFailed(f"{self.name}: {_short(argv)}: not finished after {timeout_s:g} s", code, output)
        if code != 0:
            raise HostCommandFailed(f"{self.name}: {_short(argv)}: {output or f'exit code {code}'}", code, output)
        return out

    def connection_lost(self, error: BaseException) -> ConnectionLost:
        """Return the ConnectionLost for an error that a broken connection raised."""
        return ConnectionLost(f"{self.name}: the connection broke ({error or type(error).__name__})")

    def send(self, argv: Sequence[str], source: BinaryIO, timeout_s: float, progress: Callable[[int], None]) -> str:
        """Run a command with `source` as its stdin and return its stdout. `progress` gets the bytes of each chunk.

        Raises HostCommandFailed or ConnectionLost.
        """
        try:
            with contextlib.closing(self.start(argv, timeout_s)) as channel:
                channel.settimeout(STALL_TIMEOUT_S)
                try:
                    while chunk := source.read(CHUNK_BYTES):
                        channel.sendall(chunk)
                        progress(len(chunk))
                    channel.shutdown_write()
                except TimeoutError:
                    problem = f"it accepted no data for {STALL_TIMEOUT_S:g} s during {_short(argv)}"
                    fix = "Check its link and its disk, and run the command again"
                    raise ConnectionLost(f"{self.name}: {problem}. {fix}") from None
                except OSError:  # the command has ended early; its exit code and stderr give the reason
                    pass
                channel.settimeout(timeout_s)
                out = channel.makefile("rb").read().decode(errors="replace")
                err = channel.makefile_stderr("rb").read().decode(errors="replace")
                return self._outcome(argv, timeout_s, channel.recv_exit_status(), out, err)
        except CONNECTION_ERRORS as error:
            raise self.connection_lost(error) from None

    def start(self, argv: Sequence[str], timeout_s: float) -> paramiko.Channel:
        """Start a command and return its channel at once. Raises ConnectionLost."""
        try:
            transport = self.connection.transport
            assert transport is not None
            channel = transport.open_session(timeout=CONNECT_TIMEOUT_S)
            channel.exec_command(command_line(argv, timeout_s))
            return channel
        except CONNECTION_ERRORS as error:
            raise self.connection_lost(error) from None

    def files(self) -> paramiko.SFTPClient:
        """Open and return an SFTP session, with a timeout for every answer. Raises ConnectionLost."""
        try:
            session = self.connection.client.open_sftp()
            channel: Any = session.get_channel()
            channel.settimeout(CONNECT_TIMEOUT_S)
            return session
        except CONNECTION_ERRORS as error:
            raise self.connection_lost(error) from None

    def clock(self) -> Clock:
        """Return the offset of the host's clock from this machine's, positive if the host is ahead."""
        return read_clock(lambda number: float(self.run(["date", "+%s.%N"], CONNECT_TIMEOUT_S)))


def command_line(argv: Sequence[str], timeout_s: float) -> str:
    """Return the quoted line for the host's shell."""
    return shlex.join(["timeout", f"--kill-after={KILL_AFTER_S}", f"{timeout_s:g}", *argv])


def _short(argv: Sequence[str]) -> str:
    """Return the first 60 characters of a command, for messages."""
    line = shlex.join(argv)
    return line if len(line) <= 60 else line[:57] + "..."


T = TypeVar("T")


@dataclass
class Outcome(Generic[T]):
    """The result of one host: a value or an error."""

    host: Host
    value: T | None = None
    error: TestbedError | None = None


def run_on_all(hosts: Sequence[Host], call: Callable[[Host], T]) -> list[Outcome[T]]:
    """Call a function for all hosts in parallel and return the outcomes in order. No TestbedError is raised.

    The threads are daemons, so that Ctrl-C does not wait for a slow host.
    """
    outcomes: list[Outcome[T]] = [Outcome(host) for host in hosts]

    def work(outcome: Outcome[T]) -> None:
        try:
            outcome.value = call(outcome.host)
        except TestbedError as error:
            outcome.error = error
        except Exception as error:  # a bug of the testbed; the outcomes of the other hosts are kept
            outcome.error = TestbedError(f"{outcome.host}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(outcome,), daemon=True) for outcome in outcomes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def results_or_raise(outcomes: Sequence[Outcome[T]]) -> list[T]:
    """Return the values of all hosts. Raises one error with all failures; a single error is raised unchanged."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        unavailable = any(error.exit_code == Unavailable.exit_code for error in errors)
        raise (Unavailable if unavailable else TestbedError)("; ".join(str(error).rstrip(".") for error in errors))
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]


@contextmanager
def connected(nodes: Sequence[HostNode], accept_new: bool) -> Iterator[list[Outcome[Host]]]:
    """Connect to all hosts, yield the outcomes, and close the connections. A host that is not reached has an error."""
    hosts = [Host(node, accept_new) for node in nodes]

    def connect(host: Host) -> Host:
        host.open()
        return host

    try:
        yield run_on_all(hosts, connect)
    finally:
        for host in hosts:
            host.close()
