"""Host keys: known ones are checked, unknown ones refused, unless the user opts in; changed ones are always refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import paramiko
from fabric import Connection

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
