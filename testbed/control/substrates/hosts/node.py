"""Queries of one host and of all hosts: account, engine, image, disk, interface, reachability.

Each function runs commands on the hosts and returns the result, or raises HostFailed with the fix.
"""

from __future__ import annotations

import json
import random
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from testbed.control.substrates.docker_cli import (
    IMAGE,
    NOBODY_USER,
    docker_run_argv,
    image_content_argv,
    info_argv,
    list_argv,
    remove_argv,
    server_version_argv,
)
from testbed.control.substrates.hosts.ssh import Host, Outcome, results_or_raise, run_on_all
from testbed.net import reachability
from testbed.spec.errors import CommandFailed, HostFailed, NetworkInvalid, Unavailable
from testbed.spec.run import DEFAULT_PORT

HOME = ".testbed"  # folder with all our files, in the home folder of the user on the host
QUERY_TIMEOUT_S = 30.0  # for one command, which usually takes less than a second
NOT_FOUND = (126, 127)  # a shell's exit codes for a missing program
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,150}")
PORTS = (20_000, 32_000)  # below the ephemeral ports
PORT_ATTEMPTS = 3


def run_id(folder: Path) -> str:
    """Return a name for a run on hosts: the folder's name with safe characters only, and a random suffix."""
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "_", folder.name).strip("_.-")[:100] or "run"
    return f"{slug}-{secrets.token_hex(3)}"


# Account, engine, image, disk


@dataclass(frozen=True)
class Account:
    """The user on a host, with the folders of our files."""

    uid: int
    gid: int
    home: PurePosixPath

    @property
    def rank_user(self) -> str:
        """The user of a rank: this account's, or uid 65534 if this account is root."""
        return f"{self.uid}:{self.gid}" if self.uid else NOBODY_USER

    @property
    def data(self) -> PurePosixPath:
        return self.home / HOME / "data"

    @property
    def runs(self) -> PurePosixPath:
        return self.home / HOME / "runs"


def account(host: Host) -> Account:
    """Return uid, gid and home folder of the user of the SSH connection."""
    uid, gid, home = host.run(["sh", "-c", "id -u; id -g; cd && pwd -P"], QUERY_TIMEOUT_S).splitlines()
    return Account(int(uid), int(gid), PurePosixPath(home))


def engine_version(host: Host) -> str:
    """Return the version of the Docker engine. Raises HostFailed if no engine answers."""
    try:
        return host.run(server_version_argv(), QUERY_TIMEOUT_S).strip()
    except CommandFailed as error:
        raise HostFailed(f"{host}: {_no_engine(error)}") from None


def _no_engine(error: CommandFailed) -> str:
    if error.code in NOT_FOUND or "not found" in error.output or "No such file" in error.output:
        return "no Docker engine: `docker` is not installed. Install it there, e.g. apt-get install docker.io"
    if "permission denied" in error.output.lower():
        return "the user may not use the Docker engine. There, as root: usermod -aG docker USER"
    return f"no Docker engine answers ({error.output[:120]}). Start it there, e.g. systemctl start docker"


def image_content(host: Host, image: str = IMAGE) -> str | None:
    """Return the content hash of the image on the host; None if there is no image. Raises HostFailed."""
    try:
        return host.run(image_content_argv(image), QUERY_TIMEOUT_S).strip() or None
    except CommandFailed as error:
        if "no such image" in error.output.lower() or "no such object" in error.output.lower():
            return None
        raise HostFailed(f"{host}: {_no_engine(error)}") from None


def remove_containers(host: Host, label: str) -> int:
    """Remove all containers with a label, also running ones; return their number."""
    found = host.run(list_argv(label), QUERY_TIMEOUT_S).split()
    if found:
        host.run(remove_argv(found), QUERY_TIMEOUT_S)
    return len(found)


def free_engine_bytes(host: Host) -> int:
    """Return the free bytes of the file system in which the engine stores images."""
    return free_bytes(host, host.run(info_argv("DockerRootDir"), QUERY_TIMEOUT_S).strip())


def free_bytes(host: Host, path: str) -> int:
    """Return the free bytes of the file system of `path`. The path need not be readable."""
    return int(host.run(["df", "--block-size=1", "--output=avail", path], QUERY_TIMEOUT_S).split()[-1])


# Interface and address


@dataclass(frozen=True)
class Endpoint:
    """The interface of a rank, and the address at which other ranks reach it."""

    interface: str
    address: str


def find_endpoints(hosts: Sequence[Host]) -> list[Endpoint]:
    """Return interface and address of every rank. Rank 0 is asked first: the others use the route to its address."""
    first = first_endpoint(hosts[0], hosts[1].node.address if len(hosts) > 1 else None)
    found = [first, *results_or_raise(run_on_all(hosts[1:], lambda host: endpoint(host, first.address)))]
    check_distinct(hosts, found)
    return found


def first_endpoint(host: Host, towards: str | None) -> Endpoint:
    """Return rank 0's endpoint: the inventory's interface, else that of the route to rank 1; loopback for one host."""
    if host.node.interface:
        return _endpoint_of(host, host.node.interface)
    return _endpoint_towards(host, towards) if towards else Endpoint("lo", "127.0.0.1")


def endpoint(host: Host, master: str) -> Endpoint:
    """Return another rank's endpoint: the inventory's interface, else that of the route to rank 0."""
    return _endpoint_of(host, host.node.interface) if host.node.interface else _endpoint_towards(host, master)


def _endpoint_of(host: Host, interface: str) -> Endpoint:
    """Return the interface's first address with global scope, IPv4 before IPv6."""
    try:
        found = _ip(host, "address", "show", "dev", interface)
    except CommandFailed as error:
        raise HostFailed(f"{host}: interface {interface}: {error.output}. `ip address` lists the interfaces") from None
    infos = [info for entry in found for info in entry.get("addr_info", []) if info.get("scope") == "global"]
    infos.sort(key=lambda info: info.get("family") != "inet")
    if not infos:
        raise HostFailed(f"{host}: interface {interface} has no address. `ip address` lists the interfaces")
    return Endpoint(interface, str(infos[0]["local"]))


def _endpoint_towards(host: Host, target: str) -> Endpoint:
    """Return interface and source address of the route to `target`: an address, or a name that the host resolves."""
    address = target if re.fullmatch(r"[0-9.]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*", target) else _resolve(host, target)
    try:
        route = _ip(host, "route", "get", address)[0]
        return Endpoint(str(route["dev"]), str(route["prefsrc"]))
    except (CommandFailed, LookupError) as error:
        reason = getattr(error, "output", str(error))
        fix = "Name the interface in the inventory, or fix the route"
        raise HostFailed(f"{host}: no route to {address} ({reason}). {fix}") from None


def _resolve(host: Host, name: str) -> str:
    try:
        return host.run(["getent", "ahostsv4", name], QUERY_TIMEOUT_S).split()[0]
    except (CommandFailed, LookupError):
        fix = "Give node 0 and node 1 an interface in the inventory"
        raise HostFailed(f"{host}: cannot resolve the name {name}. {fix}") from None


def _ip(host: Host, *argv: str) -> Any:
    """Return the JSON output of `ip` on the host; without that command, of `ip` in the image."""
    try:
        return json.loads(host.run(["ip", "-json", *argv], QUERY_TIMEOUT_S) or "[]")
    except CommandFailed as error:
        if error.code not in NOT_FOUND:
            raise
        return json.loads(host.run(docker_run_argv(NOBODY_USER, "ip", "-json", *argv), QUERY_TIMEOUT_S) or "[]")


def check_distinct(hosts: Sequence[Host], ends: Sequence[Endpoint]) -> None:
    """Raise NetworkInvalid if two hosts have the same address, e.g. because both are the same machine."""
    by_address: dict[str, list[str]] = {}
    for host, end in zip(hosts, ends, strict=True):
        by_address.setdefault(end.address, []).append(host.name)
    for address, names in by_address.items():
        if len(names) > 1:
            problem = f"hosts {', '.join(names)}: all have the address {address}, and every host needs its own"
            fix = "Leave all but one out of the inventory, or name another interface there"
            raise NetworkInvalid(f"{problem}. {fix}")


# Reachability: every host listens at a port and connects to all other hosts


@dataclass(frozen=True)
class Reachability:
    """One host's result: why it cannot listen at the port, and the ranks to or from which there is no connection."""

    busy: str
    missing: Sequence[int]


def try_reachability(hosts: Sequence[Host], ends: Sequence[Endpoint], port: int) -> list[Outcome[Reachability]]:
    """Run net/reachability.py on all hosts at once with the image's Python, and return the outcomes."""
    source = Path(reachability.__file__).read_text(encoding="utf-8")
    addresses = ",".join(end.address for end in ends)

    def try_host(host: Host) -> Reachability:
        argv = docker_run_argv(NOBODY_USER, "python3", "-c", source, str(hosts.index(host)), str(port), addresses)
        return Reachability(**json.loads(host.run(argv, reachability.TIMEOUT_S + QUERY_TIMEOUT_S)))

    return run_on_all(hosts, try_host)


def check_reachability(hosts: Sequence[Host], ends: Sequence[Endpoint], port: int) -> None:
    """Raise Unavailable if the port cannot be used on a host, NetworkInvalid if hosts do not reach each other."""
    answers = results_or_raise(try_reachability(hosts, ends, port))
    busy = [f"{host} ({answer.busy})" for host, answer in zip(hosts, answers, strict=True) if answer.busy]
    if busy:
        way_out = "Use another port with --set port=N, or any free port with N = 0"
        raise Unavailable(f"port {port} cannot be used on {', '.join(busy)}. {way_out}")
    pairs = {frozenset((rank, other)) for rank, answer in enumerate(answers) for other in answer.missing}
    if pairs:
        missing = ", ".join(f"{hosts[a]} and {hosts[b]}" for a, b in sorted(map(sorted, pairs)))
        fix = "Check firewalls between them and the interfaces in the inventory"
        raise NetworkInvalid(f"hosts do not reach each other at port {port}, each way: {missing}. {fix}")


def find_port(hosts: Sequence[Host], ends: Sequence[Endpoint], wanted: int) -> int:
    """Return a port at which all hosts have just reached each other: `wanted`, or a random port for 0.

    Raises Unavailable or NetworkInvalid if there is no such port.
    """
    if len(hosts) == 1:
        return wanted or DEFAULT_PORT
    for attempt in range(1, PORT_ATTEMPTS + 1):
        port = wanted or random.SystemRandom().randint(*PORTS)
        try:
            check_reachability(hosts, ends, port)
            return port
        except Unavailable:
            if wanted or attempt == PORT_ATTEMPTS:
                raise
    raise AssertionError("unreachable")
