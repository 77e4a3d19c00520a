"""What a host is and has: account, engine, disk, image, interface. Each question has one answer or one fix."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from testbed.control.substrates.hosts_remote import ACCOUNT, NOBODY_THERE, Account, content, once, parse_account
from testbed.control.substrates.hosts_ssh import CommandFailed, Host, HostFailed

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


def image_content(host: Host) -> str | None:
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
