"""Argument lists that the product builds as data, one command a line. Run in a worktree: its code is imported."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

from names import find

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


def show(title: str, commands: Iterable[Sequence[str]]) -> None:
    print(f"## {title}")
    for command in commands:
        print(shlex.join(map(str, command)).replace(find("remote_user")(), "USER@HERE"))
    print()


def network() -> None:
    link = find("Link").model_validate
    for values in LINKS:
        show(f"shape {json.dumps(values)}", find("shape")(link(values)))
        show(f"shape {json.dumps(values)}, egress only", find("shape")(link(values), "eth1", "ifb7", ingress=False))
    for values in LINKS[2], LINKS[-1]:
        for before, rate in RESHAPES:
            show(f"reshape {json.dumps(values)} from {before} to {rate}", find("reshape")(link(values), before, rate))
    show("congestion", [find("congestion")("bbr")])
    show("congestion by route", [find("route_congestion")("cubic", "10.77.0.0/24")])
    show("congestion by route, own address", [find("route_congestion")("reno", "10.0.0.0/8", "ib0", "10.9.0.7")])


def hosts() -> None:
    mount = find("mount")
    values: dict[str, Any] = {
        "name": "testbed-x-0",
        "run": "x",
        "rank": 0,
        "who": "1000:1000",
        "argv": ["python3", "-m", "testbed.rank", "--folder", "/runs/x"],
        "output": Path("/runs/x/rank0.log"),
        "mounts": [mount(PurePosixPath("/home/ann/.testbed/runs/x"), Path("/runs/x"))],
        "env": {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"},
    }
    read_only = mount(PurePosixPath("/home/a,b/.testbed/data"), Path('/data "x"'), read_only=True)
    changes: dict[str, dict[str, Any]] = {
        "a rank": {},
        "a rank with a CPU share": {"cpus": 0.4},
        "a probe": {"purpose": "probe", "rank": 3, "output": Path("/runs/x/probe1.log")},
        "hostile values": {"env": {"KEY": "$(reboot); 'a' \"b\""}, "argv": ["echo", "-v", "*", ""]},
        "data": {"mounts": [*values["mounts"], read_only]},
    }
    for title, change in changes.items():
        made = container(values | change)
        show(f"hosts: {title}", [made.start_argv() if hasattr(made, "start_argv") else made.start()])
    show("hosts: a program of the image", [find("docker_run")("1000:1000", "ip", "-json", "address")])
    show("hosts: image", [find("image_content")()])
    show("without privileges", [find("without_privileges")(1000, 100), find("without_privileges")(65534, 65534)])
    lines = [(["mkdir", "-p", "/home/a b"], 30.0), (["sh", "-c", 'exec "$@"', "it's"], 2.5)]
    print("## SSH command lines", *(find("command_line")(*line) for line in lines), sep="\n", end="\n\n")


def container(values: dict[str, Any]) -> Any:
    """Its field for the user was `who` once."""
    made = find("Container")
    known = {field.name for field in fields(made)}
    return made(**{"user" if key == "who" and "user" in known else key: value for key, value in values.items()})


def compose() -> None:
    for nodes in (1, 2, 4):
        print(f"## compose file of {nodes} nodes\n{find('compose_file')(nodes)}")
    idle = json.dumps(find("compose_idle")(2, ["/r:/runs", "/d:/data"]), indent=1, sort_keys=True)
    print(f"## compose file over it, of the controller\n{idle.replace(find('owner')(), 'OWNER')}")


if __name__ == "__main__":
    network()
    hosts()
    compose()
