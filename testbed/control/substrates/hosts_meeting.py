"""Before anything starts: through which interface each rank talks, and whether all of them reach each other."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.control.substrates.base import NODE_PORT
from testbed.control.substrates.hosts_each import Outcome, each, values
from testbed.control.substrates.hosts_facts import SOON, Endpoint, endpoint, first_endpoint
from testbed.control.substrates.hosts_remote import NOBODY_THERE as NOBODY
from testbed.control.substrates.hosts_remote import once
from testbed.control.substrates.hosts_ssh import Host
from testbed.net import meet
from testbed.spec.errors import NetworkInvalid, Unavailable

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
    source = Path(meet.__file__).read_text(encoding="utf-8")
    addresses = ",".join(end.address for end in ends)

    def ask(host: Host) -> Answer:
        argv = once(NOBODY, "python3", "-c", source, str(hosts.index(host)), str(port), addresses)
        return Answer(**json.loads(host.run(argv, meet.PATIENCE + SOON)))

    return each(hosts, ask)
