"""Argument lists of tc, docker, setpriv and ssh, one command a line.

tests/unit/test_arguments.py compares them with tests/unit/arguments.txt. After a change on
purpose, write that file again:
    python -m tests.support.arguments > tests/unit/arguments.txt
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from testbed.control.substrates.docker_cli import (
    Container,
    docker_run_argv,
    image_content_argv,
    local_user,
    mount_option,
)
from testbed.control.substrates.hosts.ssh import command_line
from testbed.net.shaping import congestion, reshape, route_congestion, shape
from testbed.spec.link import Link
from testbed.spec.privileges import without_privileges

LINKS: list[dict[str, Any]] = [
    {},
    {"rate": "10mbit"},
    {"rate": "200mbit"},
    {"rate": "1gbit"},
    {"rate": "10gbit"},
    {"rate": "100kbit"},
    {"delay": "10ms"},
    {"delay": "10ms", "jitter": "2ms"},
    {"loss": 0.01},
    {"segment": "8KiB"},
    {"rate": "1gbit", "queue": "5ms"},
    {"rate": "100mbit", "segment": "16KiB"},
    {"rate": "100mbit", "delay": "25ms", "loss": 0.001},
    {"rate": "50mbit", "delay": "100ms", "jitter": "10ms", "loss": 0.02, "queue": "200ms", "segment": "4KiB"},
]
RESHAPES = [(10**8, 5 * 10**7), (5 * 10**7, 10**9), (None, 10**8), (10**8, None), (None, None)]


def section(title: str, commands: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a heading and one command a line."""
    yield f"## {title}"
    for command in commands:
        yield shlex.join(map(str, command)).replace(local_user(), "USER@HERE")
    yield ""


def network() -> Iterator[str]:
    """Yield the tc and ip commands of many links."""
    link = Link.model_validate
    for values in LINKS:
        yield from section(f"shape {json.dumps(values)}", shape(link(values)))
        yield from section(
            f"shape {json.dumps(values)}, egress only", shape(link(values), "eth1", "ifb7", ingress=False)
        )
    for values in LINKS[2], LINKS[-1]:
        for before, rate in RESHAPES:
            yield from section(
                f"reshape {json.dumps(values)} from {before} to {rate}", reshape(link(values), before, rate)
            )
    yield from section("congestion", [congestion("bbr")])
    yield from section("congestion by route", [route_congestion("cubic", "10.77.0.0/24")])
    yield from section("congestion by route, own address", [route_congestion("reno", "10.0.0.0/8", "ib0", "10.9.0.7")])


def hosts() -> Iterator[str]:
    """Yield the commands that run on hosts."""
    values: dict[str, Any] = {
        "name": "testbed-x-0",
        "run": "x",
        "rank": 0,
        "user": "1000:1000",
        "argv": ["python3", "-m", "testbed.rank", "--folder", "/runs/x"],
        "output": Path("/runs/x/rank0.log"),
        "mounts": [mount_option(PurePosixPath("/home/ann/.testbed/runs/x"), Path("/runs/x"))],
        "env": {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"},
    }
    read_only = mount_option(PurePosixPath("/home/a,b/.testbed/data"), Path('/data "x"'), read_only=True)
    changes: dict[str, dict[str, Any]] = {
        "a rank": {},
        "a rank with a CPU share": {"cpus": 0.4},
        "a probe": {"purpose": "probe", "rank": 3, "output": Path("/runs/x/probe1.log")},
        "hostile values": {"env": {"KEY": "$(reboot); 'a' \"b\""}, "argv": ["echo", "-v", "*", ""]},
        "data": {"mounts": [*values["mounts"], read_only]},
    }
    for title, change in changes.items():
        yield from section(f"hosts: {title}", [Container(**(values | change)).start_argv()])
    yield from section("hosts: a program of the image", [docker_run_argv("1000:1000", "ip", "-json", "address")])
    yield from section("hosts: image", [image_content_argv()])
    yield from section("without privileges", [without_privileges(1000, 100), without_privileges(65534, 65534)])
    yield "## SSH command lines"
    yield command_line(["mkdir", "-p", "/home/a b"], 30.0)
    yield command_line(["sh", "-c", 'exec "$@"', "it's"], 2.5)


if __name__ == "__main__":
    print(*network(), *hosts(), sep="\n")
