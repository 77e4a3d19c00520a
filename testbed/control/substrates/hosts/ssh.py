"""One host over SSH: connections by the user's own OpenSSH configuration, checked host keys, commands with deadlines.

A command is a list of arguments. It is quoted here and nowhere else, and `timeout` on the host ends it there, too.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import paramiko
from fabric import Config, Connection
from invoke.exceptions import CommandTimedOut, ThreadException

from testbed.net.probe import Clock, read_clock
from testbed.spec.errors import AuthenticationFailed, CommandFailed, ConnectionLost, HostFailed, KeyUnknown
from testbed.spec.inventory import HostNode

# Host keys: known ones are checked, unknown ones refused, unless the user opts in; changed ones are always refused.

GLOBAL = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
USUAL = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_writing = threading.Lock()


class KeyRefused(paramiko.SSHException):
    """A host shows a key that nobody has vouched for."""


def known_hosts(ssh_config: dict[str, object]) -> list[Path]:
    """The user's files, as OpenSSH would look for them."""
    names = str(ssh_config.get("userknownhostsfile", USUAL)).split()
    return [Path(name).expanduser() for name in names if name != "none"]


def check_host_keys(connection: Connection, accept_new: bool) -> None:
    """Fabric by itself takes every key; here only known ones count, on each hop."""
    own = known_hosts(connection.ssh_config)
    for path in [*own, *map(Path, GLOBAL)]:
        if path.is_file():
            connection.client.load_system_host_keys(str(path))
    target = own[0] if own and accept_new else None
    connection.client.set_missing_host_key_policy(_Policy(connection, target))
    if isinstance(connection.gateway, Connection):
        check_host_keys(connection.gateway, accept_new)


class _Policy(paramiko.MissingHostKeyPolicy):
    """Refuse with the command that would add the key; with `target`, add it there."""

    def __init__(self, connection: Connection, target: Path | None) -> None:
        self._connection = connection
        self._target = target

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        if self._target is None:
            raise KeyRefused(_refusal(self._connection, key))
        with _writing:  # hosts connect in parallel, and one line must not run into another
            self._target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(f"{hostname} {key.get_name()} {key.get_base64()}\n")


def _refusal(connection: Connection, key: paramiko.PKey) -> str:
    who = f"the host key of {connection.host} is not known ({key.fingerprint})"
    if connection.gateway:
        add = f"ssh {connection.original_host} true"  # scanning would go past the jump host
    else:
        add = f"ssh-keyscan -p {connection.port} {connection.host} >> ~/.ssh/known_hosts"
    return f"{who}. Compare it, then add it: {add}, or take all unknown ones with --accept-new"


CONNECT = 10  # seconds for each stage of a connection
STALL = 60.0  # seconds without a byte after which a transfer has failed
AFTERWARDS = 5  # seconds between a command's end by `timeout` and the hard one
CHUNK = 1 << 18  # bytes
LOST = (EOFError, OSError, paramiko.SSHException, ThreadException)  # what a broken connection raises


class Host:
    """A node of the inventory; `open` it before anything else."""

    def __init__(self, node: HostNode, accept_new: bool = False) -> None:
        self.node = node
        self.name = node.name
        self._accept_new = accept_new
        self._connection: Connection | None = None

    def __str__(self) -> str:
        return self.name

    def open(self) -> None:
        """Connect, or say in one sentence why not and what would help."""
        if self._connection is not None and self._connection.is_connected:
            return
        if self.node.key and not Path(self.node.key).expanduser().is_file():
            fix = "Name another in the inventory, or leave it out for those of the SSH configuration"
            raise HostFailed(f"{self.name}: key {self.node.key}: no such file here. {fix}")
        try:
            self._connection = connection = self._describe()
            check_host_keys(connection, self._accept_new)
            connection.open()
            assert connection.transport is not None
            connection.transport.set_keepalive(15)
        except KeyRefused as error:
            raise KeyUnknown(f"{self.name}: {error}") from None
        except paramiko.BadHostKeyException as error:
            raise KeyUnknown(f"{self.name}: {_changed(error)}") from None
        except paramiko.AuthenticationException as error:
            raise AuthenticationFailed(f"{self.name}: {self._not_let_in(error)}") from None
        except (OSError, EOFError, paramiko.SSHException, ValueError) as error:
            where = f"{self.node.address}:{self.node.port or 22}"
            reason = " ".join(str(error).split()) or type(error).__name__
            raise HostFailed(
                f"{self.name}: no SSH connection to {where} ({reason}). Is it up, and is the address right?"
            ) from None

    def _describe(self) -> Connection:
        """What the inventory says, over what the SSH configuration says."""
        config, node = Config(), self.node
        stages = {"banner_timeout": CONNECT, "auth_timeout": CONNECT, "channel_timeout": CONNECT}
        with_key = {"key_filename": [str(Path(node.key).expanduser())], "look_for_keys": False} if node.key else {}
        jump = Connection(node.jump, config=config, connect_timeout=CONNECT) if node.jump else None
        return Connection(
            node.address,
            user=node.user,
            port=node.port,
            config=config,
            gateway=jump,
            connect_timeout=CONNECT,
            connect_kwargs=stages | with_key,
        )

    def _not_let_in(self, error: Exception) -> str:
        user = self._connection.user if self._connection else self.node.user
        if isinstance(error, paramiko.PasswordRequiredException):
            return (
                f"the key {self.node.key or ''} has a passphrase. Give it to the agent: ssh-add {self.node.key or ''}"
            )
        with_key = f" with key {self.node.key}" if self.node.key else ""
        port = f"-p {self.node.port} " if self.node.port else ""
        identity = f"-i {self.node.key} " if self.node.key else ""
        fix = f"ssh-copy-id {identity}{port}{user}@{self.node.address}"
        return f"user {user} is not let in{with_key}. Use the right key, or add it there: {fix}"

    def close(self) -> None:
        """Hang up; a connection that is broken already is fine."""
        if self._connection is not None:
            with contextlib.suppress(*LOST):
                self._connection.close()
            with contextlib.suppress(*LOST):
                if isinstance(self._connection.gateway, Connection):
                    self._connection.gateway.close()
            self._connection = None

    @property
    def connection(self) -> Connection:
        if self._connection is None or not self._connection.is_connected:
            raise ConnectionLost(f"{self.name}: the connection is lost")
        return self._connection

    def run(self, argv: Sequence[str], timeout: float) -> str:
        """Run to the end; stdout, or CommandFailed with what it said."""
        line = command_line(argv, timeout)
        try:
            result = self.connection.run(
                line, hide=True, warn=True, in_stream=False, pty=False, timeout=timeout + 2 * AFTERWARDS
            )
        except CommandTimedOut:
            raise CommandFailed(
                f"{self.name}: {_short(argv)}: not finished after {timeout:g} s. Is the host overloaded?", 124, ""
            ) from None
        except LOST as error:
            raise ConnectionLost(f"{self.name}: the connection broke ({error or type(error).__name__})") from None
        return self._outcome(argv, timeout, result.exited, result.stdout, result.stderr)

    def _outcome(self, argv: Sequence[str], timeout: float, code: int, out: str, err: str) -> str:
        if code == -1:
            raise ConnectionLost(f"{self.name}: the connection broke during {_short(argv)}")
        said = " ".join((err or out).split())
        if code == 124:
            raise CommandFailed(f"{self.name}: {_short(argv)}: not finished after {timeout:g} s", code, said)
        if code != 0:
            raise CommandFailed(f"{self.name}: {_short(argv)}: {said or f'exit code {code}'}", code, said)
        return out

    def send(self, argv: Sequence[str], source: BinaryIO, timeout: float, progress: Callable[[int], None]) -> str:
        """Run with `source` as its input; `progress` hears how many bytes have gone."""
        try:
            with contextlib.closing(self.start(argv, timeout)) as channel:
                channel.settimeout(STALL)
                try:
                    while chunk := source.read(CHUNK):
                        channel.sendall(chunk)
                        progress(len(chunk))
                    channel.shutdown_write()
                except TimeoutError:
                    what = f"it took nothing for {STALL:g} s during {_short(argv)}"
                    raise ConnectionLost(f"{self.name}: {what}. Is its link or its disk stuck? Run it again") from None
                except OSError:  # it ended early: its own words say why
                    pass
                channel.settimeout(timeout)
                out = channel.makefile("rb").read().decode(errors="replace")
                err = channel.makefile_stderr("rb").read().decode(errors="replace")
                return self._outcome(argv, timeout, channel.recv_exit_status(), out, err)
        except LOST as error:
            raise ConnectionLost(f"{self.name}: the connection broke ({error or type(error).__name__})") from None

    def start(self, argv: Sequence[str], timeout: float) -> paramiko.Channel:
        """Start a command whose end is waited for elsewhere."""
        try:
            transport = self.connection.transport
            assert transport is not None
            channel = transport.open_session(timeout=CONNECT)
            channel.exec_command(command_line(argv, timeout))
            return channel
        except LOST as error:
            raise ConnectionLost(f"{self.name}: the connection broke ({error or type(error).__name__})") from None

    def files(self) -> paramiko.SFTPClient:
        """A file session of its own; every answer has a deadline."""
        try:
            session = self.connection.client.open_sftp()
            channel: Any = session.get_channel()
            channel.settimeout(CONNECT)
            return session
        except LOST as error:
            raise ConnectionLost(f"{self.name}: the connection broke ({error or type(error).__name__})") from None

    def clock(self) -> Clock:
        """Its clock against ours."""
        return read_clock(lambda number: float(self.run(["date", "+%s.%N"], CONNECT)))


def command_line(argv: Sequence[str], timeout: float) -> str:
    """The one place where arguments become a line for a shell."""
    return shlex.join(["timeout", f"--kill-after={AFTERWARDS}", f"{timeout:g}", *argv])


def _short(argv: Sequence[str]) -> str:
    """Enough of a command to know it by."""
    line = shlex.join(argv)
    return line if len(line) <= 60 else line[:57] + "..."


def _changed(error: paramiko.BadHostKeyException) -> str:
    seen, known = error.key.fingerprint, error.expected_key.fingerprint
    what = f"the host key has changed: known is {known}, it shows {seen}"
    return f"{what}. Somebody may stand in between; if the host is new: ssh-keygen -R {shlex.quote(error.hostname)}"
