"""Before anything starts: through which interface each rank talks, and whether all of them reach each other."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from testbed.control.substrates.base import NODE_PORT
from testbed.control.substrates.hosts_each import each, values
from testbed.control.substrates.hosts_facts import SOON, Endpoint, endpoint, first_endpoint
from testbed.control.substrates.hosts_remote import once
from testbed.control.substrates.hosts_ssh import Host
from testbed.net import meet
from testbed.spec.errors import NetworkInvalid, Unavailable

PORTS = (20_000, 32_000)  # below those that the kernel hands out
TRIES = 3  # ports, before the hosts count as busy


def endpoints(hosts: Sequence[Host]) -> list[Endpoint]:
    """Interface and address of every rank: rank 0's first, for the others are found by the route to it."""
    first = first_endpoint(hosts[0], hosts[1].node.address if len(hosts) > 1 else None)
    return [first, *values(each(hosts[1:], lambda host: endpoint(host, first.address)))]


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
    source = Path(meet.__file__).read_text(encoding="utf-8")
    addresses = ",".join(end.address for end in ends)

    def ask(host: Host) -> dict[str, object]:
        rank = hosts.index(host)
        argv = once("65534:65534", "python3", "-c", source, str(rank), str(port), addresses)
        answer: dict[str, object] = json.loads(host.run(argv, meet.PATIENCE + SOON))
        return answer

    answers = values(each(hosts, ask))
    busy = [f"{host} ({answer['busy']})" for host, answer in zip(hosts, answers, strict=True) if answer["busy"]]
    if busy:
        raise Unavailable(f"port {port} cannot be used on {', '.join(busy)}. Use another with --set port=N, or 0 for any")
    missing = [
        f"{host} -> {hosts[int(str(other))]}"
        for host, answer in zip(hosts, answers, strict=True)
        for other in list(answer["missing"])  # type: ignore[call-overload]
    ]
    if missing:
        fix = "Is there a firewall between them, or the wrong interface in the inventory?"
        raise NetworkInvalid(f"hosts do not reach each other at port {port}: {', '.join(missing)}. {fix}")
