"""Every name of the product that this command looks up. A module moves: put its new place in front of the old one.

The first place that exists is used, so one table serves a worktree of either side.
"""

from __future__ import annotations

import importlib
from typing import Any

PLACES = {
    "Link": ["testbed.spec.link:Link"],
    "RunSpec": ["testbed.spec.run:RunSpec"],
    "shape": ["testbed.net.shaping:shape"],
    "reshape": ["testbed.net.shaping:reshape"],
    "congestion": ["testbed.net.shaping:congestion"],
    "route_congestion": ["testbed.net.shaping:route_congestion"],
    "compose_file": ["testbed.control.substrates.engine:render", "testbed.control.compose_file:render"],
    "compose_idle": ["testbed.control.substrates.compose:idle_override", "testbed.control.substrates.compose:idle"],
    "owner": ["testbed.control.machine.ownership:current", "testbed.control.substrates.owner:current"],
    "without_privileges": ["testbed.spec.privileges:without_privileges"],
    "command_line": [
        "testbed.control.substrates.hosts.ssh:command_line",
        "testbed.control.substrates.hosts_ssh:command_line",
    ],
    "Container": [
        "testbed.control.substrates.docker_cli:Container",
        "testbed.control.substrates.hosts.node:Container",
        "testbed.control.substrates.hosts_remote:Container",
    ],
    "mount": [
        "testbed.control.substrates.docker_cli:mount_option",
        "testbed.control.substrates.hosts.node:mount",
        "testbed.control.substrates.hosts_remote:mount",
    ],
    "docker_run": [
        "testbed.control.substrates.docker_cli:docker_run_argv",
        "testbed.control.substrates.hosts.node:once",
        "testbed.control.substrates.hosts_remote:once",
    ],
    "image_content": [
        "testbed.control.substrates.docker_cli:image_content_argv",
        "testbed.control.substrates.hosts.node:content",
        "testbed.control.substrates.hosts_remote:content",
    ],
    "remote_user": [
        "testbed.control.substrates.docker_cli:local_user",
        "testbed.control.substrates.hosts.node:user",
        "testbed.control.substrates.hosts_remote:user",
    ],
}
RANK_MODULE = "testbed.rank"  # `python -m testbed.rank --folder RUN`, with torchrun's variables


def find(name: str) -> Any:
    """The object behind a name of the table; AttributeError where no place has it."""
    for place in PLACES[name]:
        module, _, attribute = place.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            continue
    raise AttributeError(f"{name}: in none of {PLACES[name]}. Add its new place to tests/golden/names.py.")
