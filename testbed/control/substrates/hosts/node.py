"""What a host is and has: account, engine, disk, image, interface. Each question has one answer or one fix."""

from __future__ import annotations

import csv
import getpass
import io
import json
import os
import random
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from testbed.control.substrates.base import NODE_PORT
from testbed.control.substrates.engine import CPU_PERIOD, IMAGE
from testbed.control.substrates.hosts.group import Outcome, each, values
from testbed.control.substrates.hosts.ssh import Host
from testbed.net import reachability
from testbed.spec.errors import CommandFailed, HostFailed, NetworkInvalid, Unavailable
from testbed.spec.privileges import NOBODY

# What is asked of a host, as data: names, places and argument lists. Nothing here talks to anybody.

HOME = ".testbed"  # in the home folder of the user on the host: all our files
LABEL = "testbed=hosts"  # on all our containers there
RUN_LABEL, RANK_LABEL, PURPOSE_LABEL = "testbed.run", "testbed.rank", "testbed.purpose"
USER_LABEL = "testbed.user"  # who sent it there: an engine may serve several people
UNTOUCHED = "the interface, processor and disk of a real host are never touched"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,150}")
STOP_GRACE = 5  # seconds between SIGTERM and SIGKILL
MAX_PIDS = 4096
NOBODY_THERE = f"{NOBODY}:{NOBODY}"  # who runs what needs no files


@dataclass(frozen=True)
class Account:
    """Who we are on a host, and where our files lie there."""

    uid: int
    gid: int
    home: PurePosixPath

    @property
    def who(self) -> str:
        """Whom a rank runs as: the user, and nobody where that is root."""
        return f"{self.uid}:{self.gid}" if self.uid else NOBODY_THERE

    @property
    def data(self) -> PurePosixPath:
        return self.home / HOME / "data"

    @property
    def runs(self) -> PurePosixPath:
        return self.home / HOME / "runs"


ACCOUNT = ["sh", "-c", "id -u; id -g; cd && pwd -P"]


def parse_account(text: str) -> Account:
    uid, gid, home = text.splitlines()
    return Account(int(uid), int(gid), PurePosixPath(home))


def run_id(folder: Path) -> str:
    """The folder's name, made safe, and unlike any other."""
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "_", folder.name).strip("_.-")[:100] or "run"
    return f"{slug}-{secrets.token_hex(3)}"


def mount(source: PurePosixPath, target: Path | PurePosixPath, read_only: bool = False) -> list[str]:
    """`--mount` reads its value as CSV, so a path may hold commas, colons and quotes."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target}", *(["readonly"] if read_only else [])]
    csv.writer(line, lineterminator="").writerow(fields)
    return ["--mount", line.getvalue()]


def user() -> str:
    """Who we are, the same for every command from this account of this machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # an account without a name
        name = str(os.getuid())
    return re.sub(r"[^A-Za-z0-9_.@-]+", "_", f"{name}@{socket.gethostname()}")


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container on a host: what runs in it, as whom, with how much."""

    name: str
    run: str
    rank: int
    who: str
    argv: Sequence[str]
    output: Path  # inside; its stdout and stderr go there
    mounts: Sequence[Sequence[str]]
    env: Mapping[str, str]
    cpus: float | None = None
    purpose: str = "rank"  # or "probe"

    def start(self) -> list[str]:
        """Without any privilege: no capability, a read-only root, and the host's network as it is."""
        limits = ["--pids-limit", str(MAX_PIDS)]
        if self.cpus is not None:
            limits += ["--cpu-period", str(CPU_PERIOD), "--cpu-quota", str(round(self.cpus * CPU_PERIOD))]
        own = {RUN_LABEL: self.run, RANK_LABEL: self.rank, PURPOSE_LABEL: self.purpose}
        marked = [*marks(), *(word for key, value in own.items() for word in ("--label", f"{key}={value}"))]
        variables = [word for key, value in self.env.items() for word in ("--env", f"{key}={value}")]
        mounts = [word for each in self.mounts for word in each]
        wrapped = ["-c", 'exec "$@" >>"$0" 2>&1', str(self.output), *self.argv]
        named = ["docker", "run", "--detach", "--name", self.name, *marked]
        return [*named, *locked(self.who), *limits, *mounts, *variables, "--entrypoint", "sh", IMAGE, *wrapped]


def locked(who: str) -> list[str]:
    """The options that leave a container nothing but the host's network."""
    taken = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--tmpfs", "/tmp"]
    return ["--network", "host", "--user", who, *taken]


def once(who: str, program: str, *argv: str) -> list[str]:
    """A program of the image that ends by itself and leaves nothing."""
    return ["docker", "run", "--rm", *marks(), *locked(who), "--entrypoint", program, IMAGE, *argv]


def marks() -> list[str]:
    """The options that make a container ours."""
    return ["--label", LABEL, "--label", f"{USER_LABEL}={user()}"]


def listing() -> list[str]:
    """Containers of the testbed on a host, whoever sent them, one JSON object a line."""
    return ["docker", "ps", "--all", "--filter", f"label={LABEL}", "--no-trunc", "--format", "{{json .}}"]


def content() -> list[str]:
    """The content hash of the image there."""
    return ["docker", "image", "inspect", "--format", '{{index .Config.Labels "testbed.content"}}', IMAGE]


SOON = 30.0  # seconds; each of these questions takes a moment
NOT_FOUND = (126, 127)  # how a shell says that there is no such program


@dataclass(frozen=True)
class Endpoint:
    """Through which interface a rank talks, and the address it is reached at."""

    interface: str
    address: str


def account(host: Host) -> Account:
    return parse_account(host.run(ACCOUNT, SOON))


def engine(host: Host) -> str:
    """The engine's version."""
    try:
        return host.run(["docker", "version", "--format", "{{.Server.Version}}"], SOON).strip()
    except CommandFailed as error:
        raise HostFailed(f"{host}: {_no_engine(error)}") from None


def _no_engine(error: CommandFailed) -> str:
    if error.code in NOT_FOUND or "not found" in error.said or "No such file" in error.said:
        return "no Docker engine: `docker` is not installed. Install it there, e.g. apt-get install docker.io"
    if "permission denied" in error.said.lower():
        return "the user may not use the Docker engine. There, as root: usermod -aG docker USER"
    return f"no Docker engine answers ({error.said[:120]}). Start it there, e.g. systemctl start docker"


def containers(host: Host, label: str, running: bool = False) -> list[str]:
    """Ids of those with a label; stopped ones, too, unless only running ones are asked for."""
    which = [] if running else ["--all"]
    return host.run(["docker", "ps", *which, "--quiet", "--filter", f"label={label}"], SOON).split()


def remove_containers(host: Host, label: str) -> int:
    """All with a label, running or not; how many."""
    found = containers(host, label)
    if found:
        host.run(["docker", "rm", "--force", "--volumes", *found], SOON)
    return len(found)


def free_bytes(host: Host) -> int:
    """Free where the engine keeps its images."""
    root = host.run(["docker", "info", "--format", "{{.DockerRootDir}}"], SOON).strip()
    return free_at(host, root)


def free_at(host: Host, path: str) -> int:
    """Of the file system that holds `path`; the user may not be allowed to look inside, but may look at it."""
    lines = host.run(["df", "--block-size=1", "--output=avail", path], SOON).split()
    return int(lines[-1])


def content_on_host(host: Host) -> str | None:
    """The content hash of the image there; None without one."""
    try:
        return host.run(content(), SOON).strip() or None
    except CommandFailed as error:
        if "no such image" in error.said.lower() or "no such object" in error.said.lower():
            return None
        raise HostFailed(f"{host}: {_no_engine(error)}") from None


def _ip(host: Host, *argv: str) -> Any:
    """`ip` of the host, else the image's."""
    try:
        return json.loads(host.run(["ip", "-json", *argv], SOON) or "[]")
    except CommandFailed as error:
        if error.code not in NOT_FOUND:
            raise
        return json.loads(host.run(once(NOBODY_THERE, "ip", "-json", *argv), SOON) or "[]")


def own_endpoint(host: Host, interface: str) -> Endpoint:
    """The interface that the inventory names, with its first address that others can reach."""
    try:
        found = _ip(host, "address", "show", "dev", interface)
    except CommandFailed as error:
        raise HostFailed(f"{host}: interface {interface}: {error.said}. `ip address` lists those there are") from None
    infos = [info for each in found for info in each.get("addr_info", []) if info.get("scope") == "global"]
    infos.sort(key=lambda info: info.get("family") != "inet")
    if not infos:
        raise HostFailed(f"{host}: interface {interface} has no address. `ip address` lists those there are")
    return Endpoint(interface, str(infos[0]["local"]))


def endpoint_towards(host: Host, target: str) -> Endpoint:
    """What the host's own routes take to reach `target`, an address or a name that the host knows."""
    address = target if re.fullmatch(r"[0-9.]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*", target) else _resolve(host, target)
    try:
        route = _ip(host, "route", "get", address)[0]
        return Endpoint(str(route["dev"]), str(route["prefsrc"]))
    except (CommandFailed, LookupError) as error:
        said = getattr(error, "said", str(error))
        fix = "Name the interface in the inventory, or mend the route"
        raise HostFailed(f"{host}: no route to {address} ({said}). {fix}") from None


def _resolve(host: Host, name: str) -> str:
    try:
        return host.run(["getent", "ahostsv4", name], SOON).split()[0]
    except (CommandFailed, LookupError):
        fix = "Give node 0 and node 1 an interface in the inventory"
        raise HostFailed(f"{host}: does not know the name {name}. {fix}") from None


def first_endpoint(host: Host, towards: str | None) -> Endpoint:
    """Rank 0's: the inventory's interface, else the route to the next host; alone, its loopback is enough."""
    if host.node.interface:
        return own_endpoint(host, host.node.interface)
    return endpoint_towards(host, towards) if towards else Endpoint("lo", "127.0.0.1")


def endpoint(host: Host, master: str) -> Endpoint:
    """Any other rank's: the inventory's interface, else the route to rank 0."""
    if host.node.interface:
        return own_endpoint(host, host.node.interface)
    return endpoint_towards(host, master)


# Before anything starts: through which interface each rank talks, and whether all of them reach each other.

PORTS = (20_000, 32_000)  # below those that the kernel hands out
TRIES = 3  # ports, before the hosts count as busy


def endpoints(hosts: Sequence[Host]) -> list[Endpoint]:
    """Interface and address of every rank: rank 0's first, for the others are found by the route to it."""
    first = first_endpoint(hosts[0], hosts[1].node.address if len(hosts) > 1 else None)
    found = [first, *values(each(hosts[1:], lambda host: endpoint(host, first.address)))]
    check_apart(hosts, found)
    return found


def check_apart(hosts: Sequence[Host], ends: Sequence[Endpoint]) -> None:
    """One address is one rank's: two hosts that share one are the same machine, or cannot be told apart."""
    by_address: dict[str, list[str]] = {}
    for host, end in zip(hosts, ends, strict=True):
        by_address.setdefault(end.address, []).append(host.name)
    for address, names in by_address.items():
        if len(names) > 1:
            fix = "Leave all but one out of the inventory, or name another interface there"
            raise NetworkInvalid(
                f"hosts {', '.join(names)}: all have the address {address}, and each needs its own. {fix}"
            )


def meeting_port(hosts: Sequence[Host], ends: Sequence[Endpoint], wanted: int) -> int:
    """A port at which every host has just been reached by every other; `wanted`, or any for 0."""
    if len(hosts) == 1:
        return wanted or NODE_PORT
    for number in range(TRIES):
        port = wanted or random.SystemRandom().randint(*PORTS)
        try:
            check_meeting(hosts, ends, port)
            return port
        except Unavailable:
            if wanted or number == TRIES - 1:
                raise
    raise AssertionError("unreachable")


def check_meeting(hosts: Sequence[Host], ends: Sequence[Endpoint], port: int) -> None:
    """Unavailable where a port is taken, NetworkInvalid where hosts do not reach each other."""
    answers = values(try_meeting(hosts, ends, port))
    busy = [f"{host} ({answer.busy})" for host, answer in zip(hosts, answers, strict=True) if answer.busy]
    if busy:
        way_out = "Use another with --set port=N, or 0 for any"
        raise Unavailable(f"port {port} cannot be used on {', '.join(busy)}. {way_out}")
    pairs = {frozenset((rank, other)) for rank, answer in enumerate(answers) for other in answer.missing}
    if pairs:
        missing = ", ".join(f"{hosts[a]} and {hosts[b]}" for a, b in sorted(map(sorted, pairs)))
        fix = "Is there a firewall between them, or the wrong interface in the inventory?"
        raise NetworkInvalid(f"hosts do not reach each other at port {port}, each way: {missing}. {fix}")


@dataclass(frozen=True)
class Answer:
    """How the meeting went for one host: why its port is not to be had, and whom it did not both reach and hear."""

    busy: str
    missing: Sequence[int]


def try_meeting(hosts: Sequence[Host], ends: Sequence[Endpoint], port: int) -> list[Outcome[Answer]]:
    """All hosts at once: each listens, and connects to all the others."""
    source = Path(reachability.__file__).read_text(encoding="utf-8")
    addresses = ",".join(end.address for end in ends)

    def ask(host: Host) -> Answer:
        argv = once(NOBODY_THERE, "python3", "-c", source, str(hosts.index(host)), str(port), addresses)
        return Answer(**json.loads(host.run(argv, reachability.PATIENCE + SOON)))

    return each(hosts, ask)
